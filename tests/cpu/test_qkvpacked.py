"""flash_attn_qkvpacked_func on CPU tensors: results and gradients are those of slices."""
import inspect

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func
from flash_attn3.api import interface
from flash_attn3.cpu import fallback
from flash_attn3.ops import library

from tests.support import bad_inputs, compare
from tests.support.cases import DTYPES

UPSTREAM_PARAMETERS = [    # flash_attn_interface.flash_attn_qkvpacked_func, in order
    'qkv', 'softmax_scale', 'causal', 'q_descale', 'k_descale', 'v_descale', 'window_size',
    'attention_chunk', 'softcap', 'deterministic', 'num_heads_q', 'sm_margin', 'return_attn_probs']
UPSTREAM_DEFAULTS = [None, False, None, None, None, (-1, -1), 0, 0.0, False, None, 0, False]

# (heads_q, heads_k) of a tensor of five dimensions (equal heads) and of one of four.
FORMS = pytest.mark.parametrize('heads', [(4, 4), (4, 2), (3, 1)], ids=str)


def packed(heads: tuple[int, int], dtype: str = 'fp32', seqlen: int = 13) -> tuple[Tensor, dict]:
    """A qkv of head dim 16, and the num_heads_q that its form needs."""
    heads_q, heads_k = heads
    form = (3, heads_q) if heads_q == heads_k else (heads_q + 2 * heads_k,)
    qkv = torch.randn(2, seqlen, *form, 16).to(DTYPES[dtype])
    return qkv, {} if heads_q == heads_k else {'num_heads_q': heads_q}


def sliced(qkv: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v by index."""
    heads_q, heads_k = heads
    if qkv.dim() == 5:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return qkv[:, :, :heads_q], qkv[:, :, heads_q:-heads_k], qkv[:, :, -heads_k:]


def test_parameters_are_upstreams():
    parameters = inspect.signature(flash_attn_qkvpacked_func).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == UPSTREAM_PARAMETERS
    assert [p.default for p in positional[1:]] == UPSTREAM_DEFAULTS
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


# --------------------------------------------------------------------------------------- results
@FORMS
@pytest.mark.parametrize('options', [
    {}, {'causal': True}, {'softmax_scale': 0.7}, {'pack_gqa': True}, {'sm_margin': 3},
    {'deterministic': True}], ids=str)
def test_results_are_those_of_slices(options, heads):
    qkv, form = packed(heads, 'bf16')
    q, k, v = sliced(qkv, heads)
    out, lse = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options, **form)
    compare.check_forward(out, lse, (q, k, v), options.get('causal', False),
                          options.get('softmax_scale'))
    expected = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    compare.check_equal(out, expected[0], 'out')
    compare.check_equal(lse, expected[1], 'lse')
    compare.check_equal(flash_attn_qkvpacked_func(qkv, **options, **form), out, 'out alone')


def test_num_heads_q_may_be_given_with_five_dimensions():
    qkv, _ = packed((4, 4))
    assert torch.equal(flash_attn_qkvpacked_func(qkv, num_heads_q=4),
                       flash_attn_qkvpacked_func(qkv))


class _Addresses(TorchDispatchMode):
    """The storages that our forward reads and our backward writes, call by call; and the other ops.
    """

    def __init__(self):
        super().__init__()
        self.read, self.written, self.others = [], [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.flash_attn3.bwd_out.default:
            self.written.append({x.untyped_storage().data_ptr() for x in args[7:10]})
        elif op.namespace == 'flash_attn3':
            self.read.append({x.untyped_storage().data_ptr() for x in args[:3]})
        else:
            self.others.append(op)
        return op(*args, **(kwargs or {}))


@FORMS
@pytest.mark.parametrize('requires_grad', [False, True])
def test_nothing_is_copied_on_the_way_in(requires_grad, heads):
    qkv, form = packed(heads)
    strided = qkv.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(requires_grad)
    with _Addresses() as called:
        out = flash_attn_qkvpacked_func(strided, **form)
    assert called.read == [{strided.untyped_storage().data_ptr()}]
    assert torch.equal(out, flash_attn_qkvpacked_func(qkv, **form))


@FORMS
def test_out_is_written_and_returned(heads):
    qkv, form = packed(heads)
    out = torch.full((2, heads[0], 13, 16), torch.nan).transpose(1, 2)
    assert flash_attn_qkvpacked_func(qkv, out=out, **form) is out
    assert torch.equal(out, flash_attn_qkvpacked_func(qkv, **form))
    with pytest.raises(RuntimeError, match='expected requires_grad=False together with out='):
        flash_attn_qkvpacked_func(qkv.requires_grad_(), out=out, **form)


def test_meta_tensors():
    qkv, form = packed((4, 2))
    out, lse = flash_attn_qkvpacked_func(qkv.to('meta').requires_grad_(), return_attn_probs=True,
                                         **form)
    assert out.shape == (2, 13, 4, 16) and lse.shape == (2, 4, 13) and out.is_meta


# -------------------------------------------------------------------------------------- gradients
@FORMS
@pytest.mark.parametrize('causal', [False, True])
def test_gradcheck(causal, heads):
    """Both outputs, against numerical derivatives in float64."""
    qkv, form = packed(heads, 'fp64', seqlen=3)
    small = qkv[:1, ..., :2].requires_grad_()
    assert gradcheck(lambda x: flash_attn_qkvpacked_func(x, causal=causal, return_attn_probs=True,
                                                         **form), small)


@FORMS
@pytest.mark.parametrize('dtype', ['bf16', 'fp32'])
def test_gradients_are_those_of_slices(dtype, heads):
    qkv, form = packed(heads, dtype)
    qkv.requires_grad_()
    dout, dlse = torch.randn(2, 13, heads[0], 16).to(qkv.dtype), torch.randn(2, heads[0], 13)
    slices = [x.detach().requires_grad_() for x in sliced(qkv, heads)]
    outputs = flash_attn_func(*slices, causal=True, return_attn_probs=True)
    expected = torch.autograd.grad(outputs, slices, (dout, dlse))
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True, **form)
    gradient = torch.autograd.grad((out, lse), qkv, (dout, dlse))[0]
    for got, wanted in zip(sliced(gradient, heads), expected):
        compare.check_equal(got, wanted, 'gradient')


@FORMS
def test_the_gradient_is_one_tensor(heads):
    """Laid out as qkv; autograd has nothing to put together."""
    qkv, form = packed(heads)
    qkv = qkv.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, **form)
    (source, _), *others = out.grad_fn.next_functions
    assert source.name() == 'torch::autograd::AccumulateGrad'
    assert all(function is None for function, _ in others)
    gradient = torch.autograd.grad(out.sum(), qkv)[0]
    assert gradient.stride() == qkv.stride()


@FORMS
def test_the_gradient_is_written_where_it_belongs(heads):
    """By one op, into one new tensor: nothing is copied, filled or added."""
    qkv, form = packed(heads)
    out = flash_attn_qkvpacked_func(qkv.requires_grad_(), **form)
    dout = torch.randn_like(out)
    with _Addresses() as called:
        gradient, = torch.autograd.grad(out, qkv, dout)
    assert called.written == [{gradient.untyped_storage().data_ptr()}] and called.read == []
    views = {'unbind', 'split_with_sizes', 'detach'}
    assert [op._opname for op in called.others if op._opname not in views] == ['empty_like']


def test_the_gradient_of_overlapping_elements_has_elements_of_its_own():
    """Here of windows that slide over one row, each one element further."""
    row = torch.randn(48 + 4, dtype=torch.float64)
    qkv = row.as_strided((1, 5, 3, 2, 8), (0, 1, 16, 8, 1)).requires_grad_()
    copy = qkv.detach().clone().requires_grad_()
    dout = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    gradients = [torch.autograd.grad(flash_attn_qkvpacked_func(x), x, dout)[0]
                 for x in (qkv, copy)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].is_contiguous()


def test_batched_gradients_are_refused():
    qkv, form = packed((4, 2))
    out = flash_attn_qkvpacked_func(qkv.requires_grad_(), **form)
    with pytest.raises(RuntimeError, match='flash_attn3::bwd_out'):
        torch.autograd.grad(out, qkv, torch.randn(3, *out.shape), is_grads_batched=True)


def test_gradient_of_one_output_only():
    qkv, form = packed((4, 2), 'fp64')
    qkv.requires_grad_()
    for index in (0, 1):
        got, wanted = (torch.autograd.grad(outputs[index].sum(), qkv)[0] for outputs in (
            flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **form),
            flash_attn_func(*sliced(qkv, (4, 2)), return_attn_probs=True)))
        torch.testing.assert_close(got, wanted)


def test_second_derivatives_are_refused():
    qkv, form = packed((4, 2), 'fp64')
    out = flash_attn_qkvpacked_func(qkv.requires_grad_(), **form)
    gradient = torch.autograd.grad(out.sum(), qkv, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match='flash_attn_func: expected first derivatives'):
        gradient.sum().backward()


def test_a_changed_input_is_refused():
    qkv, form = packed((4, 2))
    qkv = qkv.requires_grad_() * 1
    out = flash_attn_qkvpacked_func(qkv, **form)
    qkv[:, :, 0] = 0
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.sum().backward()


@FORMS
@pytest.mark.parametrize('requires_grad', [False, True])
def test_other_devices_take_sdpa(requires_grad, heads, monkeypatch):
    """The views go there, and PyTorch differentiates them."""
    qkv, form = packed(heads)
    qkv.requires_grad_(requires_grad)
    expected = flash_attn_qkvpacked_func(qkv, causal=True, **form)
    calls, attention = [], fallback.attention
    monkeypatch.setattr(library, 'SERVED_DEVICES', set())
    monkeypatch.setattr(interface, '_is_served', lambda x: False)
    monkeypatch.setattr(fallback, '_warned_devices', {torch.device('cpu')})
    monkeypatch.setattr(fallback, 'attention', lambda *args: calls.append(1) or attention(*args))
    out = flash_attn_qkvpacked_func(qkv, causal=True, **form)
    assert calls == [1]
    torch.testing.assert_close(out, expected)
    if requires_grad:
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), qkv)[0]
                                     for x in (out, expected)))


# -------------------------------------------------------------------------------------- compilers
@FORMS
def test_one_graph_for_many_lengths(heads, fresh_compiler):
    _, form = packed(heads)

    def attention(qkv):
        out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True, **form)
        return out * 2, lse + 1

    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=True)
    for seqlen in (7, 11, 18):    # not a number of heads, that would be a guard
        qkv = packed(heads, seqlen=seqlen)[0].requires_grad_()
        results = [function(qkv) for function in (compiled, attention)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(
            torch.autograd.grad([x.square().sum() for x in result], qkv) for result in results))
    assert counter.frame_count == 1


@FORMS
def test_export_sees_views_and_one_op(heads):
    _, form = packed(heads)

    class Attention(torch.nn.Module):
        def forward(self, qkv):
            return flash_attn_qkvpacked_func(qkv, causal=True, **form)

    lengths = {'qkv': {1: torch.export.Dim('seqlen', min=2, max=4096)}}
    program = torch.export.export(Attention(), (packed(heads)[0],), dynamic_shapes=lengths)
    ops = [node.target for node in program.graph.nodes
           if isinstance(node.target, torch._ops.OpOverload)]
    split = (torch.ops.aten.unbind.int if heads == (4, 4)
             else torch.ops.aten.split_with_sizes.default)
    assert ops == [split, torch.ops.flash_attn3.fwd.default]
    qkv, _ = packed(heads, seqlen=29)
    torch.testing.assert_close(program.module()(qkv), Attention()(qkv))


# ----------------------------------------------------------------------------------------- errors
NAME = 'flash_attn3.flash_attn_qkvpacked_func: expected '
BAD_FORMS = {    # name: (shape, num_heads_q, error)
    'rank': ((2, 13, 64), None, 'qkv to have 5 dimensions (batch, seqlen, 3, heads, head_dim) or '
             '4 (batch, seqlen, heads_q + 2 * heads_k, head_dim), got 3'),
    'rank_with_heads': ((2, 13, 3, 4, 16, 1), 4, 'qkv to have 5 dimensions '),
    'two': ((2, 13, 2, 4, 16), None, 'qkv.size(2) to be 3, one each of q, k and v, got 2'),
    'other_heads': ((2, 13, 3, 4, 16), 2,
                    'num_heads_q to be None or the heads of qkv, 4, got 2'),
    'no_num_heads_q': ((2, 13, 8, 16), None,
                       'num_heads_q to be given with a qkv of 4 dimensions, got None; '
                       'hint: pass the number of query heads'),
    'odd_rest': ((2, 13, 8, 16), 3, 'num_heads_q to leave as many heads for k as for v, at least '
                 '1, of the 8 of qkv, got 3'),
    'nothing_left': ((2, 13, 8, 16), 8, 'num_heads_q to leave as many heads for k as for v, '),
    'too_many': ((2, 13, 8, 16), 10, 'num_heads_q to leave as many heads for k as for v, '),
    'zero': ((2, 13, 8, 16), 0, 'num_heads_q to leave as many heads for k as for v, '),
    'negative': ((2, 13, 8, 16), -2, 'num_heads_q to leave as many heads for k as for v, '),
}


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('name', BAD_FORMS)
def test_forms_that_do_not_fit(name, requires_grad):
    shape, num_heads_q, text = BAD_FORMS[name]
    qkv = torch.randn(shape, requires_grad=requires_grad)
    with pytest.raises(RuntimeError) as error:
        flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q)
    assert str(error.value).startswith(NAME + text)


@pytest.mark.parametrize('requires_grad', [False, True])
def test_the_views_are_checked_as_q_k_and_v(requires_grad):
    qkv = torch.randn(2, 13, 9, 16, requires_grad=requires_grad)
    with pytest.raises(RuntimeError, match='flash_attn_qkvpacked_func: expected the heads of q '
                                           'to be a multiple of 2, the KV heads, got 5'):
        flash_attn_qkvpacked_func(qkv, num_heads_q=5)
    with pytest.raises(RuntimeError, match='packed_func: expected softmax_scale to be a pos'):
        flash_attn_qkvpacked_func(qkv, num_heads_q=3, softmax_scale=-1.0)


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('name', [x for x in bad_inputs.UNSUPPORTED
                                  if x in UPSTREAM_PARAMETERS])
def test_unsupported_arguments(name, requires_grad):
    qkv = packed((4, 4))[0].requires_grad_(requires_grad)
    with pytest.raises(NotImplementedError, match=f'^{NAME}{name} to be .*; hint: '):
        flash_attn_qkvpacked_func(qkv, **{name: bad_inputs.UNSUPPORTED[name]})
