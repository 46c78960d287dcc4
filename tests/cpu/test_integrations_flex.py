"""integrations.flex against PyTorch's own flex_attention on the CPU: values, gradients, LSE."""
import gc

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from flash_attn3 import AttentionMask
from flash_attn3.integrations import _intervals, flex as ours

LENGTH = 300
documents = torch.arange(LENGTH) // 70
allowed = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.6


def causal(b, h, q, k):
    return k <= q


def window_and_sinks(b, h, q, k):
    return causal(b, h, q, k) & ((k < 4) | (k > q - 90))


def own_document(b, h, q, k):
    return causal(b, h, q, k) & (documents[q] == documents[k])


def prefix_by_sequence(b, h, q, k):
    return causal(b, h, q, k) | (k < 100 + 50 * b)


def blocks_of_heads(b, h, q, k):
    return allowed[h, q // 128, k // 128]


def causal_in_blocks(b, h, q, k):
    """Many intervals, each that is not of whole blocks ending at the query."""
    return causal(b, h, q, k) & blocks_of_heads(b, h, q, k)


def none_of_some(b, h, q, k):
    return causal(b, h, q, k) & (q % 150 > 20)


MASKS = {    # mask_mod, batch, heads
    'causal': (causal, None, None), 'sinks': (window_and_sinks, None, None),
    'documents': (own_document, None, None), 'prefix': (prefix_by_sequence, 2, None),
    'blocks': (blocks_of_heads, None, 4), 'causal_blocks': (causal_in_blocks, None, 4),
    'none_of_some': (none_of_some, None, None)}
each_mask = pytest.mark.parametrize('name', MASKS)


def block_mask_of(name, keys=LENGTH, **options):
    function, batch, heads = MASKS[name]
    return flex.create_block_mask(function, batch, heads, LENGTH, keys, 'cpu', **options)


def tensors(heads_k=2, keys=LENGTH, head_dim_v=16):
    shapes = (2, 4, LENGTH, 16), (2, heads_k, keys, 16), (2, heads_k, keys, head_dim_v)
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float32, requires_grad=True) for shape in shapes]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """PyTorch's function in plain PyTorch, with what it refuses for the CPU."""
    for name, value in (('_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG', True),
                        ('_validate_device', lambda *_: None),
                        ('_apply_kernel_options', lambda *_: {})):
        monkeypatch.setattr(flex, name, value, raising=False)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def compare(block_mask, inputs, **options):
    """Out, lse and the largest scores of both, and the gradients that out and lse give."""
    options |= dict(block_mask=block_mask, return_aux=flex.AuxRequest(lse=True, max_scores=True))
    (out, aux), (wanted, wanted_aux) = (f(*inputs, **options) for f in (
        ours.flex_attention, flex.flex_attention))
    close(out, wanted)
    assert out.shape == wanted.shape and aux.lse.dtype == wanted_aux.lse.dtype == torch.float32
    close(aux.lse, wanted_aux.lse)
    close(aux.max_scores, wanted_aux.max_scores)
    dout = torch.randn_like(out)

    def loss(out, lse):
        return (out * dout).sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()
    for got, expected in zip(torch.autograd.grad(loss(out, aux.lse), inputs),
                             torch.autograd.grad(loss(wanted, wanted_aux.lse), inputs)):
        close(got, expected)


@each_mask
def test_values_and_gradients(name):
    compare(block_mask_of(name), tensors(), enable_gqa=True)


@pytest.mark.parametrize('sizes', [64, (64, 128), 256])
def test_block_sizes(sizes):
    """Intervals alone need no blocks of ours."""
    for name in ('sinks', 'prefix'):
        compare(block_mask_of(name, BLOCK_SIZE=sizes), tensors(heads_k=4), scale=0.3)


def test_other_keys_and_head_dims():
    for keys in (130, 500):
        compare(block_mask_of('causal', keys), tensors(4, keys, head_dim_v=24))
        compare(None, tensors(4, keys))


def test_few_queries_are_read_at_a_time(monkeypatch):
    monkeypatch.setattr(_intervals, '_PAIRS', 7 * 4 * LENGTH)
    for name in ('sinks', 'causal_blocks', 'prefix'):
        compare(block_mask_of(name), tensors(), enable_gqa=True)


def test_full_blocks_are_not_asked():
    """As in PyTorch's kernels; its mask_mod says the contrary."""
    full = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    partial = torch.zeros_like(full[0]), torch.ones_like(full[1])
    partial[0][..., 1] = 1
    mask = flex.BlockMask.from_kv_blocks(*partial, *full, mask_mod=lambda b, h, q, k: k >= 200,
                                         seq_lengths=(256, 256))
    x = torch.zeros(1, 1, 256, 16)
    _, lse = ours.flex_attention(x, x, x, block_mask=mask, return_lse=True)
    close(lse.exp().flatten(), torch.tensor([128.] * 128 + [128. + 56] * 128))


@pytest.mark.filterwarnings('ignore:return_lse is deprecated')
def test_results_that_are_asked_for():
    inputs = tensors(4)
    out = ours.flex_attention(*inputs)
    assert torch.equal(out, ours.flex_attention(*inputs, return_lse=True)[0])
    for got, expected in zip(*(f(*inputs, return_lse=True) for f in (
            ours.flex_attention, flex.flex_attention))):
        close(got, expected)
    for request in (flex.AuxRequest(), flex.AuxRequest(max_scores=True), flex.AuxRequest(lse=True)):
        got, expected = (f(*inputs, return_aux=request)[1] for f in (
            ours.flex_attention, flex.flex_attention))
        assert [x is None for x in got] == [x is None for x in expected] == [not x for x in request]


def test_a_mask_is_kept_as_long_as_its_block_mask():
    block_mask, inputs, kept = block_mask_of('sinks'), tensors(4), len(ours._kept)
    ours.flex_attention(*inputs, block_mask=block_mask)
    mask = ours.mask_of(block_mask, LENGTH, LENGTH)
    ours.flex_attention(*inputs, block_mask=block_mask)
    assert ours.mask_of(block_mask, LENGTH, LENGTH) is mask and len(mask._kept) == 1
    assert len(ours._kept) == kept + 1
    del block_mask
    gc.collect()
    assert len(ours._kept) == kept


def test_an_attention_mask():
    inputs = tensors(4)
    out = ours.flex_attention(*inputs, block_mask=AttentionMask.prefix_lm(
        torch.tensor([100, 150], dtype=torch.int32), LENGTH))
    close(out, flex.flex_attention(*inputs, block_mask=block_mask_of('prefix')))


def test_under_compile():
    inputs, block_mask = tensors(4), block_mask_of('documents')
    compiled = torch.compile(ours.flex_attention, backend='eager')
    close(compiled(*inputs, block_mask=block_mask),
          flex.flex_attention(*inputs, block_mask=block_mask))
    mask = AttentionMask.prefix_lm(torch.tensor([30], dtype=torch.int32), inputs[0].size(2))
    compiled = torch.compile(ours.flex_attention, backend='eager', fullgraph=True)
    close(compiled(*inputs, block_mask=mask), ours.flex_attention(*inputs, block_mask=mask))


def test_refusals():
    inputs = tensors()
    text = '^flash_attn3.integrations.flex: expected '
    with pytest.raises(RuntimeError, match=text + '4 heads in key, as in query, or .*, got 2'):
        ours.flex_attention(*inputs)
    with pytest.raises(NotImplementedError, match=text + 'no score_mod, got causal; hint: '):
        ours.flex_attention(*inputs, causal, enable_gqa=True)
    with pytest.raises(RuntimeError, match=text + 'key of 4 dimensions, got 3'):
        ours.flex_attention(inputs[0], inputs[1][0], inputs[2])
    with pytest.raises(RuntimeError, match=text + 'one of return_lse and return_aux, got both'):
        ours.flex_attention(*inputs, enable_gqa=True, return_lse=True, return_aux=(True, True))
    with pytest.raises(RuntimeError, match=text + r'block_mask for 300 queries and 300 keys, got '
                                                  r'\(300, 500\)'):
        ours.flex_attention(*inputs, block_mask=block_mask_of('causal', 500), enable_gqa=True)


@pytest.mark.parametrize('function,size,text', [
    (lambda b, h, q, k: k % 3 == 0, 128, 'within blocks that are not full, .*, got another$'),
    (lambda b, h, q, k: k < q + h, 128, 'within blocks that are not full, .*, got another$'),
    (blocks_of_heads, 32, 'two intervals of keys at most, got another; hint: with a BLOCK_SIZE')])
def test_masks_of_more_intervals_are_refused(function, size, text):
    block_mask = flex.create_block_mask(function, None, 4, LENGTH, LENGTH, 'cpu', BLOCK_SIZE=size)
    with pytest.raises(NotImplementedError, match=text):
        ours.flex_attention(*tensors(4), block_mask=block_mask)
