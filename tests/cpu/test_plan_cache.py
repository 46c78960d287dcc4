"""plan/plan_cache.cpp: the variant, the packing and the split of a call on a cache, and the
buffers of its parts.
"""
import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from flash_attn3 import _plan
from tests.cpu.drawn import examples
from tests.cpu.test_key_splits import EVEN, PARTS, SIZE
from tests.cpu.test_plan import ceil_div
from tests.host import _host

DTYPES = {'float16': (0, 'Fp16'), 'bfloat16': (1, 'Bf16'), 'float8_e4m3fn': (2, 'E4m3')}
VARIANTS = {row['name']: row for row in _plan.variants() if row['mask'].startswith('cache')}
SMS = 132


def plans(queries=1, capacity=4096, *, batch=4, heads=(8, 2), head_dim=128, head_dim_v=None,
         dtype='bfloat16', page_size=0, total=None, **numbers):
    """total: rows of packed queries, of which `queries` are said to be the longest sequence's."""
    heads_q, heads_k = heads
    entries = (batch * capacity // page_size, page_size) if page_size else (batch, capacity)
    shapes = {'q': (batch, queries, heads_q, head_dim) if total is None
              else (total, heads_q, head_dim),
              'k': (*entries, heads_k, head_dim), 'v': (*entries, heads_k, head_dim_v or head_dim)}
    if total is not None:
        shapes['cu_seqlens_q'] = (batch + 1,)
        numbers['max_seqlen_q'] = queries
    if page_size:
        shapes |= {'page_table': (batch, capacity // page_size), 'cache_seqlens': (batch,)}
    return _host.plan_cache(DTYPES[dtype][0], shapes, numbers)


def plan(*args, **given):
    """That of the only launch."""
    (facts,) = plans(*args, **given)
    return facts


def variant_of(facts):
    return VARIANTS[facts['name']]


# --------------------------------------------------------------------------------------- variants
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('softcap', [0.0, 30.0])
def test_variant_by_dtype_and_head_dims(dtype, softcap):
    """The one that covers both head dims with the fewest columns together."""
    step = 16 if dtype == 'float8_e4m3fn' else 8
    built = {'64': (64, 64), '128': (128, 128), '192x128': (192, 128), '256': (256, 256)}
    for head_dim, head_dim_v in itertools.product(range(step, 257, step), repeat=2):
        if 64 < max(head_dim, head_dim_v) <= 96:    # test_the_decode_kernel
            continue
        covers = [(sum(dims), name) for name, dims in built.items()
                  if dims[0] >= head_dim and dims[1] >= head_dim_v]
        kind = 'CacheSoftcap' if softcap else 'Cache'
        wanted = f'Fwd{DTYPES[dtype][1]}D{min(covers)[1]}{kind}'
        facts = plan(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, softcap=softcap,
                     num_splits=1)
        assert facts['name'] == wanted and wanted in VARIANTS


@pytest.mark.parametrize('softcap', [0.0, 30.0])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('page_size', [0, 1, 4, 5, 12, 16, 64])
@pytest.mark.parametrize('head_dim', [64, 80, 96, 128, 256])
@pytest.mark.parametrize('queries', [1, 8, 9, 16, 17])
def test_the_decode_kernel(queries, head_dim, page_size, dtype, softcap):
    """Up to 32 rows; up to head dim 128 also up to 64 rows, of pages that boxes cannot load, and of
    head dims for which the others have a much larger tile. Not with e4m3 queries, nor where bits
    are promised.
    """
    capacity = 960
    given = {'heads': (8, 2), 'head_dim': head_dim, 'page_size': page_size, 'dtype': dtype,
             'softcap': softcap}
    is_faster = page_size % 8 > 0 or 64 < head_dim <= 96
    most_rows = 64 if head_dim <= 128 and is_faster else 32
    wanted = dtype != 'float8_e4m3fn' and 4 * queries <= most_rows
    facts = plan(queries, capacity, **given)
    assert facts['name'].endswith('Decode') is wanted
    if wanted:
        width = min(dim for dim in (64, 96, 128, 256) if dim >= head_dim)
        assert facts['name'] == f'Fwd{DTYPES[dtype][1]}D{width}CacheDecode'
    assert plan(queries, capacity, num_splits=3, **given)['name'].endswith('Decode') is wanted
    for numbers in ({'num_splits': 1}, {'split_size': 256}):
        assert not plan(queries, capacity, **given, **numbers)['name'].endswith('Decode')


@pytest.mark.parametrize('batch, heads, numbers, is_decoding', [
    (4096, 16, {}, True), (124, 16, {}, True), (123, 16, {}, False), (124, 32, {}, False),
    (64, 16, {'sm_margin': 66}, True), (124, 16, {'num_splits': 1}, False), (124, 4, {}, True)])
def test_chosen_latents(batch, heads, numbers, is_decoding):
    """Up to 16 rows of many tiles, which are seldom split, have a kernel of their own."""
    shapes = {'q': (batch, 1, heads, 64), 'qv': (batch, 1, heads, 512), 'k': (65536, 1, 1, 64),
              'v': (65536, 1, 1, 512), 'page_table': (batch, 2048)}
    (facts,) = _host.plan_cache(1, shapes, {'keys_chosen': True, **numbers})
    assert facts['name'] == 'FwdBf16D64x512Latent' + 'Decode' * is_decoding
    (facts,) = _host.plan_cache(1, shapes, {'cache_length': 2048, **numbers})
    assert facts['name'] == 'FwdBf16D64x512Latent'


@pytest.mark.parametrize('group, head_dim, numbers', [
    (1, 64, {}), (64, 128, {}), (128, 64, {}), (40, 128, {}), (7, 128, {'num_splits': 1}),
    (64, 256, {'split_size': 256})])
def test_chosen_keys_are_decoded(group, head_dim, numbers):
    """Other tiles do not know them, so heads are packed as a decode kernel can hold them."""
    shapes = {'q': (5, 1, 2 * group, head_dim), 'k': (4096, 1, 2, head_dim),
              'v': (4096, 1, 2, head_dim), 'page_table': (5, 300)}
    (facts,) = _host.plan_cache(1, shapes, {'keys_chosen': True, **numbers})
    assert facts['name'].endswith('Decode')
    assert facts['pack'] == max(n for n in range(1, 33) if group % n == 0)


@pytest.mark.parametrize('mask', [{}, {'causal': True}, {'window_left': 5}, {'attention_chunk': 7}])
def test_masks_are_values_and_not_variants(mask):
    assert plan(3, **mask)['name'] == 'FwdBf16D128CacheDecode'
    assert plan(3, **mask, num_splits=1)['name'] == 'FwdBf16D128Cache'


@pytest.mark.parametrize('group', [1, 2, 8])
@pytest.mark.parametrize('queries', [1, 8, 9, 32, 33, 64, 65, 500])
@pytest.mark.parametrize('numbers', [{}, {'num_splits': 3}, {'split_size': 256}, {'softcap': 9.0}])
@pytest.mark.parametrize('dtype', DTYPES)
def test_two_warpgroups_for_more_queries_than_one_takes(group, queries, numbers, dtype):
    """With split_size too: both kernels compute a row in the same order."""
    facts = plan(queries, heads=(2 * group, 2), dtype=dtype, **numbers)
    has_two_tiles = dtype != 'float8_e4m3fn' and 'softcap' not in numbers
    is_long = queries > 64 // group and has_two_tiles
    assert facts['name'].endswith('Long') is is_long
    assert variant_of(facts)['consumer_warpgroups'] == 1 + is_long


# ------------------------------------------------------------------------------- rows and the grid
@given(st.integers(1, 8), st.integers(1, 160), st.sampled_from([None, True, False]),
       st.integers(0, 140), st.sampled_from([64, 128, 256]), st.sampled_from(list(DTYPES)))
@examples(200)
def test_packing_and_grid(heads_k, group, pack_gqa, sm_margin, head_dim, dtype):
    """Heads of a group fill the rows of a tile; CTAs fill the multiprocessors."""
    sm_margin = min(sm_margin, SMS - 1)
    facts = plan(heads=(heads_k * group, heads_k), pack_gqa=pack_gqa, sm_margin=sm_margin,
                 head_dim=head_dim, dtype=dtype)
    largest = max(d for d in range(1, min(group, 64) + 1) if group % d == 0)
    assert facts['pack'] == (1 if pack_gqa is False else largest)
    heads, ctas = heads_k * group // facts['pack'], SMS - sm_margin
    ctas *= variant_of(facts)['ctas_per_sm']
    assert facts['lanes'] == max(lanes for lanes in range(1, heads + 1) if heads % lanes == 0 and (
        lanes == 1 or ctas // lanes * lanes >= 0.96 * ctas) and (
        lanes == 1 or not variant_of(facts)['swapped']))
    assert facts['grid'] == ctas // facts['lanes'] * facts['lanes']


@pytest.mark.parametrize('queries', [255, 256, 1000])
@pytest.mark.parametrize('pack_gqa', [None, True, False])
@pytest.mark.parametrize('split_size', [0, 256])
def test_many_queries_are_not_packed(queries, pack_gqa, split_size):
    """They fill tiles alone, with split_size too: bits of a row do not depend on its tile."""
    is_packed = pack_gqa is True or (pack_gqa is None and queries < 256)
    facts = plan(queries, pack_gqa=pack_gqa, split_size=split_size)
    assert facts['pack'] == (4 if is_packed else 1)


@pytest.mark.parametrize('changes, is_shared', [
    ({}, True), ({'total': 641}, False), ({'num_splits': 1}, False), ({'num_splits': 2}, False),
    ({'split_size': 256}, False), ({'dtype': 'float8_e4m3fn'}, False), ({'head_dim': 64}, True),
    ({'head_dim': 256}, False), ({'batch': 1}, False), ({'queries': 8}, False),
    ({'queries': 40}, True), ({'page_size': 16}, True), ({'softcap': 9.0}, True),
    ({'queries': 40, 'heads': (40, 40), 'page_size': 1}, False),
    ({'queries': 60, 'heads': (8, 8), 'head_dim': 96}, False)])
def test_prompts_with_steps_beside_them(changes, is_shared):
    """Two launches: each takes the sequences whose queries its tile is for."""
    given = {'queries': 512, 'total': 516, 'batch': 5, 'heads': (32, 8)} | changes
    if 'queries' in changes:
        given['total'] = given['queries'] + 4
    launches = plans(**given)
    assert [launch['is_second'] for launch in launches] == [False, True][:1 + is_shared]
    if not is_shared:
        assert launches[0]['shared'][1] == 0
        return
    prompts, steps = launches
    most = 32 // steps['pack']
    assert steps['name'].endswith('Decode') and steps['shared'][:2] == (1, most)
    assert prompts['shared'][0] == most + 1 and prompts['shared'][1] >= given['total']
    for own, other in ((prompts, steps), (steps, prompts)):
        assert own['shared'][2:5] == (positions_of(other)[1], other['weight_log2'],
                                      other['tile_units'])
    assert prompts['shared'][5] * steps['shared'][5] == pytest.approx(1)
    assert prompts['lanes'] <= 4


def positions_of(facts):
    """Queries of a warpgroup, and of a tile: decode kernels may have fewer rows."""
    variant = variant_of(facts)
    has_few = variant['swapped'] and (facts['name'].endswith('Kv8') or variant['head_dim_v'] > 128)
    return 64 // facts['pack'], (32 // facts['pack'] if has_few else
                                 variant['consumer_warpgroups'] * (64 // facts['pack']))


@pytest.mark.parametrize('head_dim', [96, 256])
def test_sequences_longer_than_said_have_slots(head_dim):
    """Packed queries of a decode kernel: max_seqlen_q says 1, one sequence may have nearly all."""
    facts = plan(1, 960, heads=(8, 2), head_dim=head_dim, page_size=5, total=100, num_splits=3)
    assert facts['name'].endswith('Decode')
    assert facts['slots'] == 3 * tiles_of(facts, 4, 8, 1, 100)
    assert positions_of(facts)[1] == (16 if head_dim == 96 else 8)


@pytest.mark.parametrize('queries', [0, 1])
def test_groups_that_a_tile_of_32_rows_cannot_hold(queries):
    facts = plan(queries, 960, heads=(64, 1), head_dim=256, page_size=5)
    assert facts['pack'] == 64 and not facts['name'].endswith('Decode')


@given(st.integers(1, 300), st.sampled_from([1, 2, 3, 8, 16, 64]), st.booleans())
@examples(200)
def test_rows_of_a_part(queries, group, is_packed):
    """Those that its queries fill, where no tile has more; packed sequences may fill tiles."""
    facts = plan(queries, heads=(2 * group, 2), total=4 * queries if is_packed else None)
    of_warpgroup, of_tile = positions_of(facts)
    assert facts['m_tiles'] == ceil_div(queries, of_tile)
    all_rows = 64 * variant_of(facts)['consumer_warpgroups']
    is_short = not is_packed and queries < of_warpgroup
    rows = queries * facts['pack'] if is_short else all_rows
    if variant_of(facts)['swapped']:    # those that its GEMMs compute
        rows = next(n for n in (8, 16, 32, 64) if n >= rows)
    else:    # those of whole warps, or two for each lane that has one
        rows = min(2 * rows, 16 * ceil_div(rows, 16))
    assert facts['rows'] == rows
    assert queries * facts['pack'] <= facts['rows'] or facts['rows'] == all_rows


# --------------------------------------------------------------------------------- parts and slots
SPLITS = st.one_of(st.just({}), st.builds(lambda n: {'num_splits': n}, st.integers(1, 128)),
                   st.builds(lambda n: {'split_size': n}, st.integers(1, 5000)))


def tiles_of(facts, batch, heads, queries, total):
    _, positions = positions_of(facts)
    of_head = (_host.most_tiles(total, batch, positions) if total is not None
               else batch * ceil_div(queries, positions))
    return of_head * heads // facts['pack']


@pytest.mark.parametrize('numbers, kind, count', [
    ({}, EVEN, 0), ({'num_splits': 1}, PARTS, 1), ({'num_splits': 7}, PARTS, 7),
    ({'split_size': 1}, SIZE, 1), ({'split_size': 128}, SIZE, 1), ({'split_size': 129}, SIZE, 2),
    ({'split_size': 4096}, SIZE, 32), ({'split_size': 640, 'num_splits': 1}, SIZE, 5)])
def test_splits(numbers, kind, count):
    """A size is rounded up to whole K tiles."""
    assert plan(head_dim=64, **numbers)['splits'] == (kind, count)
    assert variant_of(plan(head_dim=64))['tile_n'] == 128


@given(st.integers(1, 300), st.integers(1, 300), st.integers(2, 40), st.integers(1, 3000),
       st.booleans(), st.integers(0, 100), st.sampled_from([64, 128, 256]), st.integers(1, 2000))
@examples(200)
def test_a_split_size_makes_the_same_parts_in_each_batch(queries, longest, batch, capacity,
                                                         is_packed, sm_margin, head_dim, size):
    """K tiles and parts are those of a call with one sequence."""
    alone = plan(queries, capacity, batch=1, head_dim=head_dim, split_size=size)
    more = max(queries, longest)
    others = plan(more if is_packed else queries, 2 * capacity, batch=batch, head_dim=head_dim,
                  split_size=size, total=batch * more if is_packed else None, sm_margin=sm_margin)
    assert alone['splits'] == others['splits']
    assert variant_of(alone)['tile_n'] == variant_of(others)['tile_n']


@given(SPLITS, st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(1, 8),
       st.integers(1, 9000), st.sampled_from([64, 128, 256]))
@examples(300)
def test_slots(split, queries, batch, heads_k, group, capacity, head_dim):
    """Two for each CTA, or one for each part that a tile of the launch can have. None is needed
    where no tile can have several.
    """
    facts = plan(queries, capacity, batch=batch, heads=(heads_k * group, heads_k),
                 head_dim=head_dim, **split)
    heads_q, _ = facts['heads']
    tile_n = variant_of(facts)['tile_n']
    most_k_tiles = ceil_div(capacity, tile_n)
    parts = max(_host.units(facts['splits'], k_tiles) for k_tiles in range(1, most_k_tiles + 1))
    if not split and facts['splits'][0] == PARTS:
        assert batch == 1
        tiles = tiles_of(facts, batch, heads_q, queries, None)
        assert tiles * parts == facts['slots'] == facts['most_units'] <= facts['grid']
    elif not split:
        assert facts['slots'] == 2 * facts['grid'] and facts['most_units'] > 1 << 60
    elif parts == 1:
        assert facts['slots'] == 1 and facts['most_units'] > 1 << 60
    else:
        tiles = tiles_of(facts, batch, heads_q, queries, None)
        assert tiles * parts <= facts['slots'] == facts['most_units']
        assert facts['slots'] == tiles * min(parts, split.get('num_splits', parts))


@pytest.mark.parametrize('changes, name, parts', [
    ({}, 'FwdBf16D128CacheLong', 8), ({'heads': (8, 1)}, 'FwdBf16D128Cache', 16),
    ({'capacity': 1 << 15}, 'FwdBf16D128CacheLong', 8), ({'causal': True}, None, 0),
    ({'batch': 2}, None, 0), ({'num_splits': 3}, None, 3), ({'queries': 16}, None, 0),
    ({'capacity': 256}, None, 2)])
def test_equal_parts_of_known_keys(changes, name, parts):
    """Many queries on the keys of one sequence, such as a shared prefix; not where their number, or
    which of them a query sees, is known on the GPU alone.
    """
    facts = plan(**{'queries': 64, 'capacity': 8192, 'batch': 1, 'heads': (32, 8)} | changes)
    assert facts['splits'] == ((PARTS, parts) if parts else (EVEN, 0))
    assert name is None or facts['name'] == name


@pytest.mark.parametrize('queries, is_huge', [(1, False), (1 << 15, False), (1 << 20, True)])
def test_a_line_has_no_more_units_than_an_int_counts(queries, is_huge):
    """A million queries on as many keys: a unit has several K tiles, as few as possible."""
    facts = plan(queries, 1 << 20, batch=1, heads=(32, 1), head_dim=256, total=queries,
                 pack_gqa=True)
    kind, count = facts['splits']
    k_tiles = ceil_div(1 << 20, variant_of(facts)['tile_n'])
    tiles = tiles_of(facts, 1, 32, queries, queries) // facts['lanes']
    assert kind == EVEN and (count > 0) == is_huge
    of_tile = _host.units((EVEN, count), k_tiles, facts['weight_log2']) + facts['tile_units']
    assert tiles * of_tile <= 1 << 29
    if is_huge:
        assert tiles * _host.units((EVEN, count - 1), k_tiles, facts['weight_log2']) > 1 << 29


def test_fewer_keys_may_have_more_parts():
    """At most 4: 5 K tiles are 2 + 2 + 1, and 4 are 1 + 1 + 1 + 1."""
    facts = plan(capacity=5 * 128, num_splits=4)
    assert [_host.units(facts['splits'], k_tiles) for k_tiles in (5, 4)] == [3, 4]
    assert facts['slots'] == 4 * 2 * 4


@given(SPLITS, st.lists(st.integers(0, 150), min_size=1, max_size=8), st.integers(0, 50),
       st.data(), st.integers(1, 1000), st.integers(1, 140))
@examples(300)
def test_the_parts_of_any_lengths_have_slots(split, queries, unused, data, capacity, sm_margin):
    """Packed queries: lengths are known on the device alone."""
    total = max(1, sum(queries) + unused)
    launches = plans(max(queries), capacity, batch=len(queries), heads=(4, 2), total=total,
                     sm_margin=min(sm_margin, SMS - 1), **split)
    held = data.draw(st.lists(st.integers(0, capacity), min_size=len(queries),
                              max_size=len(queries)))
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    lengths = _host.CacheLengths(cu_q=starts, total_q=total, held=held, capacity=capacity)
    for facts in launches:
        _, positions = positions_of(facts)
        heads, lines = 4 // facts['pack'], facts['lanes']
        line = (len(queries), heads // lines, positions, facts['grid'] // lines, lines,
                facts['weight_log2'], facts['tile_units'], facts['shared'], (0, 0))
        _, _, ctas = _host.cache_parts(
            lengths, line, facts['splits'], _host.IntervalMask(None, 0, 0),
            variant_of(facts)['tile_n'], False, facts['most_units'])
        tiles = {tile for parts in ctas for tile, *_ in parts}
        fewest, most, *_ = facts['shared']
        taken = [n for n in queries if most == 0 or fewest <= n <= most]
        assert len(tiles) == sum(ceil_div(n, positions) for n in taken) * 4 // facts['pack']
        for _, _, (*_, count), slots in itertools.chain(*ctas):
            assert count == 1 or all(slot < facts['slots'] for slot in slots)


# ----------------------------------------------------------------------------------------- capacity
@pytest.mark.parametrize('page_size', [0, 1, 16, 256])
def test_capacity(page_size):
    assert plan(capacity=512, page_size=page_size)['capacity'] == 512


def test_packed_keys_are_one_entry():
    shapes = {'q': (100, 8, 64), 'k': (300, 2, 64), 'v': (300, 2, 64), 'cu_seqlens_q': (4,),
              'cu_seqlens_k': (4,)}
    numbers = {'max_seqlen_q': 40, 'max_seqlen_k': 200, 'num_splits': 3}
    (facts,) = _host.plan_cache(1, shapes, numbers)
    assert facts['capacity'] == 300 and facts['splits'] == (PARTS, 3)
