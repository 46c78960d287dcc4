"""combine and merge_parts: parts of attention with their LSEs, one tensor or several, against
float64.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

DTYPES = pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
HALF_UNIT = {torch.float32: 2.0 ** -24, torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8}
SMALLEST = {torch.float32: 2.0 ** -120, torch.float16: 2.0 ** -24, torch.bfloat16: 2.0 ** -120}
DELAY_CYCLES = 50_000_000    # about 30 ms


def parts_of(parts: int, *shape: int) -> tuple[Tensor, Tensor]:
    """shape: (batch, rows, heads, head_dim). A third of the parts has no key, and NaN."""
    out, lse = torch.randn(parts, *shape), 3 * torch.randn(parts, *shape[:3])
    empty = torch.rand(lse.shape) < 1 / 3
    lse[empty] = -torch.inf
    out[empty] = torch.nan
    return out, lse


def combined(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64; the last result is the size of what is added."""
    out, lse = out.double(), lse.double()
    out = out.where(lse.isneginf().logical_not()[..., None], 0.0)
    maximum = lse.amax(0) if len(lse) else lse.new_full(lse.shape[1:], -torch.inf)
    weight = (lse - maximum.where(maximum.isfinite(), 0.0)).exp()[..., None]
    total = weight.sum(0)
    divisor = total.where(total != 0, 1.0)
    whole = (weight * out).sum(0) / divisor
    size = (weight * out.abs()).sum(0) / divisor
    return whole, maximum + total[..., 0].log(), size


def run(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    return torch.ops.flash_attn3.combine(out, out_partial, lse_partial)


def check(partial: tuple[Tensor, Tensor], out: Tensor) -> None:
    lse = run(*partial, out)
    expected, expected_lse, size = combined(*(x.cpu() for x in partial))
    assert lse.shape == expected_lse.shape and lse.dtype == torch.float32
    lse = lse.cpu().double()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)
    bound = expected.abs() * HALF_UNIT[out.dtype] + size * 4e-6 + SMALLEST[out.dtype]
    wrong = (out.cpu().double() - expected).abs() > bound
    assert not wrong.any(), f'{wrong.sum()} of {wrong.numel()}: {wrong.nonzero()[:3]}'


def check_shape(parts: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
                partial_dtype: torch.dtype = torch.float32) -> None:
    out, lse = (x.to(device) for x in parts_of(parts, *shape))
    check((out.to(partial_dtype), lse),
          torch.full(shape, torch.nan, dtype=dtype, device=device))


@pytest.mark.smoke
@DTYPES
@pytest.mark.parametrize('parts', [1, 2, 3, 7, 31, 32, 33, 64, 65, 256, 300])
def test_parts(parts, dtype, device):
    check_shape(parts, (2, 3, 4, 64), dtype, device)


@DTYPES
@pytest.mark.parametrize('head_dim', [1, 3, 4, 8, 40, 64, 96, 127, 128, 129, 192, 256, 512, 520,
                                      1000])
def test_head_dims(head_dim, dtype, device):
    check_shape(5, (2, 3, 2, head_dim), dtype, device)


@pytest.mark.smoke
@DTYPES
@pytest.mark.parametrize('partial_dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('parts, head_dim', [(1, 64), (2, 128), (5, 127), (33, 129), (70, 8)])
def test_parts_of_16_bits(parts, head_dim, partial_dtype, dtype, device):
    check_shape(parts, (2, 3, 4, head_dim), dtype, device, partial_dtype)


@pytest.mark.parametrize('shape', [(1, 1, 1, 64), (1, 1, 32, 128), (3, 70, 5, 32), (7, 1, 17, 64)])
def test_rows(shape, device):
    check_shape(6, shape, torch.bfloat16, device)


@DTYPES
def test_strides(dtype, device):
    out, lse = (x.to(device) for x in parts_of(5, 2, 3, 4, 72))
    shape = (2, 3, 4, 64)
    wide = torch.zeros(2, 4, 3, 67, dtype=dtype, device=device)
    targets = {'heads first': wide[..., :64].transpose(1, 2), 'odd': wide[..., 3:].transpose(1, 2),
               'columns apart': torch.zeros(64, *shape[:3], dtype=dtype,
                                            device=device).permute(1, 2, 3, 0),
               'plain': torch.zeros(shape, dtype=dtype, device=device)}
    heads_first = out.transpose(2, 3).contiguous().transpose(2, 3)
    parts_last = lse.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    for target in targets.values():
        for one in (out[..., :64], out[..., 5:69], heads_first[..., 8:], out[..., 0:1].expand(
                5, *shape)):
            check((one, parts_last), target.fill_(torch.nan))


def test_memory_around_the_output(device):
    """Rows and columns next to it keep their values."""
    whole = torch.full((4, 5, 6, 80), 7.0, dtype=torch.bfloat16, device=device)
    inside = whole[1:3, 1:4, 1:5, 8:72]
    check(tuple(x.to(device) for x in parts_of(3, 2, 3, 4, 64)), inside)
    inside.fill_(7)
    assert (whole == 7).all()


def test_parts_without_keys(device):
    """All of a row: zeros; a part's output of NaN is not read."""
    out, lse = torch.full((40, 1, 2, 3, 64), torch.nan), torch.full((40, 1, 2, 3), -torch.inf)
    out[37, 0, 1] = 2.0
    lse[37, 0, 1] = -5.0
    target = torch.full((1, 2, 3, 64), torch.nan, device=device)
    got = run(out.to(device), lse.to(device), target).cpu()
    assert (target[0, 0] == 0).all() and (target[0, 1] == 2).all()
    assert got[0, 0].isneginf().all() and (got[0, 1] == -5).all()


@pytest.mark.parametrize('shape', [(0, 2, 3, 4, 64), (3, 0, 3, 4, 64), (3, 2, 0, 4, 64),
                                   (3, 2, 3, 0, 64), (3, 2, 3, 4, 0)])
def test_nothing(shape, device):
    out, lse = torch.zeros(shape, device=device), torch.zeros(shape[:4], device=device)
    target = torch.full(shape[1:], torch.nan, device=device)
    check((out, lse), target)


@DTYPES
def test_one_part_keeps_its_bits(dtype, device):
    """Also among parts without keys."""
    out, lse = torch.randn(3, 2, 5, 4, 64), torch.full((3, 2, 5, 4), -torch.inf)
    lse[1] = 9 * torch.randn(2, 5, 4)
    for used in (slice(None), slice(1, 2)):
        target = torch.zeros(2, 5, 4, 64, dtype=dtype, device=device)
        got = run(out[used].to(device), lse[used].to(device), target)
        assert torch.equal(target.cpu(), out[1].to(dtype)) and torch.equal(got.cpu(), lse[1])


def test_large_and_small_lses(device):
    out, lse = parts_of(9, 2, 3, 4, 64)
    lse *= torch.tensor([1.0, 100.0, 1e4])[:, None]
    for shift in (0.0, 1e4, -1e4):
        target = torch.zeros(2, 3, 4, 64, device=device)
        check((out.to(device), (lse + shift).to(device)), target)


def test_nan_stays(device):
    out, lse = torch.randn(4, 1, 1, 3, 64), torch.zeros(4, 1, 1, 3)
    out[2, 0, 0, 0, 7] = torch.nan
    lse[3, 0, 0, 1] = torch.nan
    target = torch.zeros(1, 1, 3, 64, device=device)
    got = run(out.to(device), lse.to(device), target).cpu()
    assert target[0, 0, 0].isnan().nonzero().tolist() == [[7]] and got[0, 0, 0].isfinite()
    assert target[0, 0, 1].isnan().all() and got[0, 0, 1].isnan()
    assert target[0, 0, 2].isfinite().all()


def test_the_same_bits_every_time(device):
    partial = [x.to(device) for x in parts_of(70, 2, 2, 4, 128)]
    found = []
    for _ in range(3):
        target = torch.zeros(2, 2, 4, 128, device=device)
        found.append((run(*partial, target), target))
    for lse, target in found[1:]:
        assert torch.equal(lse, found[0][0]) and torch.equal(target, found[0][1])


@pytest.mark.parametrize('changes, text', [
    (dict(out_partial=torch.zeros(3, 2, 3, 64)), 'out_partial to have the shape'),
    (dict(out_partial=torch.zeros(3, 2, 3, 4, 64).double()),
     'out_partial.dtype to be float16, bfloat16 or float32'),
    (dict(lse_partial=torch.zeros(3, 2, 4, 3)), 'lse_partial to have the shape'),
    (dict(lse_partial=torch.zeros(3, 2, 3, 4).half()), 'lse_partial.dtype to be float32'),
    (dict(out=torch.zeros(2, 3, 4, 32)), 'out to have the shape'),
    (dict(out=torch.zeros(2, 3, 4, 64).double()), 'out.dtype to be'),
    (dict(out=torch.zeros(1, 3, 4, 64).expand(2, 3, 4, 64)), r'out.stride\(0\) not to be 0'),
], ids=str)
def test_errors(changes, text, cuda):
    arguments = dict(out_partial=torch.zeros(3, 2, 3, 4, 64), lse_partial=torch.zeros(3, 2, 3, 4),
                     out=torch.zeros(2, 3, 4, 64)) | changes
    moved = {name: torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(cuda).as_strided(
        x.shape, x.stride()) for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match=f'flash_attn3.flash_attn_combine: expected {text}'):
        run(**moved)


def test_side_stream_and_graph(cuda):
    """The parts arrive late; then a graph is replayed with others."""
    source = [x.to(cuda) for x in parts_of(9, 2, 3, 4, 64)]
    late = [torch.full_like(x, torch.nan) for x in source]
    target = torch.zeros(2, 3, 4, 64, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for to, x in zip(late, source):
            to.copy_(x)
        lse = run(*late, target)
    stream.synchronize()
    again = torch.zeros_like(target)
    assert torch.equal(run(*source, again), lse) and torch.equal(again, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = run(*late, target)
    for _ in range(5):
        for to, x in zip(late, parts_of(9, 2, 3, 4, 64)):
            to.copy_(x)
        graph.replay()
        assert torch.equal(run(*late, again), lse) and torch.equal(again, target)
