"""`flash_attn_completions_func`, which a mask replaces: `AttentionMask.completions`."""
from __future__ import annotations

import warnings

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.api.interface import flash_attn_varlen_func
from flash_attn3.api.masks import AttentionMask
from flash_attn3.ops import checks, dtensors
from flash_attn3.ops.dense_and_varlen import LAYOUTS
from flash_attn3.ops.mask_shapes import completion_intervals

_OP = 'flash_attn_completions_func'
_DEPRECATED = checks.error(
    _OP, 'flash_attn_func with a mask', 'a function that the next release has not',
    'mask=AttentionMask.completions(cu_seqlens, cu_trees, seqlen), once for all layers')


@checks.names_errors
def flash_attn_completions_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_trees: Tensor,
        max_seqlen: int | Tensor = 0, softmax_scale: float | None = None, softcap: float = 0.0,
        pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
        return_attn_probs: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of prompts and their completions, where completions share a prompt.

    Deprecated: `flash_attn_func` with `mask=AttentionMask.completions(...)`, which describes the
    trees. This makes the mask anew in each call.

    Args:
        q: (total, heads_q, head_dim); dtype and strides of q, k and v as in `flash_attn_func`.
        k, v: (total, heads_k, head_dim), that of v may be another one (head_dim_v); heads_k divides
            heads_q.
        cu_seqlens, cu_trees: as of `AttentionMask.completions`. Rows after the last segment are
            never read: there out is 0, lse -inf, gradients 0.
        max_seqlen: not used.
        softmax_scale, softcap, pack_gqa, deterministic, sm_margin, return_attn_probs: as in
            `flash_attn_varlen_func`.

    Returns:
        out, (total, heads_q, head_dim_v), dtype of q; with return_attn_probs (out, lse), where lse
        is (heads_q, total), float32 (float64 for float64), over all keys that a query sees.

    Raises:
        RuntimeError, NotImplementedError: those of `AttentionMask.completions` and
            `flash_attn_varlen_func`.
    """
    if not is_compiling():
        warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=3)
    dtensors.reject(_OP, q)
    checks.length_bound('max_seqlen', max_seqlen, q, _OP)
    if q.dim() != 3:
        raise RuntimeError(checks.error(_OP, f'q to have the shape {LAYOUTS[3]}',
                                        str(tuple(q.shape))))
    rows = q.size(0)
    if k.dim() == 3 and k.size(0) != rows:
        raise RuntimeError(checks.error(_OP, f'k and v to have as many rows as q, {rows}',
                                        str(k.size(0))))
    intervals = completion_intervals(cu_seqlens, cu_trees, rows)
    # One packed sequence, so that no row after the last segment is read.
    ends = F.pad(cu_seqlens[-1:].clamp(0, rows), (1, 0))
    return flash_attn_varlen_func(
        q, k, v, ends, ends, rows, rows, softmax_scale=softmax_scale, softcap=softcap,
        pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs, mask=AttentionMask.from_intervals(intervals, ends))
