"""merge_parts: results of attention that are tensors of their own, each with its LSE, in the
layouts that attention returns. Held to the bound of tests/gpu/test_combine.py.
"""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flash_attn3 import merge_states

from tests.gpu.test_combine import HALF_UNIT, SMALLEST, combined, parts_of
from tests.support.called_ops import CalledOps

DTYPES = pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
LAYOUTS = 'like', 'packed', 'one_entry', 'wide', 'heads_first', 'odd'


def run(out: Tensor, *parts: Tensor) -> Tensor:
    return torch.ops.flash_attn3.combine(out, *parts)


def laid_out(out: Tensor, lse: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """A part (batch, rows, heads, head_dim) and its LSE (batch, rows, heads) as attention could
    return them.
    """
    lse = lse.transpose(1, 2).contiguous()
    if layout in ('packed', 'one_entry'):
        out, lse = out.flatten(0, 1).contiguous(), lse.transpose(0, 1).flatten(1).contiguous()
        return (out, lse) if layout == 'packed' else (out[None], lse[None])
    if layout == 'wide':
        wider = torch.full((*out.shape[:2], out.size(2) + 1, out.size(3) + 16), torch.nan,
                           dtype=out.dtype, device=out.device)
        view = wider[:, :, 1:, :-16]
        return view.copy_(out), lse.mT.contiguous().mT
    if layout == 'heads_first':
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse
    if layout == 'odd':
        wider = torch.full((*out.shape[:3], out.size(3) + 3), torch.nan, dtype=out.dtype,
                           device=out.device)
        return wider[..., 3:].copy_(out), lse
    return out.contiguous(), lse


def check(parts: tuple[Tensor, Tensor], layouts: tuple[str, ...], target: Tensor) -> None:
    """parts: stacked. target: (batch, rows, heads, head_dim), or packed."""
    given = [laid_out(*pair, layout) for *pair, layout in zip(*parts, layouts)]
    lse = run(target, *itertools.chain(*given))
    expected, expected_lse, size = combined(*(x.cpu() for x in parts))
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert lse.shape == (*target.shape[:-3], target.size(-2), target.size(-3))
    got_lse = lse.cpu().double().transpose(-1, -2).reshape(expected_lse.shape)
    assert torch.equal(got_lse.isneginf(), expected_lse.isneginf())
    assert torch.allclose(got_lse, expected_lse, rtol=1e-6, atol=2e-6)
    bound = expected.abs() * HALF_UNIT[target.dtype] + size * 4e-6 + SMALLEST[target.dtype]
    wrong = (target.cpu().double().view(expected.shape) - expected).abs() > bound
    assert not wrong.any(), f'{wrong.sum()} of {wrong.numel()}: {wrong.nonzero()[:3]}'


def drawn(parts: int, shape: tuple[int, ...], dtype: torch.dtype,
          device: torch.device) -> tuple[Tensor, Tensor]:
    """A third of the parts has no key, and NaN."""
    out, lse = parts_of(parts, *shape)
    return out.to(dtype).to(device), lse.to(device)


@pytest.mark.smoke
@DTYPES
@pytest.mark.parametrize('parts', [2, 3, 4])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout, parts, dtype, device):
    """Each next to one in another layout, and in the first and the last place."""
    shape = 3, 5, 4, 64
    for order in ((layout, 'like'), ('packed', layout)):
        layouts = tuple(itertools.islice(itertools.cycle(order), parts))
        check(drawn(parts, shape, dtype, device), layouts,
              torch.full(shape, torch.nan, dtype=dtype, device=device))


@DTYPES
@pytest.mark.parametrize('head_dim', [1, 4, 40, 64, 96, 127, 128, 129, 192, 256, 512])
def test_head_dims(head_dim, dtype, device):
    shape = 2, 3, 2, head_dim
    check(drawn(2, shape, dtype, device), ('one_entry', 'like'),
          torch.full(shape, torch.nan, dtype=dtype, device=device))


@pytest.mark.smoke
@pytest.mark.parametrize('shape', [(1, 1, 1, 64), (64, 1, 32, 128), (1, 70, 5, 32), (7, 3, 17, 64)])
@pytest.mark.parametrize('is_packed', [False, True])
def test_rows(is_packed, shape, device):
    """A packed result takes packed parts only."""
    target = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    layouts = ('packed',) * 2 if is_packed else ('one_entry', 'like')
    check(drawn(2, shape, torch.bfloat16, device), layouts,
          target.flatten(0, 1) if is_packed else target)


@DTYPES
def test_strides_of_the_result(dtype, device):
    """Rows and columns next to it keep their values."""
    shape = 2, 3, 4, 64
    whole = torch.full((4, 5, 6, 80), 7.0, dtype=dtype, device=device)
    targets = (whole[1:3, 1:4, 1:5, 8:72], whole[1:3, 1:4, 1:5, 3:67],
               whole[1:3, 1:5, 1:4, 8:72].transpose(1, 2))
    for target in targets:
        check(drawn(2, shape, dtype, device), ('one_entry', 'like'), target)
        target.fill_(7)
        assert (whole == 7).all()


@pytest.mark.parametrize('shape', [(0, 3, 4, 64), (2, 0, 4, 64), (2, 3, 0, 64), (2, 3, 4, 0)])
def test_nothing(shape, device):
    target = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    check(drawn(2, shape, torch.bfloat16, device), ('like', 'like'), target)


@DTYPES
def test_one_part_with_keys_keeps_its_bits(dtype, device):
    """That of the other is NaN."""
    out, lse = drawn(2, (2, 5, 4, 64), dtype, device)
    for used in (0, 1):
        out.normal_()
        out[1 - used] = torch.nan
        lse.normal_()
        lse[1 - used] = -torch.inf
        target = torch.zeros_like(out[0])
        got = run(target, *itertools.chain(*(laid_out(*pair, 'like') for pair in zip(out, lse))))
        assert torch.equal(target, out[used]) and torch.equal(got, lse[used].transpose(1, 2))


@DTYPES
def test_merge_states_takes_the_ops(dtype, cuda):
    """Without stacking where no gradient is asked for; as with gradients, but for the last bit."""
    out, lse = drawn(3, (2, 5, 4, 64), dtype, cuda)
    lists = [list(x) for x in zip(*(laid_out(*pair, 'like') for pair in zip(out, lse)))]
    with CalledOps() as called:
        merged = merge_states(*lists)
    assert called.names == ['combine']
    stacked = [torch.stack(x) for x in lists]
    with CalledOps() as called:
        from_stack = merge_states(*stacked)
    assert called.names == ['combine']
    stacked[1].requires_grad_()
    wanted = merge_states(*stacked)
    assert wanted[0].requires_grad
    for got in (merged, from_stack):
        torch.testing.assert_close(got[0], wanted[0], rtol=2 * HALF_UNIT[dtype], atol=1e-6)
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=2e-6)


def test_errors(cuda):
    out, lse = (x.to(cuda) for x in (torch.zeros(2, 3, 4, 8).half(), torch.zeros(2, 4, 3)))
    wide = out.float()
    for given, text in (((torch.empty_like(wide), wide, lse, wide, lse), 'out.dtype to be float16'),
                        ((torch.empty_like(out), out, lse.half(), out, lse),
                         r'lses\[0\].dtype to be'),
                        ((out, out, lse, out, lse), 'out with memory of its own')):
        with pytest.raises(RuntimeError, match=f'flash_attn3.merge_states: expected {text}'):
            run(*given)
