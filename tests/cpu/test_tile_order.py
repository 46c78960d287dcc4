"""core/tile_order.h: the schedule of the persistent grid, simulated for every CTA."""
from collections import Counter
from fractions import Fraction
from itertools import product

from hypothesis import given
from hypothesis import strategies as st
import pytest

from tests import _host
from tests.cpu.drawn import examples
from tests.cpu.test_plan import ceil_div, plan

SHAPES = [(1, 1, 1), (1, 7, 3), (5, 1, 1), (8, 4, 2), (13, 3, 5), (33, 16, 1), (64, 2, 3)]
GRIDS = [1, 2, 7, 64, 131, 132]


def assert_every_tile_once(causal, m_tiles, heads, batch, section_pairs, ctas, least_last=1):
    work = _host.walk_tiles(causal, m_tiles, heads, batch, section_pairs, ctas, least_last)
    counts = Counter(tile for tiles in work for tile in tiles)
    assert counts == Counter(product(range(m_tiles), range(heads), range(batch)))


@pytest.mark.parametrize('ctas', GRIDS)
@pytest.mark.parametrize('section_pairs', [1, 2, 5, 1 << 20])
@pytest.mark.parametrize('m_tiles, heads, batch', SHAPES)
def test_every_tile_exactly_once(m_tiles, heads, batch, section_pairs, ctas):
    for causal in (False, True):
        assert_every_tile_once(causal, m_tiles, heads, batch, section_pairs, ctas)


@given(st.booleans(), st.integers(0, 40), st.integers(1, 12), st.integers(1, 6),
       st.integers(1, 80), st.integers(1, 140), st.integers(1, 80))
@examples(500)
def test_every_tile_exactly_once_at_random(causal, m_tiles, heads, batch, section_pairs, ctas,
                                           least_last):
    assert_every_tile_once(causal, m_tiles, heads, batch, section_pairs, ctas, least_last)


@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 6), st.integers(1, 80),
       st.integers(1, 80))
@examples(200)
def test_only_the_last_causal_section_differs(m_tiles, heads, batch, section_pairs, least_last):
    """It has what is left, but at least so many pairs, or all."""
    [tiles] = _host.walk_tiles(True, m_tiles, heads, batch, section_pairs, 1, least_last)
    pairs = [entry * heads + head for _, head, entry in tiles]
    left, usual, sections = heads * batch, min(section_pairs, heads * batch), []
    while left - usual >= least_last:
        sections.append(usual)
        left -= usual
    begin = 0
    for section in [*sections, left]:
        order = [pair for _ in range(m_tiles) for pair in range(begin, begin + section)]
        assert pairs[begin * m_tiles:(begin + section) * m_tiles] == order
        begin += section


def test_no_tiles_no_work():
    assert _host.walk_tiles(False, 0, 4, 2, 1, 3) == [[], [], []]
    assert _host.walk_tiles(True, 0, 4, 2, 1, 3) == [[], [], []]


@pytest.mark.parametrize('m_tiles, heads, batch', SHAPES)
@pytest.mark.parametrize('ctas', GRIDS)
def test_full_tiles_are_dealt_evenly(m_tiles, heads, batch, ctas):
    work = _host.walk_tiles(False, m_tiles, heads, batch, 1, ctas)
    lengths = [len(tiles) for tiles in work]
    assert max(lengths) - min(lengths) <= 1


def test_full_tiles_of_a_round_share_few_heads():
    """132 CTAs over 32 tiles a head: 132 / 32 rounded up, and one more where a head is cut."""
    work = _host.walk_tiles(False, 32, 16, 4, 1, 132)
    for turn in range(15):
        assert len({tiles[turn][1:] for tiles in work if len(tiles) > turn}) <= 6


@pytest.mark.parametrize('section_pairs', [4, 16, 64])
def test_causal_sections_come_one_after_the_other_and_longest_first(section_pairs):
    m_tiles, heads, batch = 32, 16, 4
    for tiles in _host.walk_tiles(True, m_tiles, heads, batch, section_pairs, 132):
        keys = [((batch_ * heads + head) // section_pairs, -m) for m, head, batch_ in tiles]
        assert keys == sorted(keys)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.integers(1, 80),
       st.integers(1, 140), st.data())
@examples(300)
def test_a_section_adds_at_most_its_longest_tile_to_the_difference(m_tiles, heads, batch,
                                                                   section_pairs, ctas, data):
    """Whatever tiles cost, as long as later ones cost no less.

    With two CTAs one is ahead in the waves that run forwards, the other in those that run
    backwards. They differ in a wave by at most its first tile less its last one, and these spans do
    not overlap in the section's order, which falls: the spans of the forward waves together are at
    most the longest tile, and so are those of the backward waves.
    """
    costs = sorted(data.draw(st.lists(st.integers(1, 100), min_size=m_tiles, max_size=m_tiles)))
    work = _host.walk_tiles(True, m_tiles, heads, batch, section_pairs, ctas)
    for section in range(ceil_div(heads * batch, section_pairs)):
        loads = [sum(costs[m] for m, head, entry in tiles
                     if (entry * heads + head) // section_pairs == section) for tiles in work]
        assert max(loads) - min(loads) <= costs[-1]


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
    work = _host.walk_tiles(True, m_tiles, heads_q, batch, facts['section_pairs'], facts['grid'])
    return [sum(costs[m] for m, _, _ in tiles) for tiles in work], max(costs)


@pytest.mark.parametrize('sm_margin', [0, 1, 18])
@pytest.mark.parametrize('group', [1, 4, 8])
@pytest.mark.parametrize('seqlen', [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize('head_dim, heads', [(64, 32), (128, 16), (256, 8)])
def test_causal_work_is_balanced(head_dim, heads, seqlen, group, sm_margin):
    """The busiest CTA is at most 11 % and 1.15 longest tiles above the mean, whatever the sections.

    A section alone may leave a difference of its longest tile (the test above); the turned seats
    keep those of up to seven sections from adding up. Sections are cut to fit into L2, not for
    balance: larger ones would be more even and slower (docs/journal/forward.md).
    11 % is where a CTA gets 8 tiles in all, or a last section of less than one round is left.
    """
    loads, longest = planned_loads(head_dim, seqlen, heads, heads // group, sm_margin)
    excess = max(loads) - sum(loads) / len(loads)
    assert excess <= 0.11 * sum(loads) / len(loads)
    assert excess <= 1.15 * longest


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
    if batch == 1:
        assert facts['section_pairs'] == 16, 'the keys in use at a time fit into L2'
    work = _host.walk_tiles(True, facts['m_tiles'], 16, batch, facts['section_pairs'],
                            facts['grid'])
    loads = [sum(costs[m] for m, _, _ in tiles) for tiles in work]
    assert max(loads) <= most * sum(loads) / len(loads)
