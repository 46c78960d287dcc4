"""flash_attn_with_kvcache on CPU tensors against a computation query by query: results, the cache
after an append, upstream's signature.
"""
from __future__ import annotations

import inspect
import random

import pytest
import torch

from flash_attn3 import flash_attn_func, flash_attn_with_kvcache, get_scheduler_metadata

from tests.cpu.cached import BOUNDS, Problem, as_bits, expected
from tests.support.lists import ints

UPSTREAM = dict(
    k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
    sm_margin=0, return_softmax_lse=False)    # as flash_attn_interface has them


def check(problem: Problem) -> None:
    """Results, and every slot of the caches."""
    given = problem.build().arguments
    before = {name: given[name].clone() for name in ('k_cache', 'v_cache')}
    out, lse, *empty = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert [x.numel() for x in empty] == [0, 0]
    outs, lses, new = expected(problem)
    if problem.packed:
        wanted, wanted_lse = torch.cat(outs), torch.cat(lses).T
    else:
        wanted, wanted_lse = torch.stack(outs), torch.stack(lses).transpose(1, 2)
    bound = BOUNDS[problem.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert lse.dtype == (torch.float64 if problem.dtype == 'fp64' else torch.float32)
    for name, rows in (('k_cache', new), ('v_cache', problem.v_new)):
        check_cache(problem, before[name], given[name], rows)


def check_cache(problem: Problem, before: torch.Tensor, after: torch.Tensor, rows: list) -> None:
    """Bit for bit what was there, with the new rows behind each sequence: those of k may differ in
    the last digit where they were rotated.
    """
    flat = before.clone().view(-1, *before.shape[2:])
    for place, length, own in zip(problem.place, problem.lengths, rows):
        as_bits(flat)[place[length:length + len(own)]] = as_bits(own)
    wanted, got = flat.view(before.shape), after
    if problem.rotary:
        torch.testing.assert_close(got, wanted, equal_nan=True)
        wanted = torch.where(wanted.isnan(), wanted, got)
    if before.itemsize == 1:
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    else:
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def drawn(number: int) -> Problem:
    """A cell of upstream's grid, at small sizes."""
    pick = random.Random(number)
    capacity = pick.choice([16, 24, 40])
    packed, appends = pick.random() < 0.4, pick.random() < 0.6
    batch = pick.choice([1, 3, 4])
    count = pick.choice([1, 1, 2, 5])
    queries = tuple(pick.randint(0, 4) if packed else count for _ in range(batch))
    most = pick.randint(1, 4)
    new = tuple(pick.randint(0, 4) if packed else most for _ in range(batch))
    lengths = tuple(pick.randint(0, capacity - more) for more in new)
    pads = tuple(pick.randint(0, length) for length in lengths)
    page_size = pick.choice([0, 0, 1, 4, 8])
    dtype = pick.choice(['fp32', 'fp32', 'fp64', 'bf16', 'fp16', 'e4m3'])
    rotary = pick.choice([0, 6, 8, 16]) if appends and dtype != 'e4m3' else 0
    mask = pick.choice([{}, {'causal': True}, {'window_size': (pick.randint(0, 9),
                                                               pick.randint(0, 9))},
                        {'causal': True, 'attention_chunk': pick.randint(1, 12)}])
    options = mask | pick.choice([{}, {'softcap': 2.5}, {'num_splits': 3}, {'num_splits': 1},
                                  {'split_size': 64}, {'softmax_scale': 0.4}, {'pack_gqa': True}])
    return Problem(
        lengths, queries, new if appends else None, capacity, pick.choice([(4, 4), (4, 2), (3, 1)]),
        pick.choice([(16, 16), (16, 8), (24, 40)]), dtype, page_size,
        idx=not page_size and pick.random() < 0.5, leftpad=pads if pick.random() < 0.4 else None,
        packed=packed, rotary=rotary, interleaved=pick.random() < 0.5,
        rotary_seqlens=tuple(pick.randint(0, 30) for _ in range(batch)) if rotary and
        pick.random() < 0.3 else None, sinks=pick.random() < 0.3,
        scales=dtype == 'e4m3' and pick.random() < 0.7, options=options, seed=number)


@pytest.mark.parametrize('number', range(200))
def test_grid(number):
    check(drawn(number))


# ---------------------------------------------------------------------------------- single features
@pytest.mark.parametrize('page_size', [1, 2, 3, 4, 6, 8, 12, 24])
def test_append_across_page_borders(page_size):
    check(Problem((5, 0, 18), (6, 6, 6), (6, 6, 6), page_size=page_size, options={'causal': True}))


@pytest.mark.parametrize('page_size', [0, 4])
def test_a_number_as_length(page_size):
    check(Problem((9, 9), (2, 2), (3, 3), page_size=page_size, int_length=True))


@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('options', [{}, {'causal': True}, {'window_size': (3, 4)}], ids=str)
@pytest.mark.parametrize('rotary', [2, 10, 16])
def test_rotary(rotary, options, interleaved):
    check(Problem((5, 0, 17), (3, 3, 3), (2, 2, 2), rotary=rotary, interleaved=interleaved,
                  options=options))


def test_rotary_of_packed_queries_and_keys():
    check(Problem((5, 0, 17), (3, 0, 1), (2, 0, 4), rotary=8, packed=True, page_size=4,
                  options={'causal': True}))


def test_rotary_counts_from_slot_0_and_windows_from_the_first_key():
    check(Problem((9, 4, 17), (3, 3, 3), (3, 3, 3), rotary=8, leftpad=(4, 4, 0),
                  options={'window_size': (2, 0)}))


def test_without_a_length_the_whole_cache_counts():
    problem = Problem((24, 24), (2, 2)).build()
    given = problem.arguments
    del given['cache_seqlens']
    out = flash_attn_with_kvcache(**given)
    assert torch.equal(out, flash_attn_func(given['q'], given['k_cache'], given['v_cache']))


def test_nothing_to_attend_to():
    """Also with a leftpad of all keys; a sink alone is no key."""
    check(Problem((0, 3, 0), leftpad=(0, 3, 0), options={'causal': True}))
    check(Problem((0, 3, 0), leftpad=(0, 3, 0), sinks=True))


def test_batch_of_none():
    q, cache = torch.randn(0, 1, 2, 8), torch.randn(0, 4, 2, 8)
    assert flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints([])).shape == q.shape


def test_cu_seqlens_k_new_without_k_is_ignored():
    given = Problem().build().arguments
    same = flash_attn_with_kvcache(**given, cu_seqlens_k_new=ints([0, 7]))
    assert torch.equal(same, flash_attn_with_kvcache(**given))


@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
def test_out_is_written_and_returned(dtype):
    given = Problem(dtype=dtype).build().arguments
    wanted = flash_attn_with_kvcache(**given)
    out = torch.full_like(wanted, 7).transpose(1, 2).contiguous().transpose(1, 2)
    assert flash_attn_with_kvcache(**given, out=out) is out and torch.equal(out, wanted)


def test_dtypes_of_the_output_with_e4m3():
    given = Problem(dtype='e4m3').build().arguments
    assert flash_attn_with_kvcache(**given).dtype == torch.bfloat16
    half = flash_attn_with_kvcache(**given, out_dtype=torch.float16)
    assert half.dtype == torch.float16
    out = torch.empty_like(half)
    assert torch.equal(flash_attn_with_kvcache(**given, out=out), half)


@pytest.mark.parametrize('as_views', ['interleaved', 'heads first'])
def test_caches_that_are_views(as_views):
    """K and V in one tensor, or heads before slots: the append writes into it."""
    problem = Problem((5, 0, 17), (1, 1, 1), (2, 2, 2)).build()
    given = problem.arguments
    wanted = flash_attn_with_kvcache(**problem.build().arguments)
    k_cache, v_cache = given['k_cache'], given['v_cache']
    if as_views == 'interleaved':
        both = torch.cat([k_cache, v_cache], dim=-1)
        views = dict(k_cache=both[..., :16], v_cache=both[..., 16:])
    else:
        views = {name: given[name].transpose(1, 2).contiguous().transpose(1, 2)
                 for name in ('k_cache', 'v_cache')}
    assert torch.equal(flash_attn_with_kvcache(**given | views), wanted)
    for name, view in views.items():
        assert torch.equal(view.nan_to_num(7), problem.arguments[name].nan_to_num(7))


# ----------------------------------------------------------------------------------------- upstream
def test_parameters_are_upstreams():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    positional = {name: p.default for name, p in parameters.items()
                  if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == ['q', 'k_cache', 'v_cache', *UPSTREAM]
    assert {name: positional[name] for name in UPSTREAM} == UPSTREAM
    assert [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == [
        's_aux', 'out', 'split_size', 'out_dtype', 'shared_prefix', 'tree_mask',
        'descale_by_page']


def test_scheduler_metadata_serve_every_call():
    given = Problem().build().arguments
    metadata = get_scheduler_metadata(3, 1, 24, 4, 2, 16, given['cache_seqlens'], causal=True,
                                      page_size=4, num_splits=0)
    assert metadata.dtype == torch.int32 and metadata.dim() == 1
    for others in (given, Problem((1, 2), (3, 3)).build().arguments):
        assert torch.equal(flash_attn_with_kvcache(**others, scheduler_metadata=metadata),
                           flash_attn_with_kvcache(**others))
