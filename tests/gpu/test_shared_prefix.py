"""shared_prefix of flash_attn_with_kvcache, and shared_prefix_attn on several levels, held to the
oracles of tests/support/cache_oracle.py and tests/support/prefix_levels.py.

Only the first sequence has the shared keys: in the rows of the others their slots are NaN and their
page ids point nowhere, where following one faults.
"""
from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_with_kvcache, shared_prefix_attn

from tests.support.cache_cases import CacheCase, as_bits, call, copied
from tests.support.cache_oracle import check, check_case, check_same, run
from tests.support.lists import ints
from tests.support.prefix_levels import LevelCase, check_levels

SHARED = 192
DECODE = CacheCase(tuple((1, SHARED + own) for own in (0, 1, 64, 300, 129, 7)), heads=(8, 2),
                   shared=SHARED)
SPEC = CacheCase(tuple((4, SHARED + own) for own in (4, 5, 64, 300)), heads=(8, 2), causal=True,
                 shared=SHARED)
KINDS = [('bf16', 64, 64), ('fp16', 128, 128), ('bf16', 192, 128), ('fp16', 256, 256),
         ('bf16', 96, 96), ('fp16', 40, 40), ('e4m3', 64, 64), ('e4m3', 128, 128),
         ('e4m3', 256, 256), ('e4m3', 192, 128)]
every_kind = pytest.mark.parametrize('numbers', KINDS, ids=lambda x: f'{x[0]}-{x[1]}x{x[2]}')


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('page_size', [0, 1, 16, 48, 64, 192])
def test_page_sizes(page_size, numbers, device):
    """Shared keys that end inside a K tile, at its border, and after one page."""
    dtype, head_dim, head_dim_v = numbers
    for case in (DECODE, SPEC):
        check_case(dataclasses.replace(case, page_size=page_size, dtype=dtype, head_dim=head_dim,
                                       head_dim_v=head_dim_v), device)


@pytest.mark.parametrize('page_size', [0, 1, 16])
@pytest.mark.parametrize('shared', [16, 112, 128, 512, 4096])
def test_numbers_of_shared_keys(shared, page_size, device):
    """Down to a page, and many more than own keys."""
    lengths = tuple((1, shared + own) for own in (3, 90, 0, 41))
    check_case(dataclasses.replace(DECODE, lengths=lengths, page_size=page_size, shared=shared),
               device)


@pytest.mark.smoke
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('batch', [1, 2, 3, 17, 33, 64])
def test_batches(batch, page_size, device):
    """One sequence, and so many that their queries are several tiles."""
    lengths = tuple((1, 128 + 13 * b % 200) for b in range(batch))
    check_case(CacheCase(lengths, page_size=page_size, heads=(8, 2), shared=128), device)


MANY = CacheCase(tuple((2, 4352 + 13 * b % 90) for b in range(40)), heads=(8, 2), shared=4352)
MANY_CHANGES = {
    'one_warpgroup': {}, 'two_warpgroups': {'heads': (16, 8)}, 'each_head': {'heads': (4, 4)},
    'gaps': {'heads': (6, 2)}, 'd64': {'head_dim': 64}, 'd40': {'head_dim': 40},
    'fp16': {'dtype': 'fp16', 'head_dim': 256}, 'e4m3': {'dtype': 'e4m3'},
    'values': {'head_dim': 192, 'head_dim_v': 128}, 'no_lse': {'lse': False}, 'out': {'out': True},
    'heads_first': {'layout': 'heads_first', 'out': True}, 'softcap': {'softcap': 15.0},
    'unpacked': {'pack_gqa': False},
}


@pytest.mark.parametrize('changes', MANY_CHANGES.values(), ids=MANY_CHANGES)
@pytest.mark.parametrize('page_size', [0, 16])
def test_many_queries(page_size, changes, device):
    """Tiles of many queries have equal parts of the shared keys."""
    case = dataclasses.replace(MANY, page_size=page_size, **changes)
    got, arguments = check(case, device)
    check_same(run(case, arguments)[0], got)


FEATURES = {
    'softcap': {'softcap': 15.0}, 'sinks': {'sinks': 'fp32'}, 'huge_sinks': {'sinks': 'huge'},
    'scale': {'softmax_scale': 0.3}, 'sharp': {'logit_std': 6.0}, 'one_part': {'num_splits': 1},
    'parts': {'num_splits': 7}, 'size': {'split_size': 128}, 'unpacked': {'pack_gqa': False},
    'margin': {'sm_margin': 1}, 'out': {'out': True}, 'no_lse': {'lse': False},
    'heads_first': {'layout': 'heads_first'}, 'both': {'layout': 'rows_of_both'},
    'number': {'length_as': 'int', 'lengths': ((3, 250),) * 4},
    'whole': {'length_as': 'none', 'lengths': ((3, 256),) * 4},
    'multi_query': {'heads': (16, 1)}, 'each_head': {'heads': (4, 4)},
    'all': {'softcap': 15.0, 'sinks': 'bf16', 'softmax_scale': 0.2, 'out': True},
}
every_feature = pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)


@pytest.mark.smoke
@every_feature
@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('dtype', ['bf16', 'e4m3'])
def test_features(dtype, page_size, features, device):
    """A sink enters once; the first query of a sequence sees all shared keys."""
    check_case(dataclasses.replace(SPEC, page_size=page_size, dtype=dtype, **features), device)


@pytest.mark.parametrize('page_size', [0, 16])
def test_wide_values(page_size, device):
    """Launches for groups of columns share a workspace, so own keys wait for shared ones."""
    check_case(dataclasses.replace(SPEC, page_size=page_size, head_dim=64, head_dim_v=512,
                                   num_splits=3), device)


@pytest.mark.parametrize('page_size', [0, 16])
@pytest.mark.parametrize('causal', [False, True])
def test_packed_queries(causal, page_size, device):
    """Prompts, single steps and no query at all in one call."""
    lengths = ((5, 300), (0, 200), (1, 192 + 1), (70, 192 + 70), (1, 500))
    check_case(CacheCase(lengths, page_size=page_size, heads=(6, 2), is_packed=True, causal=causal,
                         shared=SHARED), device)


@pytest.mark.parametrize('latent', [False, True])
def test_queries_that_tma_cannot_read(latent, device):
    """Evenly spaced, but not at multiples of 16 bytes."""
    case = CacheCase(((2, 300), (2, 250)), shared=SHARED, page_size=16, latent=latent,
                     **dict(head_dim=64, head_dim_v=512, heads=(16, 1)) if latent else {})
    given = case.arguments(device)
    odd = dict(given)
    for name in ('q', 'qv') if latent else ('q',):
        x = given[name]
        odd[name] = x.new_zeros((*x.shape[:-1], x.size(-1) + 4))[..., :x.size(-1)].copy_(x)
    for got, wanted in zip(flash_attn_with_kvcache(**odd), flash_attn_with_kvcache(**given)):
        assert torch.equal(got, wanted)


@pytest.mark.smoke
@pytest.mark.parametrize('dtype', ['bf16', 'fp16', 'e4m3'])
@pytest.mark.parametrize('page_size', [0, 1, 16])
def test_append(page_size, dtype, device):
    """New keys, rotated, go behind the own ones; the shared ones keep their bits."""
    own = {} if dtype == 'e4m3' else {'rotary': 0.5}
    case = CacheCase(((2, 192), (2, 250), (2, 193)), 320, page_size, heads=(8, 2), dtype=dtype,
                     new=(2,) * 3, causal=True, shared=SHARED, **own)
    check_case(case, device)
    check_case(dataclasses.replace(case, is_packed=True, new=(2, 5, 3), new_packed=True), device)


def test_a_row_of_the_cache_for_each_sequence(device):
    check_case(dataclasses.replace(DECODE, batch_idx=True), device)


@pytest.mark.smoke
@pytest.mark.parametrize('page_size', [0, 16])
def test_the_same_bits_every_time(page_size, device):
    case = dataclasses.replace(DECODE, page_size=page_size)
    got, arguments = check(case, device)
    for _ in range(3):
        check_same(run(case, arguments)[0], got)


def test_own_keys_of_others_do_not_matter(device):
    """With split_size a sequence's bits depend on its own keys and the shared ones alone."""
    case = dataclasses.replace(DECODE, page_size=16, split_size=128)
    got, arguments = check(case, device)
    lengths = arguments['cache_seqlens'].clone()
    lengths[1:] = SHARED
    other, _ = run(case, arguments | {'cache_seqlens': lengths})
    assert torch.equal(other.out[0], got.out[0]) and torch.equal(other.lse[0], got.lse[0])


# ------------------------------------------------------------------------------------------ graphs
class Captured:
    """A graph of one call, whose inputs are exchanged in place."""

    def __init__(self, case: CacheCase, device: torch.device) -> None:
        full = dataclasses.replace(case, lengths=tuple(
            (count, case.slots - sum(case.new[:1])) for count, _ in case.lengths))
        self.arguments = full.arguments(device)
        self.graph = torch.cuda.CUDAGraph()
        call(case, copied(self.arguments))
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.results = call(case, self.arguments)

    def replayed(self, given: dict):
        for name, own in self.arguments.items():
            if isinstance(own, Tensor):    # descales are expanded
                count = given[name].size(0) if own.stride(0) else 1
                as_bits(own[:count]).copy_(as_bits(given[name][:count]))
        for x in self.results.tensors:
            x.fill_(torch.nan)
        self.graph.replay()
        return self.results


@pytest.mark.smoke
@pytest.mark.parametrize('changes', [
    {}, {'page_size': 16}, {'page_size': 1, 'num_splits': 5}, {'page_size': 64, 'dtype': 'e4m3'},
    {'page_size': 16, 'new': (1,) * 6, 'rotary': 1.0, 'causal': True}], ids=str)
def test_replays_with_other_lengths(changes, cuda):
    """Captured with full caches; other lengths, tables and page ids later."""
    case, pick = dataclasses.replace(DECODE, capacity=640, **changes), random.Random(str(changes))
    graph = Captured(case, cuda)
    for _ in range(30):
        lengths = tuple((1, pick.choice((SHARED, pick.randint(SHARED, 638)))) for _ in range(6))
        other = dataclasses.replace(case, lengths=lengths)
        given = other.arguments(cuda)
        wanted, _ = run(other, given)
        check_same(graph.replayed(given), wanted)


def test_nothing_waits_for_the_gpu(cuda):
    case = dataclasses.replace(DECODE, page_size=16)
    arguments = case.arguments(cuda)
    call(case, copied(arguments))
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    call(case, arguments)
    assert not torch.cuda.current_stream().query()


@pytest.mark.parametrize('case, kernels', [
    (DECODE, 2 * ['decode_kernel']), (MANY, ['decode_kernel', 'forward_kernel'])],
    ids=['few', 'many'])
def test_launches(case, kernels, cuda):
    """Two of attention and a merge; nothing is filled, copied or stacked."""
    arguments = dataclasses.replace(case, page_size=16).arguments(cuda)
    flash_attn_with_kvcache(**arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flash_attn_with_kvcache(**arguments)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if '_kernel' in event.name]
    kinds = [next((kind for kind in ('forward_kernel', 'decode_kernel', 'combine_kernel')
                   if kind in name), name) for name in names]
    assert sorted(kinds) == ['combine_kernel'] + kernels


# ------------------------------------------------------------------------------------------ levels
LEVELS = {
    'two': LevelCase(((6,),), ((300,),), ((1, 5), (1, 0), (1, 70), (1, 9), (1, 200), (1, 33))),
    'three': LevelCase(((6,), (2, 1, 3)), ((300,), (64, 0, 130)),
                       ((1, 5), (1, 1), (1, 70), (1, 9), (1, 200), (1, 33))),
    'four': LevelCase(((4,), (3, 1), (1, 2, 1)), ((50,), (64, 7), (3, 0, 130)),
                      ((2, 5), (2, 2), (2, 70), (2, 9)), causal=True, sinks=True),
    'packed': LevelCase(((4,), (3, 1)), ((128,), (64, 7)), ((2, 5), (0, 2), (7, 70), (1, 9)),
                        is_packed=True, causal=True),
    'many': LevelCase(((64,), (32, 31, 1)), ((512,), (64, 70, 1)), ((1, 9),) * 64),
    'one': LevelCase((), (), ((3, 30), (3, 4), (3, 100)), causal=True),
    'no_keys': LevelCase(((2, 1),), ((0, 40),), ((1, 0), (1, 0), (1, 0)), sinks=True),
}
every_level_case = pytest.mark.parametrize('case', LEVELS.values(), ids=LEVELS)


@pytest.mark.smoke
@every_level_case
@pytest.mark.parametrize('page_size', [1, 16, 64])
@pytest.mark.parametrize('dtype', ['bf16', 'fp16', 'e4m3'])
def test_levels(dtype, page_size, case, device):
    check_levels(dataclasses.replace(case, dtype=dtype, page_size=page_size), device)


@every_level_case
def test_levels_with_the_same_bits(case, device):
    given = case.build(device).arguments
    first, again = (shared_prefix_attn(**given, return_softmax_lse=True) for _ in range(2))
    for one, other in zip(first, again):
        assert torch.equal(one, other)


@every_level_case
def test_levels_in_a_graph(case, cuda):
    """Replayed with other queries and shorter sequences."""
    given = case.build(cuda).arguments
    shared_prefix_attn(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = shared_prefix_attn(**given, return_softmax_lse=True)
    for part in (1, 2, 3):
        given['q'].normal_()
        for level in given['levels'][:-1]:
            level.seqlens.copy_(ints([x // part for x in level.seqlens.tolist()], cuda))
        wanted = shared_prefix_attn(**given, return_softmax_lse=True)
        graph.replay()
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
