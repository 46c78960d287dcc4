"""quantize_fp8 on the GPU: bit for bit what the CPU gives."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flash_attn3 import quantize_fp8
from flash_attn3.ops import fp8
from flash_attn3.cpu.quantize import PER_HEAD, PER_TENSOR, signs

from tests.cpu.test_quantize import ERRORS
from tests.support.lists import starts

DTYPES = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32], ids=str)
ROTATED = pytest.mark.parametrize('rotate', [False, True])
BLOCKS = (32, 64, 96, 128, 256, 384, 1024, 2048, 'head', 'tensor')
DELAY_CYCLES = 50_000_000    # about 30 ms


def check_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Values and scales; got from any device."""
    for one, wanted, as_bits in zip(got, expected, (torch.uint8, torch.int32)):
        assert one.shape == wanted.shape and one.dtype == wanted.dtype
        differs = one.cpu().view(as_bits) != wanted.view(as_bits)
        assert not differs.any(), f'{differs.sum()} of {differs.numel()}: {differs.nonzero()[:3]}'


def check(x: Tensor, device: torch.device, **options) -> None:
    """The op on a copy of a CPU tensor that has its strides."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    on_device = memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    lists = {name: value.to(device) for name, value in options.items() if isinstance(value, Tensor)}
    got, expected = quantize_fp8(on_device, **options | lists), plainly(x, **options)
    assert [y.stride() for y in got] == [y.stride() for y in expected]
    check_bits(got, expected)


def plainly(x: Tensor, rotate: bool = False, block: int | str = 'head', seed: int = 0,
            group: int = 1, cu_seqlens: Tensor | None = None,
            seqused: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What quantize_fp8 gives on the CPU, also where its op is emulated there."""
    rows = {'head': PER_HEAD, 'tensor': PER_TENSOR}.get(block, block)
    values, scale = fp8.quantize_plainly(x, cu_seqlens, seqused, rows, group,
                                         seed if rotate else None)
    batch = x.size(0) if cu_seqlens is None else cu_seqlens.size(0) - 1
    return values, scale.expand(batch, x.size(-2) // group) if block == 'tensor' else scale


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Every kind of number: NaN, infinities, subnormals, zeros, huge and tiny ones."""
    word = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(word)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=word).view(dtype)


# ------------------------------------------------------------------------------------------- dense
@pytest.mark.smoke
@ROTATED
@DTYPES
@pytest.mark.parametrize('head_dim', range(8, 257, 8))
def test_head_dims(head_dim, dtype, rotate, device):
    x = torch.randn(2, 75, 6, head_dim).to(dtype)
    check(x, device, rotate=rotate, block=32, group=3, seed=head_dim)


@ROTATED
@DTYPES
@pytest.mark.parametrize('block', BLOCKS)
@pytest.mark.parametrize('head_dim', [64, 128, 192, 256])
def test_blocks(head_dim, block, dtype, rotate, device):
    x = torch.randn(2, 300, 4, head_dim).to(dtype) * torch.rand(2, 300, 4, 1).to(dtype)
    check(x, device, rotate=rotate, block=block, group=2)


@pytest.mark.parametrize('rows', [1, 31, 32, 33, 63, 65, 1000])
@pytest.mark.parametrize('heads', [1, 5, 16])
def test_rows_and_heads(heads, rows, device):
    check(torch.randn(3, rows, heads, 40).bfloat16(), device, rotate=True, block=64)
    check(torch.randn(3, rows, heads, 40).bfloat16(), device, rotate=True)


@ROTATED
@DTYPES
@pytest.mark.parametrize('head_dim', [8, 24, 64, 80, 96, 120, 128, 184, 248, 256])
@pytest.mark.parametrize('rows', [1, 127, 128, 129, 1000])
def test_one_scale_of_many_rows(rows, head_dim, dtype, rotate, device):
    """Rows around the ends of tiles, in two passes."""
    x = torch.randn(3, rows, 6, head_dim).to(dtype) * torch.rand(3, rows, 6, 1).to(dtype)
    for block in ('head', 'tensor'):
        check(x, device, rotate=rotate, block=block, group=3)


@ROTATED
@DTYPES
@pytest.mark.parametrize('head_dim', [40, 64, 80, 128, 192, 248, 256])
@pytest.mark.parametrize('block', [256, 384, 416, 448, 1024, 1056])
def test_large_blocks(block, head_dim, dtype, rotate, device):
    """In shared memory or read twice; rows around the ends of blocks."""
    for rows in (1, 383, 384, 385, 513, 1000):
        x = torch.randn(2, rows, 2, head_dim) * torch.rand(2, rows, 2, 1)
        check(x.to(dtype), device, rotate=rotate, block=block, group=2)


@DTYPES
@pytest.mark.parametrize('block', [32, 384, 'head'])
@pytest.mark.parametrize('heads', [1, 3, 40])
@pytest.mark.parametrize('head_dim', [8, 16, 24, 40, 72, 104, 144, 248])
def test_rows_of_any_alignment(head_dim, heads, block, dtype, device):
    """Heads share sectors of L2, and rows begin at any multiple of 8 bytes, in memory that held
    other bits.
    """
    x = torch.randn(2, 450, heads, head_dim).to(dtype)
    for rotate in (False, True):
        torch.full((x.numel(),), 0xff, dtype=torch.uint8, device=device)
        check(x, device, rotate=rotate, block=block)
        cu = starts([0, 33, 384, 1, 350])
        check(x.flatten(0, 1), device, rotate=rotate, block=block, cu_seqlens=cu)


@pytest.mark.parametrize('head_dim, width', [(80, 16), (96, 32)])
def test_signs_of_zeros(head_dim, width, device):
    """Zeros that cancel to -0 in each column of the narrow piece, and zeros with any signs."""
    for seed in range(20):
        x = torch.zeros(2, width, 4, head_dim)
        cancelling = -hadamard(width)[:, None] * signs(seed, 4, head_dim)[:, 64:]
        x[0, :, :, 64:] = torch.copysign(x[0, :, :, 64:], cancelling)
        x[1] = torch.copysign(x[1], torch.randn(width, 4, head_dim))
        for dtype in (torch.bfloat16, torch.float16):
            check(x.to(dtype), device, rotate=True, block=32, seed=seed)


def hadamard(width: int) -> Tensor:
    found = torch.ones(1, 1)
    while len(found) < width:
        found = torch.kron(torch.tensor([[1., 1.], [1., -1.]]), found)
    return found


@ROTATED
@DTYPES
@pytest.mark.parametrize('row', [0, 130, 383, 384, 599])
def test_infinity_in_a_block(row, dtype, rotate, device):
    """It does not count as the largest value."""
    x = torch.randn(1, 600, 6, 128).to(dtype)
    x[0, row, ::2, 7] = -torch.inf
    x[0, row, 1, 9] = torch.nan
    check(x, device, rotate=rotate, block=384)


@pytest.mark.parametrize('heads, group', [(1, 1), (5, 1), (16, 2), (12, 12), (130, 1), (34, 17)])
def test_groups_of_heads(heads, group, device):
    x = torch.randn(2, 2000, heads, 64).bfloat16()
    x[0, 1999, 0] *= 100
    check(x, device, rotate=True, group=group)


@pytest.mark.parametrize('seed', [0, 1, 12345, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
def test_seeds(seed, device):
    check(torch.randn(1, 40, 8, 256).half(), device, rotate=True, seed=seed, block=32, group=2)


@ROTATED
@DTYPES
@pytest.mark.parametrize('block', [32, 128, 384, 'head', 'tensor'])
def test_any_bits(block, dtype, rotate, device):
    for head_dim in (24, 80, 96, 128):
        check(random_bits(2, 500, 4, head_dim, dtype=dtype), device, rotate=rotate, block=block)


@ROTATED
@DTYPES
@pytest.mark.parametrize('exponent', [-149, -140, -126, -100, -74, -70, -64, -24, -14, 15, 120])
def test_small_and_large_values(exponent, dtype, rotate, device):
    """Zeros keep their sign, also of sums that a GPU would flush; the floor of scales; sums that
    are too large."""
    for head_dim in (64, 80, 96):
        x = torch.randn(1, 64, 2, head_dim, dtype=torch.float64) * 2.0 ** exponent
        x[0, 40:, :, ::3] = 0
        x[0, 50] *= -0.0
        check(x.to(dtype), device, rotate=rotate, block=32)
        x[0, :, 1] = torch.randn(64, head_dim)
        check(x.to(dtype), device, rotate=rotate)


def test_many_scales(device):
    """The largest values of blocks of 32 elements, of every mantissa's kind."""
    x = torch.zeros(1, 32 * 4096, 2, 8)
    x[0, :, :, 0] = torch.rand(32 * 4096, 2) * torch.exp2(torch.randint(-90, 127, (1, 2)).float())
    x[0, :, :, 1:] = x[0, :, :, :1] * torch.rand(32 * 4096, 2, 7)
    check(x, device, block=32)


@pytest.mark.parametrize('block', [32, 384, 'head'])
def test_strides(block, device):
    base = torch.randn(2, 6, 90, 136).bfloat16()
    layouts = {'heads before rows': base.transpose(1, 2), 'slice': base[:, :, 1:80, 8:72],
               'odd base': base[..., 3:67], 'odd rows': torch.randn(2, 50, 3, 67).half()[..., :64],
               'columns apart': base.transpose(2, 3)[:, :, :5, :64],
               'every other column': base[..., ::2][..., :64],
               'expanded': torch.randn(1, 1, 1, 48).bfloat16().expand(2, 40, 2, 48),
               'wide, odd base': torch.randn(2, 70, 3, 66)[..., 1:65]}
    for x in layouts.values():
        for rotate in (False, True):
            check(x, device, rotate=rotate, block=block)


# ------------------------------------------------------------------------------------------ packed
@ROTATED
@pytest.mark.parametrize('block', BLOCKS)
@pytest.mark.parametrize('lengths', [[64, 32, 128], [0, 5, 0, 0, 129, 32, 1, 0], [300], [0], [],
                                     [31] * 45, [1] * 70,
                                     [1, 127, 0, 128, 129, 383, 0, 384, 385]])
@pytest.mark.parametrize('after', [0, 1, 100])
def test_packed(after, lengths, block, rotate, device):
    """Rows that do not count are NaN."""
    cu = starts(lengths)
    x = torch.randn(sum(lengths) + after, 4, 64).bfloat16()
    x[sum(lengths):] = torch.nan
    check(x, device, rotate=rotate, block=block, group=2, cu_seqlens=cu)
    used = torch.tensor([int(length * part) for length, part in zip(
        lengths, torch.rand(len(lengths)).tolist())], dtype=torch.int32)
    for first, count, length in zip(cu.tolist(), used.tolist(), lengths):
        x[first + count:first + length] = torch.nan
    check(x, device, rotate=rotate, block=block, group=2, cu_seqlens=cu, seqused=used)


@pytest.mark.parametrize('batch', [31, 32, 33, 1056, 1057])
def test_many_sequences(batch, device):
    lengths = torch.randint(0, 40, (batch,)).tolist()
    x = torch.randn(sum(lengths) + 7, 2, 16).half()
    for block in (32, 384, 'head'):
        check(x, device, rotate=True, block=block, cu_seqlens=starts(lengths))


@ROTATED
@DTYPES
@pytest.mark.parametrize('head_dim', [64, 80, 96, 128, 192, 256])
def test_packed_blocks_of_384_rows(head_dim, dtype, rotate, device):
    lengths = [0, 1, 127, 128, 0, 129, 383, 384, 385, 0]
    cu = starts(lengths)
    x = torch.randn(sum(lengths) + 50, 3, head_dim).to(dtype)
    check(x, device, rotate=rotate, block=384, cu_seqlens=cu)
    used = torch.tensor([0, 0, 127, 1, 0, 128, 129, 300, 384, 0], dtype=torch.int32)
    for first, count, length in zip(cu.tolist(), used.tolist(), lengths):
        x[first + count:first + length] = torch.nan
    check(x, device, rotate=rotate, block=384, cu_seqlens=cu, seqused=used)


@ROTATED
@DTYPES
@pytest.mark.parametrize('head_dim', [64, 80, 128, 256])
@pytest.mark.parametrize('lengths', [
    [0, 1, 3000, 0, 383, 384, 385, 2500, 48], [0] * 20 + [9000] + [0] * 17 + [1, 900], [1000],
    [48, 16, 1, 0, 33] * 41], ids=['mixed', 'empty', 'one', 'short'])
def test_packed_with_infinities(lengths, head_dim, dtype, rotate, device):
    """At the ends of sequences, in blocks that are not full."""
    cu = starts(lengths)
    x = torch.randn(sum(lengths) + 500, 3, head_dim).to(dtype)
    x[cu[1:] - 1, 1, 3] = torch.inf
    check(x, device, rotate=rotate, block=384, cu_seqlens=cu)
    used = (cu[1:] - cu[:-1]) // 2
    for first, count, length in zip(cu.tolist(), used.tolist(), lengths):
        x[first + count:first + length] = torch.nan
    check(x[:sum(lengths)], device, rotate=rotate, block=384, cu_seqlens=cu, seqused=used)


def test_many_short_sequences(cuda):
    lengths = torch.randint(0, 90, (16_000,)).tolist()
    x = torch.randn(sum(lengths), 1, 64).bfloat16()
    check(x, cuda, rotate=True, block=384, cu_seqlens=starts(lengths))


def test_packed_strides(device):
    x = torch.randn(4, 120, 136).bfloat16()
    for one in (x.transpose(0, 1), x.transpose(0, 1)[..., 1:97]):
        check(one, device, rotate=True, block=64, cu_seqlens=starts([50, 60]))


NONSENSE = ([500, 0, 500], [0, -7, 40], [0, 1 << 30, -(1 << 31)], [(1 << 31) - 1] * 3,
            [70, 60, 50, 40, 30, 20, 10, 0], [-(1 << 31)] * 40, [0, 200, 100, 200, 100, 200])


@pytest.mark.parametrize('block', [32, 64, 384, 2048, 'head', 'tensor'])
@pytest.mark.parametrize('cu', NONSENSE, ids=str)
def test_nonsense_stays_inside(cu, block, cuda):
    """The memory next to the results is not written; the next call is right again."""
    x = torch.randn(200, 2, 64, device=cuda).bfloat16()
    size = x.numel()
    neighbours = [torch.full((size,), 77, dtype=torch.uint8, device=cuda) for _ in range(9)]
    del neighbours[1::2]
    cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=cuda)
    for used in (None, torch.full_like(cu_seqlens[1:], 1 << 30), -cu_seqlens[1:]):
        quantize_fp8(x, block=block, rotate=True, cu_seqlens=cu_seqlens, seqused=used)
    torch.cuda.synchronize()
    assert all((one == 77).all() for one in neighbours)
    check(x.cpu(), cuda, block=block, cu_seqlens=starts([100, 100]))


# ----------------------------------------------------------------------------------- empty, errors
@pytest.mark.parametrize('block', [32, 384, 2048, 'head', 'tensor'])
def test_nothing_to_do(block, device):
    for shape in ((0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64), (0, 0, 0, 8)):
        check(torch.zeros(shape), device, block=block)
    for total, lengths in ((0, []), (0, [0, 0]), (40, []), (40, [0, 0])):
        check(torch.randn(total, 4, 64), device, block=block, cu_seqlens=starts(lengths))


@pytest.mark.parametrize('changes, text', [
    *[error for error in ERRORS if not error[1].startswith(('cu_seqlens[', 'seqused['))],
    ({'x': torch.zeros(1, 5, 4, 20)}, 'the head_dim of x to be a multiple of 8 from 8 to '
     '256, got 20; hint: a GPU takes no others: pad x with zeros'),
    ({'x': torch.zeros(5, 4, 264), 'cu_seqlens': starts([5])}, 'the head_dim of x to be a '
     'multiple of 8 from 8 to 256, got 264; hint: a GPU takes no others: pad x with zeros'),
], ids=str)
def test_errors(changes, text, cuda):
    arguments = {'x': torch.zeros(1, 5, 4, 16)} | changes
    moved = {name: value.to(cuda) if isinstance(value, Tensor) else value
             for name, value in arguments.items()}
    with pytest.raises(RuntimeError) as raised:
        quantize_fp8(**moved)
    assert str(raised.value).startswith(f'flash_attn3.quantize_fp8: expected {text}')


def test_lists_on_another_device(cuda):
    with pytest.raises(RuntimeError, match='on the device of x, cuda:0, got cpu'):
        quantize_fp8(torch.zeros(5, 4, 16, device=cuda), cu_seqlens=starts([5]))


# --------------------------------------------------------------------------------- how it is called
def test_plain_code_gives_the_same_bits(cuda):
    """What GPUs without kernels get."""
    x = random_bits(2, 100, 4, 96, dtype=torch.float32)
    for block in (32, PER_HEAD, PER_TENSOR):
        check_bits(fp8.quantize_plainly(x.to(cuda), None, None, block, 2, 5),
                   fp8.quantize_plainly(x, None, None, block, 2, 5))


@pytest.mark.parametrize('block', [PER_HEAD, PER_TENSOR, 32])
@pytest.mark.parametrize('is_packed', [False, True])
def test_opcheck(is_packed, block, device):
    x = torch.randn(2, 4, 40, 16, device=device).bfloat16().transpose(1, 2)
    lists = (None, None)
    if is_packed:
        x, lists = x[0], (starts([20, 0, 15]).to(device), None)
    opcheck(torch.ops.flash_attn3.quantize_fp8.default, (x, *lists, block, 2, 3))


@pytest.mark.parametrize('rows, heads', [((4096, 4096), (16, 16)), ((700, 900), (8, 2)),
                                         ((65, 1), (4, 4)), ((1000, 385), (6, 3))])
@pytest.mark.parametrize('head_dim', [64, 80, 96, 128, 192, 256])
def test_the_three_of_attention_at_once(head_dim, rows, heads, cuda):
    """Each result is as by itself, whatever ran before in the same memory."""
    ops = torch.ops.flash_attn3
    blocks, batch = (64, 384), 2
    sets = [[torch.randn(batch, n, h, head_dim, device=cuda, dtype=torch.bfloat16) * 3 ** i
             for n, h in zip((rows[0], rows[1], rows[1]), (heads[0], heads[1], heads[1]))]
            for i in range(4)]
    found = []
    for q, k, v in sets * 3:
        results = ops.quantize_qkv_fp8(q, k, v, None, None, None, None, *blocks, 5)
        found.append([y.clone() for y in results])
        del results
        torch.empty_like(q).normal_()    # in the place of what was freed
    for got, (q, k, v) in zip(found, sets * 3):
        group = heads[0] // heads[1]
        for two, arguments in zip((got[:2], got[2:4], got[4:]), (
                (q, None, None, blocks[0], group, 5), (k, None, None, blocks[1], 1, 5),
                (v, None, None, blocks[1], 1))):
            check_bits(two, [y.cpu() for y in ops.quantize_fp8(*arguments)])


@pytest.mark.parametrize('lengths', [[1000, 0, 2000, 1100], [100, 0, 300, 20]], ids=str)
@pytest.mark.parametrize('head_dim', [64, 128, 256])
def test_the_three_of_packed_sequences_at_once(head_dim, lengths, device):
    ops = torch.ops.flash_attn3
    cu = [starts(each).to(device) for each in (lengths, lengths[::-1])]
    used = [(list_[1:] - list_[:-1]) // 2 for list_ in cu]
    for _ in range(5):
        q, k, v = (torch.randn(sum(lengths) + 3, h, head_dim, device=device).bfloat16()
                   for h in (4, 2, 2))
        got = ops.quantize_qkv_fp8(q, k, v, cu[0], used[0], cu[1], used[1], 64, 384, 5)
        for two, arguments in zip((got[:2], got[2:4], got[4:]), (
                (q, cu[0], used[0], 64, 2, 5), (k, cu[1], used[1], 384, 1, 5),
                (v, cu[1], used[1], 384, 1))):
            on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
            check_bits([x.cpu() for x in two], fp8.quantize_plainly(*on_cpu))


@pytest.mark.parametrize('block', [32, 384, 'head', 'tensor'])
def test_the_same_bits_every_time(block, cuda):
    x = torch.randn(4, 2000, 8, 128, device=cuda).bfloat16()
    first = [y.cpu() for y in quantize_fp8(x, rotate=True, block=block)]
    for _ in range(5):
        check_bits(quantize_fp8(x, rotate=True, block=block), first)


@pytest.mark.parametrize('block', [32, 384, 'head'])
def test_side_stream_and_graph(block, cuda):
    """The input arrives late on the side stream; then the same in a graph."""
    source = torch.randn(2, 500, 4, 128, device=cuda).bfloat16()
    expected = [y.cpu() for y in quantize_fp8(source, rotate=True, block=block)]
    late = torch.full_like(source, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        late.copy_(source)
        got = quantize_fp8(late, rotate=True, block=block)
    stream.synchronize()
    check_bits(got, expected)
    graph = torch.cuda.CUDAGraph()
    late.fill_(1)
    with torch.cuda.graph(graph):
        got = quantize_fp8(late, rotate=True, block=block)
    for _ in range(3):
        got[0].view(torch.uint8).fill_(0x55)
        late.copy_(source)
        graph.replay()
        check_bits(got, expected)


@pytest.mark.parametrize('is_packed', [False, True])
def test_two_streams(is_packed, cuda):
    """Both passes of each share maxima; matrix products run at the same time."""
    x = [torch.randn(40_000, 4, 128, device=cuda).bfloat16() for _ in range(2)]
    options = dict(cu_seqlens=starts([15_000, 0, 1, 24_999]).to(cuda)) if is_packed else {}
    x = x if is_packed else [one[None] for one in x]
    expected = [[y.clone() for y in quantize_fp8(one, rotate=True, **options)] for one in x]
    square = torch.randn(2048, 2048, device=cuda).bfloat16()
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    found = []
    for turn, i in itertools.product(range(50), range(2)):
        with torch.cuda.stream(streams[i]):
            if turn % 3 == 0:
                square @ square
            got = quantize_fp8(x[i], rotate=True, **options)
            found += [(y.view(torch.uint8) != wanted.view(torch.uint8)).sum()
                      for y, wanted in zip(got, expected[i])]
    torch.cuda.synchronize()
    assert not sum(found).item()


def test_every_value_and_scale_is_written(cuda):
    """The memory of the results and of the maxima between passes held other bits before."""
    x = torch.randn(2, 3000, 4, 128, device=cuda).bfloat16()
    expected = [y.cpu() for y in quantize_fp8(x, rotate=True)]
    for byte in (0xff, 0x80, 0x7f):
        old = [torch.full((size,), byte, dtype=torch.uint8, device=cuda)
               for size in (x.numel(), 512, 1024, 2048, 4096, 8192)]
        del old
        check_bits(quantize_fp8(x, rotate=True), expected)


def test_offsets_beyond_32_bits(cuda, needs_memory):
    needs_memory(12)
    rows, heads = 140_800, 128
    x = torch.randn(1, rows, heads, 128, device=cuda, dtype=torch.bfloat16)
    for block in (64, 'head'):
        values, scale = quantize_fp8(x, rotate=True, block=block)
        tail = slice(rows - 640, None)
        if block == 64:
            expected = quantize_fp8(x[:, tail].cpu(), rotate=True, block=block)
            check_bits((values[:, tail].contiguous(), scale[:, :, -10:].contiguous()), expected)
        else:
            columns = fp8.quantize.rotate(x[:, tail].float().cpu(), fp8.quantize.Rotation(0, 1))
            largest = columns.magnitudes().amax((1, 3))
            assert (scale.cpu() * 448 >= largest * (1 - 1e-6)).all()
            codes = columns.cast(scale.cpu()[:, None, :, None])
            assert torch.equal(values[:, tail].cpu().view(torch.uint8), codes.view(torch.uint8))
    in_entries = x.view(4, rows // 4, heads, 128)
    found = [y[3:] for y in quantize_fp8(in_entries, rotate=True)]
    check_bits(found, [y.cpu() for y in quantize_fp8(in_entries[3:], rotate=True)])
