"""append_and_attend: new keys and values in a cache, and rotated queries, against loops in float64.

Unused slots, pages and the memory around the cache keep every byte.
"""
from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn3.ops.attend_cache import Attend, Rotary

from tests.support.lists import ints, starts

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize('dtype', [BF16, FP16, E4M3], ids=str)
WIDE = pytest.mark.parametrize('dtype', [BF16, FP16], ids=str)
PAGE_SIZES = (1, 4, 7, 16, 48, 64, 272)
GUARD = 4096    # bytes on both sides of a cache
MANTISSA_BITS = {BF16: 8, FP16: 11}
SMALLEST = {BF16: 2.0 ** -126, FP16: 2.0 ** -24}    # smaller ones a kernel flushes to 0
DELAY_CYCLES = 50_000_000    # about 30 ms
DEFAULTS = dict(cache_seqlens=None, page_table=None, appended=0, cache_length=-1,
                cache_batch_idx=None, cache_leftpad=None, cu_seqlens_k_new=None, rotary_cos=None,
                rotary_sin=None, rotary_seqlens=None, rotary_interleaved=True,
                rotary_per_query=True, cu_seqlens_q=None)


class Memory(NamedTuple):
    """A cache with random bytes, between guards of 0x55."""
    bytes: Tensor
    cache: Tensor

    def copy(self, device: torch.device | str) -> Memory:
        whole = self.bytes.to(device, copy=True)
        typed = whole[GUARD:-GUARD].view(self.cache.dtype)
        return Memory(whole, typed.as_strided(self.cache.shape, self.cache.stride()))


def memory(shape: tuple[int, ...], dtype: torch.dtype,
           order: tuple[int, ...] = (0, 1, 2, 3)) -> Memory:
    """A cache whose dimensions lie in this order, outermost first."""
    ordered = [shape[i] for i in order]
    count = torch.Size(ordered).numel() * dtype.itemsize
    whole = torch.randint(0, 256, (count + 2 * GUARD,), dtype=torch.uint8)
    whole[:GUARD] = whole[GUARD + count:] = 0x55
    typed = whole[GUARD:GUARD + count].view(dtype).view(ordered)
    return Memory(whole, typed.permute([order.index(i) for i in range(4)]))


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def tables(positions: int, rotary_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    angle = torch.arange(positions)[:, None] * 10000 ** (-torch.arange(rotary_dim // 2)
                                                         / (rotary_dim // 2))
    return dict(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype))


# --------------------------------------------------------------------------------------- the oracle
def tokens_of(x: Tensor, cu: Tensor | None) -> list[list[Tensor]]:
    """The tokens (heads, head_dim) of each sequence."""
    if cu is None:
        return [list(entry) for entry in x]
    return [list(x[begin:end]) for begin, end in zip(cu.tolist(), cu.tolist()[1:])]


def rotated(x: Tensor, position: int, given: dict) -> tuple[Tensor, Tensor]:
    """A token in float64, and the size of what its columns are the sum of."""
    cos, sin = (given[f'rotary_{name}'][position].double() for name in ('cos', 'sin'))
    exact, size = x.double().clone(), torch.zeros(x.shape, dtype=torch.float64)
    half = cos.numel()
    if given['rotary_interleaved']:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x.double()[:, first], x.double()[:, second]
    exact[:, first], exact[:, second] = a * cos - b * sin, b * cos + a * sin
    size[:, first], size[:, second] = (a * cos).abs() + (b * sin).abs(), (
        b * cos).abs() + (a * sin).abs()
    return exact, size


def check_rounded(got: Tensor, exact: Tensor, size: Tensor) -> None:
    """Rounded once from float32; columns of size 0 are copies."""
    bound = (exact.abs() * 2.0 ** -MANTISSA_BITS[got.dtype] + size * 2.0 ** -21
             + SMALLEST[got.dtype])
    wrong = (got.double() - exact).abs() > torch.where(size > 0, bound, 0.0)
    assert not wrong.any(), f'{wrong.sum()} of {wrong.numel()}: {wrong.nonzero()[:3]}'


def place_of(given: dict, shape: torch.Size, b: int, slot: int) -> tuple[int, int] | None:
    """(page or entry, row) of a slot; None outside of the cache."""
    table, index = given['page_table'], given['cache_batch_idx']
    if slot >= shape[1] * (1 if table is None else table.size(1)):
        return None
    page, row = (b if index is None else int(index[b])), slot
    if table is not None:
        page, row = int(table[b, slot // shape[1]]), slot % shape[1]
    return (page, row) if 0 <= page < shape[0] else None


def length_of(given: dict, b: int) -> int:
    return int(given['cache_seqlens'][b]) if given['cache_seqlens'] is not None else given[
        'cache_length']


def expect_cache(memories: list[Memory], new: list[Tensor], given: dict, got: list[Memory]) -> None:
    """Every byte of both caches and their guards. Rotated keys are checked, then taken over."""
    k_tokens, v_tokens = (tokens_of(x, given['cu_seqlens_k_new']) for x in new)
    expected_k, expected_v = (one.copy('cpu') for one in memories)
    for b, (keys, vals) in enumerate(zip(k_tokens, v_tokens)):
        length = length_of(given, b)
        for i, (key, value) in enumerate(zip(keys, vals)):
            place = None if length < 0 else place_of(given, memories[0].cache.shape, b, length + i)
            if place is None:
                continue
            expected_v.cache[place] = value
            expected_k.cache[place] = key
            if given['rotary_cos'] is not None:
                base = given['rotary_seqlens']
                position = (length if base is None else int(base[b])) + i
                check_rounded(got[0].cache[place], *rotated(key, position, given))
                expected_k.cache[place] = got[0].cache[place]
    for expected, one in zip((expected_k, expected_v), got):
        differs = expected.bytes != one.bytes
        assert not differs.any(), f'{differs.sum()} bytes: {differs.nonzero()[:3]}'


def expect_queries(q: Tensor, given: dict, got: Tensor) -> None:
    assert got.shape == q.shape and got.is_contiguous() and got.dtype == q.dtype
    packed = given['cu_seqlens_q']
    for b, (own, found) in enumerate(zip(tokens_of(q, packed), tokens_of(got, packed))):
        base = given['rotary_seqlens']
        begin = length_of(given, b) if base is None else int(base[b])
        for i, (query, result) in enumerate(zip(own, found)):
            position = begin + (i if given['rotary_per_query'] else 0)
            check_rounded(result, *rotated(query, position, given))


def on(device: torch.device, x: object) -> object:
    """A tensor there, with its strides."""
    if not isinstance(x, Tensor):
        return x
    if x.device.type == device.type:
        return x
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def append(caches: list[Tensor], new: list[Tensor], q: Tensor | None, given: dict) -> Tensor:
    """The rotated queries. Without q, one of zeros attends, of each sequence."""
    own = DEFAULTS | given
    is_rotated = q is not None
    if q is None:
        packed = own['cu_seqlens_k_new']
        batch = new[0].size(0) if packed is None else packed.numel() - 1
        q = new[0].new_zeros(batch, 1, *caches[0].shape[2:])
        own['cu_seqlens_q'] = None
    rows = new[0].size(1) if new[0].dim() == 4 else 0
    attend = Attend(appended=rows, **{name: own[name] for name in Attend._fields if name in own
                                      and name != 'appended'})
    rotary = Rotary(**{name: own[name] for name in Rotary._fields})
    rotated = torch.ops.flash_attn3.append_and_attend(q, *caches, *new, None, None, None, *rotary,
                                                      *attend)[2]
    return rotated if is_rotated else rotated[:0].flatten()


def check(memories: list[Memory], new: list[Tensor], device: torch.device, q: Tensor | None = None,
          **given) -> None:
    given = DEFAULTS | given
    there = [one.copy(device) for one in memories]
    result = append([one.cache for one in there], [on(device, x) for x in new], on(device, q),
                    {name: on(device, x) for name, x in given.items()})
    back = [one.copy('cpu') for one in there]
    expect_cache(memories, new, given, back)
    if q is None or given['rotary_cos'] is None:
        assert result.shape == (0,)
    else:
        expect_queries(q, given, result.cpu())


def both(shape: tuple[int, ...], dtype: torch.dtype, head_dim_v: int | None = None,
         order: tuple[int, ...] = (0, 1, 2, 3)) -> list[Memory]:
    """Caches of k and v."""
    v_shape = (*shape[:3], head_dim_v or shape[3])
    return [memory(shape, dtype, order), memory(v_shape, dtype, order)]


def pages_of(needs: list[int], page_size: int, spare: int = 3) -> tuple[Tensor, int]:
    """A table of shuffled pages for these numbers of slots, -1 after the need; the pages."""
    counts = [-(-need // page_size) for need in needs]
    pages = sum(counts) + spare
    free = torch.randperm(pages).tolist()
    table = torch.full((len(needs), max(counts, default=0) + 2), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for i in range(count):
            table[b, i] = free.pop()
    return table, pages


# ----------------------------------------------------------------------------------------- copies
@pytest.mark.smoke
@DTYPES
@pytest.mark.parametrize('heads, head_dim, head_dim_v', [
    (8, 128, 128), (1, 64, 64), (2, 192, 128), (3, 80, 80), (5, 256, 256), (17, 16, 32),
    (1, 48, 512), (40, 128, 128)])
def test_dense(heads, head_dim, head_dim_v, dtype, device):
    lengths, new = [0, 5, 37, 12], 3
    head_dim_v = min(head_dim_v, 512 if dtype != E4M3 else 256)    # what attention takes
    caches = both((4, 40, heads, head_dim), dtype, head_dim_v)
    rows = [values(4, new, heads, d, dtype=dtype) for d in (head_dim, head_dim_v)]
    check(caches, rows, device, cache_seqlens=ints(lengths))
    check(caches, rows, device, cache_length=7)


@DTYPES
@pytest.mark.parametrize('page_size', PAGE_SIZES)
def test_paged(page_size, dtype, device):
    """Across the borders of pages."""
    lengths, new = [0, page_size, page_size - 1, 2 * page_size + 1], 2 * min(page_size, 8) + 1
    table, pages = pages_of([length + new for length in lengths], page_size)
    caches = both((pages, page_size, 2, 64), dtype)
    rows = [values(4, new, 2, 64, dtype=dtype) for _ in range(2)]
    check(caches, rows, device, cache_seqlens=ints(lengths), page_table=table)


@pytest.mark.parametrize('order', [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_strides_of_caches(order, device):
    rows = [values(3, 2, 4, 64, dtype=BF16) for _ in range(2)]
    check(both((3, 20, 4, 64), BF16, order=order), rows, device,
          cache_seqlens=ints([3, 18, 0]))
    table, pages = pages_of([5, 20, 2], 4)
    check(both((pages, 4, 4, 64), BF16, order=order), rows, device, page_table=table,
          cache_seqlens=ints([3, 18, 0]))


def test_keys_and_values_interleaved(device):
    whole = memory((3, 20, 4, 128), BF16)
    got = whole.copy(device)
    new = [values(3, 2, 4, 64, dtype=BF16) for _ in range(2)]
    append([got.cache[..., :64], got.cache[..., 64:]], [on(device, x) for x in new], None,
           dict(cache_length=5))
    whole.cache[:, 5:7] = torch.cat(new, dim=-1)
    assert torch.equal(got.bytes.cpu(), whole.bytes)


def test_strides_of_new_rows(device):
    """Also such that the kernel reads copies."""
    base = values(4, 6, 10, 136, dtype=BF16)
    for x in (base[:3, :2, :4, :64], base.transpose(1, 2)[:3, :2, :4, 8:72],
              base[:3, :2, :4, 3:67], base[:1, :2, :4, :64].expand(3, 2, 4, 64)):
        check(both((3, 20, 4, 64), BF16), [x, x], device, cache_seqlens=ints([3, 18, 0]))


def test_padded_table(device):
    """Rows of the page table further apart than they are long."""
    table, pages = pages_of([9, 12], 4)
    wide = torch.full((2, 50), -1, dtype=torch.int32)
    wide[:, 7:7 + table.size(1)] = table
    rows = [values(2, 3, 2, 64, dtype=BF16) for _ in range(2)]
    check(both((pages, 4, 2, 64), BF16), rows, device, cache_seqlens=ints([6, 9]),
          page_table=wide[:, 7:7 + table.size(1)])


def test_batch_idx(device):
    rows = [values(3, 2, 4, 64, dtype=BF16) for _ in range(2)]
    check(both((5, 20, 4, 64), BF16), rows, device, cache_seqlens=ints([3, 18, 0]),
          cache_batch_idx=ints([4, 0, 2]))


def test_leftpad_moves_no_slot(device):
    rows = [values(2, 2, 4, 64, dtype=BF16) for _ in range(2)]
    check(both((2, 20, 4, 64), BF16), rows, device, cache_seqlens=ints([7, 9]),
          cache_leftpad=ints([3, 0]))


@pytest.mark.parametrize('lengths', [[3], [2, 0, 5, 0, 0, 1], [0, 0, 4], [0, 0], [],
                                     [1, 0, 2] * 25, [1] * 1100], ids=len)
def test_packed(lengths, device):
    have = [(5 * b) % 11 for b in range(len(lengths))]
    rows = [values(sum(lengths), 2, 32, dtype=BF16) for _ in range(2)]
    check(both((len(lengths), 20, 2, 32), BF16), rows, device,
          cache_seqlens=ints(have), cu_seqlens_k_new=starts(lengths))
    table, pages = pages_of([sum(pair) for pair in zip(lengths, have)], 7)
    if lengths:
        check(both((pages, 7, 2, 32), BF16), rows, device, cache_seqlens=ints(have),
              cu_seqlens_k_new=starts(lengths), page_table=table)


def test_nothing_new(device):
    for batch, new in ((3, 0), (0, 4)):
        rows = [values(batch, new, 2, 64, dtype=BF16) for _ in range(2)]
        check(both((batch, 20, 2, 64), BF16), rows, device, cache_length=5)


# ----------------------------------------------------------------------------- outside of the cache
@DTYPES
def test_rows_that_do_not_fit(dtype, kernels):
    """Lengths at and after the capacity, and such that are none."""
    lengths = [18, 19, 20, 21, 1 << 30, (1 << 31) - 1, -1, -(1 << 31), 0]
    rows = [values(9, 3, 4, 64, dtype=dtype) for _ in range(2)]
    check(both((9, 20, 4, 64), dtype), rows, kernels, cache_seqlens=ints(lengths))
    table = torch.randperm(9 * 5).view(9, 5).int()
    check(both((45, 4, 4, 64), dtype), rows, kernels, cache_seqlens=ints(lengths),
          page_table=table)


@pytest.mark.parametrize('bad', [-1, -(1 << 31), 45, 46, (1 << 31) - 1])
def test_pages_that_are_none(bad, kernels):
    table = torch.randperm(45).view(9, 5).int()
    table[::2, 3] = bad
    rows = [values(9, 6, 4, 64, dtype=BF16) for _ in range(2)]
    check(both((45, 4, 4, 64), BF16), rows, kernels, cache_length=9, page_table=table)
    rows = [values(3, 2, 4, 64, dtype=BF16) for _ in range(2)]
    check(both((45, 20, 4, 64), BF16), rows, kernels, cache_length=3,
          cache_batch_idx=ints([7, bad, 0]))


@pytest.mark.parametrize('cu', [[500, 0, 500], [0, -7, 40], [0, 1 << 30, -(1 << 31)],
                                [(1 << 31) - 1] * 3, [7, 6, 5], [-(1 << 31)] * 3], ids=str)
def test_nonsense_stays_inside(cu, kernels):
    caches = [one.copy(kernels) for one in both((2, 20, 2, 64), BF16)]
    rows = [values(9, 2, 64, dtype=BF16).to(kernels) for _ in range(2)]
    given = dict(cache_seqlens=ints([3, 18]), cu_seqlens_k_new=ints(cu),
                 cu_seqlens_q=ints(cu), **tables(40, 32, BF16))
    append([one.cache for one in caches], rows, rows[0],
           {name: on(kernels, x) for name, x in given.items()})
    for one in caches:
        assert (one.bytes[:GUARD] == 0x55).all() and (one.bytes[-GUARD:] == 0x55).all()


# ----------------------------------------------------------------------------------------- rotation
@pytest.mark.smoke
@WIDE
@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('head_dim, rotary_dim', [
    (128, 128), (128, 64), (128, 16), (64, 64), (96, 96), (80, 32), (256, 256), (72, 48), (192, 64),
    (16, 16)])
def test_rotary(head_dim, rotary_dim, interleaved, dtype, device):
    rows = [values(3, 2, 2, head_dim, dtype=dtype) for _ in range(2)]
    check(both((3, 20, 2, head_dim), dtype), rows, device, values(3, 4, 6, head_dim, dtype=dtype),
          cache_seqlens=ints([3, 15, 0]), rotary_interleaved=interleaved,
          **tables(24, rotary_dim, dtype))


@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('per_query', [True, False])
@pytest.mark.parametrize('has_seqlens', [True, False])
def test_positions(has_seqlens, per_query, interleaved, device):
    rows = [values(3, 2, 2, 64, dtype=BF16) for _ in range(2)]
    given = dict(rotary_seqlens=ints([9, 0, 30])) if has_seqlens else {}
    given |= dict(rotary_interleaved=interleaved, rotary_per_query=per_query,
                  **tables(40, 32, BF16))
    q = values(3, 5, 4, 64, dtype=BF16)
    check(both((3, 20, 2, 64), BF16), rows, device, q, cache_seqlens=ints([3, 15, 0]),
          cache_leftpad=ints([2, 0, 0]), **given)
    table, pages = pages_of([5, 17, 2], 7)
    check(both((pages, 7, 2, 64), BF16), rows, device, q, cache_seqlens=ints([3, 15, 0]),
          page_table=table, **given)
    check(both((3, 20, 2, 64), BF16), rows, device, cache_length=4, **given)


@pytest.mark.parametrize('queries', [[1, 1, 1], [0, 9, 3], [4, 0, 0], [2, 3, 40]], ids=str)
@pytest.mark.parametrize('new', [[1, 1, 1], [2, 0, 7]], ids=str)
def test_rotary_of_packed(new, queries, device):
    rows = [values(sum(new), 2, 64, dtype=FP16) for _ in range(2)]
    check(both((3, 20, 2, 64), FP16), rows, device, values(sum(queries), 4, 64, dtype=FP16),
          cache_seqlens=ints([3, 15, 0]), cu_seqlens_k_new=starts(new),
          cu_seqlens_q=starts(queries), **tables(70, 48, FP16))
    dense = [values(3, 2, 2, 64, dtype=FP16) for _ in range(2)]
    check(both((3, 20, 2, 64), FP16), dense, device, values(sum(queries), 4, 64, dtype=FP16),
          cache_seqlens=ints([3, 15, 0]), cu_seqlens_q=starts(queries),
          rotary_per_query=False, **tables(70, 48, FP16))


def test_strides_of_tables_and_queries(device):
    wide = tables(30, 128, BF16)
    given = {name: x[2:, 8:40] for name, x in wide.items()}
    base = values(3, 4, 12, 72, dtype=BF16)
    rows = [values(3, 2, 2, 64, dtype=BF16) for _ in range(2)]
    for q in (base[:, :, ::3, :64], base.transpose(1, 2)[..., 3:67]):
        check(both((3, 20, 2, 64), BF16), rows, device, q, cache_length=4, **given)


def test_positions_outside_of_the_tables(kernels):
    """NaN, in the rotated columns alone."""
    caches = [one.copy(kernels) for one in both((2, 20, 2, 64), BF16)]
    rows = [values(2, 2, 2, 64, dtype=BF16).to(kernels) for _ in range(2)]
    given = dict(cache_seqlens=ints([9, 3]), rotary_seqlens=ints([9, 3]),
                 **tables(10, 32, BF16))
    result = append([one.cache for one in caches], rows, rows[0],
                    {name: on(kernels, x) for name, x in given.items()}).cpu()
    k = caches[0].cache.cpu()
    assert k[0, 9].isfinite().all() and k[1, 3:5].isfinite().all()
    assert k[0, 10, :, :32].isnan().all() and torch.equal(k[0, 10, :, 32:], rows[0][0, 1, :, 32:]
                                                          .cpu())
    assert result[0, 1, :, :32].isnan().all() and result[1].isfinite().all()


# --------------------------------------------------------------------------------- how it is called
def test_step_of_decoding(device):
    """The sizes of a large batch, rotated."""
    lengths = torch.randint(0, 60, (64,)).tolist()
    rows = [values(64, 1, 8, 128, dtype=BF16) for _ in range(2)]
    check(both((64, 64, 8, 128), BF16), rows, device, values(64, 1, 32, 128, dtype=BF16),
          cache_seqlens=ints(lengths), **tables(64, 128, BF16))


def test_large_offsets(cuda, needs_memory):
    """Behind 2^31 elements."""
    needs_memory(20)
    caches = [torch.zeros(2, 1 << 21, 8, 128, device=cuda, dtype=BF16) for _ in range(2)]
    rows = [torch.randn(2, 2, 8, 128, device=cuda).to(BF16) for _ in range(2)]
    slot = (1 << 21) - 2
    append(caches, rows, None, dict(cache_length=slot))
    for cache, row in zip(caches, rows):
        assert torch.equal(cache[:, slot:], row) and not cache[:, :slot].any()


def test_side_stream(cuda):
    """All inputs arrive late."""
    late = [torch.zeros(2, 3, 4, 64, device=cuda, dtype=BF16) for _ in range(2)]
    source = [torch.randn(2, 3, 4, 64, device=cuda).to(BF16) for _ in range(2)]
    caches = [torch.zeros(2, 20, 4, 64, device=cuda, dtype=BF16) for _ in range(2)]
    length, q = torch.zeros(2, dtype=torch.int32, device=cuda), torch.zeros_like(source[0])
    cos_sin = {name: x.to(cuda) for name, x in tables(40, 64, BF16).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for to, x in zip((*late, q), (*source, source[1])):
            to.copy_(x)
        length.fill_(9)
        result = append(caches, late, q, dict(cache_seqlens=length, **cos_sin))
        copy = [x.clone() for x in (*caches, result)]
    stream.synchronize()
    again = [torch.zeros_like(x) for x in caches]
    expected = append(again, source, source[1], dict(cache_length=9, **cos_sin))
    for got, wanted in zip(copy, (*again, expected)):
        assert torch.equal(got, wanted)


def test_graph_replayed_with_other_lengths(cuda):
    table, pages = pages_of([40] * 4, 7)
    memories = [one.copy(cuda) for one in both((pages, 7, 2, 64), BF16)]
    first = [one.bytes.clone() for one in memories]
    rows = [torch.randn(4, 2, 2, 64, device=cuda).to(BF16) for _ in range(2)]
    q = torch.randn(4, 2, 8, 64, device=cuda).to(BF16)
    given = dict(cache_seqlens=ints([0] * 4), page_table=table, **tables(60, 64, BF16))
    given = {name: on(cuda, x) for name, x in given.items()}
    append([one.cache for one in memories], rows, q, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = append([one.cache for one in memories], rows, q, given)
    for _ in range(20):
        given['cache_seqlens'].copy_(torch.randint(0, 39, (4,)))
        given['page_table'][:, :6] = torch.randperm(pages)[:24].view(4, 6).to(cuda)
        for x in (*rows, q):
            x.normal_()
        for one, before in zip(memories, first):
            one.bytes.copy_(before)
        graph.replay()
        found = [one.bytes.cpu() for one in memories]
        for one, before in zip(memories, first):
            one.bytes.copy_(before)
        expected = append([one.cache for one in memories], rows, q, given)
        assert torch.equal(result, expected)
        assert all(torch.equal(x, one.bytes.cpu()) for x, one in zip(found, memories))
