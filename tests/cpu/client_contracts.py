"""What clients that look for upstream at their import do with the shim, each in a process of its
own: `python -m tests.cpu.client_contracts diffusers`.

Their own code calls our functions on CPU tensors; results are held to plain PyTorch in float64.
"""
import functools
import importlib
import inspect
import sys
import types
from unittest import mock

import torch
import torch.nn.functional as F

TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def attention(q, k, v, **options):
    """SDPA in float64 of (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return out.transpose(1, 2).float()


def on_cpu(op):
    """A custom op that the client defines for CUDA tensors alone, on CPU tensors too."""
    op.register_kernel('cpu')(op._init_fn)
    return op


# ---------------------------------------------------------------------------------------- diffusers
def diffusers() -> None:
    """A random Flux transformer with the backends _flash_3 and _flash_varlen_3; masks."""
    from diffusers import FluxTransformer2DModel
    from diffusers.models import attention_dispatch as dispatch
    on_cpu(dispatch._wrapped_flash_attn_3)
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16,
        guidance_embeds=False, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)).eval()
    call = dict(hidden_states=torch.randn(2, 16, 8), encoder_hidden_states=torch.randn(2, 5, 32),
                pooled_projections=torch.randn(2, 32), timestep=torch.tensor([0.3, 0.7]),
                img_ids=torch.randint(4, (16, 3)), txt_ids=torch.zeros(5, 3))
    results = {}
    for backend in ('native', '_flash_3', '_flash_varlen_3'):
        model.set_attention_backend(backend)
        with torch.no_grad():
            results[backend] = model(**call).sample
    for backend in ('_flash_3', '_flash_varlen_3'):
        torch.testing.assert_close(results[backend], results['native'], **TOLERANCE)

    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 13, 4, 16), torch.randn(2, 13, 4, 16)
    mask = torch.arange(13) < torch.tensor([[13], [6]])
    out = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend='_flash_varlen_3')
    expected = attention(q, k, v, attn_mask=mask[:, None, None])
    torch.testing.assert_close(out, expected, **TOLERANCE)
    _flex_backend_of_diffusers(dispatch)


def _flex_backend_of_diffusers(dispatch) -> None:
    """Blocks of NABLA by its own code."""
    from diffusers.models.transformers.transformer_kandinsky import nablaT_v2
    from flash_attn3.integrations import diffusers, flex
    q, k, v = (torch.randn(2, 256, 4, 16) for _ in range(3))
    mask = nablaT_v2(q, k, torch.eye(4, dtype=torch.bool), thr=0.5)
    shown = mask.to_dense().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)
    assert not shown.all()
    theirs = dispatch.dispatch_attention_fn(q, k, v, backend='flex')
    diffusers.enable_flex()
    with mock.patch.object(flex, 'flash_attn_func', wraps=flex.flash_attn_func) as ours:
        out = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend='flex')
        torch.testing.assert_close(out, attention(q, k, v, attn_mask=shown), **TOLERANCE)
        out = dispatch.dispatch_attention_fn(q, k, v, backend='flex')
        torch.testing.assert_close(out, theirs, **TOLERANCE)
        assert ours.call_count == 2
    diffusers.disable_flex()
    dispatch.dispatch_attention_fn(q, k, v, backend='flex')
    assert ours.call_count == 2


# ----------------------------------------------------------------------------------------- xFormers
def xformers() -> None:
    """Its check of our schemas; its own code of the forward and backward, packed, and on pages."""
    flash3 = importlib.import_module('xformers.ops.fmha.flash3')
    assert flash3._C_flashattention3 is torch.ops.flash_attn_3
    assert flash3._flash_attention3_incompatible_reason() is None
    forward, backward = flash3.mha_fwd._init_fn, flash3.mha_bwd._init_fn
    qkv = torch.randn(20, 3, 4, 32, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv.unbind(1))
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    parts = [[x[a:b][None] for x in (q, k, v)] for a, b in ((0, 7), (7, 20))]
    wanted = torch.cat([attention(*part, is_causal=True)[0] for part in parts])
    scale = 32 ** -0.5
    with torch.no_grad():
        out, lse = forward(q, k, v, starts, starts, None, None, 13, 13, 0.0, scale, True,
                           window_right=0)
        torch.testing.assert_close(out, wanted, **TOLERANCE)
        dout = torch.randn_like(out)
        # It passes the LSE with a batch of 1, and gradients that lie like q, k and v.
        gradients = backward(True, dout, q, k, v, out, lse[None], starts, starts, 13, 13, scale,
                             True, -1, 0)
    for got, expected in zip(gradients, torch.autograd.grad(wanted, (q, k, v), dout)):
        assert got.stride() == (3 * 128, 32, 1)
        torch.testing.assert_close(got, expected, **TOLERANCE)

    # Pages of 4, the keys of each sequence from a slot of its own on.
    cache_k, cache_v = torch.randn(2, 8, 4, 2, 32)
    table = torch.tensor([[3, 1, 6], [0, 7, 2]], dtype=torch.int32)
    left, used = torch.tensor([2, 0]).int(), torch.tensor([9, 12]).int()
    query, ends = torch.randn(4, 4, 32), torch.tensor([0, 1, 4]).int()
    out, _ = forward(query, cache_k, cache_v, ends, ends, used, left, 3, 12, 0.0, scale, True,
                     block_table=table, window_right=0)
    for row in range(2):
        k, v = (x[table[row]].flatten(0, 1)[left[row]:used[row]][None] for x in (cache_k, cache_v))
        part = query[ends[row]:ends[row + 1]][None]
        mask = torch.ones(part.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - part.size(1))
        torch.testing.assert_close(out[ends[row]:ends[row + 1]],
                                   attention(part, k, v, attn_mask=mask)[0], **TOLERANCE)


# ------------------------------------------------------------------------------------- Megatron, TE
def megatron() -> None:
    """The two calls of its inference, by its own code: prefill with decode, and decode."""
    module = importlib.import_module('megatron.core.transformer.attention')
    assert module.HAVE_FA3
    cache_k, cache_v = torch.randn(2, 6, 8, 2, 32)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    used = torch.tensor([11, 9], dtype=torch.int32)
    this = types.SimpleNamespace(training=False, batch_invariant_mode=False, config=None)
    this._flash_attention_3_forward_wrapper = functools.partial(
        module.Attention._flash_attention_3_forward_wrapper, this)
    for lengths in ((5, 3), (1, 1)):
        q = torch.randn(sum(lengths), 4, 32)
        starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        out = module.Attention.flash_decode_and_prefill(
            this, q[:, None], cache_k, cache_v, lengths[0], 11, starts, None, used, table,
            lengths == (1, 1))[:, 0]
        for row, (start, end) in enumerate(zip(starts, starts[1:])):
            k, v = (x[table[row]].flatten(0, 1)[:used[row]][None] for x in (cache_k, cache_v))
            rows, keys = int(end - start), int(used[row])
            mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
            torch.testing.assert_close(out[start:end], attention(
                q[start:end][None], k, v, attn_mask=mask)[0], **TOLERANCE)


def transformer_engine() -> None:
    """Emulated: the import, the version, and the calls of context parallelism by position: two
    halves of the keys, merged, and each half's part of the gradients from the merged LSE.
    """
    from importlib.metadata import version

    from flash_attn_interface import (_flash_attn_backward, _flash_attn_forward, flash_attn_func,
                                      flash_attn_varlen_func, flash_attn_with_kvcache)
    assert version('flash-attn-3').startswith('3.0.0') and inspect.isfunction(_flash_attn_forward)
    for function, names in ((flash_attn_func, ('num_splits', 'deterministic', 'window_size')),
                            (flash_attn_varlen_func, ('seqused_q', 'seqused_k')),
                            (flash_attn_with_kvcache, ('cache_seqlens', 'page_table'))):
        assert set(names) <= set(inspect.signature(function).parameters)
    q, k, v = (torch.randn(2, 8, 4, 32, requires_grad=True) for _ in range(3))
    wanted, scale, dout = attention(q, k, v), 32 ** -0.5, torch.randn(2, 8, 4, 32)
    expected = torch.autograd.grad(wanted, (q, k, v), dout)
    none = [None] * 9
    with torch.no_grad():
        halves = list(zip(k.split(4, 1), v.split(4, 1)))
        parts = [_flash_attn_forward(
            q, *half, *none[:4], None, None, None, None, None, 8, 4, *none, causal=False,
            softmax_scale=scale, window_size_left=-1, window_size_right=-1, num_splits=1)
            for half in halves]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(o * (x - lse).exp().transpose(1, 2)[..., None] for o, x, *_ in parts)
        torch.testing.assert_close(out, wanted, **TOLERANCE)
        dq = torch.zeros_like(q)
        for index, half in enumerate(halves):
            gradients = [torch.empty_like(x) for x in (q, *half)]
            _flash_attn_backward(dout, q, *half, out, lse, None, None, None, None, 8, 4, *gradients,
                                 is_causal=False, softmax_scale=scale, deterministic=False,
                                 window_size_left=-1, window_size_right=-1)
            dq += gradients[0]
            for got, whole in zip(gradients[1:], expected[1:]):
                torch.testing.assert_close(got, whole.split(4, 1)[index], **TOLERANCE)
        torch.testing.assert_close(dq, expected[0], **TOLERANCE)


def main(name: str) -> None:
    integration = importlib.import_module(f'flash_attn3.integrations.{name}')
    if name == 'transformer_engine':    # emulated, so it may be missing
        from flash_attn3 import compat
        compat.install()
    else:
        integration.enable()
        assert integration.is_enabled()
    globals()[name]()
    assert name == 'transformer_engine' or integration.problem() == ''
    print('served')


if __name__ == '__main__':
    main(sys.argv[1])
