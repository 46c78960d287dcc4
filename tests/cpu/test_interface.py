"""flash_attn_func on CPU tensors: results, gradients, out=, errors, and upstream's signature."""
import dataclasses
import inspect
import math

import pytest
import torch
from torch.autograd import gradcheck

from flash_attn3 import flash_attn_func
from flash_attn3.ops import checks

from tests.support import bad_inputs, compare, plain
from tests.support.cases import CORNERS, SMOKE, Case

UPSTREAM_PARAMETERS = [    # flash_attn_interface.flash_attn_func, in order
    'q', 'k', 'v', 'softmax_scale', 'causal', 'qv', 'q_descale', 'k_descale', 'v_descale',
    'window_size', 'attention_chunk', 'softcap', 'num_splits', 'pack_gqa', 'deterministic',
    'sm_margin', 'return_attn_probs']
UPSTREAM_DEFAULTS = [None, False, None, None, None, None, (-1, -1), 0, 0.0, 1, None, False, 0,
                     False]


def test_parameters_are_upstreams():
    parameters = inspect.signature(flash_attn_func).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == UPSTREAM_PARAMETERS
    assert [p.default for p in positional[3:]] == UPSTREAM_DEFAULTS
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


# --------------------------------------------------------------------------------------- results
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('dtype', ['fp16', 'bf16', 'fp32'])
@pytest.mark.parametrize('case', SMOKE[:1] + CORNERS, ids=str)
def test_results(case, dtype, causal):
    case = dataclasses.replace(case, dtype=dtype, causal=causal, head_dim=64)
    compare.check_case(case, 'cpu')


@pytest.mark.parametrize('head_dim', [1, 8, 40, 192, 320])
def test_any_head_dim(head_dim):
    compare.check_case(Case(33, 47, head_dim=head_dim, causal=True), 'cpu')


def test_head_dim_of_v_may_differ():
    q, k, v = torch.randn(2, 5, 4, 24), torch.randn(2, 7, 2, 24), torch.randn(2, 7, 2, 40)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    compare.check_forward(out, lse, (q, k, v), causal=False)


def test_softmax_scale_and_its_default():
    q, k, v = Case(16, 16, dtype='fp64').tensors('cpu')
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, 128 ** -0.5))
    expected, _ = plain.forward(q, k, v, 0.7, False)
    torch.testing.assert_close(flash_attn_func(q, k, v, softmax_scale=0.7), expected)


@pytest.mark.parametrize('changes', [{'pack_gqa': True}, {'pack_gqa': False}, {'sm_margin': 3},
                                     {'deterministic': True}, {'num_splits': 0},
                                     {'window_size': [-1, -1]}], ids=str)
def test_arguments_that_do_not_change_the_result(changes):
    q, k, v = Case(16, 24, heads_k=2).tensors('cpu')
    assert torch.equal(flash_attn_func(q, k, v, **changes), flash_attn_func(q, k, v))


def test_strided_inputs():
    q, k, v = Case(16, 24, heads_k=2, dtype='fp32').tensors('cpu')
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert turned[0].stride(3) != 1
    torch.testing.assert_close(flash_attn_func(*turned), flash_attn_func(q, k, v))


def test_nan_propagates():
    q, k, v = Case(16, 24).tensors('cpu')
    v[0, 3, 1, 5] = math.nan
    out = flash_attn_func(q, k, v)
    assert out[0, :, 1, 5].isnan().all() and out.isnan().sum() == 16


# ------------------------------------------------------------------------------------------- out=
@pytest.mark.parametrize('dtype', ['bf16', 'fp32'])
def test_out_is_written_and_returned(dtype):
    q, k, v = Case(16, 24, dtype=dtype).tensors('cpu')
    out = torch.full((2, 4, 16, 130), math.nan, dtype=q.dtype)[..., 1:129].transpose(1, 2)
    result, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, out=out)
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert result is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize('name', ['q', 'k', 'v', 'out'])
def test_out_refuses_gradients(name):
    tensors = dict(zip('qkv', Case(16, 24).tensors('cpu')))
    tensors['out'] = torch.empty_like(tensors['q'])
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f'expected requires_grad=False together with out=, got '
                                           f'requires_grad=True of {name}; hint: '):
        flash_attn_func(**tensors)
    with torch.no_grad():
        assert flash_attn_func(**tensors) is tensors['out']


# -------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seqlens', [(3, 5), (5, 3), (4, 4)], ids=str)
def test_gradcheck(seqlens, causal):
    """Both outputs, against numerical derivatives in float64."""
    case = Case(*seqlens, head_dim=4, heads_q=2, heads_k=1, batch=1, dtype='fp64', causal=causal)
    tensors = [x.requires_grad_() for x in case.tensors('cpu')]

    def attention(q, k, v):
        out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        return out, lse.masked_fill(lse.isneginf(), 0)

    assert gradcheck(attention, tensors)


@pytest.mark.parametrize('dtype', ['fp16', 'bf16'])
def test_gradients_in_half_precision(dtype):
    """Each gradient against float64, with PyTorch's own gradients in that dtype as the bar."""
    q, k, v = Case(65, 97, heads_k=2, head_dim=64, dtype=dtype).tensors('cpu')
    dout = torch.randn_like(q)
    scale = 64 ** -0.5
    tensors = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(flash_attn_func(*tensors, causal=True), tensors, dout)
    with torch.no_grad():
        ref = plain.backward(dout.double(), None, *(x.double() for x in tensors), scale, True)
        pt = plain.backward(dout, None, *tensors, scale, True)
    for name, *values in zip(('dq', 'dk', 'dv'), got, ref, pt):
        compare.check_close(*values, name)


def test_gradient_of_one_output_only():
    q, k, v = (x.requires_grad_() for x in Case(5, 7, dtype='fp64').tensors('cpu'))
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    from_lse = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    assert (from_lse[2] == 0).all() and (from_lse[0] != 0).any()
    expected = plain.backward(torch.ones_like(out), None, q.detach(), k.detach(), v.detach(),
                              128 ** -0.5, False)
    for got, wanted in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected):
        torch.testing.assert_close(got, wanted)


def test_gradient_of_an_expanded_gradient():
    """out.sum() hands down a gradient with strides 0."""
    q, k, v = (x.requires_grad_() for x in Case(5, 7, dtype='fp64').tensors('cpu'))
    summed = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q)[0]
    dotted = torch.autograd.grad(flash_attn_func(q, k, v), q, torch.ones_like(q))[0]
    torch.testing.assert_close(summed, dotted)


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in Case(5, 7, dtype='fp64').tensors('cpu'))
    gradient = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match='flash_attn_func: expected first derivatives'):
        gradient.sum().backward()


# ----------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize('bad', bad_inputs.EVERYWHERE, ids=str)
def test_bad_input(bad):
    with pytest.raises(RuntimeError) as error:
        flash_attn_func(**bad.arguments('cpu'))
    assert str(error.value).startswith(bad.text)


@pytest.mark.parametrize('bad', bad_inputs.EVERYWHERE + bad_inputs.KERNEL_RULES, ids=str)
def test_bad_input_by_the_rules_of_the_kernels(bad):
    assert checks.problem_text(bad.arguments('cpu'), rules_of='cuda').startswith(bad.text)


def test_good_input_by_the_rules_of_the_kernels():
    good = bad_inputs.good_arguments('cpu')
    assert checks.problem_text(good, rules_of='cuda') == ''


def test_tensors_on_two_devices():
    good = bad_inputs.good_arguments('cpu')
    text = checks.problem_text(good | {'k': good['k'].to('meta')})
    assert text == 'flash_attn3.flash_attn_func: expected k on the device of q, cpu, got meta'


@pytest.mark.parametrize('name', bad_inputs.UNSUPPORTED)
def test_unsupported_arguments(name):
    arguments = bad_inputs.good_arguments('cpu') | {name: bad_inputs.UNSUPPORTED[name]}
    text = f'^flash_attn3.flash_attn_func: expected {name} to be .*; hint: '
    with pytest.raises(NotImplementedError, match=text):
        flash_attn_func(**arguments)


def test_errors_of_calls_that_need_gradients_are_the_same():
    arguments = bad_inputs.good_arguments('cpu')
    arguments['q'] = arguments['q'][:, :, :3].requires_grad_()
    with pytest.raises(RuntimeError, match='expected the heads of q to be a multiple'):
        flash_attn_func(**arguments)
