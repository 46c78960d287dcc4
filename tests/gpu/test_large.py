"""More than 2^31 elements, and more (batch, head) pairs than a grid dimension may have."""
import pytest
import torch

from flash_attn3 import flash_attn_func, quantize_fp8

from tests.support import compare
from tests.support.cases import Case

FAR = 2 ** 31    # elements: beyond any 32-bit index, and past 4 GiB in bytes
DTYPE = torch.bfloat16


def randn(*shape, device):
    return torch.randn(shape, dtype=DTYPE, device=device)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('far_dim', [0, 1, 2], ids=['batch', 'row', 'head'])
def test_far_strides(far_dim, causal, cuda, needs_memory):
    """Small tensors whose last batch entry, row or head lies past element 2^31 of their buffer."""
    needs_memory(24)
    shape = [3, 129, 3, 64]
    stride = -(-FAR // (shape[far_dim] - 1) // 64) * 64    # a multiple of 128 bytes
    others = [dim for dim in range(3) if dim != far_dim]
    strides = [0, 0, 0, 1]
    strides[far_dim], strides[others[1]] = stride, 64
    strides[others[0]] = 64 * shape[others[1]]

    def far(x):
        buffer = torch.empty(stride * shape[far_dim], dtype=DTYPE, device=cuda)
        return buffer.as_strided(shape, strides).copy_(x)

    tensors = [randn(*shape, device=cuda) for _ in range(3)]
    out = far(torch.zeros_like(tensors[0]))
    result, lse = flash_attn_func(*map(far, tensors), causal=causal, return_attn_probs=True,
                                  out=out)
    assert (result.select(far_dim, -1).data_ptr() - result.data_ptr()) // 2 >= FAR
    compare.check_forward(result.contiguous(), lse, tensors, causal)


@pytest.mark.parametrize('causal', [False, True])
def test_large_queries(causal, cuda, needs_memory):
    needs_memory(24)
    seqlen_q, heads, head_dim, seqlen_k = FAR // (16 * 128) + 37, 16, 128, 77
    q = randn(1, seqlen_q, heads, head_dim, device=cuda)
    k, v = (randn(1, seqlen_k, heads, head_dim, device=cuda) for _ in range(2))
    assert q.numel() > FAR
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    last = slice(-200, None)    # aligned bottom-right, so that the last rows are a problem alone
    compare.check_forward(out[:, last], lse[:, :, last], (q[:, last], k, v), causal)
    for rows in (slice(0, 200), slice(seqlen_q // 2, seqlen_q // 2 + 200)):
        if causal:
            assert (out[:, rows] == 0).all() and lse[:, :, rows].isneginf().all()
        else:
            compare.check_forward(out[:, rows], lse[:, :, rows], (q[:, rows], k, v), False)


@pytest.mark.parametrize('causal', [False, True])
def test_large_keys(causal, cuda, needs_memory):
    needs_memory(24)
    seqlen_k, heads, head_dim = FAR // (16 * 128) + 37, 16, 128
    q = randn(1, 65, heads, head_dim, device=cuda)
    k, v = (randn(1, seqlen_k, heads, head_dim, device=cuda) for _ in range(2))
    assert k.numel() > FAR
    out, lse = flash_attn_func(q * 8, k, v, causal=causal, return_attn_probs=True)
    for head in (slice(0, 1), slice(15, 16)):
        inputs = (q[:, :, head] * 8, k[:, :, head], v[:, :, head])
        compare.check_forward(out[:, :, head], lse[:, head], inputs, causal)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('batch, heads', [(70000, 1), (1, 70000), (35000, 2)])
def test_many_heads_and_batches(batch, heads, causal, cuda):
    case = Case(17, 33, head_dim=64, batch=batch, heads_q=heads, heads_k=heads, causal=causal)
    compare.check_case(case, cuda)


def same_bits(got, expected):
    return got.shape == expected.shape and torch.equal(got.view(torch.uint8),
                                                       expected.view(torch.uint8))


@pytest.mark.parametrize('block', [64, 384, 'head'])
def test_large_quantize_fp8(block, cuda, needs_memory):
    """The last batch entry gets the bits that it gets alone."""
    needs_memory(24)
    x = randn(2, FAR // (2 * 16 * 128) + 37, 16, 128, device=cuda)
    assert x.numel() > FAR
    values, scale = quantize_fp8(x, rotate=True, block=block)
    values_alone, scale_alone = quantize_fp8(x[1:], rotate=True, block=block)
    assert same_bits(values[1:], values_alone)
    assert torch.equal(scale[1:], scale_alone)


@pytest.mark.parametrize('rotate', [False, True])
@pytest.mark.parametrize('block', [64, 384])
def test_large_quantize_fp8_packed(block, rotate, cuda, needs_memory):
    """The last sequence, of 500 rows, gets the bits that it gets alone."""
    needs_memory(24)
    rows, last = FAR // (16 * 128) + 537, 500
    x = randn(rows, 16, 128, device=cuda)
    cu = torch.tensor([0, 40, rows - last, rows], dtype=torch.int32, device=cuda)
    values, scale = quantize_fp8(x, rotate=rotate, block=block, cu_seqlens=cu)
    values_alone, scale_alone = quantize_fp8(x[-last:], rotate=rotate, block=block,
                                             cu_seqlens=cu[[0, 3]].clamp(max=last))
    assert same_bits(values[-last:], values_alone)
    first, count = (rows - last) // block + 2, -(-last // block)
    assert torch.equal(scale[..., first:first + count], scale_alone[..., :count])
