"""The FP8 ops themselves: opcheck, defaults, fakes, torch.compile, torch.export."""
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from benchmarks.fp8_accuracy import BLOCKS
from flash_attn3 import (flash_attn_fp8_func, flash_attn_func, flash_attn_qkvpacked_func,
                         flash_attn_varlen_fp8_func, flash_attn_varlen_func, quantize_fp8)
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import Execution
from flash_attn3.cpu.quantize import PER_HEAD, PER_TENSOR
from flash_attn3.cpu.reference_fp8 import Scales

from tests.cpu.test_general_op import LENGTHS, inputs
from tests.support.fp8_data import E4M3, descales, quantize_all
from tests.support.lists import ints, starts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('fresh_compiler')]

OPS = torch.ops.flash_attn3
KINDS = pytest.mark.parametrize('kind', ['dense', 'packed'])
EVERY_GRANULARITY = pytest.mark.parametrize('granularity', BLOCKS)

# test_schema is missing: it compares the inputs by operations that PyTorch lacks for e4m3.
ON_E4M3 = ('test_autograd_registration', 'test_faketensor', 'test_aot_dispatch_dynamic')


def fp8_inputs(kind: str, granularity='block'):
    """e4m3 of q, k and v, their scales, and arguments with everything in use."""
    tensors, general = inputs(kind)
    lists = ((general.cu_seqlens_q, general.seqused_q), (general.cu_seqlens_k, general.seqused_k))
    return *quantize_all(*tensors, granularity, True, lists=lists), general


# ---------------------------------------------------------------------------------------- opcheck
@pytest.mark.parametrize('blocks', [(64, 384), (PER_HEAD, PER_HEAD)])
@KINDS
def test_the_three_of_attention_at_once(kind, blocks):
    """Each as by itself; q with the signs of its KV heads, v not rotated."""
    (q, k, v), general = inputs(kind)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    of_q = general.cu_seqlens_q, general.seqused_q
    of_k = general.cu_seqlens_k, general.seqused_k
    arguments = (q, k, v, *of_q, *of_k, *blocks, 3)
    group = q.size(-2) // k.size(-2)
    expected = (*OPS.quantize_fp8(q, *of_q, blocks[0], group, 3),
                *OPS.quantize_fp8(k, *of_k, blocks[1], 1, 3),
                *OPS.quantize_fp8(v, *of_k, blocks[1], 1))
    got = OPS.quantize_qkv_fp8(*arguments)
    assert len(got) == 6
    for one, other in zip(got, expected):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.float(), other.float())
    opcheck(OPS.quantize_qkv_fp8.default, arguments)


@pytest.mark.parametrize('seed', [None, 3])
@pytest.mark.parametrize('block', [PER_HEAD, PER_TENSOR, 32])
@KINDS
def test_opcheck_quantize(kind, block, seed):
    x = torch.randn(2, 4, 40, 16).bfloat16().transpose(1, 2)
    lists = (None, None)
    if kind == 'packed':
        x, lists = x[0], (starts([20, 0, 15]), ints([20, 0, 3]))
    opcheck(OPS.quantize_fp8.default, (x, *lists, block, 2, seed))


@pytest.mark.parametrize('max_logits', [False, True])
@EVERY_GRANULARITY
@KINDS
def test_opcheck_attend(kind, granularity, max_logits):
    values, scales, general = fp8_inputs(kind, granularity)
    execution = Execution(return_max_logits=max_logits)[:-1]
    arguments = *values, None, *general, *execution, *scales, True, True
    opcheck(OPS.attend.default, arguments, test_utils=ON_E4M3)
    out = torch.zeros(*values[0].shape[:-1], 6, dtype=torch.bfloat16)
    opcheck(OPS.attend.default, (*values, out, *arguments[4:]), test_utils=ON_E4M3)
    copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    OPS.attend(*arguments)
    assert all(torch.equal(x.double().nan_to_num(-1), copy.double().nan_to_num(-1))
               for x, copy in zip(arguments, copies) if isinstance(x, Tensor) and x.numel())


@pytest.mark.parametrize('quantization', [
    Quantization(), Quantization(None, False, False, True), Quantization(3, rounded_backward=True),
    Quantization(None, False, True)], ids=str)
@pytest.mark.parametrize('requires_grad', [False, True])
@KINDS
def test_opcheck_fwd_quantized(kind, requires_grad, quantization):
    tensors, general = inputs(kind, torch.bfloat16, requires_grad)
    execution = Execution(return_max_logits=True)
    opcheck(OPS.fwd_quantized.default, (*tensors, *general, *execution, *quantization))


def test_ops_are_tagged_for_pt2():
    for op in (OPS.quantize_fp8, OPS.attend, OPS.fwd_quantized):
        assert torch.Tag.pt2_compliant_tag in op.default.tags


# ------------------------------------------------------------------------------ defaults and fakes
def test_defaults():
    q, k, v = (torch.randn(2, rows, 2, 16).to(E4M3) for rows in (5, 7, 7))
    out, lse, max_logits = OPS.attend(q, k, v)
    expected = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert out.dtype == torch.bfloat16 and max_logits.shape == (0,)
    into = torch.empty_like(out)
    assert torch.equal(OPS.attend(q, k, v, into)[1], lse) and torch.equal(into, out)
    wide = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert torch.equal(OPS.fwd_quantized(*wide)[0], flash_attn_fp8_func(*wide))
    values, scale = OPS.quantize_fp8(wide[0])
    expected = quantize_fp8(wide[0])
    assert torch.equal(scale, expected[1])
    assert torch.equal(values.float(), expected[0].float())


@EVERY_GRANULARITY
@KINDS
def test_fakes_on_a_gpu(kind, granularity):
    """Shapes, strides and dtypes are those of the CPU, also on a device that is not there."""
    (q, k, v), scales, general = fp8_inputs(kind, granularity)
    wide = torch.randn(q.shape)
    block = {'tensor': PER_TENSOR, 'head': PER_HEAD, 'block': 64}[granularity]

    def results(q, k, v, wide, *scales_and_general):
        lists = scales_and_general[3:][:4]
        return (*OPS.attend(q, k, v, None, *scales_and_general[3:], *Execution()[:-1],
                            *scales_and_general[:3]),
                *OPS.quantize_fp8(wide, lists[0], lists[2], block, 2, 7))

    real = results(q, k, v, wide, *scales, *general)
    with FakeTensorMode() as mode:
        def on_gpu(x):
            return mode.from_tensor(x).to('cuda') if isinstance(x, Tensor) else x
        fake = results(*map(on_gpu, (q, k, v, wide, *scales, *general)))
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert other.device.type == 'cuda'


# --------------------------------------------------------------------------------------- compiling
def compiled(function, **options):
    return torch.compile(function, backend='aot_eager', fullgraph=True, **options)


@EVERY_GRANULARITY
def test_e4m3_compiles(granularity):
    (q, k, v), scales, general = fp8_inputs('dense', granularity)

    def attention(q, k, v, scales, s_aux):
        return flash_attn_func(q, k, v, **descales(Scales(*scales)), causal=True, softcap=3.0,
                               s_aux=s_aux, out_dtype=torch.float16, fp8_accum='promote',
                               return_attn_probs=True)

    arguments = q, k, v, tuple(scales), general.sinks
    torch.testing.assert_close(compiled(attention)(*arguments), attention(*arguments))


def test_e4m3_with_out_compiles():
    (q, k, v), scales, _ = fp8_inputs('dense')

    def into(q, k, v, scales, out):
        return flash_attn_func(q, k, v, **descales(Scales(*scales)), out=out,
                               return_attn_probs=True)[1].sin()

    out = torch.zeros(2, 5, 4, 6, dtype=torch.bfloat16)
    lse = compiled(into)(q, k, v, tuple(scales), out)
    expected = flash_attn_func(q, k, v, **descales(scales), return_attn_probs=True)
    torch.testing.assert_close((out, lse), (expected[0], expected[1].sin()))


def test_qkvpacked_compiles():
    qkv = torch.randn(2, 9, 8, 16).to(E4M3)

    def attention(qkv):
        return flash_attn_qkvpacked_func(qkv, num_heads_q=4, causal=True)

    torch.testing.assert_close(compiled(attention)(qkv), attention(qkv))


def fp8_varlen(q, k, v, cu_q, cu_k, s_aux):
    out, lse = flash_attn_varlen_fp8_func(q, k, v, cu_q, cu_k, 20, 20, causal=True, softcap=3.0,
                                          s_aux=s_aux, return_attn_probs=True, seed=2)
    return out * 2, lse + 1


def fp8_varlen_arguments(lengths) -> tuple:
    tensors = (torch.randn(sum(x), heads, 16).bfloat16().requires_grad_()
               for x, heads in ((lengths[0], 4), (lengths[1], 2), (lengths[1], 2)))
    return *tensors, *map(starts, lengths), torch.randn(4, requires_grad=True)


def test_one_compilation_for_many_lengths():
    """With gradients."""
    counter = CompileCounterWithBackend('aot_eager')
    function = torch.compile(fp8_varlen, backend=counter, fullgraph=True, dynamic=True)
    for lengths in (([6, 0, 5, 1, 1], [9, 3, 2, 4, 1]), ([7, 9, 2, 5], [11, 3, 6, 9]),
                    ([20, 11], [17, 12])):
        arguments = fp8_varlen_arguments(lengths)
        leaves = [x for x in arguments if x.requires_grad]
        results = [one(*arguments) for one in (function, fp8_varlen)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(
            torch.autograd.grad([x.float().square().sum() for x in one], leaves)
            for one in results))
    assert counter.frame_count == 1


@pytest.mark.parametrize('granularity', ['head', 'block'])
def test_quantising_compiles_with_the_attention(granularity):
    """Two functions of the user in one graph, of packed tensors, for many lengths."""
    def attention(q, k, v, cu_q, cu_k):
        lists = (cu_q, None), (cu_k, None)
        values, scales = quantize_all(q, k, v, granularity, True, lists=lists)
        return flash_attn_varlen_func(*values, cu_q, cu_k, 20, 20, **descales(scales))

    function = compiled(attention, dynamic=True)
    for lengths in (LENGTHS, ([7, 9, 2, 5], [11, 3, 6, 9])):
        arguments = [x.detach() for x in fp8_varlen_arguments(lengths)[:5]]
        torch.testing.assert_close(function(*arguments), attention(*arguments))


@pytest.mark.parametrize('strict', [False, True])
def test_export(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_fp8_func(q, k, v, causal=True, return_attn_probs=True)

    def arguments(batch, seqlen):
        return tuple(torch.randn(batch, seqlen, heads, 16).bfloat16() for heads in (4, 2, 2))

    batch, seqlen = (torch.export.Dim(name, min=2, max=4096) for name in ('batch', 'seqlen'))
    shapes = {name: {0: batch, 1: seqlen} for name in 'qkv'}
    program = torch.export.export(Attention(), arguments(2, 40), strict=strict,
                                  dynamic_shapes=shapes)
    calls = [node.target for node in program.graph.nodes if node.op == 'call_function']
    assert calls.count(OPS.fwd_quantized.default) == 1
    for sizes in ((2, 40), (3, 70)):
        tensors = arguments(*sizes)
        torch.testing.assert_close(program.module()(*tensors), Attention()(*tensors))
