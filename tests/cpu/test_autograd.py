"""Gradients in the settings of a training run: checkpointing, autocast, in-place changes."""
import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts)

from flash_attn3 import flash_attn_func, flash_attn_qkvpacked_func

from tests.cpu.layer import Layer
from tests.support import compare
from tests.support.cases import Case

OPS = torch.ops.flash_attn3
FUNCTIONS = {    # the public functions on one tensor, 4 query and 2 KV heads
    'flash_attn_func': lambda x, **options: flash_attn_func(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:],
                                                            **options),
    'flash_attn_qkvpacked_func': functools.partial(flash_attn_qkvpacked_func, num_heads_q=4)}
EVERY_FUNCTION = pytest.mark.parametrize('attention', FUNCTIONS.values(), ids=FUNCTIONS)


def packed(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 9, 8, 16, dtype=dtype, requires_grad=True)


def tensors(**changes) -> list[Tensor]:
    """q, k and v that require grad, and are no leaves: they may be changed in place."""
    case = Case(5, 7, head_dim=16, heads_k=2, **changes)
    return [x.requires_grad_() * 1 for x in case.tensors('cpu')]


# ---------------------------------------------------------------------------------- both outputs
@pytest.mark.parametrize('op', ['eager', 'traced'])
def test_gradients_through_both_outputs(op):
    """Attention over the keys in two parts, joined by their LSE as in ring attention."""
    def part(q, k, v):
        return (flash_attn_func(q, k, v, return_attn_probs=True) if op == 'eager'
                else OPS.fwd(q, k, v))

    q, k, v = (x.detach().requires_grad_() for x in tensors(dtype='fp64'))
    outs, lses = zip(*(part(q, k[:, keys], v[:, keys]) for keys in (slice(3), slice(3, None))))
    weights = torch.softmax(torch.stack(lses), dim=0).mT.unsqueeze(-1)    # (parts, b, sq, h, 1)
    joined = (weights * torch.stack(outs)).sum(0)
    whole = flash_attn_func(q, k, v)
    torch.testing.assert_close(joined, whole)
    dout = torch.randn_like(whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, (q, k, v), dout)
                                 for x in (joined, whole)))


def test_second_derivatives_of_the_op_are_refused():
    q, k, v = tensors(dtype='fp64')
    gradient = torch.autograd.grad(OPS.fwd(q, k, v)[0].sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match='flash_attn_func: expected first derivatives'):
        gradient.sum().backward()


# --------------------------------------------------------------------------------- checkpointing
class _ForwardCalls(TorchDispatchMode):
    """How often the forward was computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        is_backward = op in (OPS.bwd.default, OPS.bwd_out.default)
        self.count += op.namespace == 'flash_attn3' and not is_backward
        return op(*args, **(kwargs or {}))


def block(attention, x: Tensor) -> Tensor:
    return (attention(x.sin(), causal=True) * 2).cos()


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    """A selective policy: our forward is kept (`_fwd` in eager, `fwd` when traced), no other op."""
    is_ours = op in (OPS._fwd.default, OPS.fwd.default)
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_attention)


@EVERY_FUNCTION
@pytest.mark.parametrize('options, calls', [
    ({'use_reentrant': True}, 2), ({'use_reentrant': False}, 2),
    ({'use_reentrant': False, 'context_fn': SELECTIVE}, 1)], ids=['reentrant', 'full', 'selective'])
def test_checkpointing(options, calls, attention):
    x = packed()
    expected = torch.autograd.grad(block(attention, x).sum(), x)[0]
    with _ForwardCalls() as forward:
        checkpoint(block, attention, x, **options).sum().backward()
    assert forward.count == calls
    assert torch.equal(x.grad, expected)


@EVERY_FUNCTION
def test_selective_checkpointing_under_compile(attention):
    """The backward's graph has no forward of ours in it."""
    graphs = []

    def keep_graph(module, _):
        graphs.append([node.target for node in module.graph.nodes])
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep_graph, bw_compiler=keep_graph,
                           partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(backend=backend, fullgraph=True)(
        lambda x: checkpoint(block, attention, x, use_reentrant=False, context_fn=SELECTIVE))
    x = packed()
    expected = torch.autograd.grad(block(attention, x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], expected)
    counts = [(graph.count(OPS.fwd.default), graph.count(OPS.bwd.default)) for graph in graphs]
    assert counts == [(1, 0), (0, 1)]


# -------------------------------------------------------------------------------------- autocast
@EVERY_FUNCTION
def test_autocast_leaves_the_precision_inside_alone(attention):
    """Sums and softmax stay in float32, forward and backward, for 16-bit and float32 inputs."""
    for dtype in (torch.bfloat16, torch.float32):
        x = packed(dtype)
        results = []
        for is_on in (False, True):
            with torch.autocast('cpu', torch.bfloat16, enabled=is_on):
                out, lse = attention(x, causal=True, return_attn_probs=True)
                results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), x)))
        for name, *values in zip(('out', 'lse', 'gradient'), *results):
            compare.check_equal(*values, name)


def test_autocast_around_a_layer():
    """16-bit products and float32 gradients, the same as with the casts written out."""
    layer, x = Layer(), torch.randn(2, 9, 24)
    with torch.autocast('cpu', torch.bfloat16):
        out = layer(x)
    out.float().square().sum().backward()
    parameters = {name: p.detach().bfloat16().requires_grad_()
                  for name, p in layer.named_parameters()}
    expected = torch.func.functional_call(layer, parameters, x.bfloat16())
    expected.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    for name, p in layer.named_parameters():
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, parameters[name].grad.float())


def test_mixed_dtypes_under_autocast_are_refused():
    """Such as those of a norm on q and k alone: no silent cast."""
    q, k, v = tensors(dtype='bf16')
    with torch.autocast('cpu', torch.bfloat16):
        with pytest.raises(RuntimeError, match='expected v.dtype to be that of q, float32, got '):
            flash_attn_func(q.float(), k.float(), v)


# -------------------------------------------------------------------------------- in-place changes
@pytest.mark.parametrize('op', ['eager', 'traced'])
@pytest.mark.parametrize('name', ['q', 'k', 'v', 'out'])
def test_changed_tensors_are_refused(name, op):
    named = dict(zip('qkv', tensors(dtype='fp64')))
    named['out'] = (flash_attn_func(**named) if op == 'eager' else OPS.fwd(**named)[0])
    loss = named['out'].sum()
    with torch.no_grad():
        named[name].mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()
