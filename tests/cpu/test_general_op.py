"""The general ops themselves: opcheck, defaults, fakes, torch.compile, torch.export."""
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.ops.dense_and_varlen import Execution, General, for_backward

from tests.support.called_ops import CalledOps
from tests.support.lists import ints, starts

pytestmark = pytest.mark.usefixtures('fresh_compiler')
OPS = torch.ops.flash_attn3
FORWARD = [OPS.fwd_general.default, OPS.attend.default]
LENGTHS = ([3, 0, 5], [4, 3, 2])
SCORES = {'softmax_scale': 0.3, 'causal': True, 'window_left': 4, 'window_right': 1,
          'attention_chunk': 5, 'softcap': 3.0}


def inputs(kind: str, dtype=torch.float32, requires_grad=False) -> tuple[list[Tensor], General]:
    """q, k and v, dense or packed, and arguments with everything in use."""
    rows_q, rows_k = ((8,), (9,)) if kind == 'packed' else ((2, 5), (2, 7))
    tensors = [torch.randn(*rows, heads, dim).to(dtype).requires_grad_(requires_grad)
               for rows, heads, dim in ((rows_q, 4, 8), (rows_k, 2, 8), (rows_k, 2, 6))]
    lists = {} if kind != 'packed' else {
        'cu_seqlens_q': starts(LENGTHS[0]), 'cu_seqlens_k': starts(LENGTHS[1]),
        'seqused_q': ints([2, 0, 5]), 'seqused_k': ints([4, 3, 1]), 'max_seqlen_q': 5}
    sinks = torch.randn(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return tensors, General(sinks=sinks.requires_grad_(requires_grad), **lists, **SCORES)


KINDS = pytest.mark.parametrize('kind', ['dense', 'packed'])


# ---------------------------------------------------------------------------------------- opcheck
@KINDS
@pytest.mark.parametrize('execution', [Execution(), Execution(True, 0, True, 0, True)], ids=str)
@pytest.mark.parametrize('requires_grad', [False, True])
def test_opcheck_fwd_general(requires_grad, execution, kind):
    tensors, general = inputs(kind, requires_grad=requires_grad)
    opcheck(OPS.fwd_general.default, (*tensors, *general, *execution))


@KINDS
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_opcheck_without_autograd(dtype, kind):
    tensors, general = inputs(kind, dtype)
    execution = Execution(return_max_logits=True)[:-1]
    out = torch.zeros(tensors[0].shape[:-1] + (6,), dtype=dtype)
    for given in (None, out):
        opcheck(OPS.attend.default, (*tensors, given, *general, *execution))


@KINDS
@pytest.mark.parametrize('has_dlse', [False, True])
@pytest.mark.parametrize('sinks', [False, True])
def test_opcheck_bwd_general(sinks, has_dlse, kind):
    tensors, general = inputs(kind)
    general = general if sinks else general._replace(sinks=None)
    out, lse, _ = OPS.attend(*tensors, None, *general)
    dlse = torch.randn_like(lse) if has_dlse else None
    given = torch.randn_like(out), dlse, *tensors, out, lse
    opcheck(OPS.bwd.default, (*given, *for_backward(general, True)))
    opcheck(OPS.bwd_out.default,
            (*given, *(torch.zeros_like(x) for x in tensors), *for_backward(general, True)))


@KINDS
def test_gradients_into_given_tensors(kind):
    """They have the bits of new ones, whatever their strides."""
    tensors, general = inputs(kind)
    out, lse, _ = OPS.attend(*tensors, None, *general)
    given = torch.randn_like(out), None, *tensors, out, lse
    wanted = OPS.bwd(*given, *for_backward(general, False))
    found = [torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
             for x in tensors]
    gradients = [x[..., :size.shape[-1]] for x, size in zip(found, tensors)]
    dsinks = OPS.bwd_out(*given, *gradients, *for_backward(general, False))
    assert all(map(torch.equal, (*gradients, dsinks), wanted))
    assert all(x[..., size.shape[-1]:].isnan().all() for x, size in zip(found, tensors))


def test_ops_are_tagged_for_pt2():
    for op in (*FORWARD, OPS.bwd.default, OPS.bwd_out.default):
        assert torch.Tag.pt2_compliant_tag in op.tags


# ------------------------------------------------------------------------------ which op, and what
def test_with_defaults_it_is_fwd():
    (q, k, v), _ = inputs('dense', requires_grad=True)
    wanted = OPS.fwd(q, k, v)
    for op in FORWARD:
        out, lse, max_logits = op(q, k, v)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
        assert max_logits.shape == (0,)
    out, lse, _ = OPS.fwd_general(q, k, v)
    gradients = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    for got, expected in zip(gradients,
                             torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), (q, k, v))):
        assert torch.equal(got, expected)


@KINDS
def test_the_forward_ops_agree(kind):
    tensors, general = inputs(kind)
    execution = Execution(return_max_logits=True)
    results = [OPS.fwd_general(*tensors, *general, *execution),
               OPS.attend(*tensors, None, *general, *execution[:-1])]
    out = torch.full_like(results[0][0], torch.nan)
    results.append((out, *OPS.attend(*tensors, out, *general, *execution[:-1])[1:]))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_gradient_of_no_sinks_is_empty():
    tensors, general = inputs('packed')
    general = general._replace(sinks=None)
    out, lse, _ = OPS.attend(*tensors, None, *general)
    *_, dsinks = OPS.bwd(out, None, *tensors, out, lse, *for_backward(general, False))
    assert dsinks.shape == (0,) and dsinks.dtype == torch.float32


@pytest.mark.parametrize('changes, op', [
    ({'window_size': [-1, -1]}, '_fwd_no_lse'), ({'num_splits': 0}, '_fwd_no_lse'),
    ({'attention_chunk': 3}, 'attend'), ({'softcap': 2.0}, 'attend'),
    ({'window_size': (1, -1)}, 'attend'), ({'s_aux': torch.zeros(4)}, 'attend'),
    ({'return_max_logits': True}, 'attend'),
    ({'softcap': 2.0, 'out': torch.empty(2, 5, 4, 6)}, 'attend')],
    ids=lambda x: x if isinstance(x, str) else '-'.join(x))
def test_only_features_take_the_general_op(changes, op):
    tensors, _ = inputs('dense')
    with CalledOps() as called:
        flash_attn_func(*tensors, **changes)
    assert called.names == [op]


WRITING_OPS = pytest.mark.parametrize('name', ['_fwd_no_lse', 'attend', 'attend_cache'])


@WRITING_OPS
def test_vmap_of_an_op_that_may_write(name):
    """Also into a batch of given tensors."""
    def attention(q, given=None):
        results = getattr(OPS, name)(q, q, q, softmax_scale=0.3, out=given)
        return results if name == '_fwd_no_lse' else results[0]

    q, out = torch.randn(3, 2, 5, 4, 8), torch.zeros(3, 2, 5, 4, 8)
    wanted = torch.stack([attention(x) for x in q])
    torch.testing.assert_close(torch.vmap(attention)(q), wanted)
    assert torch.vmap(attention)(q, out).shape == (3, 0)
    torch.testing.assert_close(out, wanted)


@WRITING_OPS
def test_vmap_into_a_tensor_that_entries_share(name):
    """The last entry would win."""
    q = torch.randn(3, 1, 5, 2, 16)
    with pytest.raises(RuntimeError, match=f'flash_attn3.{name}: expected out with the batch of '):
        torch.vmap(lambda x: getattr(OPS, name)(x, x, x, out=torch.empty(1, 5, 2, 16)))(q)


# ------------------------------------------------------------------------------------------ fakes
@KINDS
@pytest.mark.parametrize('device', ['cuda', 'cpu'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_fakes(dtype, device, kind):
    """Shapes, dtypes and strides without data: also of a GPU that is not there."""
    tensors, general = inputs(kind, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(x.shape, dtype=dtype, device=device).transpose(0, 1).contiguous()
                   .transpose(0, 1) for x in tensors)
        general = general._replace(sinks=torch.empty(4, device=device, dtype=wide))
        out, lse, empty = OPS.attend(q, k, v, None, *general)
        max_logits = OPS.attend(q, k, v, None, *general, None, 0, True)[2]
        dq, dk, dv, dsinks = OPS.bwd(out, None, q, k, v, out, lse,
                                     *for_backward(general, False))
    shapes = ((8, 4, 6), (4, 8)) if kind == 'packed' else ((2, 5, 4, 6), (2, 4, 5))
    assert (out.shape, lse.shape) == shapes and out.dtype == dtype and lse.dtype == wide
    assert out.is_contiguous() and lse.is_contiguous() and max_logits.is_contiguous()
    assert max_logits.shape == lse.shape and max_logits.dtype == wide and empty.shape == (0,)
    assert out.device.type == lse.device.type == dsinks.device.type == device
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert dsinks.shape == (4,) and dsinks.dtype == wide
    assert dq.is_contiguous() and dk.is_contiguous() and dv.is_contiguous()


def test_fakes_of_sizes_that_only_data_know():
    """No comparison of an unbacked total, or of the length of a list."""
    shape_env = ShapeEnv(allow_scalar_outputs=True)
    with FakeTensorMode(shape_env=shape_env):
        total_q, total_k, batch = (torch.tensor(x).item() for x in (8, 9, 4))
        for size in (total_q, total_k, batch):
            torch._check(size >= 0)
        q = torch.empty(total_q, 4, 8)
        k = torch.empty(total_k, 2, 8)
        cu = torch.empty(batch, dtype=torch.int32)
        out, lse, _ = OPS.fwd_general(q, k, k, cu, cu, None, None, total_q, total_k)
        assert out.shape[0] is q.shape[0] or out.shape[0] == q.shape[0]
        dq, dk, _, _ = OPS.bwd(out, None, q, k, k, out, lse, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert str(lse.shape[1]) == str(q.shape[0]) and str(dk.shape[0]) == str(k.shape[0])
    assert str(dq.shape[0]) == str(q.shape[0])


def test_fakes_name_the_rank():
    (q, k, v), general = inputs('packed')
    with pytest.raises(RuntimeError, match=r'expected k to have the shape \(total, heads'):
        OPS.attend(q.to('meta'), k[None].to('meta'), v.to('meta'), None, *general)


# -------------------------------------------------------------------------------------- compilers
def varlen(q, k, v, cu_q, cu_k, max_seqlen, s_aux):
    out, lse, max_logits = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_seqlen, max_seqlen, causal=True, window_size=(6, -1), softcap=3.0,
        s_aux=s_aux, return_attn_probs=True, return_max_logits=True)
    return out * 2, lse + 1, max_logits - 1


def varlen_arguments(lengths=LENGTHS, as_tensor=False) -> tuple:
    q, k, v = (torch.randn(sum(x), heads, 8, requires_grad=True)
               for x, heads in ((lengths[0], 4), (lengths[1], 2), (lengths[1], 2)))
    longest = max(*lengths[0], *lengths[1])
    return (q, k, v, *map(starts, lengths), torch.tensor(longest) if as_tensor else longest,
            torch.randn(4, requires_grad=True))


def check_same(compiled, arguments) -> None:
    """Results and gradients of a compiled varlen()."""
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    results = [function(*arguments) for function in (compiled, varlen)]
    torch.testing.assert_close(*results)
    assert not results[0][2].requires_grad
    torch.testing.assert_close(*(
        torch.autograd.grad([x.square().sum() for x in result[:2]], leaves) for result in results))


@pytest.mark.parametrize('as_tensor', [False, True])
def test_one_compilation_for_many_lengths(as_tensor):
    """Also of max_seqlen, as a number and as a tensor, and of other batches."""
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(varlen, backend=counter, fullgraph=True, dynamic=True)
    # No two sizes of the first call are equal, that would be a guard.
    for lengths in (([6, 0, 5, 1, 1], [9, 3, 2, 4, 1]), ([7, 9, 2, 5], [11, 3, 6, 9]),
                    ([20, 11], [17, 12])):
        check_same(compiled, varlen_arguments(lengths, as_tensor))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_one_graph_with_the_default_backend():
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in varlen_arguments()]
    torch.testing.assert_close(torch.compile(varlen, fullgraph=True)(*arguments),
                               varlen(*arguments))


@pytest.mark.parametrize('options', [
    {'window_size': (3, 1)}, {'window_size': [-1, 0]}, {'attention_chunk': 3},
    {'softcap': 2.0, 'causal': True}, {'return_max_logits': True}], ids=str)
def test_dense_features_compile(options):
    tensors, general = inputs('dense')

    def attention(q, k, v, s_aux):
        return flash_attn_func(q, k, v, s_aux=s_aux, **options)

    compiled = torch.compile(attention, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(*tensors, general.sinks),
                               attention(*tensors, general.sinks))


def test_out_argument_compiles():
    (q, k, v), general = inputs('packed')
    cu = general[:2]

    def into(q, k, v, out):
        return flash_attn_varlen_func(q, k, v, *cu, 5, 4, out=out, return_attn_probs=True)[1].sin()

    out = torch.zeros(4, 8, 6).transpose(0, 1)
    lse = torch.compile(into, backend='aot_eager', fullgraph=True)(q, k, v, out)
    expected = flash_attn_varlen_func(q, k, v, *cu, 5, 4, return_attn_probs=True)
    torch.testing.assert_close((out, lse), (expected[0], expected[1].sin()))


@pytest.mark.parametrize('strict', [False, True])
def test_export_with_dynamic_totals(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, cu_q, cu_k):
            return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 64, 64, causal=True, softcap=2.0,
                                          return_attn_probs=True)

    def arguments(lengths):
        return tuple(x.detach() for x in varlen_arguments(lengths)[:5])

    total_q, total_k, count = (torch.export.Dim(name, min=2, max=4096)
                               for name in ('total_q', 'total_k', 'starts'))
    shapes = {'q': {0: total_q}, 'k': {0: total_k}, 'v': {0: total_k}, 'cu_q': {0: count},
              'cu_k': {0: count}}
    program = torch.export.export(Attention(), arguments(LENGTHS), strict=strict,
                                  dynamic_shapes=shapes)
    calls = [node.target for node in program.graph.nodes if node.op == 'call_function']
    assert calls.count(OPS.fwd_general.default) == 1
    for lengths in (LENGTHS, ([7, 9, 2, 5], [11, 3, 6, 9])):
        tensors = arguments(lengths)
        torch.testing.assert_close(program.module()(*tensors), Attention()(*tensors))
