"""Attention on a KV cache whose sequences share keys in groups, on several levels.

A level is one call of `attend_cache` with packed queries: those of a group are a sequence for it.
`merge_parts` merges the levels.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.api import kvcache, merging
from flash_attn3.ops import attend_cache, checks, library, prefix_rules
from flash_attn3.ops.attend_arguments import shortest
from flash_attn3.ops.attend_cache import Attend
from flash_attn3.cpu.quantize import E4M3

_OP = 'shared_prefix_attn'


class PrefixLevel(NamedTuple):
    """Keys that each group of queries sees.

    Attributes:
        page_table: (groups, pages) int32: the pages with the keys of each group. A dense cache is
            one of pages as long as its rows.
        seqlens: (groups,) int32 or one number: keys of each group, also 0.
        cu_seqlens_q: (groups + 1,) int32: where the queries of each group begin among all, one
            sequence after the other. None: each entry of the batch is a group.
        max_seqlen_q: the most queries of a group, a hint.
    """
    page_table: Tensor
    seqlens: Tensor | int
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0


@checks.names_errors
def shared_prefix_attn(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, levels: Sequence[PrefixLevel | tuple], *,
        qv: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None,
        softcap: float = 0.0, s_aux: Tensor | None = None, q_descale: Tensor | None = None,
        k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        num_splits: int = 0, split_size: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
        return_softmax_lse: bool = False, out: Tensor | None = None,
        out_dtype: torch.dtype | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on a paged cache whose sequences share keys: each level reads its keys once.

    Each query sees all keys of its group on each level; on the last level, which has the keys of
    each sequence alone, causal ends bottom-right. Nothing waits, as in `flash_attn_with_kvcache`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim).
        k_cache, v_cache: (pages, page_size, heads_k, head_dim), any page size; dtype of q.
        levels: one to four `PrefixLevel`, or tuples of the same, that of the most queries first.
            The groups of a level have every query once, in order. A packed q needs cu_seqlens_q on
            each level.
        s_aux: (heads_q,): sinks, which enter once.
        q_descale, k_descale, v_descale: (1, heads_k) float32, for float8_e4m3fn; also expanded.
        others: as in `flash_attn_with_kvcache`, for each level.

    Returns:
        out, shaped like q with the head_dim of v; with return_softmax_lse (out, lse), where lse is
        (batch, heads_q, seqlen_q) or (heads_q, total_q).

    Raises:
        RuntimeError: a wrong level, shape, dtype, stride, device or number; a tensor that requires
            grad.
    """
    kvcache.reject(_OP, softmax_scale, softcap, out_dtype, dict(
        q=q, k_cache=k_cache, v_cache=v_cache, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, s_aux=s_aux, out=out))
    dtype = prefix_rules.result_dtype(q, out, out_dtype)
    if problem := prefix_rules.out_problem(q, v_cache, out, dtype):
        raise RuntimeError(checks.error(_OP, *problem))
    is_half = q.dtype == E4M3 and dtype == torch.float16
    shared = Attend(softmax_scale=softmax_scale, softcap=softcap, return_lse=True,
                    num_splits=num_splits, split_size=split_size, pack_gqa=pack_gqa,
                    sm_margin=sm_margin, q_descale=q_descale, k_descale=k_descale,
                    v_descale=v_descale, qv=qv, float16_out=is_half)
    _check(q, levels, shared)
    calls = [_call(q, PrefixLevel(*level), shared) for level in levels]
    rows, last = calls[-1]
    calls[-1] = rows, last._replace(causal=causal,
                                    sinks=None if s_aux is None else checks.sinks_of(s_aux, q, _OP))
    _check_contents(calls, (k_cache, v_cache))
    attend = kvcache.functions_for(q, _OP, split_size)[0]
    parts = [x for rows, own in calls
             for x in attend(rows, k_cache, v_cache, None, *shortest(own))]
    return _merged(q, parts, out, return_softmax_lse)


def _merged(q: Tensor, parts: list[Tensor], out: Tensor | None,
            return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """parts: results and LSEs in turns."""
    shape = (*q.shape[:-1], parts[0].size(-1))
    if len(parts) > 2:
        result = parts[0].new_empty(shape) if out is None else out
        lse = merging.merge_parts(result, *parts)
    else:
        result, lse = parts[0].view(shape), parts[1]
        if q.dim() == 4 and lse.dim() == 2:
            lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
        result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


# ------------------------------------------------------------------------------------------- levels
def _check(q: Tensor, levels: Sequence, shared: Attend) -> None:
    """Raises RuntimeError for what the ops do not check."""
    if not 1 <= len(levels) <= merging.MOST_PARTS:
        raise RuntimeError(checks.error(_OP, f'one to {merging.MOST_PARTS} levels',
                                        str(len(levels))))
    if q.dim() not in (3, 4):
        raise RuntimeError(checks.error(
            _OP, 'q to have 4 dimensions (batch, seqlen, heads, head_dim), or 3 without a batch',
            str(q.dim())))
    for number, level in enumerate(levels):
        if not isinstance(level, tuple) or not 2 <= len(level) <= len(PrefixLevel._fields):
            raise RuntimeError(checks.error(
                _OP, f'levels[{number}] to be a PrefixLevel, or a tuple of page_table, seqlens, '
                'cu_seqlens_q and max_seqlen_q', repr(type(level).__name__)))
        _check_level(q, number, PrefixLevel(*level))
    for name in ('q_descale', 'k_descale', 'v_descale'):
        scale = getattr(shared, name)
        if scale is not None and scale.dim() != 2 and shared.qv is None:
            raise RuntimeError(checks.error(_OP, f'{name} to have 2 dimensions (1, heads_k)',
                                            str(scale.dim())))
    if problem := prefix_rules.descale_problem(shared):
        raise RuntimeError(checks.error(_OP, *problem))


def _check_level(q: Tensor, number: int, level: PrefixLevel) -> None:
    """Types and sizes; the op checks the rest."""
    table, length, starts, _ = level
    for name, x, dims in (('page_table', table, 2), ('seqlens', length, 1),
                          ('cu_seqlens_q', starts, 1)):
        may_be_else = (name == 'seqlens' and isinstance(x, (int, torch.SymInt))
                       and not isinstance(x, bool)) or (name == 'cu_seqlens_q' and x is None)
        if not may_be_else and not (isinstance(x, Tensor) and x.dim() == dims):
            raise RuntimeError(checks.error(
                _OP, f'levels[{number}].{name} to be a tensor of {dims} dimensions',
                f'{x.dim()}' if isinstance(x, Tensor) else repr(x)))
    if starts is None and q.dim() == 3:
        raise RuntimeError(checks.error(
            _OP, f'levels[{number}].cu_seqlens_q to be given with a packed q', 'None',
            'on the last level these are the starts of the sequences'))
    if isinstance(length, int) and length < 0:
        raise RuntimeError(checks.error(
            _OP, f'levels[{number}].seqlens to be 0 or more', str(length)))


def _call(q: Tensor, level: PrefixLevel, shared: Attend) -> tuple[Tensor, Attend]:
    """The queries and the arguments of a level; q is packed if the level has groups."""
    table, length, starts, longest = level
    groups = table.size(0)
    is_tensor = isinstance(length, Tensor)
    scales = (x if x is None or shared.qv is not None else x[:1].expand(groups, -1)
              for x in (shared.q_descale, shared.k_descale, shared.v_descale))
    rows, qv = (x.flatten(0, 1) if starts is not None and x is not None and x.dim() == 4 else x
                for x in (q, shared.qv))
    own = shared._replace(
        qv=qv, page_table=table, cache_seqlens=length if is_tensor else None,
        cache_length=-1 if is_tensor else length, cu_seqlens_q=starts, max_seqlen_q=longest,
        **dict(zip(('q_descale', 'k_descale', 'v_descale'), scales)))
    return rows, own


# ----------------------------------------------------------------------------------------- contents
def _check_contents(calls: list[tuple[Tensor, Attend]], caches: tuple[Tensor, Tensor]) -> None:
    """Raises RuntimeError for bad lists, where they can be read, before any work."""
    q = calls[0][0]
    on_gpu = q.is_cuda and library.kernels_serve(q.device)
    if is_compiling() or (on_gpu and not checks.reads_contents(q)):
        return
    for number, (rows, own) in enumerate(calls):
        attend_cache.check_attend((rows, *caches, None), own, rules_of='cuda' if on_gpu else 'cpu')
        starts = None if own.cu_seqlens_q is None else own.cu_seqlens_q.tolist()
        if starts and starts[-1] != rows.size(0) and number < len(calls) - 1:
            raise RuntimeError(checks.error(
                _OP, f'levels[{number}].cu_seqlens_q to end at {rows.size(0)}, the queries',
                str(starts[-1]), 'give a group without keys a seqlens of 0'))
    _check_causal(*calls[-1], number)


def _check_causal(q: Tensor, own: Attend, number: int) -> None:
    """Raises RuntimeError if a query would not see all keys of the previous levels."""
    if not own.causal:
        return
    groups = own.page_table.size(0)
    queries = [q.size(1)] * groups if own.cu_seqlens_q is None else own.cu_seqlens_q.diff().tolist()
    lengths = [own.cache_length] * groups if own.cache_seqlens is None else (
        own.cache_seqlens.tolist())
    for sequence, (count, length) in enumerate(zip(queries, lengths)):
        if number > 0 and length < count:
            raise RuntimeError(checks.error(
                _OP, f'levels[{number}].seqlens[{sequence}] to be at least {count}, the queries, '
                'under causal', str(length)))
