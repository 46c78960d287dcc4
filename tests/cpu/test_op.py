"""The ops themselves: opcheck, schemas, what the fakes say."""
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from flash_attn3 import flash_attn_func

from tests.cases import Case

OPS = torch.ops.flash_attn3
SCALARS = (0.3, True, None, 0)    # softmax_scale, causal, pack_gqa, sm_margin


def inputs(dtype='fp32', requires_grad=False):
    tensors = Case(5, 7, head_dim=8, heads_q=4, heads_k=2, dtype=dtype).tensors('cpu')
    return tuple(x.requires_grad_(requires_grad) for x in tensors)


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_opcheck_fwd(dtype, requires_grad):
    opcheck(OPS.fwd.default, (*inputs(dtype, requires_grad), *SCALARS))


@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_opcheck_fwd_without_autograd(dtype):
    opcheck(OPS._fwd.default, (*inputs(dtype), *SCALARS))


@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_opcheck_fwd_out(dtype):
    q, k, v = inputs(dtype)
    opcheck(OPS.fwd_out.default, (q, k, v, torch.zeros(2, 4, 5, 8, dtype=q.dtype).mT.contiguous().mT
                                  .transpose(1, 2), *SCALARS))


@pytest.mark.parametrize('with_dlse', [False, True])
def test_opcheck_bwd(with_dlse):
    q, k, v = inputs()
    out, lse = OPS.fwd(q, k, v, *SCALARS)
    dlse = torch.randn_like(lse) if with_dlse else None
    opcheck(OPS.bwd.default, (torch.randn_like(out), dlse, q, k, v, out, lse, 0.3, True))


def test_the_two_forward_ops_agree():
    q, k, v = inputs()
    for a, b in zip(OPS.fwd(q, k, v, *SCALARS), OPS._fwd(q, k, v, *SCALARS)):
        assert torch.equal(a, b)


@pytest.mark.parametrize('device', ['cuda', 'cpu'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_fakes(device, dtype):
    """Shapes, dtypes, strides and device without data: also of a GPU that is not there."""
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 64, device=device, dtype=dtype).transpose(1, 2).contiguous()
        q = q.transpose(1, 2)
        k = torch.empty(2, 7, 2, 64, device=device, dtype=dtype)
        v = torch.empty(2, 7, 2, 32, device=device, dtype=dtype)
        out, lse = OPS.fwd(q, k, v, *SCALARS)
        dq, dk, dv = OPS.bwd(out, None, q, k, v, out, lse, 0.3, True)
    assert out.shape == (2, 5, 4, 32) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.is_contiguous()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.device.type == lse.device.type == device
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_meta_tensors():
    q, k, v = (x.to('meta') for x in inputs())
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and out.is_meta
    with pytest.raises(RuntimeError, match='flash_attn3.fwd: expected q to have 4 dimensions'):
        flash_attn_func(q[0], k, v)


def test_ops_are_tagged_for_pt2():
    for op in (OPS.fwd, OPS._fwd, OPS.fwd_out, OPS.bwd):
        assert torch.Tag.pt2_compliant_tag in op.default.tags
