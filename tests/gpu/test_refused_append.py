"""A call that appends and is refused leaves the caches and their scales as they were, whatever is
wrong and wherever it is found out; one whose new rows lie in the cache writes what they were.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

import flash_attn3
from flash_attn3 import flash_attn_with_kvcache

from tests.support.cache_cases import CacheCase, as_bits, copied
from tests.support.wrong_appends import bits_of, expect_refused, expect_untouched, wrong_calls

# One call of each way through the host.
CASES = {
    'dense': CacheCase(((1, 70), (1, 5)), new=(1, 1), causal=True, capacity=90),
    'paged': CacheCase(((2, 70), (2, 5)), new=(3, 3), rotary=0.5, page_size=16, causal=True),
    'packed': CacheCase(((2, 70), (1, 5)), is_packed=True, new=(2, 4), new_packed=True),
    'e4m3': CacheCase(((1, 70), (1, 5)), new=(1, 1), dtype='e4m3', page_size=16),
    'kv8': CacheCase(((1, 70), (1, 5)), new=(1, 1), kv8=True),
    'by_page': CacheCase(((1, 70), (1, 5)), new=(1, 1), kv8=True, by_page=True, page_size=16),
    'latent': CacheCase(((1, 70), (1, 5)), new=(1, 1), latent=True, head_dim=64, head_dim_v=512,
                        heads=(16, 1), page_size=16, causal=True),
    'latent_kv8': CacheCase(((1, 70), (1, 5)), new=(1, 1), latent=True, kv8=True, head_dim=64,
                            head_dim_v=512, heads=(16, 1), page_size=16),
    'prefix': CacheCase(((1, 70), (1, 50)), new=(1, 1), shared=32, page_size=16, causal=True),
}
each_case = pytest.mark.parametrize('name', CASES)


@each_case
def test_refused_calls_write_nothing(name, device):
    given = CASES[name].arguments(device)
    for what, change in wrong_calls(given).items():
        expect_refused(copied(given), what, change)
    flash_attn_with_kvcache(**copied(given))    # as it is, it is fine


@each_case
def test_refused_in_a_capture(name, cuda):
    """Nothing of them is in the graph."""
    given = copied(CASES[name].arguments(cuda))
    before = bits_of(given)
    flash_attn_with_kvcache(**copied(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marker = torch.ones(1, device=cuda)
        for change in (dict(num_splits=-1), dict(softmax_scale=0.0), dict(attention_chunk=-1)):
            with pytest.raises(RuntimeError, match='flash_attn3'):
                flash_attn_with_kvcache(**given | change)
    graph.replay()
    torch.cuda.synchronize()
    assert marker.item() == 1
    expect_untouched(given, before, name)


@pytest.mark.parametrize('name', ['dense', 'paged', 'latent'])
@pytest.mark.parametrize('change', [dict(num_splits=257), dict(softmax_scale=0.0)], ids=str)
def test_refused_when_compiled(change, name, device):
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, backend='aot_eager')
    expect_refused(copied(CASES[name].arguments(device)), str(change), change, compiled)


class Full:
    """A GPU of which this process may have no more memory than blocks that it holds."""
    SIZES = (2 << 20, 256 << 10, 4 << 10, 512)

    def __init__(self, device: torch.device):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.held: list[torch.Tensor] = []
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4096) / total)
        for size in self.SIZES:
            while (block := self._block(size, device)) is not None:
                self.held.append(block)

    def _block(self, size: int, device: torch.device) -> torch.Tensor | None:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return None

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_) -> None:
        self.held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize('name', ['dense', 'paged', 'latent', 'prefix', 'by_page'])
def test_without_memory(name, cuda):
    """What the launches need is allocated before the first of them: with ever more free blocks it
    is always another one that fails.
    """
    given = copied(CASES[name].arguments(cuda))
    flash_attn_with_kvcache(**copied(given))    # counters of the stream
    before, free = bits_of(given), torch.empty(12 << 20, dtype=torch.uint8, device=cuda)
    del free    # cached: what the blocks are made of
    failed = 0
    with Full(cuda) as full:
        spare = full.held[::2]    # no two of them are neighbours
        del full.held[::2]
        spare.sort(key=lambda x: -x.numel())
        while spare:
            try:
                flash_attn_with_kvcache(**given)
                break
            except RuntimeError:
                failed += 1
                expect_untouched_here(given, before)
            spare.pop()
    assert failed > 0
    flash_attn_with_kvcache(**given)


def expect_untouched_here(given: dict, before: dict) -> None:
    """`expect_untouched` on the host: the GPU has no memory left for the comparison."""
    for name, bits in before.items():
        assert torch.equal(as_bits(given[name]).cpu(), bits.cpu()), f'{name} was written'


# ------------------------------------------------------------------------------- shared memory
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('which', ['k', 'v', 'q', 'all'])
def test_rows_of_the_cache_as_new_rows(which, page_size, device):
    """k, v and q that are views of the cache count as they were before the append."""
    case = CacheCase(((4, 70), (4, 5)), heads=(2, 2), new=(4, 4), page_size=page_size, causal=True)
    given = copied(case.arguments(device))
    for cache in (given['k_cache'], given['v_cache']):
        cache[:, :4] = torch.randn_like(cache[:, :4])
    # Slots 0 to 3 are read, 2 to 5 and 1 to 4 are written, of the same pages or entries.
    views = dict(k=given['v_cache'][:2, :4], v=given['k_cache'][:2, :4],
                 q=given['k_cache'][:2, :4])
    given['cache_seqlens'] = torch.tensor([2, 1], dtype=torch.int32, device=device)
    if page_size:
        given['page_table'][:, 0] = torch.arange(2)
    chosen = views if which == 'all' else {which: views[which]}
    apart = copied(given) | {name: x.clone() for name, x in (given | chosen).items()
                             if name in ('q', 'k', 'v')}
    wanted = flash_attn_with_kvcache(**apart)
    got = flash_attn_with_kvcache(**given | chosen)
    for ours, theirs in zip(got[:2], wanted[:2]):
        assert torch.equal(as_bits(ours), as_bits(theirs))
    for name in ('k_cache', 'v_cache'):
        assert torch.equal(as_bits(given[name]), as_bits(apart[name]))


def test_out_in_the_cache(device):
    case = dataclasses.replace(CASES['dense'], heads=(2, 2))
    given = copied(case.arguments(device))
    for cache in (given['k_cache'], given['v_cache']):
        expect_refused(given, 'out', dict(out=cache[:, 7:8]))


# ------------------------------------------------------------------------- scales that are numbers
@pytest.mark.parametrize('name', ['e4m3', 'kv8'])
def test_numbers_as_descales(name, device):
    case = CASES[name]
    given = case.arguments(device)
    heads, batch = case.heads[1], case.batch
    names = ('q_descale', 'k_descale', 'v_descale') if name == 'e4m3' else ('k_descale',
                                                                            'v_descale')
    numbers = dict(zip(names, (0.5, 2, 0.25)))
    tensors = {key: torch.full((batch, heads), float(x), device=device)
               for key, x in numbers.items()}
    got, wanted = (flash_attn_with_kvcache(**copied(given | scales))
                   for scales in (numbers, tensors))
    for ours, theirs in zip(got[:2], wanted[:2]):
        assert torch.equal(as_bits(ours), as_bits(theirs))


def test_a_number_for_latents(device):
    case = dataclasses.replace(CASES['latent_kv8'], new=(), descales=False)
    given = case.arguments(device)
    scale = torch.full((*given['v_cache'].shape[:2], 1), 0.5, device=device)
    got, wanted = (flash_attn_with_kvcache(**given | dict(v_descale=x)) for x in (0.5, scale))
    assert torch.equal(as_bits(got[0]), as_bits(wanted[0]))


@pytest.mark.parametrize('packed', [False, True])
def test_numbers_as_descales_without_a_cache(packed, device):
    q, k, v = (torch.randn(2, 70, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(3))
    function, lists = flash_attn3.flash_attn_func, ()
    if packed:
        starts = torch.tensor([0, 70, 140], dtype=torch.int32, device=device)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        function, lists = flash_attn3.flash_attn_varlen_func, (starts, starts, 70, 70)
    names = ('q_descale', 'k_descale', 'v_descale')
    got = function(q, k, v, *lists, **dict(zip(names, (0.5, 2, 0.25))))
    wanted = function(q, k, v, *lists, **{name: torch.full((2, 2), x, device=device)
                                          for name, x in zip(names, (0.5, 2.0, 0.25))})
    assert torch.equal(got, wanted)
    with pytest.raises(RuntimeError, match='k_descale to be a tensor or a number'):
        function(q, k, v, *lists, k_descale='2')


# ------------------------------------------------------------------------ what was refused before
@pytest.mark.parametrize('case', [
    CacheCase(((3, 70), (3, 5)), page_size=16, batch_idx=True, causal=True),
    CacheCase(((3, 70), (3, 5)), page_size=16, batch_idx=True, causal=True, new=(3, 3),
              rotary=0.5, kv8=True, by_page=True),
    CacheCase(((3, 70), (3, 5)), rotary=0.5, causal=True),
    CacheCase(((3, 70), (3, 5)), rotary=1.0, own_positions=True, interleaved=False, page_size=4),
    CacheCase(((3, 70), (1, 5)), rotary=1.0, is_packed=True, kv8=True, causal=True),
    CacheCase(((3, 70), (3, 5)), rotary=1.0, dtype='e4m3', causal=True),
    CacheCase(((3, 70), (3, 5)), rotary=0.5, dtype='e4m3', causal=True, new=(3, 3), page_size=16),
    CacheCase(((3, 70), (3, 5)), rotary=1.0, dtype='e4m3', interleaved=False, new=(2, 2),
              own_positions=True, head_dim=64),
], ids=str)
def test_what_upstream_takes(case, device):
    from tests.support.cache_oracle import check_case
    check_case(case, device)


@pytest.mark.parametrize('table_dtype', [torch.bfloat16, torch.float16], ids=str)
def test_tables_of_16_bits_for_e4m3(table_dtype, device):
    case = CacheCase(((3, 70), (3, 5)), rotary=1.0, dtype='e4m3', causal=True, new=(3, 3))
    given = case.arguments(device)
    e4m3 = {name: given[name] for name in ('rotary_cos', 'rotary_sin')}
    wide = {name: x.to(table_dtype) for name, x in e4m3.items()}
    one, other = copied(given | e4m3), copied(given | wide)
    got, wanted = (flash_attn_with_kvcache(**x) for x in (one, other))
    assert torch.equal(as_bits(got[0]), as_bits(wanted[0]))
    assert torch.equal(as_bits(one['k_cache']), as_bits(other['k_cache']))


def test_positions_without_tables(device):
    case = CASES['dense']
    given = case.arguments(device)
    lists = dict(rotary_seqlens=given['cache_seqlens'] + 3)
    got, wanted = (flash_attn_with_kvcache(**copied(given | x)) for x in (lists, {}))
    assert torch.equal(as_bits(got[0]), as_bits(wanted[0]))


def test_rows_of_the_table_that_are_none(device, request):
    """They have no pages: nothing is written for them, and nothing else changes."""
    if request.config.getoption('--device') == 'cpu':
        pytest.skip('the CPU path refuses such rows')
    case = CacheCase(((1, 70), (1, 5)), new=(1, 1), page_size=16, batch_idx=True)
    given = case.arguments(device)
    good, bad = copied(given), copied(given)
    bad['cache_batch_idx'] = given['cache_batch_idx'].clone()
    bad['cache_batch_idx'][1] = 99
    wanted, got = (flash_attn_with_kvcache(**x) for x in (good, bad))
    assert torch.equal(got[0][0], wanted[0][0])
    table = given['page_table'][given['cache_batch_idx'][1].item()]
    page = table[5 // 16].item()
    for name in ('k_cache', 'v_cache'):
        expected = as_bits(good[name]).clone()
        expected[page] = as_bits(given[name])[page]
        assert torch.equal(as_bits(bad[name]), expected)


def test_latents_that_are_e4m3(device):
    """Copied as they are; their scales stay the caller's."""
    case = CASES['latent_kv8']
    given = copied(case.arguments(device))
    new = (given['v'].float().clamp(-8, 8)).to(torch.float8_e4m3fn)
    before = given['v_descale'].clone()
    for b, length in enumerate(given['cache_seqlens'].tolist()):
        page = given['page_table'][b, length // 16].item()
        before[page, length % 16] = 0.5
    own = given | dict(v=new, v_descale=before.clone())
    out = flash_attn_with_kvcache(**own)[0]
    assert torch.equal(own['v_descale'].nan_to_num(), before.nan_to_num())
    for b, length in enumerate(given['cache_seqlens'].tolist()):
        page = given['page_table'][b, length // 16].item()
        assert torch.equal(as_bits(own['v_cache'])[page, length % 16], as_bits(new)[b, 0])
    assert out.isfinite().all()
