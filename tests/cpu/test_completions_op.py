"""flash_attn_completions_func among PyTorch's tools: derivatives that there are not, checkpointing,
fakes, compilers, and its op.
"""
from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
                                    create_selective_checkpoint_contexts)

from flash_attn3 import flash_attn_completions_func
from flash_attn3.api import completions

from tests.cpu.test_completions import BAD, CASE, OTHER_TREES, TREES, dense, good
from tests.support import compare, derivative_calls
from tests.support.called_ops import CalledOps, compilations
from tests.support.completion_cases import check_same, run
from tests.support.lists import ints

pytestmark = pytest.mark.usefixtures('fresh_compiler')
OP = torch.ops.flash_attn3.fwd_completions


# -------------------------------------------------------------------------------------- derivatives
def of_one(x: Tensor, **options) -> Tensor:
    """A function of one tensor, (2, 5, 2, 64), which is q, k and v."""
    rows = x.flatten(0, 1)
    return flash_attn_completions_func(rows, rows, rows, ints([0, 4, 7, 10]), ints([0, 3]),
                                       **options)


@derivative_calls.every_forward_mode
def test_forward_mode_is_refused(derivative):
    derivative_calls.check_forward_mode_is_refused(derivative, of_one, torch.device('cpu'))


def test_what_has_no_tangent_is_served():
    derivative_calls.check_constants_are_served(of_one, torch.device('cpu'))


@pytest.mark.parametrize('is_traced', [False, True])
def test_second_derivatives_are_refused(is_traced):
    tensors = CASE.tensors('cpu')
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    call = OP if is_traced else (
        lambda *x: flash_attn_completions_func(*x, return_attn_probs=True))
    gradient, = torch.autograd.grad(call(q, k, v, *tensors.lists)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='completions_func: expected first derivatives'):
        gradient.sum().backward()
    out = call(q, k, v, *tensors.lists)[0]
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match='completions_func: expected first deriv'):
            torch.autograd.grad(out, q, dout)


@pytest.mark.parametrize('argument', ['softmax_scale', 'softcap'])
def test_numbers_that_require_grad_are_refused(argument, monkeypatch):
    monkeypatch.setitem(derivative_calls.FUNCTIONS, 'flash_attn_completions_func', of_one)
    derivative_calls.check_number_is_refused('flash_attn_completions_func', argument, 2.0,
                                             torch.device('cpu'))


# ------------------------------------------------------------------------------- the op, compilers
@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('dtype', ['fp64', 'bf16'])
def test_opcheck(dtype, requires_grad):
    tensors = dataclasses.replace(CASE, dtype=dtype).tensors('cpu')
    given = [x.requires_grad_(requires_grad) for x in tensors[:3]]
    opcheck(OP.default, (*given, *tensors.lists), {'softcap': 2.0})
    opcheck(OP.default, (*given, *tensors.lists, 4, 0.3, 0.0, True, 0, True))


def test_which_ops_are_called():
    tensors = CASE.tensors('cpu')
    with CalledOps() as called:
        run(CASE, tensors)
    assert called.names == ['attend'] * 2 + ['bwd'] * 2
    assert torch.Tag.pt2_compliant_tag in OP.default.tags


@pytest.mark.parametrize('device', ['cuda', 'cpu'])
def test_fakes(device):
    """Shapes, dtypes and gradients without data: also of a GPU that is not there."""
    case = dataclasses.replace(CASE, dtype='bf16')
    with FakeTensorMode():
        q, k, v = (torch.empty(20, heads, dim, dtype=torch.bfloat16, device=device)
                   for heads, dim in ((4, 8), (2, 8), (2, 6)))
        lists = [torch.empty(size, dtype=torch.int32, device=device) for size in (12, 6)]
        for call in (OP, lambda *x: flash_attn_completions_func(*x, return_attn_probs=True)):
            out, lse = call(q, k, v, *lists)
            gradients = completions._gradients(out, lse, q, k, v, out, lse, *lists)
            assert out.shape == (20, 4, 6) and out.dtype == torch.bfloat16 and out.is_contiguous()
            assert lse.shape == (4, 20) and lse.dtype == torch.float32 and lse.is_contiguous()
            assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
            assert {x.device.type for x in (out, lse, *gradients)} == {device}
    meta = [x.to('meta') for x in (*case.tensors('cpu')[:3], *CASE.lists('cpu'))]
    assert flash_attn_completions_func(*meta).shape == (20, 4, 6)


def test_one_compilation_for_many_lengths():
    """Forward and gradients, of other trees, rows and hints."""
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(flash_attn_completions_func, backend=counter, fullgraph=True,
                             dynamic=True)
    # No two sizes of the first call are equal, that would be a guard.
    for trees, hint in ((TREES, 5), (OTHER_TREES, 9), (((30, 2, 1), (7,)), 30)):
        case = dataclasses.replace(CASE, trees=trees, head_dim_v=7, max_seqlen=hint, behind=1)
        tensors = case.tensors('cpu')
        torch.testing.assert_close(run(case, tensors, compiled), dense(case, tensors))
    assert compilations(counter) == 1


@pytest.mark.slow
def test_one_graph_with_the_default_backend():
    tensors = CASE.tensors('cpu')
    compiled = torch.compile(flash_attn_completions_func, fullgraph=True)
    torch.testing.assert_close(run(CASE, tensors, compiled), run(CASE, tensors))


def test_bad_lists_are_named_in_compiled_calls():
    compiled = torch.compile(flash_attn_completions_func, backend='aot_eager', fullgraph=True)
    with pytest.raises(RuntimeError, match=re.escape(BAD['short trees'][1])):
        compiled(**good(cu_trees=ints([0, 4])))


@pytest.mark.parametrize('strict', [False, True])
def test_export_with_dynamic_rows(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens, cu_trees):
            return flash_attn_completions_func(q, k, v, cu_seqlens, cu_trees,
                                               return_attn_probs=True)

    def arguments(trees):
        tensors = dataclasses.replace(CASE, trees=trees).tensors('cpu')
        return *tensors[:3], *tensors.lists

    rows, segments, count = (torch.export.Dim(name, min=2, max=4096)
                             for name in ('rows', 'segments', 'count'))
    shapes = dict.fromkeys('qkv', {0: rows}) | {'cu_seqlens': {0: segments},
                                                'cu_trees': {0: count}}
    program = torch.export.export(Attention(), arguments(TREES), strict=strict,
                                  dynamic_shapes=shapes)
    calls = [node.target for node in program.graph.nodes if node.op == 'call_function']
    assert calls.count(OP.default) == 1
    for trees in (TREES, OTHER_TREES):
        for got, wanted in zip(program.module()(*arguments(trees)), Attention()(*arguments(trees))):
            compare.check_equal(got, wanted, 'exported')


# ------------------------------------------------------------------------------------ checkpointing
def test_checkpointing():
    def attention(*tensors, **options):
        return checkpoint(flash_attn_completions_func, *tensors, use_reentrant=False, **options)

    tensors = CASE.tensors('cpu')
    check_same(run(CASE, tensors, attention), run(CASE, tensors))


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    """The forward ops that docs/training.md names, eager and traced."""
    is_kept = op in (torch.ops.flash_attn3.attend.default, OP.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(*tensors, **options):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    return checkpoint(flash_attn_completions_func, *tensors, use_reentrant=False,
                      context_fn=contexts, **options)


def test_selective_checkpointing():
    """No forward op of ours runs a second time."""
    tensors = CASE.tensors('cpu')
    with CalledOps() as called:
        got = run(CASE, tensors, selective)
    assert called.names == ['attend'] * 2 + ['bwd'] * 2
    check_same(got, run(CASE, tensors))


def test_selective_checkpointing_under_compile():
    graphs = []

    def keep_graph(module, _):
        graphs.append([node.target for node in module.graph.nodes])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep_graph, bw_compiler=keep_graph,
                           partition_fn=min_cut_rematerialization_partition)
    tensors = CASE.tensors('cpu')
    compiled = torch.compile(selective, backend=backend, fullgraph=True)
    torch.testing.assert_close(run(CASE, tensors, compiled), run(CASE, tensors))
    bwd = torch.ops.flash_attn3.bwd.default
    assert [(graph.count(OP.default), graph.count(bwd)) for graph in graphs] == [(1, 0), (0, 2)]
