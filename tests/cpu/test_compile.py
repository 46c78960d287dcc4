"""torch.compile and torch.export: one graph, no break, one compilation for many lengths."""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn3 import flash_attn_func

from tests.support.called_ops import compilations
from tests.support.cases import Case

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('fresh_compiler')]


def inputs(seqlen_q=5, seqlen_k=7, requires_grad=False):
    case = Case(seqlen_q, seqlen_k, head_dim=16, heads_q=4, heads_k=2, dtype='fp32')
    return tuple(x.requires_grad_(requires_grad) for x in case.tensors('cpu'))


def attention(q, k, v):
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out * 2, lse + 1


def test_one_graph_with_the_default_backend():
    compiled = torch.compile(attention, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs()), attention(*inputs()))


def test_one_compilation_for_many_lengths():
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=True)
    for seqlen in (5, 9, 17, 64, 131):    # no two sizes of a call are equal, that would be a guard
        tensors = inputs(seqlen, seqlen + 6)
        torch.testing.assert_close(compiled(*tensors), attention(*tensors))
    assert compilations(counter) == 1


@pytest.mark.parametrize('dynamic', [False, True])
def test_gradients(dynamic):
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=dynamic)
    for seqlen in (5, 9, 17) if dynamic else (5,):
        tensors = inputs(seqlen, seqlen + 6, requires_grad=True)
        gradients = [torch.autograd.grad([x.square().sum() for x in function(*tensors)], tensors)
                     for function in (compiled, attention)]
        torch.testing.assert_close(*gradients)
    assert compilations(counter) == 1


@pytest.mark.parametrize('with_lse', [False, True])
def test_out_argument(with_lse):
    def into(q, k, v, out):
        results = flash_attn_func(q, k, v, out=out, return_attn_probs=with_lse)
        return [x.sin() for x in (results if with_lse else [results])]

    q, k, v = inputs()
    out = torch.zeros(2, 4, 5, 16).transpose(1, 2)
    results = torch.compile(into, backend='aot_eager', fullgraph=True)(q, k, v, out)
    expected = flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, expected[0])
    assert len(results) == 1 + with_lse
    for result, wanted in zip(results, expected):
        torch.testing.assert_close(result, wanted.sin())


def test_unsupported_arguments_still_raise():
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, qv=q),
                             backend='eager')
    with pytest.raises(NotImplementedError, match='expected qv to be None, got a tensor'):
        compiled(*inputs())


@pytest.mark.parametrize('strict', [False, True])
def test_export_with_dynamic_lengths(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)

    lengths = {name: torch.export.Dim(name, min=2, max=4096) for name in ('seqlen_q', 'seqlen_k')}
    q_dims, k_dims = ({1: lengths['seqlen_q']}, {1: lengths['seqlen_k']})
    program = torch.export.export(Attention(), inputs(), strict=strict,
                                  dynamic_shapes={'q': q_dims, 'k': k_dims, 'v': k_dims})
    calls = [node.target for node in program.graph.nodes if node.op == 'call_function']
    assert calls.count(torch.ops.flash_attn3.fwd.default) == 1
    for seqlens in ((5, 7), (33, 12)):
        tensors = inputs(*seqlens)
        expected = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
        torch.testing.assert_close(program.module()(*tensors), expected)
