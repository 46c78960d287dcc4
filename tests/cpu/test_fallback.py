"""What serves CUDA devices without our kernels: SDPA. Tried on CPU tensors, where it also runs."""
import warnings

import pytest
import torch

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.api import interface
from flash_attn3.cpu import fallback
from flash_attn3.ops import library
from flash_attn3.ops.dense_and_varlen import General

from tests.cpu import by_row
from tests.cpu.test_general import EVERY_FEATURE
from tests.cpu.test_reference_packed import packed_inputs
from tests.support import plain
from tests.support.cases import Case
from tests.support.lists import starts

SEQLENS = [(8, 8), (5, 9), (9, 5), (1, 7), (0, 4), (4, 0)]


@pytest.fixture
def quiet(monkeypatch):
    """The warning was given already."""
    monkeypatch.setattr(fallback, '_warned_devices', {torch.device('cpu')})


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seqlens', SEQLENS, ids=str)
def test_results_and_gradients(seqlens, causal, quiet):
    case = Case(*seqlens, head_dim=8, heads_q=4, heads_k=2, dtype='fp64')
    q, k, v = (x.requires_grad_() for x in case.tensors('cpu'))
    general = General(softmax_scale=0.3, causal=causal)
    out, lse, _ = fallback.attention(q, k, v, general, True)
    expected = plain.forward(q.detach(), k.detach(), v.detach(), 0.3, causal)
    torch.testing.assert_close((out, lse), expected)
    assert out.is_contiguous()

    seen = lse.isfinite()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    with torch.no_grad():
        expected = plain.backward(dout, dlse, q, k, v, 0.3, causal)
    sums = (out * dout).sum() + (lse[seen] * dlse[seen]).sum()
    got = torch.autograd.grad(sums, (q, k, v), allow_unused=True)
    for gradient, wanted in zip(got, expected):
        gradient = torch.zeros_like(wanted) if gradient is None else gradient
        torch.testing.assert_close(gradient, wanted)


def test_no_lse_unless_asked_for(quiet):
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    assert fallback.attention(q, k, v, General(), False)[1] is None


def test_autocast_leaves_the_lse_alone(quiet):
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    _, expected, _ = fallback.attention(q, k, v, General(causal=True), True)
    with torch.autocast('cpu', torch.bfloat16):
        _, lse, _ = fallback.attention(q, k, v, General(causal=True), True)
    assert torch.equal(lse, expected)


def test_one_warning_that_names_the_device(monkeypatch):
    monkeypatch.setattr(fallback, '_warned_devices', set())
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    with pytest.warns(UserWarning, match=r'expected a Hopper GPU and its kernels, got cpu .*'
                                         'scaled_dot_product_attention is used instead'):
        fallback.attention(q, k, v, General(), False)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fallback.attention(q, k, v, General(), False)


class _OnOtherGpu(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return 0


def test_flash_attn_func_goes_there(monkeypatch, quiet):
    calls, attention = [], fallback.attention
    monkeypatch.setattr(library, 'KERNELS_MISSING', 'a reason')
    monkeypatch.setattr(library, 'SERVED_DEVICES', {-1})
    monkeypatch.setattr(fallback, 'attention', lambda *args: calls.append(1) or attention(*args))
    q, k, v = Case(8, 12, heads_k=2, dtype='fp32').tensors('cpu')
    expected = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out = torch.empty_like(q)
    result, lse = flash_attn_func(q.as_subclass(_OnOtherGpu), k, v, causal=True,
                                  return_attn_probs=True, out=out)
    torch.testing.assert_close((result, lse), expected)
    assert result is out
    result = flash_attn_func(q.as_subclass(_OnOtherGpu), k, v, causal=True)
    torch.testing.assert_close(result, expected[0])
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match='flash_attn3.flash_attn_func: expected the heads of q'):
        flash_attn_func(q[:, :, :3].as_subclass(_OnOtherGpu), k, v)


# --------------------------------------------------------------------- arguments of general ops
def results_and_gradients(attention, inputs) -> list:
    """out and lse where there is one, max_logits, and gradients of a weighted sum."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out, lse, max_logits = attention(*leaves)
    generator = torch.Generator().manual_seed(0)
    dout, dlse = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse))
    seen = lse.isfinite()
    named = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad((out * dout).sum() + (lse[seen] * dlse[seen]).sum(), named,
                                    allow_unused=True)
    return [out, lse, max_logits, *(torch.zeros_like(x) if gradient is None else gradient
                                    for x, gradient in zip(named, gradients))]


@EVERY_FEATURE
@pytest.mark.parametrize('seqlens', SEQLENS, ids=str)
def test_every_feature(seqlens, options, quiet, monkeypatch):
    """As on the CPU: results, gradients, and what SDPA gives alone."""
    inputs = by_row.random_inputs((2, seqlens[0], 4, 8), (2, seqlens[1], 2, 8), 8,
                                  's_aux' in options)
    options = {name: value for name, value in options.items() if name != 's_aux'}

    def attention(q, k, v, s_aux):
        return flash_attn_func(q, k, v, **options, s_aux=s_aux, return_attn_probs=True,
                               return_max_logits=True)

    expected = results_and_gradients(attention, inputs)
    alone = flash_attn_func(*inputs[:3], **options, s_aux=inputs.s_aux)
    calls, sdpa = [], fallback._masked_sdpa
    monkeypatch.setattr(interface, '_is_served', lambda x: False)
    monkeypatch.setattr(fallback, '_masked_sdpa', lambda *args: calls.append(1) or sdpa(*args))
    torch.testing.assert_close(results_and_gradients(attention, inputs), expected)
    assert not calls
    leaf = inputs.v.requires_grad_()
    out = flash_attn_func(*inputs[:3], **options, s_aux=inputs.s_aux)
    torch.testing.assert_close(out, alone)
    assert out.is_contiguous()
    assert len(calls) == (inputs.s_aux is None and not options.get('softcap') and seqlens[1] > 0)
    assert torch.autograd.grad(out.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize('options', [{'window_size': (1, 0)}, {'attention_chunk': 2}], ids=str)
def test_sdpas_gradients_of_masks_with_empty_rows(options, quiet, monkeypatch):
    inputs = by_row.random_inputs((2, 7, 4, 8), (2, 3, 2, 8), 8, False)

    def gradients():
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        return torch.autograd.grad(flash_attn_func(*leaves, **options).square().sum(), leaves)

    expected = gradients()
    monkeypatch.setattr(interface, '_is_served', lambda x: False)
    torch.testing.assert_close(gradients(), expected)


@EVERY_FEATURE
def test_packed_sequences(options, quiet, monkeypatch):
    lengths = ([3, 0, 5, 2], [4, 3, 0, 6])
    inputs = packed_inputs(12, 15, 's_aux' in options)
    options = {name: value for name, value in options.items() if name != 's_aux'}

    def attention(q, k, v, s_aux):
        return flash_attn_varlen_func(q, k, v, *map(starts, lengths), 5, 6, **options, s_aux=s_aux,
                                      return_attn_probs=True, return_max_logits=True)

    expected = results_and_gradients(attention, inputs)
    monkeypatch.setattr(interface, '_is_served', lambda x: False)
    got = results_and_gradients(attention, inputs)
    torch.testing.assert_close(got, expected)
    assert not got[2].requires_grad
    out = torch.empty_like(expected[0])
    result = flash_attn_varlen_func(*(x.detach() for x in inputs[:3]), *map(starts, lengths), 5, 6,
                                    **options, s_aux=inputs.s_aux, out=out)
    assert result is out
    torch.testing.assert_close(out, expected[0].detach())


def test_half_precision_is_computed_in_float32(quiet):
    inputs = by_row.random_inputs((2, 9, 4, 8), (2, 9, 2, 8), 8, True).to(torch.bfloat16)
    general = General(sinks=inputs.s_aux.float(), softcap=3.0)
    got = fallback.attention(*inputs[:3], general, True)
    wanted = flash_attn_func(*inputs[:3], s_aux=inputs.s_aux, softcap=3.0, return_attn_probs=True)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_wrong_arguments_are_named_there_too(quiet, monkeypatch):
    monkeypatch.setattr(interface, '_is_served', lambda x: False)
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    with pytest.raises(RuntimeError, match='flash_attn3.flash_attn_func: expected softcap to be 0'):
        flash_attn_func(q, k, v, softcap=-1.0)
