"""q, k and v in one tensor: its views, the same for the tensor and for its gradient."""
from __future__ import annotations

from torch import Tensor

from flash_attn3.ops import checks


def unpack(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v, (batch, seqlen, heads, head_dim) each.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or
            (batch, seqlen, heads_q + 2 * heads_k, head_dim): the heads of q, then of k, then of v.
        num_heads_q: heads_q; may be None for five dimensions.

    Raises:
        RuntimeError: a shape that is neither, or a num_heads_q that does not fit it.
    """
    if qkv.dim() == 5:
        heads = qkv.size(3)
        if qkv.size(2) != 3:
            raise _error('qkv.size(2) to be 3, one each of q, k and v', qkv.size(2))
        if num_heads_q is not None and num_heads_q != heads:
            raise _error(f'num_heads_q to be None or the heads of qkv, {heads}', num_heads_q)
        return qkv.unbind(2)

    if qkv.dim() != 4:
        raise _error('qkv to have 5 dimensions (batch, seqlen, 3, heads, head_dim) or 4 (batch, '
                     'seqlen, heads_q + 2 * heads_k, head_dim)', qkv.dim())
    if num_heads_q is None:
        raise _error('num_heads_q to be given with a qkv of 4 dimensions', None,
                     'pass the number of query heads')
    heads_k = (qkv.size(2) - num_heads_q) // 2
    if num_heads_q < 1 or heads_k < 1 or num_heads_q + 2 * heads_k != qkv.size(2):
        raise _error('num_heads_q to leave as many heads for k as for v, at least 1, of the '
                     f'{qkv.size(2)} of qkv', num_heads_q)
    return qkv.split((num_heads_q, heads_k, heads_k), dim=2)


def _error(expected: str, got: int | None, hint: str = '') -> RuntimeError:
    return RuntimeError(checks.error('flash_attn_qkvpacked_func', expected, str(got), hint))
