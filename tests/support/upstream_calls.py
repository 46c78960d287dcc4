"""Upstream's interface, and calls of it: `GeneralCase` and `CacheCase` through
`_flash_attn_forward` and `_flash_attn_backward`, or through the ops of `torch.ops.flash_attn_3`.

Signatures and schemas are facts of upstream's sources of 2026-07-29, written down here once more:
those of the package must not be compared with themselves.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn3.compat import functions, register_ops

from tests.support.cache_cases import CacheCase
from tests.support.general_cases import GeneralCase, Results, Tensors

SIGNATURES = {    # bf16: torch.bfloat16
    'flash_attn_func':
        'q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, '
        'v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, '
        'pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False',
    'flash_attn_varlen_func':
        'q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, '
        'seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, '
        'k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, '
        'num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False',
    'flash_attn_qkvpacked_func':
        'qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, '
        'window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, '
        'num_heads_q=None, sm_margin=0, return_attn_probs=False',
    'flash_attn_with_kvcache':
        'q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, '
        'cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, '
        'cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, '
        'q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, '
        'window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, '
        'scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, '
        'return_softmax_lse=False',
    'flash_attn_combine': 'out_partial, lse_partial, out=None, out_dtype=None',
    'get_scheduler_metadata':
        'batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, '
        'cache_seqlens, qkv_dtype=bf16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, '
        'cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, '
        'window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, '
        'pack_gqa=None, sm_margin=0',
    '_flash_attn_forward':
        'q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, '
        'cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, '
        'max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, '
        'leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, '
        'k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, '
        'window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, '
        'scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0',
    '_flash_attn_backward':
        'dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, '
        'sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, '
        'softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, '
        'softcap=0.0, deterministic=False, sm_margin=0',
}
SCHEMAS = (
    'flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, '
    'Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, '
    'Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, '
    'Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, '
    'int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, '
    'Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, '
    'Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, '
    'Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, '
    'int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0, '
    'bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, '
    'bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)',
    'flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, '
    'Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, '
    'Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, '
    'int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, '
    'bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0, '
    'bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    'flash_attn_3::fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, '
    'ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)',
    'flash_attn_3::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, '
    'int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, '
    'Tensor seqused_k, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, '
    'Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, '
    'int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, '
    'int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, '
    'bool? pack_gqa=None, int sm_margin=0) -> Tensor')

# What the op calls the arguments of `_flash_attn_forward`, and what a cache calls them.
_OF_OP = {'qv': 'q_v', 'out_': 'out', 'causal': 'is_causal',
          'rotary_interleaved': 'is_rotary_interleaved'}
_OF_CACHE = {'k_cache': 'k', 'v_cache': 'v', 'k': 'k_new', 'v': 'v_new', 'out': 'out_',
             'cache_seqlens': 'seqused_k', 'cache_batch_idx': 'kv_batch_idx',
             'cache_leftpad': 'leftpad_k', 'rotary_seqlens': 'seqlens_rotary'}


# ---------------------------------------------------------------------------------- the two layers
def function_forward(**given) -> tuple[Tensor, Tensor]:
    out, lse, *parts = functions._flash_attn_forward(**given)
    assert [x.numel() for x in parts] == [0, 0]
    return out, lse


def op_forward(**given) -> tuple[Tensor, Tensor]:
    register_ops()
    given = {_OF_OP.get(name, name): x for name, x in given.items()}
    out, lse, *parts = torch.ops.flash_attn_3.fwd(**given)
    assert parts == [None, None]
    return out, lse


def function_backward(*tensors: Tensor, lists: tuple, gradients: tuple, scalars: tuple) -> None:
    result = functions._flash_attn_backward(*tensors, *lists, *gradients, *scalars)
    assert result.numel() == 0


def op_backward(*tensors: Tensor, lists: tuple, gradients: tuple, scalars: tuple) -> None:
    register_ops()
    results = torch.ops.flash_attn_3.bwd(*tensors, *gradients, *lists, *scalars)
    assert [x.numel() for x in results] == [0] * 5


LAYERS = {'functions': (function_forward, function_backward), 'ops': (op_forward, op_backward)}


# ----------------------------------------------------------------------------------------- calls
def blank(x: Tensor, layout: str) -> Tensor:
    """A gradient to write into, full of NaN: contiguous, a view of longer rows, or with elements
    that lie apart.
    """
    if layout == 'contiguous':
        return torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device)
    if layout == 'rows':
        shape = (*x.shape[:-1], x.size(-1) + 16)
        return torch.full(shape, math.nan, dtype=x.dtype, device=x.device)[..., 8:-8]
    return torch.full((x.size(-1), *x.shape[:-1]), math.nan, dtype=x.dtype,
                      device=x.device).movedim(0, -1)


def run(case: GeneralCase, tensors: Tensors, layer: str, layout: str = 'contiguous',
        **changes) -> Results:
    """Results, and gradients in a layout of blank(). changes: to the arguments of the forward."""
    assert not (case.sinks or case.max_logits or case.dlse)
    forward, backward = LAYERS[layer]
    q, k, v, _ = tensors.inputs
    left, right = case.window
    given = dict(q=q, k=k, v=v, **tensors.lists, softmax_scale=case.softmax_scale,
                 causal=case.causal, window_size_left=left, window_size_right=right,
                 attention_chunk=case.chunk, softcap=case.softcap, pack_gqa=case.pack_gqa)
    out, lse = forward(**given | changes)
    if not case.has_gradients:
        return Results(out, lse, *[None] * 5)
    gradients = tuple(blank(x, layout) for x in (q, k, v))
    names = ('cu_seqlens_q', 'cu_seqlens_k', 'seqused_q', 'seqused_k', 'max_seqlen_q',
             'max_seqlen_k')
    backward(tensors.dout, q, k, v, out, lse, gradients=gradients,
             lists=tuple(tensors.lists.get(name) for name in names),
             scalars=(case.softmax_scale, case.causal, left, right, case.softcap,
                      case.deterministic, 0))
    return Results(out, lse, None, *gradients, None)


def as_kvcache(forward: Callable) -> Callable:
    """`flash_attn_with_kvcache` by one of the forwards, for `cache_cases.call`."""
    def call(*, window_size, return_softmax_lse, **given):
        given = {_OF_CACHE.get(name, name): x for name, x in given.items()}
        left, right = window_size
        out, lse = forward(**given, window_size_left=left, window_size_right=right)
        empty = lse.new_empty(0)
        return (out, lse, empty, empty) if return_softmax_lse else out
    return call


GENERAL = {
    'dense': GeneralCase(((33, 47),) * 2, is_packed=False, dlse=False),
    'packed': GeneralCase(((13, 23), (0, 7), (37, 20), (7, 0)), dlse=False),
    'used': GeneralCase(((13, 23), (0, 7), (37, 20)), used=((9, 20), (0, 3), (30, 11)),
                        behind=(3, 5), dlse=False),
}
FEATURES = {
    'full': {}, 'causal': {'causal': True}, 'window': {'window': (7, 4)},
    'causal_window': {'causal': True, 'window': (9, 9)}, 'diagonal': {'window': (-1, 0)},
    'softcap': {'softcap': 15.0}, 'scale': {'softmax_scale': 0.3, 'causal': True},
    'chunk': {'chunk': 10, 'gradients': False},
}
CACHES = {
    'dense': CacheCase(((3, 20), (3, 0), (3, 9)), 32, causal=True),
    'append': CacheCase(((2, 20), (2, 0), (2, 9)), 32, new=(2, 2, 2), causal=True),
    'pages': CacheCase(((1, 20), (1, 5), (1, 31)), 32, page_size=4, num_splits=1),
    'append_to_pages': CacheCase(((1, 20), (1, 5), (1, 30)), 32, page_size=4, new=(1, 1, 1),
                                 rotary=0.5, causal=True),
    'packed': CacheCase(((3, 20), (1, 5), (4, 30)), 40, page_size=8, is_packed=True,
                        new=(3, 1, 4), new_packed=True, causal=True, rotary=0.5, interleaved=False,
                        own_positions=True),
    'rows': CacheCase(((2, 20), (2, 5), (2, 30)), 32, batch_idx=True, leftpad=(3, 0, 30),
                      window=(9, 3), out=True),
    'fp8': CacheCase(((2, 20), (2, 5)), 32, dtype='e4m3', causal=True),
}


def with_features(case: GeneralCase, features: str) -> GeneralCase:
    return dataclasses.replace(case, **FEATURES[features])
