"""core/tile_order.h: the order of tiles, and the work that each CTA draws, simulated."""
from collections import Counter
from fractions import Fraction
import heapq
from itertools import product
import re

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests.cpu.drawn import examples
from tests.cpu.test_plan import ceil_div, plan
from tests.host import _host
from tests.support.checkout import ROOT

SHAPES = [(1, 1, 1), (1, 7, 3), (5, 1, 1), (8, 4, 2), (13, 3, 5), (33, 16, 1), (64, 2, 3)]

# K tiles before the end of a tile at which the kernel draws the next one.
DRAW_AHEAD = int(re.search(r'kDrawAhead = (\d+);',
                           (ROOT / 'csrc/forward/producer.h').read_text())[1])


def drawn_loads(costs, ctas, ahead=DRAW_AHEAD):
    """When each CTA ends that draws tiles of these costs, each so long before it has done the one
    before; the first at the beginning.
    """
    ends = costs[:ctas]
    draws = [(end - min(end, ahead), cta) for cta, end in enumerate(ends)]
    heapq.heapify(draws)
    for cost in costs[ctas:]:
        cta = draws[0][1]
        ends[cta] += cost
        heapq.heapreplace(draws, (ends[cta] - min(cost, ahead), cta))
    return ends


def assert_every_tile_once(causal, m_tiles, heads, batch, section_pairs, least_last):
    tiles = _host.ordered_tiles(causal, m_tiles, heads, batch, section_pairs, least_last)
    assert Counter(tiles) == Counter(product(range(m_tiles), range(heads), range(batch)))


@pytest.mark.parametrize('section_pairs', [1, 2, 5, 1 << 20])
@pytest.mark.parametrize('m_tiles, heads, batch', [*SHAPES, (0, 4, 2)])
def test_every_tile_exactly_once(m_tiles, heads, batch, section_pairs):
    for causal in (False, True):
        assert_every_tile_once(causal, m_tiles, heads, batch, section_pairs, 1)


@given(st.booleans(), st.integers(0, 40), st.integers(1, 12), st.integers(1, 6),
       st.integers(1, 80), st.integers(1, 80))
@examples(500)
def test_every_tile_exactly_once_at_random(causal, m_tiles, heads, batch, section_pairs,
                                           least_last):
    assert_every_tile_once(causal, m_tiles, heads, batch, section_pairs, least_last)


@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 6), st.integers(1, 80),
       st.integers(1, 80))
@examples(200)
def test_only_the_last_causal_section_differs(m_tiles, heads, batch, section_pairs, least_last):
    """It has what is left, but at least so many pairs, or all. The longest tiles come first."""
    tiles = _host.ordered_tiles(True, m_tiles, heads, batch, section_pairs, least_last)
    pairs, usual, order, begin = heads * batch, min(section_pairs, heads * batch), [], 0
    while begin < pairs:
        last = pairs - begin - usual < least_last
        end = pairs if last else begin + usual
        order += [(m, pair % heads, pair // heads)
                  for m in reversed(range(m_tiles)) for pair in range(begin, end)]
        begin = end
    assert tiles == order


def test_full_tiles_of_a_round_share_few_heads():
    """132 CTAs over 32 tiles a head: 132 / 32 rounded up, and one more where a head is cut."""
    tiles = _host.ordered_tiles(False, 32, 16, 4, 1, 1)
    for begin in range(0, len(tiles), 132):
        assert len({tile[1:] for tile in tiles[begin:begin + 132]}) <= 6


def planned_loads(head_dim, seqlen, heads_q, heads_k, sm_margin):
    """What each CTA of a causal launch on 16k tokens gets, and the longest tile, in K tiles.

    A tile costs more than those, to start and end: what the planner counts for it.
    """
    batch = 16384 // seqlen
    facts = plan(seqlen, seqlen, batch=batch, heads_q=heads_q, heads_k=heads_k, head_dim=head_dim,
                 causal=True, pack_gqa=False, sm_margin=sm_margin)
    m_tiles, rows = facts['m_tiles'], facts['tile_m']
    ends = [_host.CausalMask().block_range(m * rows, (m + 1) * rows, seqlen, seqlen,
                                           facts['tile_n'])[3] for m in range(m_tiles)]
    costs = [Fraction(facts['fixed_keys'], facts['tile_n']) + end for end in ends]
    order = _host.ordered_tiles(True, m_tiles, heads_q, batch, facts['section_pairs'],
                                facts['least_last_pairs'])
    return drawn_loads([costs[m] for m, _, _ in order], facts['grid']), max(costs)


@pytest.mark.parametrize('sm_margin', [0, 1, 18])
@pytest.mark.parametrize('group', [1, 4, 8])
@pytest.mark.parametrize('seqlen', [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize('head_dim, heads', [(64, 32), (128, 16), (256, 8)])
def test_causal_work_is_balanced(head_dim, heads, seqlen, group, sm_margin):
    """The busiest CTA is at most 4.1 % and 0.41 longest tiles above the mean."""
    loads, longest = planned_loads(head_dim, seqlen, heads, heads // group, sm_margin)
    excess = max(loads) - sum(loads) / len(loads)
    assert excess <= Fraction('0.041') * sum(loads) / len(loads)
    assert excess <= Fraction('0.41') * longest


@pytest.mark.parametrize('dtype', ['bfloat16', 'float8_e4m3fn'])
@pytest.mark.parametrize('batch, seqlen, window, most', [
    (1, 16384, 1024, 1.025), (4, 4096, 512, 1.035), (4, 16384, 1024, 1.015)])
def test_window_work_is_balanced(batch, seqlen, window, most, dtype):
    """The first tiles of a sequence see less than a window; dealt last, they fill the last round,
    of which the others alone would leave up to two thirds idle.

    A tile costs its K tiles and two more, which is what the rest of it takes.
    """
    facts = plan(seqlen, seqlen, batch=batch, heads_q=16, heads_k=16, window_left=window,
                 window_right=0, dtype=dtype)
    rows, keys = facts['tile_m'], facts['tile_n']
    costs = [ceil_div(min(seqlen, (m + 1) * rows), keys) - max(0, m * rows - window) // keys + 2
             for m in range(facts['m_tiles'])]
    order = _host.ordered_tiles(True, facts['m_tiles'], 16, batch, facts['section_pairs'],
                                facts['least_last_pairs'])
    loads = drawn_loads([costs[m] for m, _, _ in order], facts['grid'])
    assert max(loads) <= most * sum(loads) / len(loads)
