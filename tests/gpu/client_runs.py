"""Clients that look for upstream at their import, on a GPU, each in a process of its own:

    python -m tests.gpu.client_runs diffusers [--device cpu]

Their own code calls our functions in bfloat16. Values are held to the client's own attention, or
plain PyTorch, in float32 or float64: errors of at most twice those of the same in bfloat16. The
profiler proves that our kernels ran. On the CPU their ops for CUDA tensors are registered there.
"""
from __future__ import annotations

import argparse
import copy
import functools
import importlib
import types
from collections.abc import Callable

import torch
from torch import Tensor

from tests.cpu.client_contracts import on_cpu
from tests.support import compare
from tests.support.ran import Ran

ROUNDING = 2 * 2 ** -8    # two units of bf16, of the largest of a gradient
FEW = 64    # the errors of fewer numbers than that are luck
LENGTHS = 70, 1, 57
SHARPENED = ('norm_q.weight', 'norm_added_q.weight', 'to_v.weight', 'add_v_proj.weight',
             'to_out.0.weight', 'to_add_out.weight')


def randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of (batch, seqlen, heads, head_dim) in the dtype of q; mask: what is added."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q * q.size(-1) ** -0.5 @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask.to(q.dtype)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def lower_right(rows: int, keys: int, device: torch.device) -> Tensor:
    """The causal mask, aligned at the end, as `plain` takes it."""
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)
    return torch.zeros(rows, keys, device=device).masked_fill(hidden, float('-inf'))


def out_and_gradients(function: Callable, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def check_calls(name: str, results: list[list[Tensor]]) -> None:
    """Ours, and the same in float64 and in bfloat16: out, or out, dq, dk and dv."""
    for part, *values in zip(('out', 'dq', 'dk', 'dv'), *results):
        ref = values[1]
        compare.check_close(*values, f'{name}: {part}',
                            0.0 if part == 'out' else 2 ** -14 * ref.abs().max().item())


# ---------------------------------------------------------------------------------------- diffusers
def diffusers(device: torch.device) -> None:
    """Flux and Wan with _flash_3 and _flash_varlen_3, which has gradients; single calls, masks."""
    import diffusers as library
    from diffusers.models import attention_dispatch as dispatch
    if device.type == 'cpu':
        on_cpu(dispatch._wrapped_flash_attn_3)
    flux = library.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=128,
        guidance_embeds=False, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(16, 56, 56))
    images = dict(hidden_states=randn(device, 2, 100, 8), timestep=torch.tensor([0.25, 0.125]),
                  encoder_hidden_states=randn(device, 2, 29, 32),
                  pooled_projections=randn(device, 2, 32), img_ids=torch.randint(9, (100, 3)),
                  txt_ids=torch.zeros(29, 3))
    wan = library.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=32, ffn_dim=64, num_layers=2)
    video = dict(hidden_states=randn(device, 2, 4, 2, 16, 18), timestep=torch.tensor([250, 125]),
                 encoder_hidden_states=randn(device, 2, 29, 32))
    for name, model, inputs in (('Flux', flux, images), ('Wan', wan, video)):
        inputs = {key: x.to(device) for key, x in inputs.items()}
        with torch.no_grad():    # attention of new models is almost uniform, and counts little
            for key, x in model.named_parameters():
                x.mul_(4 if key.endswith(SHARPENED) else 1)
        narrow = model.bfloat16().to(device)
        check_diffuser(name, narrow, copy.deepcopy(narrow).float(), inputs)
    check_dispatch(dispatch.dispatch_attention_fn, device)


def check_diffuser(name: str, narrow, wide, inputs: dict) -> None:
    """The model's output with both backends, and the gradients of its parameters with varlen."""
    shape = inputs['hidden_states'].shape
    weights = torch.randn(shape, device=inputs['hidden_states'].device)

    def results(model, backend, gradients=True):
        model.set_attention_backend(backend)
        model.zero_grad()
        dtype = next(model.parameters()).dtype
        with torch.set_grad_enabled(gradients):
            out = model(**{key: x.to(dtype) if x.dtype == torch.bfloat16 else x
                           for key, x in inputs.items()}).sample
        if gradients:
            (out.float() * weights).sum().backward()
        return dict(out=out.detach()) | {
            key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}
    ref, pt = results(wide, 'native'), results(narrow, 'native')
    for backend in ('_flash_3', '_flash_varlen_3'):
        gradients = backend == '_flash_varlen_3'
        with Ran(weights.device) as ran:
            got = results(narrow, backend, gradients)
        assert ran.forwards >= 2 and (ran.backwards >= 2) == gradients, ran.names
        assert len(got) == (len(ref) if gradients else 1)
        for key, x in got.items():
            floor = 0.0 if key == 'out' else ROUNDING * ref[key].abs().max().item()
            if x.numel() >= FEW:
                compare.check_close(x, ref[key], pt[key], f'{name}, {backend}: {key}', floor)


def check_dispatch(dispatch: Callable, device: torch.device) -> None:
    """One call of each backend, of queries and fewer keys; masks for _flash_varlen_3."""
    q, k, v = (randn(device, 2, rows, 4, 64) for rows in (130, 75, 75))
    dout = randn(device, 2, 130, 4, 64)
    mask = torch.arange(75, device=device) < torch.tensor([[75], [31]], device=device)

    def native(q, k, v, mask=None, causal=False):
        mask = mask if mask is None else mask[:, None, None]
        return dispatch(q, k, v, attn_mask=mask, is_causal=causal, backend='native')
    wide = [x.double() for x in (q, k, v)]
    for name, options in (('full', {}), ('mask', dict(attn_mask=mask))):
        given = options.get('attn_mask')
        expected = [out_and_gradients(functools.partial(native, mask=given), inputs, dout)
                    for inputs in (wide, [q, k, v])]
        with Ran(device) as ran:
            got = out_and_gradients(lambda *x, options=options: dispatch(
                *x, **options, backend='_flash_varlen_3'), [q, k, v], dout)
        assert ran.forwards and ran.backwards, ran.names
        check_calls(f'_flash_varlen_3, {name}', [got, *expected])
    q = q[:, :75]
    with torch.no_grad():
        for causal in (False, True):
            with Ran(device) as ran:
                got = dispatch(q, k, v, is_causal=causal, backend='_flash_3')
            assert ran.forwards, ran.names
            check_calls(f'_flash_3, causal={causal}', [[got], *(
                [native(*x, causal=causal)] for x in ([y.double() for y in (q, k, v)],
                                                      (q, k, v)))])


# ----------------------------------------------------------------------------------------- xFormers
def xformers(device: torch.device) -> None:
    """memory_efficient_attention with gradients; caches, pages and GQA without."""
    from xformers.ops import fmha
    if device.type == 'cpu':
        for op in (fmha.flash3.mha_fwd, fmha.flash3.mha_bwd):
            on_cpu(op)
        for operator in (fmha.flash3.FwOp, fmha.flash3.BwOp):
            operator.not_supported_reasons = classmethod(lambda cls, inputs: [])
    else:    # its own kernels need another CUDA than this PyTorch may have; flash3 has none of them
        fmha.common._built_with_cuda = True
    bias = fmha.attn_bias
    causal = bias.LowerTriangularFromBottomRightMask()
    packed = bias.BlockDiagonalCausalMask.from_seqlens(LENGTHS, device=device)
    for head_dim in (64, 128):
        for name, given in (
                ('full', None), ('causal', bias.LowerTriangularMask()),
                ('window', causal.make_local_attention(20)), ('packed', packed),
                ('packed, full', bias.BlockDiagonalMask.from_seqlens(LENGTHS, device=device)),
                ('packed, window', packed.make_local_attention(20))):
            for one_tensor in (False, True):
                check_xformers_training(fmha, f'{name}, {head_dim}, {one_tensor}', given, head_dim,
                                        one_tensor, device)
        check_xformers_caches(fmha, head_dim, device)


def check_xformers_training(fmha, name: str, given, head_dim: int, one_tensor: bool,
                            device: torch.device) -> None:
    """one_tensor: q, k and v are views of it."""
    batch, rows = (1, sum(LENGTHS)) if 'packed' in name else (2, 100)
    if one_tensor:
        inputs = list(randn(device, batch, rows, 3, 4, head_dim).unbind(2))
    else:
        inputs = [randn(device, batch, rows, 4, head_dim) for _ in range(3)]
    dout = randn(device, batch, rows, 4, head_dim)
    mask = given if given is None else given.materialize((1, 1, rows, rows), device=device)
    op = fmha.flash3.FwOp, fmha.flash3.BwOp
    with Ran(device) as ran:
        got = out_and_gradients(lambda *x: fmha.memory_efficient_attention(
            *x, attn_bias=given, op=op), inputs, dout)
    assert ran.forwards and ran.backwards, ran.names
    check_calls(f'xFormers, {name}', [got, *(
        out_and_gradients(lambda *x: plain(*x, mask), x, dout)
        for x in ([y.double() for y in inputs], inputs))])


def check_xformers_caches(fmha, head_dim: int, device: torch.device) -> None:
    """Queries at the end of each sequence, of a cache of two sequences with 4 pages of 64 each."""
    bias, flash3 = fmha.attn_bias, fmha.flash3
    room, page, used, left = 256, 64, (200, 181), (0, 70)
    k, v = (randn(device, 1, 2 * room, 2, head_dim) for _ in range(2))
    table = torch.tensor([[3, 1, 6, 2], [0, 7, 4, 5]], dtype=torch.int32, device=device)
    for rows in ((33, 5), (1, 1)):
        padded = bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            rows, room, used, device=device)
        gappy = bias.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            rows, [left[0], room + left[1], 2 * room], used, device=device)
        pages = (
            padded.make_paged(table, page, bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
            gappy.make_paged(table, page, room,
                             bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask))
        splits = [(given, flash3.FwOp_KVSplit) for given in pages if rows == (1, 1)]
        for given, operator in [(x, flash3.FwOp) for x in (padded, gappy, *pages)] + splits:
            # (batch, rows, groups, heads in the group, head_dim)
            q = randn(device, 1, sum(rows), 2, 3, head_dim)
            expanded = [x[:, :, :, None].expand(-1, -1, -1, 3, -1) for x in (k, v)]
            with Ran(device) as ran:
                got = fmha.memory_efficient_attention_forward(q, *expanded, given, op=operator)
            assert ran.forwards, ran.names
            mask = given.materialize((1, 1, sum(rows), 2 * room), device=device)
            folded = q.flatten(2, 3), k, v
            check_calls(f'{type(given).__name__}, {operator.NAME}, {rows}', [
                [got.flatten(2, 3)], *([plain(*(x.to(dtype) for x in folded), mask)]
                                       for dtype in (torch.float64, torch.bfloat16))])


# ----------------------------------------------------------------------------------------- Megatron
def megatron(device: torch.device) -> None:
    """The two calls of its inference, by its own code: prefill with decode, and decode."""
    module = importlib.import_module('megatron.core.transformer.attention')
    assert module.HAVE_FA3
    page, used = 64, torch.tensor([190, 77], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 1, 2], [0, 3, 5]], dtype=torch.int32, device=device)
    this = types.SimpleNamespace(training=False, batch_invariant_mode=False, config=None)
    this._flash_attention_3_forward_wrapper = functools.partial(
        module.Attention._flash_attention_3_forward_wrapper, this)
    for head_dim in (64, 128):
        cache_k, cache_v = (randn(device, 6, page, 2, head_dim) for _ in range(2))
        for lengths in ((50, 3), (1, 1)):
            q = randn(device, sum(lengths), 4, head_dim)
            starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
            with Ran(device) as ran, torch.no_grad():
                out = module.Attention.flash_decode_and_prefill(
                    this, q[:, None], cache_k, cache_v, lengths[0], 190, starts, None, used, table,
                    lengths == (1, 1))[:, 0]
            assert ran.forwards and out.shape == q.shape, ran.names
            for row, (got, part) in enumerate(zip(out.split(lengths), q.split(lengths))):
                keys = int(used[row])
                pair = [x[table[row]].flatten(0, 1)[:keys] for x in (cache_k, cache_v)]
                mask = lower_right(lengths[row], keys, device)
                check_calls(f'{lengths}, row {row}', [[got], *(
                    [plain(*(x[None].to(dtype) for x in (part, *pair)), mask)[0]]
                    for dtype in (torch.float64, torch.bfloat16))])


CLIENTS = dict(diffusers=diffusers, xformers=xformers, megatron=megatron)


def main(name: str, device: torch.device) -> None:
    integration = importlib.import_module(f'flash_attn3.integrations.{name}')
    integration.enable()
    torch.manual_seed(0)
    CLIENTS[name](device)
    assert integration.problem() == ''
    print('served')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('name', choices=CLIENTS)
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    arguments = parser.parse_args()
    main(arguments.name, torch.device(arguments.device))
