"""Wrong calls of flash_attn_func and what the error has to say, the same on every device.

The rules under KERNEL_RULES hold only where the kernels run; the CPU path accepts those tensors.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BadInput:
    name: str
    change: Callable[[dict], dict]    # from good arguments, the ones to replace
    text: str                         # a part of the error, from its start

    def arguments(self, device: str | torch.device) -> dict:
        good = good_arguments(device)
        return good | self.change(good)

    def __str__(self) -> str:
        return self.name


def good_arguments(device: str | torch.device) -> dict:
    """Keyword arguments that every device takes."""
    q = torch.randn(2, 16, 4, 64, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(2, 24, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {'q': q, 'k': k, 'v': v}


def _all(change: Callable) -> Callable[[dict], dict]:
    """Applies one change to each of q, k and v."""
    return lambda good: {name: change(good[name]) for name in 'qkv'}


FWD = 'flash_attn3.flash_attn_func: expected '
LAYOUT = '(batch, seqlen, heads, head_dim)'

EVERYWHERE = [
    BadInput('q_rank', lambda g: {'q': g['q'][0]},
             f'{FWD}q to have the shape {LAYOUT}, got (16, 4'),
    BadInput('k_rank', lambda g: {'k': g['k'][None]},
             f'{FWD}k to have the shape (2, seqlen, heads, 64), got (1, 2'),
    BadInput('scalar', lambda g: {'q': g['q'].sum()},
             f'{FWD}q to have the shape {LAYOUT}, got ()'),
    BadInput('k_dtype', lambda g: {'k': g['k'].half()},
             f'{FWD}k.dtype to be that of q, bfloat16, got float16'),
    BadInput('v_dtype', lambda g: {'v': g['v'].half()},
             f'{FWD}v.dtype to be that of q, bfloat16, got float16'),
    BadInput('integers', _all(torch.Tensor.int), f'{FWD}q.dtype to be float16'),
    BadInput('batch', lambda g: {'k': g['k'][:1]},
             f'{FWD}k to have the shape (2, seqlen, heads, 64), got (1, 24, 2, 64)'),
    BadInput('v_batch', lambda g: {'v': g['v'][:1]},
             f'{FWD}v to have the shape (2, 24, 2, head_dim), got (1, 24, 2, 64)'),
    BadInput('v_seqlen', lambda g: {'v': g['v'][:, 1:]},
             f'{FWD}v to have the shape (2, 24, 2, head_dim), got (2, 23, 2, 64)'),
    BadInput('v_heads', lambda g: {'v': g['v'][:, :, :1]},
             f'{FWD}v to have the shape (2, 24, 2, head_dim), got (2, 24, 1, 64)'),
    BadInput('k_head_dim', lambda g: {'k': g['k'][..., :56]},
             f'{FWD}k to have the shape (2, seqlen, heads, 64), got (2, 24, 2, 56)'),
    BadInput('heads', lambda g: {'q': g['q'][:, :, :3]},
             f'{FWD}the heads of q to be a multiple of 2, the KV heads, got 3'),
    BadInput('no_kv_heads', lambda g: {'k': g['k'][:, :, :0], 'v': g['v'][:, :, :0]},
             f'{FWD}the heads of k to be 1 or more, got 0'),
    BadInput('no_head_dim', _all(lambda x: x[..., :0]), f'{FWD}'),
    BadInput('scale_0', lambda g: {'softmax_scale': 0.0},
             f'{FWD}softmax_scale to be a positive finite float32, got 0'),
    BadInput('scale_negative', lambda g: {'softmax_scale': -1.0},
             f'{FWD}softmax_scale to be a positive finite float32, got -1'),
    BadInput('scale_nan', lambda g: {'softmax_scale': math.nan},
             f'{FWD}softmax_scale to be a positive finite float32, got nan'),
    BadInput('scale_inf', lambda g: {'softmax_scale': math.inf},
             f'{FWD}softmax_scale to be a positive finite float32, got inf'),
    BadInput('margin_negative', lambda g: {'sm_margin': -1},
             f'{FWD}sm_margin to be from 0 to '),
    BadInput('margin_large', lambda g: {'sm_margin': 132}, f'{FWD}sm_margin to be from 0 to '),
    BadInput('out_shape', lambda g: {'out': torch.empty_like(g['q'])[:, 1:]},
             f'{FWD}out to have the shape (2, 16, 4, 64), got (2, 15, 4, 64)'),
    BadInput('out_rank', lambda g: {'out': torch.empty_like(g['q'])[0]},
             f'{FWD}out to have the shape (2, 16, 4, 64), got (16, 4, 64)'),
    BadInput('out_dtype', lambda g: {'out': torch.empty_like(g['q'], dtype=torch.float16)},
             f'{FWD}out.dtype to be that of q, bfloat16, got float16'),
    BadInput('out_expanded', lambda g: {'out': torch.empty_like(g['q'][:1]).expand(2, -1, -1, -1)},
             f'{FWD}out.stride(0) not to be 0, got 0'),
    BadInput('out_is_q', lambda g: {'out': g['q']},
             f'{FWD}out with memory of its own, got the memory of q'),
    BadInput('out_over_the_end_of_q', lambda g: dict(zip(('q', 'out'), (
        rows.view(2, 16, 4, 64) for rows in torch.stack([g['q']] * 2).flatten().unfold(
            0, g['q'].numel(), g['q'].numel() // 2)))),
             f'{FWD}out with memory of its own, got the memory of q'),
]

KERNEL_RULES = [
    BadInput('float32', _all(torch.Tensor.float),
             f'{FWD}q.dtype to be float16 or bfloat16, got float32; hint: convert q, k and v'),
    BadInput('head_dim_100', _all(lambda x: x.repeat(1, 1, 1, 2)[..., :100]),
             f'{FWD}the head_dim of q to be a multiple of 8 from 8 to 512, got 100'),
    BadInput('head_dim_1024', _all(lambda x: x.repeat(1, 1, 1, 16)),
             f'{FWD}the head_dim of q to be a multiple of 8 from 8 to 512, got 1024'),
    BadInput('v_head_dim', lambda g: {'v': g['v'].repeat(1, 1, 1, 9)[..., :520]},
             f'{FWD}the head_dim of v to be a multiple of 8 from 8 to 512, '
             'got 520'),
    BadInput('v_head_dim_100', lambda g: {'v': g['v'].repeat(1, 1, 1, 2)[..., :100]},
             f'{FWD}the head_dim of v to be a multiple of 8 from 8 to 512, '
             'got 100'),
    BadInput('too_many_tiles', lambda g: {
        'q': g['q'][:1, :1, :1].expand(1 << 20, 64, 1024, 64),
        'k': g['k'][:1].expand(1 << 20, -1, -1, -1), 'v': g['v'][:1].expand(1 << 20, -1, -1, -1)},
             f'{FWD}twice the tiles of q, 64 rows each, to be at most 1073741824, got 214'),
    BadInput('too_many_keys', lambda g: {
        name: g[name][:, :1].expand(-1, (1 << 30) + 1, -1, -1) for name in 'kv'},
             f'{FWD}sizes of k of at most 1073741824, got 1073741825'),
    BadInput('q_last_stride', lambda g: {'q': g['q'].mT.contiguous().mT},
             f'{FWD}q.stride(3) to be 1, got 4'),
    BadInput('v_last_stride', lambda g: {'v': g['v'].repeat(1, 1, 1, 2)[..., ::2]},
             f'{FWD}v.stride(3) to be 1, got 2'),
    BadInput('out_last_stride', lambda g: {'out': g['q'].mT.contiguous().mT},
             f'{FWD}out.stride(3) to be 1, got 4'),
]

# Arguments of upstream that this version does not have, and what their errors name.
UNSUPPORTED = {
    'qv': torch.zeros(1), 'q_descale': torch.zeros(1), 'k_descale': torch.zeros(1),
    'v_descale': torch.zeros(1),
}
