"""`fp8_backward='rounded'`: the gradients at the values that the FP8 forward had."""
import pytest
import torch

from flash_attn3 import flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_fp8_func
from flash_attn3.cpu import quantize, reference_fp8
from flash_attn3.ops import fp8_gradients
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import General
from flash_attn3.cpu.reference import Inputs

from tests.cpu.test_fp8 import (EVERY_OPTION, LENGTH_NAMES, packed, score_of, tensors, with_sinks)
from tests.support.fp8_data import check_gradients, given_gradients, quantize_all
from tests.support.lists import lengths_of

TENSORS = 'q', 'k', 'v'


def rounded(inputs, general: General, granularity: str, seed: int | None) -> list[torch.Tensor]:
    """In float64: the values with their scales, rotated back."""
    pairs = ((general.cu_seqlens_q, general.seqused_q), (general.cu_seqlens_k, general.seqused_k))
    lengths = None if general.cu_seqlens_q is None else lengths_of(*general[:4])
    values, scales = quantize_all(*inputs, granularity, seed is not None, seed or 0, pairs)
    q, k, v, _ = reference_fp8.dequantize(Inputs(*values), scales, lengths, torch.float64)
    if seed is None:
        return [q, k, v]
    heads, head_dim = k.shape[-2:]
    signs = quantize.signs(seed, heads, head_dim).double()
    norms = torch.tensor([w ** -0.5 for w in quantize.pieces(head_dim) for _ in range(w)],
                         dtype=torch.float64)
    return [quantize.hadamard(x) * norms * signs.repeat_interleave(x.size(-2) // heads, 0)
            for x in (q, k)] + [v]


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('granularity', ['block', 'head'])
@pytest.mark.parametrize('seed', [None, 3])
@pytest.mark.parametrize('head_dim', [32, 96, 256, 'packed'])
def test_inputs(head_dim, seed, granularity, dtype):
    """Rounded to their dtype, and to float16 before if they are rotated."""
    if head_dim == 'packed':
        inputs, lists, _ = packed()
        general = General(*(lists[name] for name in LENGTH_NAMES))
    else:
        inputs, general = tensors((2, 70), (2, 430), head_dims=(head_dim, 48)), General()
    inputs = [x.to(dtype) for x in inputs]
    quantization = Quantization(seed, granularity == 'block')
    got = fp8_gradients.round_inputs(*inputs, general, quantization)
    for name, one, other in zip(TENSORS, got, rounded(inputs, general, granularity, seed)):
        roundoff = torch.finfo(dtype).eps / 2 + 2.0 ** -11 * (seed is not None)
        floor = 2.0 ** -24 if dtype == torch.float16 else 0.0
        largest = other.abs().amax(-1, keepdim=True) if name != 'v' else 0.0
        assert one.dtype == dtype and one.shape == other.shape
        assert ((one.double() - other).abs()
                <= 1.1 * roundoff * other.abs() + floor + 1e-6 * largest).all()


@EVERY_OPTION
def test_gradients(options):
    """Those of the rounded tensors, with the out and lse of the forward."""
    leaves = [x.requires_grad_() for x in tensors((2, 70), (2, 101))]
    options = with_sinks(options, 4)
    if 's_aux' in options:
        leaves.append(options['s_aux'].requires_grad_())
    out, lse = flash_attn_fp8_func(*leaves[:3], **options, return_attn_probs=True,
                                   fp8_backward='rounded')
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), leaves, weights)
    own = fp8_gradients.round_inputs(*(x.detach() for x in leaves[:3]), General(), Quantization())
    check_gradients(gradients, given_gradients(Inputs(*own, *leaves[3:]), score_of(options, 32),
                                               (out, lse), weights))


def test_packed_is_each_sequence_alone():
    inputs, lists, _ = packed()
    leaves = [x.requires_grad_() for x in inputs]
    out = flash_attn_varlen_fp8_func(*leaves, **lists, causal=True, fp8_backward='rounded')
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, weights)
    for rows, keys in lengths_of(*(lists[name] for name in LENGTH_NAMES)).slices():
        one = [x.detach()[None, part].requires_grad_()
               for x, part in zip(inputs, (rows, keys, keys))]
        alone = flash_attn_fp8_func(*one, causal=True, fp8_backward='rounded')
        for got, part, wanted in zip(gradients, (rows, keys, keys),
                                     torch.autograd.grad(alone, one, weights[None, rows])):
            torch.testing.assert_close(got[None, part], wanted)


def relative_errors(fp8_backward: str, inputs, dout) -> list[float]:
    """Distances of dq, dk and dv from those of bfloat16, over their norms."""
    results = []
    for function, options in ((flash_attn_fp8_func, {'fp8_backward': fp8_backward}),
                              (flash_attn_func, {})):
        leaves = [x.clone().requires_grad_() for x in inputs]
        results.append(torch.autograd.grad(function(*leaves, causal=True, **options), leaves, dout))
    return [((one.float() - other.float()).norm() / other.float().norm()).item()
            for one, other in zip(*results)]


@pytest.mark.parametrize('factor, largest', [(1, 0.09), (4, 0.15), (16, 0.45)])
def test_sharp_rows(factor, largest):
    """The larger the scores, the more 'rounded' is ahead: nothing is left of 'given' at last."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 512, 2, 128, generator=generator) for _ in range(4))
    inputs, dout = [x.bfloat16() for x in (q * factor, k, v)], dout.bfloat16()
    errors = {name: relative_errors(name, inputs, dout) for name in ('rounded', 'given')}
    assert max(errors['rounded']) < largest
    assert factor < 16 or min(errors['given']) > 0.7


def test_a_row_that_sees_one_key():
    """P is 1 and dS 0, but for what bfloat16 makes of scores of 64."""
    generator = torch.Generator().manual_seed(0)
    k, v, dout = (torch.randn(1, 256, 2, 64, generator=generator).bfloat16() for _ in range(3))
    leaves = [x.requires_grad_() for x in (8 * k, k.clone(), v)]
    out = flash_attn_fp8_func(*leaves, window_size=(0, 0), fp8_backward='rounded')
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(dv, dout, rtol=0.2, atol=0)
    assert ((dv.float() - dout.float()).norm() / dout.float().norm()) < 0.06
    assert max(dq.abs().max(), dk.abs().max() / 8) < 0.1


@pytest.mark.parametrize('autocast', [False, True])
def test_meta_tensors(autocast):
    leaves = [torch.zeros(1, 8, heads, 64, dtype=torch.bfloat16, device='meta', requires_grad=True)
              for heads in (4, 2, 2)]
    with torch.autocast('cpu', enabled=autocast):
        out = flash_attn_fp8_func(*leaves, fp8_backward='rounded')
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert [(x.shape, x.dtype, x.is_meta) for x in gradients] == [
        (x.shape, x.dtype, True) for x in leaves]


def test_errors():
    x = torch.zeros(1, 8, 2, 32).bfloat16()
    with pytest.raises(RuntimeError, match="flash_attn_fp8_func: expected fp8_backward to be "
                                           "'given' or 'rounded', got 'exact'"):
        flash_attn_fp8_func(x, x, x, fp8_backward='exact')
    leaf = x.clone().requires_grad_()
    out = flash_attn_fp8_func(leaf, x, x, fp8_backward='rounded')
    first, = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match='flash_attn3.* expected first derivatives'):
        torch.autograd.grad(first.sum(), leaf)
