"""Splits along the keys, combined: any number of them, and parts of a fixed size, by which the bits
of a sequence depend on nothing but itself.
"""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_attn3 import flash_attn_with_kvcache

from tests.support import compare
from tests.support.cache_cases import CacheCase, Returned, alone, call, copied, mixed
from tests.support.cache_oracle import (check, check_case, check_result, check_same, expected,
                                        one_of, run)
from tests.support.lists import ints, starts

PARTS = 4    # tests.record runs so many processes

MOST_SPLITS = 256
DECODE = CacheCase(mixed(5, 1500), heads=(8, 2))
PREFILL = CacheCase(((1, 900), (130, 400), (1, 3), (40, 64), (0, 70)), heads=(4, 2), is_packed=True,
                    causal=True)
SHAPES = {'decode': DECODE, 'paged': dataclasses.replace(DECODE, page_size=16),
          'prefill': PREFILL, 'fp8': dataclasses.replace(DECODE, dtype='e4m3', page_size=64),
          'append': dataclasses.replace(DECODE, page_size=7, new=(1,) * 5, rotary=1.0)}
every_shape = pytest.mark.parametrize('case', SHAPES.values(), ids=SHAPES)
KINDS = [('bf16', 64, 64), ('bf16', 64, 512), ('fp16', 128, 128), ('bf16', 192, 128),
         ('bf16', 256, 256), ('bf16', 512, 512), ('e4m3', 128, 128)]
every_kind = pytest.mark.parametrize('numbers', KINDS, ids=lambda x: f'{x[0]}-{x[1]}x{x[2]}')


def of(case: CacheCase, numbers: tuple[str, int, int], **changes) -> CacheCase:
    dtype, head_dim, head_dim_v = numbers
    return dataclasses.replace(case, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v,
                               **changes)


# ----------------------------------------------------------------------------------------- counts
@every_shape
def test_each_number_of_splits(case, device):
    """1 to the most, so also more of them than there are K tiles: a part without keys writes no
    NaN and counts for nothing. All end, and none is further from float64 than one part may be.
    """
    case = dataclasses.replace(case, num_splits=1)
    arguments = case.arguments(device)
    one, after = run(case, arguments)
    want = expected(case, after)
    check_result(case, after, one, want)
    numbers = range(2, MOST_SPLITS + 1) if device.type == 'cuda' else (2, 7, MOST_SPLITS)
    for number in numbers:
        got, _ = run(case, arguments, num_splits=number)
        try:
            check_result(case, after, got, want)
        except AssertionError as error:
            raise AssertionError(f'num_splits={number}: {error}') from error


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('page_size', [0, 1, 64])
@pytest.mark.parametrize('num_splits', [0, 2, 3, 17, 64])
def test_splits_of_every_head_dim(num_splits, page_size, numbers, device):
    check_case(of(DECODE, numbers, page_size=page_size, num_splits=num_splits), device)
    check_case(of(PREFILL, numbers, page_size=page_size, num_splits=num_splits), device)


@pytest.mark.smoke
@every_shape
def test_the_same_bits_on_every_call(case, device):
    """Parts are combined in the order of the keys, whichever is ready first."""
    for num_splits in (0, 3, 40):
        one = dataclasses.replace(case, num_splits=num_splits)
        arguments = one.arguments(device)
        wanted, _ = run(one, arguments)
        for _ in range(10):
            check_same(run(one, arguments)[0], wanted)


@pytest.mark.parametrize('keys', [1, 63, 64, 65, 127, 128, 129, 176, 1024, 16384])
@pytest.mark.parametrize('num_splits', [0, 2, 132])
def test_one_sequence(num_splits, keys, device):
    """Lengths at the borders of K tiles and of parts; all multiprocessors on one sequence."""
    check_case(CacheCase(((1, keys),), heads=(8, 1), num_splits=num_splits), device)


@pytest.mark.parametrize('margin', [1, 100])
def test_splits_beside_other_kernels(margin, device):
    check_case(dataclasses.replace(DECODE, sm_margin=margin), device)


@pytest.mark.parametrize('num_splits', [0, 5])
@pytest.mark.parametrize('lse', [False, True])
def test_splits_with_a_given_output_and_odd_rows(lse, num_splits, device):
    """Partial results have strides of their own; those of the output are the caller's."""
    case = dataclasses.replace(DECODE, heads=(14, 2), num_splits=num_splits, lse=lse)
    arguments = case.arguments(device)
    wanted, _ = run(case, arguments)
    wide = torch.full((case.batch, 1, 14, 160), torch.nan, dtype=torch.bfloat16, device=device)
    arguments['out'] = wide[..., 8:136]
    got = call(case, arguments)
    compare.check_equal(got.out, wanted.out, 'out')
    assert wide[..., :8].isnan().all() and wide[..., 136:].isnan().all()


# ---------------------------------------------------------------------------------------- metadata
def test_metadata_serve_many_steps(device):
    """Made once, used by calls of other lengths: they hold nothing that depends on lengths."""
    case = dataclasses.replace(DECODE, metadata=True, capacity=2000, page_size=16)
    arguments = case.arguments(device)
    for used in ((1, 5, 0, 200, 64), (2000, 1999, 3, 1024, 0)):
        longer = dataclasses.replace(case, lengths=tuple((1, n) for n in used))
        own = dataclasses.replace(longer, metadata=False).arguments(device)
        wanted = call(longer, own)
        check_same(call(longer, own | {'scheduler_metadata': arguments['scheduler_metadata']}),
                   wanted)


# ------------------------------------------------------------------------------------- fixed parts
SPLIT_SIZES = (64, 256, 300, 1024)


@pytest.mark.smoke
@every_shape
@pytest.mark.parametrize('split_size', SPLIT_SIZES)
def test_split_sizes(split_size, case, device):
    """A size that is no multiple of the K tile is rounded up."""
    check_case(dataclasses.replace(case, split_size=split_size), device)


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('split_size', [128, 512])
@pytest.mark.parametrize('page_size', [0, 16])
def test_a_sequence_has_the_same_bits_in_every_batch(page_size, split_size, numbers, device):
    """Alone as among 64: with a fixed size of the parts the batch does not decide where a sequence
    is split.
    """
    case = of(CacheCase(mixed(64, 900), heads=(8, 2), split_size=split_size), numbers,
              page_size=page_size)
    arguments = case.arguments(device)
    together = call(case, arguments)
    for b in (0, 1, 2, 3, 31, 63):
        own_case, own = alone(case, arguments, b)
        check_same(one_of(own_case, call(own_case, own), 0), one_of(case, together, b))


@pytest.mark.smoke
@every_kind
def test_pages_change_no_bit(numbers, device):
    """Nor does the layout: with a fixed size of the parts."""
    results = []
    for page_size in (0, 1, 4, 7, 16, 48, 64, 128, 256, 272):
        case = of(CacheCase(((1, 900), (1, 272), (1, 0)), 7 * 272 * 16, split_size=256), numbers)
        arguments = case.arguments(device)
        if page_size:
            arguments |= as_pages(arguments, page_size)
        results.append(call(case, arguments))
    for got in results[1:]:
        check_same(got, results[0])


def as_pages(arguments: dict, page_size: int) -> dict:
    """A dense cache as pages, in reverse order."""
    batch, slots = arguments['k_cache'].shape[:2]
    count = slots // page_size
    caches = {}
    for name in ('k_cache', 'v_cache'):
        x = arguments[name][:, :count * page_size].unflatten(1, (count, page_size))
        caches[name] = x.flatten(0, 1).view(torch.uint8).flip(0).contiguous().view(x.dtype)
    table = torch.arange(batch * count, device=arguments['q'].device).flip(0)
    return caches | {'page_table': table.view(batch, count).int()}


@pytest.mark.smoke
@every_kind
@pytest.mark.parametrize('split_size', [128, 512])
def test_a_length_changes_its_own_sequence_only(split_size, numbers, device):
    """Every other output keeps its bits while one sequence grows and shrinks."""
    case = of(CacheCase(((1, 700),) * 6, 1200, heads=(4, 2), split_size=split_size), numbers)
    arguments = case.arguments(device)
    for name in ('k_cache', 'v_cache'):    # all slots hold something
        x = arguments[name].float().nan_to_num(nan=0.5)
        arguments[name] = x.to(case.wide)
    wanted = call(case, arguments)
    for length in (0, 1, 64, 699, 701, 1200):
        lengths = ints([700, 700, length, 700, 700, 700], device)
        got = call(case, arguments | {'cache_seqlens': lengths})
        for b in (0, 1, 3, 4, 5):
            check_same(one_of(case, got, b), one_of(case, wanted, b))


def test_an_append_has_the_bits_of_a_longer_cache(device):
    """With parts of a fixed size a step of decoding is what a later call on the same keys gives."""
    case = CacheCase(((1, 500), (1, 63), (1, 0)), page_size=16, new=(1,) * 3, split_size=128)
    arguments = case.arguments(device)
    got, after = run(case, arguments)
    later = {name: x for name, x in after.items() if name not in 'kv'}
    later['cache_seqlens'] = arguments['cache_seqlens'] + 1
    plain = dataclasses.replace(case, new=())
    check_same(call(plain, later), got)


# --------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize('options', [
    {'num_splits': -1}, {'num_splits': MOST_SPLITS + 1}, {'split_size': -1},
    {'num_splits': 2, 'split_size': 128}], ids=str)
def test_splits_that_are_refused(options, device):
    arguments = CacheCase(((1, 30),)).arguments(device)
    before = copied(arguments)
    text = r'flash_attn3\.\w+: expected (no )?(num_splits|split_size)'
    with pytest.raises(RuntimeError, match=text):
        flash_attn_with_kvcache(**arguments | options)
    assert before['k_cache'].shape == arguments['k_cache'].shape


@pytest.mark.parametrize('value', [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize('num_splits', [0, 1, 9])
def test_a_bad_key_spoils_its_sequence_only(num_splits, value, device):
    """NaN in a valid slot reaches the rows that see it, whichever part has it."""
    case = CacheCase(((1, 900),) * 4, heads=(4, 2), num_splits=num_splits)
    arguments = case.arguments(device)
    wanted: Returned = call(case, arguments)
    arguments['k_cache'][2, 500, 1, 3] = value
    arguments['q'][2, 0, 2:, 3] = arguments['q'][2, 0, 2:, 3].abs() + 0.5
    got = call(case, arguments)
    assert got.out[2, 0, 2:].isnan().all() and got.out[2, 0, :2].isfinite().all()
    for b in (0, 1, 3):
        check_same(one_of(case, got, b), one_of(case, wanted, b))


def test_the_oracle_notices_a_lost_part(device):
    """The bar itself: a result without one of 12 K tiles is not accepted."""
    case = CacheCase(((1, 1536),), heads=(8, 2))
    got, arguments = check(case, device)
    short = call(case, arguments | {'cache_seqlens': ints([1536 - 128], device)})
    with pytest.raises(AssertionError):
        check_result(case, arguments, short)
    assert got.out.isfinite().all()


# -------------------------------------------------------------------------- prompts beside steps
BESIDE = {
    'one prompt': ((1, 300),) * 9 + ((300, 900),),
    'no steps': ((0, 20),) * 9 + ((300, 300),),
    'queries around the limit': ((8, 100), (9, 100), (16, 70), (17, 300), (32, 64), (33, 900),
                                 (1, 5), (0, 0), (1, 1), (400, 450)),
    'many steps': ((1, 40),) * 400 + ((50, 400), (1, 2000), (90, 90))}


@pytest.mark.smoke
@pytest.mark.parametrize('lengths', BESIDE)
@pytest.mark.parametrize('heads', [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize('head_dim', [64, 96, 128])
@pytest.mark.parametrize('page_size', [0, 1, 64])
def test_prompts_and_steps_share_a_call(page_size, head_dim, heads, lengths, device):
    """Two launches, each with its tile, that run side by side."""
    check_case(CacheCase(BESIDE[lengths], heads=heads, head_dim=head_dim, page_size=page_size,
                         is_packed=True, causal=True), device)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float8_e4m3fn], ids=['bf16', 'kv8'])
@pytest.mark.parametrize('is_packed', [True, False])
@pytest.mark.parametrize('heads', [(8, 2), (8, 1)], ids=str)
def test_parts_of_groups_of_heads(heads, is_packed, dtype, kernels):
    """A long page table, whose parts would take more memory than a launch may have: groups of heads
    are computed one after the other. The bits are those with a short table.
    """
    page_size, lengths = 256, (300, 1) if is_packed else (150, 150)
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), heads[0], 64, device=kernels).bfloat16()
    given = {'cu_seqlens_q': starts(lengths, kernels), 'max_seqlen_q': 300} if is_packed else {}
    q = q if is_packed else q.unflatten(0, (2, 150))
    caches = [torch.randn(3, page_size, heads[1], 64, device=kernels).to(dtype) for _ in 'kv']
    sinks = torch.randn(heads[0], device=kernels)
    scales = {f'{name}_descale': 0.5 + torch.rand(2, heads[1], device=kernels) for name in 'kv'
              if dtype == torch.float8_e4m3fn}

    def attention(columns: int) -> Returned:
        table = torch.full((2, columns), -1, dtype=torch.int32, device=kernels)
        table[0, :2], table[1, 0] = ints((2, 0), kernels), 1
        return flash_attn_with_kvcache(
            q, *caches, cache_seqlens=ints((400, 200), kernels), page_table=table, causal=True,
            s_aux=sinks, split_size=128, return_softmax_lse=True, **given, **scales)[:2]
    for name, got, wanted in zip(('out', 'lse'), attention(2048), attention(2)):
        compare.check_equal(got, wanted, name)
