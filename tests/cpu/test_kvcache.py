"""flash_attn_with_kvcache on CPU tensors against a computation query by query: results, the cache
after an append, upstream's signature.
"""
from __future__ import annotations

import inspect
import random

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn3.cpu.reference import Inputs, Lengths

from tests.cpu import by_row
from tests.support import compare
from tests.support.cache_cases import E4M3, LAYOUTS, CacheCase, small
from tests.support.cache_oracle import (check_cache, check_shapes, inputs_of, packed, run,
                                        scales_of)
from tests.support.lists import ints

BOUNDS = {'fp64': 1e-12, 'fp32': 1e-5, 'fp16': 2e-3, 'bf16': 1.6e-2, 'e4m3': 1.6e-2}

UPSTREAM = dict(
    k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
    sm_margin=0, return_softmax_lse=False)    # as flash_attn_interface has them


def scaled(case: CacheCase, inputs: Inputs, lengths: Lengths, arguments: dict) -> Inputs:
    """In float64, with the scales of e4m3."""
    wide = inputs.to(torch.float64)
    for name, scale in zip('qkv', scales_of(arguments)):
        if case.wide == E4M3 and scale is not None:
            x = getattr(wide, name)
            counts = ints(case.queries) if name == 'q' else lengths.k.cu_seqlens.diff()
            heads = scale.double().repeat_interleave(x.size(1) // scale.size(1), 1)
            wide = wide._replace(**{name: x * heads.repeat_interleave(counts, 0)[..., None]})
    return wide


def by_rows(case: CacheCase, arguments: dict) -> tuple[Tensor, Tensor]:
    """out (rows, heads, columns) and LSE (heads, rows) by loops over rows and heads, from what the
    cache holds after the call.
    """
    inputs, lengths, _ = inputs_of(case, arguments)
    q, k, v, s_aux = scaled(case, inputs, lengths, arguments)
    found = [by_row.attend(Inputs(q[None, rows], k[None, keys], v[None, keys], s_aux), case.score)
             for rows, keys in lengths.slices()]
    return torch.cat([x.out[0] for x in found]), torch.cat([x.lse[0] for x in found], 1)


def check(case: CacheCase) -> None:
    """Results, and every slot of the caches."""
    arguments = case.arguments('cpu')
    got, after = run(case, arguments)
    with compare.naming(case):
        check_cache(case, arguments, after)
        check_shapes(case, after, got)
        out, lse, _ = packed(case, got)
        wanted, wanted_lse = by_rows(case, after)
        bound = BOUNDS[case.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def drawn(number: int) -> CacheCase:
    """A cell of upstream's grid, at small sizes."""
    pick = random.Random(number)
    capacity = pick.choice([16, 24, 40])
    is_packed, appends = pick.random() < 0.4, pick.random() < 0.6
    batch = pick.choice([1, 3, 4])
    count = pick.choice([1, 1, 2, 5])
    queries = tuple(pick.randint(0, 4) if is_packed else count for _ in range(batch))
    most = pick.randint(1, 4)
    new = tuple(pick.randint(0, 4) if is_packed else most for _ in range(batch))
    lengths = tuple(pick.randint(0, capacity - more) for more in new)
    pads = tuple(pick.randint(0, length) for length in lengths)
    page_size = pick.choice([0, 0, 1, 4, 8])
    dtype = pick.choice(['fp32', 'fp32', 'fp64', 'bf16', 'fp16', 'e4m3'])
    rotary = pick.choice([0, 6, 8, 16]) if appends and dtype != 'e4m3' else 0
    mask = pick.choice([{}, {'causal': True}, {'window': (pick.randint(0, 9), pick.randint(0, 9))},
                        {'causal': True, 'chunk': pick.randint(1, 12)}])
    options = mask | pick.choice([{}, {'softcap': 2.5}, {'num_splits': 3}, {'num_splits': 1},
                                  {'split_size': 64}, {'softmax_scale': 0.4}, {'pack_gqa': True}])
    head_dim, head_dim_v = pick.choice([(16, 16), (16, 8), (24, 40)])
    return small(
        lengths, queries, new=new if appends else (), capacity=capacity,
        heads=pick.choice([(4, 4), (4, 2), (3, 1)]), head_dim=head_dim, head_dim_v=head_dim_v,
        dtype=dtype, page_size=page_size, batch_idx=pick.random() < 0.5,
        leftpad=pads if pick.random() < 0.4 else (), is_packed=is_packed, new_packed=is_packed,
        rotary_columns=rotary, interleaved=pick.random() < 0.5,
        own_positions=rotary > 0 and pick.random() < 0.3,
        sinks='fp32' if pick.random() < 0.3 else '', descales=pick.random() < 0.7, **options)


@pytest.mark.parametrize('number', range(200))
def test_grid(number):
    check(drawn(number))


# ---------------------------------------------------------------------------------- single features
@pytest.mark.parametrize('page_size', [1, 2, 3, 4, 6, 8, 12, 24])
def test_append_across_page_borders(page_size):
    check(small((5, 0, 18), 6, new=(6, 6, 6), page_size=page_size, causal=True))


@pytest.mark.parametrize('page_size', [0, 4])
def test_a_number_as_length(page_size):
    check(small((9, 9), 2, new=(3, 3), page_size=page_size, length_as='int'))


@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('options', [{}, {'causal': True}, {'window': (3, 4)}], ids=str)
@pytest.mark.parametrize('rotary', [2, 10, 16])
def test_rotary(rotary, options, interleaved):
    check(small(queries=3, new=(2, 2, 2), rotary_columns=rotary, interleaved=interleaved,
                **options))


def test_rotary_of_packed_queries_and_keys():
    check(small(queries=(3, 0, 1), new=(2, 0, 4), rotary_columns=8, is_packed=True,
                new_packed=True, page_size=4, causal=True))


def test_rotary_counts_from_slot_0_and_windows_from_the_first_key():
    check(small((9, 4, 17), 3, new=(3, 3, 3), rotary_columns=8, leftpad=(4, 4, 0), window=(2, 0)))


def test_without_a_length_the_whole_cache_counts():
    given = small((24, 24), 2, length_as='none', lse=False).arguments('cpu')
    out = flash_attn_with_kvcache(**given)
    assert torch.equal(out, flash_attn_func(given['q'], given['k_cache'], given['v_cache']))


def test_nothing_to_attend_to():
    """Also with a leftpad of all keys; a sink alone is no key."""
    check(small((0, 3, 0), leftpad=(0, 3, 0), causal=True))
    check(small((0, 3, 0), leftpad=(0, 3, 0), sinks='fp32'))


@pytest.mark.parametrize('shape, table', [((2, 0), None), ((0, 16), 0), ((0, 16), 3), ((3, 16), 0)],
                         ids=str)
def test_a_cache_without_slots(shape, table):
    """The LSE is the sink, or -inf."""
    q, cache, sinks = torch.randn(2, 3, 4, 8), torch.randn(*shape, 2, 8), torch.randn(4)
    given = {} if table is None else {'page_table': torch.zeros(2, table, dtype=torch.int32)}
    for s_aux, wanted in ((sinks, sinks[:, None]), (None, torch.tensor(-torch.inf))):
        out, lse, *_ = flash_attn_with_kvcache(q, cache, cache, **given, s_aux=s_aux,
                                               cache_seqlens=ints([0, 0]), return_softmax_lse=True)
        assert (out == 0).all() and torch.equal(lse, wanted.expand(2, 4, 3))


def test_batch_of_none():
    q, cache = torch.randn(0, 1, 2, 8), torch.randn(0, 4, 2, 8)
    assert flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints([])).shape == q.shape


def test_cu_seqlens_k_new_without_k_is_ignored():
    given = small(lse=False).arguments('cpu')
    same = flash_attn_with_kvcache(**given, cu_seqlens_k_new=ints([0, 7]))
    assert torch.equal(same, flash_attn_with_kvcache(**given))


@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
def test_out_is_written_and_returned(dtype):
    given = small(dtype=dtype, lse=False).arguments('cpu')
    wanted = flash_attn_with_kvcache(**given)
    out = torch.full_like(wanted, 7).transpose(1, 2).contiguous().transpose(1, 2)
    assert flash_attn_with_kvcache(**given, out=out) is out and torch.equal(out, wanted)


def test_dtypes_of_the_output_with_e4m3():
    given = small(dtype='e4m3', lse=False).arguments('cpu')
    assert flash_attn_with_kvcache(**given).dtype == torch.bfloat16
    half = flash_attn_with_kvcache(**given, out_dtype=torch.float16)
    assert half.dtype == torch.float16
    out = torch.empty_like(half)
    assert torch.equal(flash_attn_with_kvcache(**given, out=out), half)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_caches_that_are_views(layout):
    """K and V in one tensor, heads before slots, rows with room: the append writes into it."""
    check(small(new=(2, 2, 2), layout=layout))


# ----------------------------------------------------------------------------------------- upstream
def test_parameters_are_upstreams():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    positional = {name: p.default for name, p in parameters.items()
                  if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == ['q', 'k_cache', 'v_cache', *UPSTREAM]
    assert {name: positional[name] for name in UPSTREAM} == UPSTREAM
    assert [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == [
        's_aux', 'out', 'split_size', 'out_dtype', 'shared_prefix', 'tree_mask',
        'descale_by_page', 'indices', 'index_block', 'index_counts', 'return_max_logits']


def test_scheduler_metadata_serve_every_call():
    given = small(lse=False).arguments('cpu')
    metadata = get_scheduler_metadata(3, 1, 24, 4, 2, 16, given['cache_seqlens'], causal=True,
                                      page_size=4, num_splits=0)
    assert metadata.dtype == torch.int32 and metadata.dim() == 1
    for others in (given, small((1, 2), 3, lse=False).arguments('cpu')):
        assert torch.equal(flash_attn_with_kvcache(**others, scheduler_metadata=metadata),
                           flash_attn_with_kvcache(**others))
