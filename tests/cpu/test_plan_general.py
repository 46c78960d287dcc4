"""plan/plan.cpp for windows, chunks, unequal head dims and packed sequences."""
import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from flash_attn3 import _plan
from tests.cpu.drawn import examples
from tests.cpu.drawn_masks import Drawn, masks
from tests.cpu.test_plan import MASKS, call_of_sizes, ceil_div, plan
from tests.host import _host
from tests.support.cases import is_folded

FACTS = {row['name']: row for row in _plan.variants()}
DIMS = range(8, 257, 8)
GENERAL_FOR = {'full': 'general', 'causal': 'general'}


# --------------------------------------------------------------------------------------- variants
def cheapest(dtype, mask, head_dim, head_dim_v):
    """Names of the variants that cover both head dims with the fewest columns together: those of
    the mask, else general ones.
    """
    def cost(row):
        return row['head_dim'] + row['head_dim_v'], row['mask'] != mask

    serving = [row for row in FACTS.values()
               if row['dtype'] == dtype and row['mask'] in (mask, GENERAL_FOR.get(mask))
               and not is_folded(row)
               and row['head_dim'] >= head_dim and row['head_dim_v'] >= head_dim_v]
    least = min(map(cost, serving))
    return [row['name'] for row in serving if cost(row) == least]


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('mask', MASKS)
def test_candidates_of_every_pair_of_head_dims(dtype, mask):
    pairs = list(itertools.product(DIMS, DIMS))
    pairs += list(itertools.product(range(8, 65, 8), range(264, 513, 8)))
    for head_dim, head_dim_v in pairs:
        names = _host.candidate_names(dtype == 'bfloat16', MASKS.index(mask), head_dim, head_dim_v)
        columns = _host.value_columns(head_dim, head_dim_v)
        assert names == cheapest(dtype, mask, head_dim, columns)


def test_columns_of_values_in_one_launch():
    for head_dim_v in range(8, 513, 8):
        columns, launches = (function(64, head_dim_v) for function in (_host.value_columns,
                                                                       _host.value_launches))
        assert columns % 8 == 0 and columns <= 256
        assert launches == (1 if head_dim_v <= 256 else 2)
        assert (launches - 1) * columns < head_dim_v <= launches * columns


@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('head_dim, head_dim_v, name, softcap_name, launches', [
    (192, 128, 'D192x128', 'D256', 1), (168, 120, 'D192x128', 'D256', 1),
    (64, 128, 'D64x128', 'D128', 1), (8, 184, 'D64x256', 'D256', 1),
    (64, 512, 'D64x256', 'D256', 2), (64, 392, 'D64x256', 'D256', 2),
    (128, 64, 'D128x64', 'D128', 1), (96, 64, 'D96x64', 'D128', 1)])
def test_plans_of_unequal_head_dims(mask, head_dim, head_dim_v, name, softcap_name, launches):
    """Full problems run on general variants; a softcap has none of unequal head dims."""
    facts = plan(4096, 4096, head_dim=head_dim, head_dim_v=head_dim_v, causal=mask == 'causal',
                 softcap=3.0 * (mask == 'softcap'), return_max_logits=mask == 'general')
    expected = {'full': f'{name}General', 'softcap': f'{softcap_name}Softcap'}.get(
        mask, f'{name}{mask.capitalize()}')
    assert facts['name'].startswith(f'FwdBf16{expected}')
    assert facts['launches'] == launches
    pairs = visible_pairs(Drawn('causal' if mask == 'causal' else 'full'), 4096, 4096)
    assert facts['flops'] == 2 * 2 * 8 * pairs * (head_dim + head_dim_v)


def test_each_launch_for_a_part_of_the_values_multiplies_q_and_k_again():
    facts = plan(4096, 4096, head_dim=64, head_dim_v=512)
    assert facts['useful_share'] == pytest.approx((64 + 512) / (2 * (64 + 256)))


# ------------------------------------------------------------------------------------------- masks
def visible_pairs(mask, seqlen_q, seqlen_k):
    if mask.kind == 'causal':
        return sum(max(0, min(seqlen_k, i + 1 + seqlen_k - seqlen_q)) for i in range(seqlen_q))
    if mask == Drawn('full') or mask == Drawn('general'):
        return seqlen_q * seqlen_k
    return mask.visible(seqlen_q, seqlen_k).sum().item()


def visited_tiles(facts, mask, seqlen_q, seqlen_k):
    """K tiles that each tile of queries works on: at least one."""
    positions = facts['consumer_warpgroups'] * (64 // facts['pack'])
    ranges = [mask.of_kernels.block_range(max(0, begin), begin + positions, seqlen_q, seqlen_k,
                                          facts['tile_n'])
              for begin in range(-facts['lead'], seqlen_q, positions)]
    return [max(1, last - first) for first, _, _, last in ranges]


def plan_of(mask, *lengths, **others):
    return plan(*lengths, causal=mask.kind == 'causal', window_left=mask.left,
                window_right=mask.right, attention_chunk=mask.chunk, **others)


@given(masks(600), st.integers(1, 700), st.integers(1, 700), st.integers(1, 4),
       st.sampled_from([64, 128, 256]))
@examples(300)
def test_work_of_every_mask(mask, seqlen_q, seqlen_k, group, head_dim):
    facts = plan_of(mask, seqlen_q, seqlen_k, batch=3, heads_q=2 * group, heads_k=2,
                    head_dim=head_dim)
    assert facts['flops'] == 4 * head_dim * 6 * group * visible_pairs(mask, seqlen_q, seqlen_k)
    visited = visited_tiles(facts, mask, seqlen_q, seqlen_k)
    tiles_of_keys = ceil_div(seqlen_k, facts['tile_n'])
    assert facts['m_tiles'] == len(visited)
    assert facts['visited_share'] == pytest.approx(sum(visited) / len(visited) / tiles_of_keys)
    computed = sum(visited) * facts['tile_m'] * facts['tile_n'] * facts['tiles'] / len(visited)
    assert facts['useful_share'] == pytest.approx(facts['flops'] / (4 * head_dim * computed))


def test_a_window_visits_its_share_of_the_keys():
    """64 tiles of 128 queries: 9 K tiles each, but for the first 8, which have 1 to 8."""
    facts = plan_of(Drawn('general', 1024, 0), 8192, 8192)
    assert (facts['tile_m'], facts['tile_n']) == (128, 128)
    assert facts['visited_share'] == pytest.approx((9 * 64 - 36) / 64 / 64)


@pytest.mark.parametrize('name, kind', [('softcap', 'softcap'), ('return_max_logits', 'general')])
def test_scores_of_general_kernels(name, kind):
    for causal in (False, True):
        facts, plain = plan(causal=causal, **{name: 1}), plan(causal=causal)
        assert facts['mask'] == kind and plain['mask'] == ('causal' if causal else 'full')
        assert facts['flops'] == plain['flops']


def test_long_problems_are_planned_at_once():
    """No loop over the queries: 2^30 of them would take seconds."""
    facts = plan(2**30, 2**30, batch=1, heads_q=1, heads_k=1, head_dim=64, attention_chunk=3,
                 window_left=1, window_right=1)
    chunks, rest = divmod(2**30, 3)
    assert rest == 1 and facts['flops'] == 4 * 64 * (7 * chunks + 1)


# ------------------------------------------------------------------------------------------ packed
PACKED_SIZES = dict(batch=st.integers(0, 300), total_q=st.integers(0, 20000),
                    total_k=st.integers(0, 20000), heads_k=st.integers(1, 12),
                    group=st.integers(1, 9), head_dim=st.sampled_from([64, 128, 256]),
                    causal=st.booleans(), sm_margin=st.integers(0, 131), hint=st.integers(0, 30000),
                    has_seqused=st.booleans())


@given(**PACKED_SIZES)
@examples(300)
def test_packed_tiles_and_grid(batch, total_q, total_k, heads_k, group, head_dim, causal, sm_margin,
                               hint, has_seqused):
    facts = plan(hint, hint, batch=batch, totals=(total_q, total_k), heads_q=heads_k * group,
                 heads_k=heads_k, head_dim=head_dim, causal=causal, sm_margin=sm_margin,
                 has_seqused=has_seqused)
    heads = heads_k * group // facts['pack']
    positions = facts['consumer_warpgroups'] * (64 // facts['pack'])
    # And the rows behind the last sequence, and those of each that do not count.
    entries = batch + 1 + (batch if has_seqused else 0)
    of_head = _host.most_tiles(total_q, entries, positions)
    assert facts['is_packed'] and facts['tiles'] == of_head * heads
    assert facts['grid'] == min(facts['tiles'], (132 - sm_margin) * facts['ctas_per_sm'])
    assert heads % facts['section_heads'] == 0
    assert facts['section_heads'] % (group // facts['pack']) == 0, 'whole KV heads'
    assert facts['workspace_bytes'] == 4 * _host.packed_workspace_ints(of_head, entries)


@given(st.integers(0, 5000), st.lists(st.integers(0, 700), min_size=1, max_size=40),
       st.integers(1, 192))
@examples(300)
def test_there_are_no_more_tiles_than_planned_for(unused, lengths, rows):
    """Sequences in a tensor that may have rows beyond them."""
    tiles = sum(ceil_div(length, rows) for length in lengths)
    assert tiles <= _host.most_tiles(sum(lengths) + unused, len(lengths), rows)


def test_the_bound_on_tiles_is_reached():
    assert _host.most_tiles(3 * 129, 3, 128) == 2 * 3
    assert _host.most_tiles(8192, 8192, 128) == 8192 + 64
    assert _host.most_tiles(3, 8192, 128) == 3, 'no more than rows'


def test_the_workspace_holds_header_tiles_and_sequences():
    """8 integers, an integer a tile in whole groups of 8, and 32 bytes a sequence, aligned to them.
    """
    assert _host.packed_workspace_ints(17, 5) == 8 + 24 + 8 * 5
    assert _host.packed_workspace_ints(0, 0) == 8


@pytest.mark.parametrize('heads_k, seqlen, section', [
    (12, 1024, 12),     # 0.5 MiB a head, 60 % of 50 MiB hold 60
    (12, 16384, 3),     # 8 MiB: 3 fit
    (12, 10000, 6),     # 4.9 MiB: 6 fit
    (7, 16384, 1),      # 3 of 7 do not divide them
    (12, 1 << 20, 1)])
def test_heads_that_go_through_a_sequence_together(heads_k, seqlen, section):
    """As many as fit into L2 with their keys and values, in sections of one size."""
    facts = plan(seqlen, seqlen, batch=4, totals=2 * (4 * seqlen,),
                 heads_q=2 * heads_k, heads_k=heads_k)
    assert facts['section_heads'] == 2 * section // facts['pack']


@pytest.mark.parametrize('window, section', [(1023, 12), (4095, 6), (8191, 3), (16383, 3)])
def test_a_window_moves_on_with_the_queries(window, section):
    """With twice as many keys as it has, or all: 1, 4, 8, 8 MiB a head."""
    facts = plan(16384, 16384, batch=4, totals=2 * (4 * 16384,), heads_q=24,
                 heads_k=12, window_left=window, window_right=0)
    assert facts['section_heads'] == 2 * section // facts['pack']


@pytest.mark.parametrize('window_left, is_dealt_so', [(128, False), (255, False), (256, True)])
def test_only_windows_of_two_tiles_and_more_are_dealt_in_sections(window_left, is_dealt_so):
    """Tiles of 128 queries; of a narrower one no tile costs much less than the others."""
    facts = plan(4096, 4096, batch=4, heads_q=16, heads_k=16, window_left=window_left,
                 window_right=0)
    assert facts['tile_m'] == 128
    assert (facts['section_pairs'] > 1) == is_dealt_so


@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize('seqlen_q, seqlen_k, is_tiny', [
    (64, 64, True), (1, 4096, True), (64, 4096, True), (65, 64, False), (128, 128, False),
    (4096, 4096, False)])
@pytest.mark.parametrize('causal', [False, True])
def test_two_ctas_of_a_multiprocessor_for_short_sequences(seqlen_q, seqlen_k, is_tiny, causal,
                                                          head_dim):
    """However many rows the tensors have: the longest length tells how many tiles there are."""
    for total in (8192 * seqlen_q // 2, 8192 * seqlen_q):
        facts = plan(seqlen_q, seqlen_k, batch=8192, totals=(total, 8192 * seqlen_k),
                     heads_q=16, heads_k=16, head_dim=head_dim, causal=causal)
        assert facts['name'].endswith('Tiny') is is_tiny
        assert facts['grid'] == (264 if is_tiny else 132)
        assert facts['ctas_per_sm'] == (2 if is_tiny else 1)


@given(st.integers(1, 200), st.integers(2, 201))
def test_largest_divisor_below(n, end):
    assert _host.largest_divisor_below(n, end) == max(d for d in range(1, min(n, end - 1) + 1)
                                                      if n % d == 0)


def test_packed_plans_say_nothing_of_lengths_that_nobody_knows():
    facts = plan(0, 0, batch=3, totals=(1000, 2000))
    assert not {'flops', 'bytes', 'waves', 'useful_share'} & set(facts)
    assert facts['m_tiles'] == ceil_div(1000, facts['tile_m'])


@given(**PACKED_SIZES)
@examples(200)
def test_keys_of_a_tile_depend_on_the_said_lengths_alone(batch, total_q, total_k, heads_k, group,
                                                         head_dim, causal, sm_margin, hint,
                                                         has_seqused):
    """A result depends on them: max_seqlen says which it is, whatever else is in the tensors."""
    total_q, total_k = max(total_q, hint), max(total_k, hint)
    sizes = dict(head_dim=head_dim, causal=causal)
    alone = plan(hint, hint, batch=1, totals=(hint, hint), heads_q=1, heads_k=1, **sizes)
    among_others = plan(hint, hint, batch=batch, totals=(total_q, total_k), heads_k=heads_k,
                        heads_q=heads_k * group, sm_margin=sm_margin, has_seqused=has_seqused,
                        **sizes)
    if hint and batch:
        assert among_others['tile_n'] == alone['tile_n']


@pytest.mark.parametrize('change, reason', [
    ({'window_left': -2}, 'flash_attn_func: expected window_size[0] to be -1 or more, got -2'),
    ({'attention_chunk': -1}, 'flash_attn_func: expected attention_chunk to be 0 or more, got -1'),
    ({'softcap': -1.0}, 'flash_attn_func: expected softcap to be 0 (none) or a positive finite '
                        'float32, got -1'),
    ({'totals': (8, -1)}, 'explain: expected sizes of 0 or more, got -1'),
    ({'head_dim_v': 520, 'head_dim': 64}, 'flash_attn_func: expected the head_dim of v to '
                                          'be a multiple of 8 from 8 to 512, got 520'),
    ({'head_dim': 100, 'totals': (9, 9)},
     'flash_attn_varlen_func: expected the head_dim of q to be a multiple of 8 from 8 to 512, got '
     '100; hint: pad q, k and v with zeros, and pass softmax_scale'),
    ({'head_dim_v': 520, 'head_dim': 64, 'totals': (9, 9)},
     'flash_attn_varlen_func: expected the head_dim of v to be a multiple of 8 from 8 to 512, '
     'got 520'),
    ({'totals': (1 << 24, 1), 'batch': 1 << 26},
     'flash_attn_varlen_func: expected twice the tiles of q, 64 rows each, to be at most '
     '1073741824, got 1077936128; hint: split the batch')])
def test_no_plan_says_why(change, reason):
    facts = plan(**change)
    assert facts == {'reason': f'flash_attn3.{reason}'}


@pytest.mark.parametrize('change, reason', [
    ({'head_dim': 64, 'head_dim_v': 520},
     'the head_dim of v to be a multiple of 8 from 8 to 512, got 520'),
    ({'totals': (8, 1 << 28), 'heads_q': 200, 'heads_k': 200},
     'twice the tiles of k, 64 rows each, to be at most 1073741824, got 1677722400; hint: split '
     'the batch'),
    ({'seqlen_k': 1 << 28, 'heads_q': 200, 'heads_k': 200},
     'twice the tiles of k, 64 rows each, to be at most 1073741824, got 3355443200; hint: split '
     'the batch')])
def test_no_gradients_say_why(change, reason):
    call = call_of_sizes(**{'seqlen_q': 8, 'seqlen_k': 8} | change)
    op = 'flash_attn_varlen_func' if 'totals' in change else 'flash_attn_func'
    assert _plan.plan_backward(**call) == {'reason': f'flash_attn3.{op}: expected {reason}'}
