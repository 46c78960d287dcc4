"""FlashMLA's ops for keys chosen by the query, as vLLM and SGLang ship them: their arguments and
results, sorted to `flash_attn_with_kvcache` with `indices`.

A token has 512 latent columns, then 64 rotary ones or none. A cache for decoding has bytes: 512 of
e4m3, four scales of float32, the rotary columns in bfloat16.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn3 import flash_attn_with_kvcache
from flash_attn3.integrations import _base
from flash_attn3.integrations._private_ops import HINT, Replacement, refuse
from flash_attn3.ops import checks

_LATENTS, _SCALES, _ROTARY = 512, 16, 128    # bytes of a row of a cache
_ROW = _LATENTS + _SCALES + _ROTARY
_FORMATS = {None: _ROW, 'V32': _ROW, 'V32_NO_ROPE': _ROW - _ROTARY}
_NO_SECOND_CACHE = {'extra_kv': (None,), 'extra_indices': (None,), 'extra_topk_length': (None,)}
_REFUSED = {'d_v': (_LATENTS,)}
_REFUSED_IN_DECODING = _REFUSED | _NO_SECOND_CACHE | {
    'enable_batch_invariant': (False,), 'kv_format': tuple(_FORMATS)}
_READ = {'q', 'kv', 'indices', 'sm_scale', 'attn_sink', 'topk_length', 'out_', 'return_log2_stats',
         'return_stats', 'tile_scheduler_metadata', 'num_splits'}


def prefill(client: str, call: dict[str, Any]) -> list[Tensor | None]:
    """q (tokens, heads, columns) on rows kv (rows, 1, columns) of 16 bits, chosen by indices
    (tokens, 1, n); topk_length (tokens,) counts them.

    Returns:
        out; the largest score of each query and the LSE, (tokens, heads), in base 2 with
        return_log2_stats. Without return_stats None for both.
    """
    refuse(client, call, _REFUSED)
    kv, counts = call['kv'], call['topk_length']
    rows = kv[None]
    wants_stats = call.get('return_stats', True)
    out, lse, *largest = _attend(call, _rotary(rows), rows[..., :_LATENTS], index_counts=counts,
                                 return_max_logits=wants_stats)
    if not wants_stats:
        return [out, None, None]
    unit = math.log(2) if call.get('return_log2_stats') else 1
    return [out, *(x.t() / unit for x in (*largest, lse))]


def decode(client: str,
           call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """q (batch, seqlen, heads, columns) on a cache kv (pages, page_size, 1, bytes), chosen by
    indices (batch, seqlen, n) of slots; topk_length (batch,) counts them.

    Returns:
        out; the LSE (batch, heads, seqlen); the metadata and splits that were given, which nothing
        reads.
    """
    refuse(client, call, _REFUSED_IN_DECODING)
    q, kv, counts = call['q'], call['kv'], call['topk_length']
    size = _FORMATS[call.get('kv_format')]
    if kv.dim() != 4 or kv.element_size() != 1 or kv.size(-1) != size:
        raise NotImplementedError(_base.error(
            client, f'kv with rows of {size} bytes', f'the shape {tuple(kv.shape)} of '
            f'{checks.dtype_name(kv.dtype)}', f'other caches are not supported; {HINT}'))
    kv = kv.view(torch.uint8)
    latents, scales, rotary = kv.split((_LATENTS, _SCALES, size - _LATENTS - _SCALES), -1)
    if counts is not None:
        counts = counts[:, None].expand(-1, q.size(1))
    out, lse = _attend(
        call, rotary.view(q.dtype) if rotary.size(-1) else None, latents.view(torch.float8_e4m3fn),
        v_descale=scales.view(torch.float32)[:, :, 0], index_counts=counts)
    return out, lse, call['tile_scheduler_metadata'], call['num_splits']


def _rotary(x: Tensor) -> Tensor | None:
    """The columns after the latents; None if there are none."""
    return x[..., _LATENTS:] if x.size(-1) > _LATENTS else None


def _attend(call: dict[str, Any], k: Tensor | None, v: Tensor,
            **options) -> tuple[Tensor, ...]:
    """(out, lse), and max_logits if asked for. A query without keys has an LSE of +inf, which a
    sink does not change.
    """
    q, indices, sink = call['q'], call['indices'], call['attn_sink']
    if checks.reads_contents(q):    # what is outside counts as none there, and is an error here
        slots = v.size(0) * v.size(1)
        indices = indices.masked_fill((indices < 0) | (indices >= slots), -1)
    out, lse, _, _, *largest = flash_attn_with_kvcache(
        _rotary(q), k, v, qv=q[..., :_LATENTS], indices=indices, softmax_scale=call['sm_scale'],
        out=call.get('out_'), return_softmax_lse=True, **options)
    is_none = lse == -math.inf
    if sink is not None:
        share = torch.sigmoid(lse - sink[:, None]).masked_fill_(is_none, 0)
        out.mul_(share.transpose(-1, -2)[..., None])
    return out, lse.masked_fill_(is_none, math.inf), *largest


OPS = {'sparse_decode_fwd': Replacement(decode, {*_READ, *_REFUSED_IN_DECODING}),
       'sparse_prefill_fwd': Replacement(prefill, {*_READ, *_REFUSED})}
