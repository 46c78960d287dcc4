"""mask= of flash_attn_fp8_func and flash_attn_varlen_fp8_func on the CPU: every error, before
anything is quantised, and their op. Values and gradients: tests/gpu/test_fp8_masks.py.
"""
from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn3 import AttentionMask, flash_attn_fp8_func, flash_attn_varlen_fp8_func
from flash_attn3.ops import fp8, library
from flash_attn3.ops.dense_and_varlen import Execution, General, MaskTensors
from flash_attn3.ops.fp8 import Quantization

from tests.support.lists import ints, starts
from tests.support.mask_cases import Blocks, MaskCase
from tests.support.mask_cases_fp8 import check_in_one_call, check_straight_through

ROWS = 130


def prefix(device='cpu', rows: int = ROWS) -> AttentionMask:
    return AttentionMask.prefix_lm(ints([30], device), rows)


def tensors(device='cpu', dtype=torch.bfloat16, heads: int = 2) -> list[torch.Tensor]:
    return [torch.randn(1, ROWS, count, 64, device=device).to(dtype) for count in (heads, 2, 2)]


@pytest.mark.parametrize('options', [
    dict(intervals='two'), dict(blocks=Blocks(64, 64, heads='q'), s_aux=True),
    dict(intervals='tree', blocks=Blocks(), is_packed=True, lengths=((3, 5), (0, 7), (130, 150)))],
    ids=str)
def test_values_and_gradients(options):
    case = MaskCase(head_dim=32, **options)
    for granularity in ('block', 'head'):
        check_in_one_call(case, 'cpu', granularity)
    for fp8_backward in ('given', 'rounded'):
        check_straight_through(case, 'cpu', fp8_backward)


def test_softcap_and_max_logits():
    """Only kernels do not have them."""
    q, k, v = (x.requires_grad_() for x in tensors())
    out, most = flash_attn_fp8_func(q, k, v, mask=prefix(), softcap=2.0, fp8_accum='promote',
                                    return_max_logits=True)
    assert most.max() <= 2.0
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


BAD = {
    'causal': (dict(causal=True), 'no causal with mask, got causal'),
    'window': (dict(window_size=(3, 0)), 'no window_size with mask'),
    'chunk': (dict(attention_chunk=5), 'no attention_chunk with mask'),
    'type': (dict(mask=torch.ones(2)), 'mask to be an AttentionMask, got Tensor'),
    'length': (dict(mask=prefix(rows=131)), 'mask for a seqlen_q of 130, got one for 131'),
    'packed': (dict(mask=AttentionMask.prefix_lm(ints([3]), ROWS, starts([ROWS]))),
               'mask of dense sequences'),
    'device': (dict(mask=prefix('meta')), 'mask on the device of q, cpu, got meta'),
    'dtype': (dict(q=tensors(dtype=torch.float32)[0]), 'q.dtype to be float16 or bfloat16'),
    'e4m3': (dict(q=tensors(dtype=torch.float8_e4m3fn)[0]), 'q.dtype to be float16 or bfloat16'),
    'no heads': (dict(q=tensors(heads=0)[0]), 'at least one head of q to quantise'),
    'heads': (dict(q=tensors(heads=3)[0]), 'the heads of q'),
    'accumulation': (dict(fp8_accum='exact'), "fp8_accum to be 'fast' or 'promote'"),
}


@pytest.mark.parametrize('name', BAD)
@pytest.mark.parametrize('requires_grad', [False, True])
def test_errors(requires_grad, name, monkeypatch):
    changes, text = BAD[name]
    q, k, v = tensors()
    given = dict(q=q, k=k.requires_grad_(requires_grad), v=v, mask=prefix()) | changes
    monkeypatch.setattr(fp8, 'quantize_inputs', None)
    with pytest.raises(RuntimeError, match=f'flash_attn_(fp8_)?func: expected {text}'):
        flash_attn_fp8_func(**given)


def test_packed_errors(monkeypatch):
    q, k, v = (x[0] for x in tensors())
    cu = starts([ROWS])
    monkeypatch.setattr(fp8, 'quantize_inputs', None)
    for changes, text in ((dict(seqused_k=ints([5])), 'no seqused_k with mask'),
                          (dict(mask=prefix()), 'mask of packed sequences')):
        mask = AttentionMask.prefix_lm(ints([3]), ROWS, cu)
        with pytest.raises(RuntimeError, match=f'flash_attn_varlen_fp8_func: expected {text}'):
            flash_attn_varlen_fp8_func(q, k, v, cu, cu, ROWS, ROWS, **dict(mask=mask) | changes)


@pytest.mark.parametrize('changes, got', [
    (dict(softcap=3.0), 'softcap 3.0'), (dict(fp8_accum='promote'), "'promote'")], ids=str)
def test_what_kernels_do_not_have(changes, got, monkeypatch):
    monkeypatch.setattr(library, 'kernels_serve', lambda device: True)
    with FakeTensorMode(), pytest.raises(RuntimeError) as raised:
        flash_attn_fp8_func(*tensors('cuda'), mask=prefix('cuda'), **changes)
    assert str(raised.value) == ('flash_attn3.flash_attn_fp8_func: expected no softcap or '
                                 f"fp8_accum of 'promote' with mask on a GPU, got {got}")


# -------------------------------------------------------------------------------------------- tools
@pytest.mark.slow
@pytest.mark.parametrize('requires_grad', [False, True])
def test_opcheck(requires_grad):
    q, k, v = (x.requires_grad_(requires_grad) for x in tensors())
    rows = ints([[0, 30, 0, 0]] * ROWS)[None]
    shown = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    opcheck(torch.ops.flash_attn3.fwd_quantized.default,
            (q, k, v, *General(), *Execution(), *Quantization(), *MaskTensors(rows, shown)))


@pytest.mark.slow
@pytest.mark.usefixtures('fresh_compiler')
def test_compiled():
    def results(function) -> list[torch.Tensor]:
        out, lse = function(*leaves, mask=prefix(), return_attn_probs=True)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)]

    leaves = [x.requires_grad_() for x in tensors()]
    compiled = torch.compile(flash_attn_fp8_func, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(results(compiled), results(flash_attn_fp8_func))
