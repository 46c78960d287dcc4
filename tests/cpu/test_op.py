"""The ops themselves: opcheck, schemas, what the fakes say."""
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from flash_attn3 import flash_attn_func
from flash_attn3.ops.dense_and_varlen import General

from tests.support import layouts, plain
from tests.support.called_ops import CalledOps
from tests.support.cases import Case

OPS = torch.ops.flash_attn3
SCALARS = (0.3, True, None, 0)    # softmax_scale, causal, pack_gqa, sm_margin


def inputs(dtype='fp32', requires_grad=False):
    tensors = Case(5, 7, head_dim=8, heads_q=4, heads_k=2, dtype=dtype).tensors('cpu')
    return tuple(x.requires_grad_(requires_grad) for x in tensors)


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_opcheck_fwd(dtype, requires_grad):
    opcheck(OPS.fwd.default, (*inputs(dtype, requires_grad), *SCALARS))


@pytest.mark.parametrize('op', [OPS._fwd.default, OPS._fwd_no_lse.default], ids=str)
@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_opcheck_fwd_without_autograd(dtype, op):
    opcheck(op, (*inputs(dtype), *SCALARS))


@pytest.mark.parametrize('dtype', ['fp32', 'bf16'])
def test_opcheck_into_out(dtype):
    q, k, v = inputs(dtype)
    out = torch.zeros(2, 4, 5, 8, dtype=q.dtype).mT.contiguous().mT.transpose(1, 2)
    opcheck(OPS.attend.default, (q, k, v, out, *General(softmax_scale=0.3, causal=True)))
    opcheck(OPS._fwd_no_lse.default, (q, k, v, *SCALARS, out))


@pytest.mark.parametrize('deterministic', [False, True])
@pytest.mark.parametrize('with_dlse', [False, True])
def test_opcheck_bwd(with_dlse, deterministic):
    q, k, v = inputs()
    out, lse = OPS.fwd(q, k, v, *SCALARS)
    dlse = torch.randn_like(lse) if with_dlse else None
    opcheck(OPS.bwd.default,
            (torch.randn_like(out), dlse, q, k, v, out, lse, 0.3, True, deterministic))


@pytest.mark.parametrize('deterministic', [False, True])
@pytest.mark.parametrize('with_dlse', [False, True])
def test_opcheck_bwd_out(with_dlse, deterministic):
    q, k, v = inputs()
    out, lse = OPS.fwd(q, k, v, *SCALARS)
    dlse = torch.randn_like(lse) if with_dlse else None
    gradients = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    opcheck(OPS.bwd_out.default, (torch.randn_like(out), dlse, q, k, v, out, lse, *gradients, 0.3,
                                  True, deterministic))


@pytest.mark.parametrize('dtype', ['fp32', 'bf16', 'fp64'])
@pytest.mark.parametrize('sizes', [(5, 7), (0, 7), (7, 0)], ids=str)
def test_the_backward_ops_agree(sizes, dtype):
    """Also in tensors of any strides, which were full of NaN; around them nothing is written."""
    q, k, v = Case(*sizes, head_dim=8, heads_q=4, heads_k=2, dtype=dtype).tensors('cpu')
    out, lse = OPS.fwd(q, k, v, *SCALARS)
    arguments = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse
    *expected, dsinks = OPS.bwd(*arguments, *SCALARS[:2])
    assert dsinks.shape == (0,)
    for layout in layouts.DIRECT + layouts.COPIED:
        given = [layout.place(torch.full_like(x, torch.nan)) for x in (q, k, v)]
        around = [layouts.nan_count(x) - x.numel() for x in given]
        assert OPS.bwd_out(*arguments, *given, *SCALARS[:2]).shape == (0,)
        assert all(torch.equal(a, b) for a, b in zip(given, expected))
        assert [layouts.nan_count(x) for x in given] == around


def results_of_all_forward_ops(*scalars) -> tuple[list, list]:
    """Every out and every LSE."""
    q, k, v = inputs()
    given = torch.full((2, 5, 4, 8), torch.nan)
    general = General(**dict(zip(('softmax_scale', 'causal'), scalars)))
    empty, lse, max_logits = OPS.attend(q, k, v, given, *general)
    assert empty.shape == max_logits.shape == (0,)
    alone = torch.full_like(given, torch.nan)
    assert OPS._fwd_no_lse(q, k, v, *scalars, out=alone).shape == (0,)
    pairs = [OPS.fwd(q, k, v, *scalars), OPS._fwd(q, k, v, *scalars), (given, lse),
             OPS.attend(q, k, v, None, *general)[:2]]
    return ([*(out for out, _ in pairs), alone, OPS._fwd_no_lse(q, k, v, *scalars)],
            [lse for _, lse in pairs])


@pytest.mark.parametrize('scalars', [(), SCALARS], ids=['defaults', 'given'])
def test_the_forward_ops_agree(scalars):
    scale, causal = scalars[:2] or (8 ** -0.5, False)
    out, lse = plain.forward(*inputs(), scale, causal)
    outs, lses = results_of_all_forward_ops(*scalars)
    assert len(outs) == 6 and all(torch.equal(x, out) for x in outs)
    assert len(lses) == 4 and all(torch.equal(x, lse) for x in lses)


def test_the_default_scale_reaches_the_gradients():
    q, k, v = inputs(requires_grad=True)
    gradients = [torch.autograd.grad(OPS.fwd(q, k, v, *scale)[0].square().sum(), (q, k, v))
                 for scale in ((), (8 ** -0.5,))]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize('changes, op', [
    ({}, '_fwd_no_lse'), ({'causal': True}, '_fwd_no_lse'), ({'softmax_scale': 0.3}, '_fwd_no_lse'),
    ({'pack_gqa': False}, '_fwd_no_lse'), ({'return_attn_probs': True}, '_fwd'),
    ({'out': torch.empty(2, 5, 4, 8)}, '_fwd_no_lse'),
    ({'out': torch.empty(2, 5, 4, 8), 'return_attn_probs': True}, 'attend')],
    ids=lambda x: x if isinstance(x, str) else '-'.join(x))
def test_the_lse_is_made_only_for_those_who_ask(changes, op):
    tensors = inputs()
    with CalledOps() as called:
        flash_attn_func(*tensors, **changes)
    assert called.names == [op]


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
        alone = OPS._fwd_no_lse(q, k, v)
        assert OPS._fwd_no_lse(q, k, v, *SCALARS, alone).shape == (0,)
        dq, dk, dv, dsinks = OPS.bwd(out, None, q, k, v, out, lse, 0.3, True)
        assert dsinks.shape == (0,)
        assert OPS.bwd_out(out, None, q, k, v, out, lse, dq, dk, dv, 0.3, True).shape == (0,)
    assert alone.shape == out.shape and alone.stride() == out.stride() and alone.dtype == dtype
    assert out.shape == (2, 5, 4, 32) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.is_contiguous()
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.device.type == lse.device.type == device
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_meta_tensors():
    q, k, v = (x.to('meta') for x in inputs())
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 5) and out.is_meta
    with pytest.raises(RuntimeError, match='flash_attn_func: expected q to have the shape'):
        flash_attn_func(q[0], k, v)


def test_ops_are_tagged_for_pt2():
    for op in (OPS.fwd, OPS._fwd, OPS._fwd_no_lse, OPS.attend, OPS.bwd, OPS.bwd_out):
        assert torch.Tag.pt2_compliant_tag in op.default.tags
