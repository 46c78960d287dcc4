"""What serves CUDA devices without our kernels: SDPA. Tried on CPU tensors, where it also runs."""
import warnings

import pytest
import torch

from flash_attn3 import _library, fallback, flash_attn_func, reference

from tests.cases import Case

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
    out, lse = fallback.attention(q, k, v, 0.3, causal, return_lse=True)
    expected = reference.forward(q.detach(), k.detach(), v.detach(), 0.3, causal)
    torch.testing.assert_close((out, lse), expected)
    assert out.is_contiguous()

    seen = lse.isfinite()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    with torch.no_grad():
        expected = reference.backward(dout, dlse, q, k, v, 0.3, causal)
    sums = (out * dout).sum() + (lse[seen] * dlse[seen]).sum()
    got = torch.autograd.grad(sums, (q, k, v), allow_unused=True)
    for gradient, wanted in zip(got, expected):
        gradient = torch.zeros_like(wanted) if gradient is None else gradient
        torch.testing.assert_close(gradient, wanted)


def test_no_lse_unless_asked_for(quiet):
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    assert fallback.attention(q, k, v, 0.3, False, return_lse=False)[1] is None


def test_autocast_leaves_the_lse_alone(quiet):
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    _, expected = fallback.attention(q, k, v, 0.3, True, return_lse=True)
    with torch.autocast('cpu', torch.bfloat16):
        _, lse = fallback.attention(q, k, v, 0.3, True, return_lse=True)
    assert torch.equal(lse, expected)


def test_one_warning_that_names_the_device(monkeypatch):
    monkeypatch.setattr(fallback, '_warned_devices', set())
    q, k, v = Case(8, 8, dtype='fp32').tensors('cpu')
    with pytest.warns(UserWarning, match=r'expected a Hopper GPU and its kernels, got cpu .*'
                                         'scaled_dot_product_attention is used instead'):
        fallback.attention(q, k, v, 0.3, False, return_lse=False)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fallback.attention(q, k, v, 0.3, False, return_lse=False)


class _OnOtherGpu(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return 0


def test_flash_attn_func_goes_there(monkeypatch, quiet):
    calls, attention = [], fallback.attention
    monkeypatch.setattr(_library, 'KERNELS_MISSING', 'a reason')
    monkeypatch.setattr(_library, 'SERVED_DEVICES', {-1})
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
    with pytest.raises(RuntimeError, match='flash_attn3.fwd: expected the heads of q'):
        flash_attn_func(q[:, :, :3].as_subclass(_OnOtherGpu), k, v)
