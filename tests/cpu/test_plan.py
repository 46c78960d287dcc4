"""plan/plan.cpp through flash_attn3._plan: the facts of a plan against arithmetic written here.
"""
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st
import pytest

from flash_attn3 import _plan
from tests.cpu.drawn import examples
from tests.host import _host
from tests.support.described import describe_sizes

NEVER, ALWAYS, HEURISTIC = False, True, None
MASKS = ['full', 'causal', 'general', 'softcap']    # numbers of core/mask_limits.h, MaskKind
H200 = {'sm_count': 132, 'l2_bytes': 50 << 20}


def plan(seqlen_q=1024, seqlen_k=1024, **others):
    return _plan.plan_forward(**call_of_sizes(seqlen_q, seqlen_k, **others))


def call_of_sizes(seqlen_q, seqlen_k, *, batch=2, heads_q=8, heads_k=8, head_dim=128,
                  head_dim_v=None, dtype='bfloat16', totals=None, has_seqused=False, **others):
    """What `_plan` takes. totals: rows of packed sequences; seqlen_q and seqlen_k are hints."""
    rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    if totals is not None:
        rows_q, rows_k = ((total,) for total in totals)
        starts, used = (describe_sizes((size,), 'int32') for size in (batch + 1, batch))
        others |= {'cu_seqlens_q': starts, 'cu_seqlens_k': starts, 'max_seqlen_q': seqlen_q,
                   'max_seqlen_k': seqlen_k, 'seqused_k': used if has_seqused else None}
    return H200 | {'q': describe_sizes((*rows_q, heads_q, head_dim), dtype),
                   'k': describe_sizes((*rows_k, heads_k, head_dim), dtype),
                   'v': describe_sizes((*rows_k, heads_k, head_dim_v or head_dim), dtype)} | others


def ceil_div(a, b):
    return -(-a // b)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('head_dim', range(32, 257, 16))
@pytest.mark.parametrize('causal', [False, True])
def test_variant_by_dtype_head_dim_and_mask(dtype, head_dim, causal):
    facts = plan(16384, 16384, head_dim=head_dim, causal=causal, dtype=dtype)
    short_dtype, mask = {'float16': 'Fp16', 'bfloat16': 'Bf16'}[dtype], ('Full', 'Causal')[causal]
    name = f'Fwd{short_dtype}D{head_dim}{mask}'
    assert facts['name'] == name
    of_the_variant = next(row for row in _plan.variants() if row['name'] == name)
    assert of_the_variant.items() <= facts.items()


@pytest.mark.parametrize('head_dim, causal, first_long', [
    (64, True, 2048), (128, False, 2048), (96, False, 2048), (96, True, 2048),
    (256, False, 1024), (256, True, 2048)])
def test_tile_by_length(head_dim, causal, first_long):
    """As measured with 16k tokens: large tiles waste more of short problems than they gain."""
    heads = 2048 // head_dim
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
        facts = plan(seqlen, seqlen, batch=16384 // seqlen, heads_q=heads, heads_k=heads,
                     head_dim=head_dim, causal=causal)
        assert facts['name'].endswith('Short') is (seqlen < first_long), seqlen


def tile_costs(variant, seqlen_q, seqlen_k, causal, lead):
    """Pairs of each tile of a head, and those that its start and end are worth."""
    rows, keys = variant['tile_m'], variant['tile_n']
    mask = _host.CausalMask() if causal else _host.FullMask()
    ends = [mask.block_range(max(0, begin), begin + rows, seqlen_q, seqlen_k, keys)[3]
            for begin in range(-lead, seqlen_q, rows)]
    return [(max(end, 1) * keys + variant['fixed_keys']) * rows for end in ends]


def sampled_sum(costs):
    """As the planner compares leads: the last one of many tiles, and 16 of the others."""
    others, count = costs[:-1], min(16, len(costs) - 1)
    first, end = (len(others) - count) // 2, (len(others) + count) // 2
    return costs[-1] + (Fraction(sum(others[first:end]), count) * len(others) if count else 0)


def costs_of(variant, seqlen_q, seqlen_k, causal):
    """With the empty rows in the last tile, or as whole warpgroups in the first one."""
    warpgroups = variant['tile_m'] // 64
    most = _host.lead_positions(ceil_div(seqlen_q, variant['tile_m']), seqlen_q, warpgroups, 64)
    costs, shifted = (tile_costs(variant, seqlen_q, seqlen_k, causal, lead) for lead in (0, most))
    return shifted if causal and sampled_sum(shifted) < sampled_sum(costs) else costs


def time_of_head(variant, *problem):
    return Fraction(sum(costs_of(variant, *problem)), variant['relative_speed'])


def time_of_plan(variant, seqlen_q, seqlen_k, causal, heads):
    costs = costs_of(variant, seqlen_q, seqlen_k, causal)
    ctas = min(132, len(costs) * heads)
    if causal:
        busiest = max(Fraction(sum(costs) * heads, ctas), costs[-1])
    else:
        busiest = ceil_div(len(costs) * heads, ctas) * costs[-1]
    return Fraction(busiest, variant['relative_speed'])


@given(seqlen_q=st.integers(1, 4096), seqlen_k=st.integers(1, 10000), heads=st.integers(1, 300),
       causal=st.booleans(), head_dim=st.sampled_from([64, 80, 128, 192, 256]))
@examples(300)
def test_variant_that_takes_the_least_time(seqlen_q, seqlen_k, heads, causal, head_dim):
    """First the keys of a tile, by the lengths alone; then its rows, by what the busiest CTA does.

    Up to 64 tiles a head, where the planner looks at each of them.
    """
    problem = seqlen_q, seqlen_k, causal
    names = _host.candidate_names(True, MASKS.index('causal' if causal else 'full'), head_dim,
                                  head_dim)
    serving = {row['name']: row for row in _plan.variants() if row['name'] in names}
    chosen = plan(seqlen_q, seqlen_k, batch=1, heads_q=heads, heads_k=heads, head_dim=head_dim,
                  causal=causal, pack_gqa=NEVER)
    rounding = 1 + Fraction(1, 10 ** 12)
    alike = [row for row in serving.values() if row['tile_n'] == chosen['tile_n']]
    assert min(time_of_head(row, *problem) for row in alike) <= rounding * min(
        time_of_head(row, *problem) for row in serving.values())
    assert time_of_plan(serving[chosen['name']], *problem, heads) <= rounding * min(
        time_of_plan(row, *problem, heads) for row in alike)


@given(seqlen_q=st.integers(1, 40000), seqlen_k=st.integers(1, 40000), causal=st.booleans(),
       head_dim=st.sampled_from([64, 80, 128, 192, 256]), batch=st.integers(1, 50),
       heads_k=st.integers(1, 9), group=st.integers(1, 70), sm_margin=st.integers(0, 131),
       pack_gqa=st.sampled_from([NEVER, ALWAYS, HEURISTIC]))
@examples(300)
def test_keys_of_a_tile_depend_on_the_lengths_alone(seqlen_q, seqlen_k, causal, head_dim, batch,
                                                    heads_k, group, sm_margin, pack_gqa):
    """They are what a result depends on: an entry gives the same bits in every batch."""
    alone = plan(seqlen_q, seqlen_k, batch=1, heads_q=1, heads_k=1, head_dim=head_dim,
                 causal=causal)
    among_others = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                        head_dim=head_dim, causal=causal, pack_gqa=pack_gqa, sm_margin=sm_margin)
    assert among_others['tile_n'] == alone['tile_n']


@pytest.mark.parametrize('head_dim', [64, 128, 256])
@pytest.mark.parametrize('causal', [False, True])
def test_small_problems_get_small_tiles(head_dim, causal):
    for seqlen in (64, 512, 2048):
        one_head = plan(seqlen, seqlen, batch=1, heads_q=1, heads_k=1, head_dim=head_dim,
                        causal=causal)
        many = plan(seqlen, seqlen, batch=64, heads_q=16, heads_k=16, head_dim=head_dim,
                    causal=causal)
        assert one_head['tile_m'] == 64 and (many['tile_m'] > 64 or seqlen == 64)


@given(batch=st.integers(0, 9), seqlen_q=st.integers(0, 5000), seqlen_k=st.integers(0, 5000),
       heads_k=st.integers(1, 9), group=st.integers(1, 70),
       head_dim=st.sampled_from([64, 128, 256]),
       causal=st.booleans(), pack_gqa=st.sampled_from([NEVER, ALWAYS, HEURISTIC]),
       sm_margin=st.integers(0, 131))
@examples(300)
def test_tiles_and_grid(batch, seqlen_q, seqlen_k, heads_k, group, head_dim, causal, pack_gqa,
                        sm_margin):
    facts = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                 head_dim=head_dim, causal=causal, pack_gqa=pack_gqa, sm_margin=sm_margin)
    pack = facts['pack']
    assert group % pack == 0 and 1 <= pack <= 64
    positions = facts['consumer_warpgroups'] * (64 // pack)
    assert facts['m_tiles'] == ceil_div(seqlen_q, positions)
    assert facts['tiles'] == facts['m_tiles'] * (heads_k * group // pack) * batch
    assert facts['grid'] == min(facts['tiles'], 132 - sm_margin)


@pytest.mark.parametrize('group, pack', [
    (1, 1), (2, 2), (3, 3), (8, 8), (64, 64), (65, 13), (128, 64)])
def test_pack_on_request(group, pack):
    assert plan(heads_q=group, heads_k=1, pack_gqa=ALWAYS)['pack'] == pack
    assert plan(heads_q=group, heads_k=1, pack_gqa=NEVER)['pack'] == 1


@pytest.mark.parametrize('seqlen_q, group, packs', [
    (1, 8, True),      # decode: 1 of 128 rows against 8
    (16, 4, True),
    (40, 8, True),     # a third of a tile is padding
    (64, 8, False),    # a small tile is full either way
    (128, 8, False),   # a tile is full either way
    (129, 8, True),    # 2 tiles for 129 rows, 9 for 1032
    (4032, 8, False),  # 21 tiles of 192
    (4096, 8, True),   # 22 tiles for 4096 rows, 171 for 8 times as many
    (1, 1, False)])
def test_pack_where_it_saves_padding(seqlen_q, group, packs):
    assert (plan(seqlen_q, heads_q=8 * group, heads_k=8)['pack'] > 1) is packs


@given(st.integers(1, 3000), st.integers(2, 64))
@examples(300)
@example(1537, 15)    # unpacked, a tile of 64 rows is the fastest
def test_pack_needs_two_percent_less_work(seqlen_q, group):
    """By the rows of one tile; where packed and unpacked rows have different tiles, by time."""
    found, unpacked = (plan(seqlen_q, batch=1, heads_q=group, heads_k=1, pack_gqa=pack_gqa)
                       for pack_gqa in (HEURISTIC, NEVER))
    packed = plan(seqlen_q, batch=1, heads_q=group, heads_k=1, pack_gqa=ALWAYS)
    if packed['name'] != unpacked['name']:
        assert found['name'] in (packed['name'], unpacked['name'])
        return
    gain = unpacked['tiles'] / packed['tiles']
    assert (found['pack'] > 1) is (gain > 1 / 0.98) or gain == pytest.approx(1 / 0.98)


@pytest.mark.parametrize('dtype, window, packs', [
    ('float8_e4m3fn', -1, True),    # 43 tiles of 48 positions: 121 K tiles a head for 132
    ('bfloat16', -1, False),        # 128 x 128: 136, packed too
    ('float8_e4m3fn', 1024, True)])
def test_pack_where_less_is_hidden(dtype, window, packs):
    """Under a causal mask: packed tiles have fewer positions, and end closer to what they see."""
    def of(pack_gqa):
        return plan(2048, 2048, batch=8, heads_q=32, heads_k=8, causal=True, dtype=dtype,
                    window_left=window, pack_gqa=pack_gqa)
    assert (of(HEURISTIC)['pack'] == 4) is packs
    assert (of(ALWAYS)['useful_share'] > 1.02 * of(NEVER)['useful_share']) is packs


@pytest.mark.parametrize('seqlen, lead', [
    (512, 64), (1024, 128), (2048, 64), (4096, 128), (4095, 64 + 64), (4033, 128), (4032, 0)])
def test_the_first_causal_tile_is_the_one_that_is_not_full(seqlen, lead):
    """192 x 128: more keys are visible to the last rows than to the first."""
    facts = plan(seqlen, seqlen, batch=64, heads_q=32, heads_k=32, head_dim=64, causal=True,
                 dtype='float8_e4m3fn')
    assert (facts['tile_m'], facts['tile_n'], facts['lead']) == (192, 128, lead)
    assert plan(seqlen, seqlen, head_dim=64, dtype='float8_e4m3fn')['lead'] == 0


def test_no_lead_where_it_gains_nothing():
    """192 x 96, 2048 rows: tiles that begin 64 rows earlier end within a K tile, 132 K tiles a head
    both ways."""
    facts = plan(2048, 2048, causal=True, dtype='float8_e4m3fn', pack_gqa=NEVER)
    assert (facts['tile_m'], facts['tile_n'], facts['lead']) == (192, 96, 0)
    assert facts['useful_share'] == pytest.approx(2048 * 2049 / 2 / (132 * 192 * 96))


@pytest.mark.parametrize('seqlen, lead', [(4096, 128), (2048, 0)])
def test_the_lead_of_the_longest_packed_sequence(seqlen, lead):
    """That of a dense batch of such sequences: of 192 x 96, 2048 rows gain nothing by one."""
    options = dict(causal=True, dtype='float8_e4m3fn', pack_gqa=NEVER)
    facts = plan(seqlen, seqlen, batch=16, totals=2 * (16 * seqlen,), **options)
    assert (facts['tile_m'], facts['tile_n'], facts['lead']) == (192, 96, lead)
    assert plan(seqlen, seqlen, batch=16, **options)['lead'] == lead


def visible_pairs(seqlen_q, seqlen_k, causal):
    if not causal:
        return seqlen_q * seqlen_k
    return sum(max(0, min(seqlen_k, i + 1 + seqlen_k - seqlen_q)) for i in range(seqlen_q))


@given(seqlen_q=st.integers(1, 700), seqlen_k=st.integers(1, 700), causal=st.booleans(),
       pack_gqa=st.sampled_from([NEVER, ALWAYS]))
@examples(200)
def test_work_counts_visible_pairs(seqlen_q, seqlen_k, causal, pack_gqa):
    facts = plan(seqlen_q, seqlen_k, batch=3, heads_q=6, heads_k=2, head_dim=64, causal=causal,
                 pack_gqa=pack_gqa)
    pairs = 3 * 6 * visible_pairs(seqlen_q, seqlen_k, causal)
    assert facts['flops'] == 4 * 64 * pairs
    halves, floats = 2 * seqlen_q * 6 * 64 + 2 * seqlen_k * 2 * 64, seqlen_q * 6
    assert facts['bytes'] == 3 * (2 * halves + 4 * floats)
    assert 0 < facts['useful_share'] <= 1
    if not causal:
        columns = ceil_div(seqlen_k, facts['tile_n']) * facts['tile_n']
        computed = facts['tiles'] * facts['tile_m'] * columns
        assert facts['useful_share'] == pytest.approx(pairs / computed)


def test_useful_share_of_causal_tiles():
    """256 x 256 in tiles of 128 x 128: a whole tile and two with half of their pairs visible."""
    facts = plan(256, 256, batch=16, heads_q=64, heads_k=64, causal=True)
    assert (facts['tile_m'], facts['tile_n']) == (128, 128)
    assert facts['useful_share'] == pytest.approx((128 * 129 + 128 * 128) / (3 * 128 * 128))


def test_waves():
    facts = plan(4096, 4096, batch=4, heads_q=16, heads_k=16, causal=True)
    assert facts['tiles'] == 2048 and facts['waves'] == pytest.approx(2048 / 132)


@pytest.mark.parametrize('sizes', [{'batch': 0}, {'seqlen_q': 0}, {'heads_q': 0}])
def test_nothing_to_do(sizes):
    facts = plan(**sizes)
    assert facts['tiles'] == facts['grid'] == facts['flops'] == facts['waves'] == 0


def test_no_keys():
    facts = plan(seqlen_k=0)
    assert facts['tiles'] > 0 and facts['flops'] == 0 and facts['useful_share'] == 0


def sections(batch, seqlen, heads_q, heads_k, **others):
    facts = plan(seqlen, seqlen, batch=batch, heads_q=heads_q, heads_k=heads_k, causal=True,
                 pack_gqa=NEVER, **others)
    return facts['section_pairs'], facts['least_last_pairs']


def test_sections_give_eight_ctas_to_a_head():
    """132 CTAs; 4, 16 and 128 tiles a head."""
    assert sections(32, 512, 16, 16) == (132 // 4, ceil_div(264, 4))
    assert sections(8, 2048, 16, 16) == (132 // 8, ceil_div(264, 16))
    assert sections(2, 16384, 16, 16) == (132 // 8, ceil_div(264, 128))
    assert sections(1, 16384, 8, 8) == (8, 3), 'all heads'


def test_sections_have_whole_kv_heads():
    """4 query heads of 16 tiles each."""
    assert sections(16, 2048, 16, 4) == (132 // 8 * 4, ceil_div(264, 64) * 4)


@given(batch=st.integers(1, 40), seqlen_q=st.integers(1, 9000), seqlen_k=st.integers(1, 9000),
       heads_k=st.integers(1, 12), group=st.integers(1, 8),
       head_dim=st.sampled_from([64, 128, 256]), pack_gqa=st.sampled_from([NEVER, ALWAYS]),
       sm_margin=st.integers(0, 131))
@examples(300)
def test_the_last_section_has_two_tiles_a_cta(batch, seqlen_q, seqlen_k, heads_k, group, head_dim,
                                              pack_gqa, sm_margin):
    """Or all pairs."""
    facts = plan(seqlen_q, seqlen_k, batch=batch, heads_q=heads_k * group, heads_k=heads_k,
                 head_dim=head_dim, causal=True, pack_gqa=pack_gqa, sm_margin=sm_margin)
    pairs_of_head = group // facts['pack']
    usual, last = facts['section_pairs'], facts['least_last_pairs']
    assert usual % pairs_of_head == last % pairs_of_head == 0
    all_pairs = heads_k * batch * pairs_of_head
    assert last * facts['m_tiles'] >= 2 * facts['grid'] or last == all_pairs


def test_full_attention_has_no_sections():
    assert plan(4096, 4096, batch=16, heads_q=16, heads_k=4)['section_pairs'] == 1


@pytest.mark.parametrize('change, reason', [
    ({'head_dim': 100}, 'flash_attn_func: expected the head_dim of q to be a multiple of 8 from 8 '
                        'to 512, got 100'),
    ({'head_dim': 520}, 'flash_attn_func: expected the head_dim of q to be a multiple of 8 from 8 '
                        'to 512, got 520'),
    ({'dtype': 'float32'}, 'flash_attn_func: expected q.dtype to be float16 or bfloat16, got '
                           'float32'),
    ({'heads_q': 7, 'heads_k': 2}, 'flash_attn_func: expected the heads of q to be a multiple of '
                                   '2, the KV heads, got 7'),
    ({'sm_margin': 132}, 'flash_attn_func: expected sm_margin to be from 0 to 131, got 132'),
    ({'seqlen_q': -1}, 'explain: expected sizes of 0 or more, got -1'),
    ({'sm_count': 0}, 'explain: expected sm_count to be 1 or more, got 0')])
def test_no_plan_says_why(change, reason):
    facts = plan(**change)
    assert list(facts) == ['reason']
    assert facts['reason'].startswith(f'flash_attn3.{reason}')
