"""The public functions on a KV cache: attention with append, and the merging of partial results.

No policy lives here: the ops check their inputs and choose the kernel. A call is one op. A decode
step takes microseconds on a GPU, so the functions do as little Python as they can.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn3 import _plan, env
from flash_attn3.arguments import names, public_names
from flash_attn3.cpu import fallback
from flash_attn3.ops import (attend_arguments, attend_cache, checks, chosen_gradients, chosen_keys,
                             derivatives, dtensors, fp8, invariance, library, prefix_rules,
                             rope_free)
from flash_attn3.api.merging import flash_attn_combine, merge_states
from flash_attn3.ops.attend_cache import Attend, Rotary
from flash_attn3.ops.chosen_keys import KVCACHE, SPARSE, Choice, Function, Layout
from flash_attn3.ops.dense_and_varlen import batch_of, general_of
from flash_attn3.ops.fp8 import Descale

__all__ = ['flash_attn_combine', 'flash_attn_sparse_func', 'flash_attn_with_kvcache',
           'get_scheduler_metadata', 'merge_states']

_OP = 'flash_attn_with_kvcache'
# (attend, append and attend): traced ops, eager ops, and functions without an op.
_TRACED = (torch.ops.flash_attn3.attend_cache.default,
           torch.ops.flash_attn3.append_and_attend.default)
_EAGER = tuple(library.bare(op) for op in _TRACED)
_PLAIN = attend_cache.attend_plainly, attend_cache.append_and_attend_plainly
_INVARIANT = invariance.OPEN    # not empty under invariant()

# What says where an append goes, and how q is packed. Chosen keys need no such thing.
_OF_APPENDS = ('cache_seqlens', 'cache_length', 'appended', 'cache_batch_idx', 'cu_seqlens_k_new',
               'cu_seqlens_q', 'max_seqlen_q')

# The tensors that `_reject` takes, in order.
TENSORS = ('q', 'k_cache', 'v_cache', 'out', 'k', 'v', 'qv', 'rotary_cos', 'rotary_sin', 's_aux',
           'q_descale', 'k_descale', 'v_descale')
_OF_SPARSE = 'q', 'k', 'v', 'qv', 's_aux'

Result = Tensor | tuple[Tensor, ...]


def flash_attn_with_kvcache(
        q: Tensor | None, k_cache: Tensor | None, v_cache: Tensor, k: Tensor | None = None,
        v: Tensor | None = None, qv: Tensor | None = None, rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
        rotary_seqlens: Tensor | None = None, q_descale: Descale = None, k_descale: Descale = None,
        v_descale: Descale = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: Sequence[int] | Tensor = (-1, -1), attention_chunk: int = 0,
        softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
        sm_margin: int = 0, return_softmax_lse: bool = False, *, s_aux: Tensor | None = None,
        out: Tensor | None = None, split_size: int = 0, out_dtype: torch.dtype | None = None,
        shared_prefix: int = 0, tree_mask: Tensor | None = None, descale_by_page: bool = False,
        indices: Tensor | None = None, index_block: int = 1, index_counts: Tensor | None = None,
        return_max_logits: bool = False) -> Result:
    """Appends k and v to a KV cache, then attends to its keys and values.

    Sequence b has the keys of slots cache_leftpad[b] to cache_seqlens[b], then the new ones. Masks
    count from its first key, causal is bottom-right. A refused call changes no cache.
    Returns out, like q with the head_dim of v; with return_softmax_lse (out, lse, empty, empty).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q (total_q, heads_q, head_dim).
        k_cache, v_cache: (batch, capacity, heads_k, head_dim), or with page_table (pages,
            page_size, heads_k, head_dim); dtype of q, or float8_e4m3fn (with qv v_cache alone).
        k, v: (batch, new, heads_k, head_dim), or with cu_seqlens_k_new (total_new, ...): appended
            to each sequence that has room. float8_e4m3fn caches store 16-bit ones over descales.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), dtype of q (e4m3: or 16 bits), for q
            and k from cache_seqlens (or rotary_seqlens) on, in pairs (2i, 2i + 1) or halves.
        cache_seqlens: keys before the append, a number or (batch,) int32, as cache_leftpad (first
            slot), rotary_seqlens (position) and cache_batch_idx (row of the cache or page_table).
        page_table: (rows, pages) int32. num_splits: most parts of a tile's keys; 0: by plan.
        shared_prefix: leading keys that all share, whole pages. tree_mask: from `pack_tree_mask`.
        out_dtype: with float8_e4m3fn, bfloat16 (default) or float16. Descales: (batch, heads_k) or
            a number; descale_by_page: (pages, heads_k) for q of 16 bits, set where k begins a page.
        qv: as q, with the head_dim of v, for one KV head: scores are (q k^T + qv v^T) * (head_dim +
            head_dim_v) ** -0.5; v_descale: (*v_cache.shape[:2], 1 or head_dim_v / 128), set by v.
        indices: each query attends to slots i % size of rows or pages i // size alone, with size =
            k_cache.size(1); as in `flash_attn_sparse_func`. Others: as in `flash_attn_func`.
    """
    if q is None or k_cache is None:
        q, k_cache, softmax_scale = rope_free.of_cache(q, k_cache, v_cache, qv, softmax_scale, k, v)
    tensors, k_set, v_set = (q, k_cache, v_cache, out), None, None
    if q_descale is not None or k_descale is not None or v_descale is not None:
        q_descale, k_descale, v_descale = descales_of(
            (q_descale, k_descale, v_descale), tensors, cu_seqlens_q, descale_by_page, qv)
    given = *tensors, k, v, qv, rotary_cos, rotary_sin, s_aux, q_descale, k_descale, v_descale
    if (scheduler_metadata is not None or out_dtype is not None or type(q) is not Tensor
            or type(softcap) is not float or forward_ad._current_level >= 0
            or (softmax_scale is not None and type(softmax_scale) is not float)
            or (is_grad_enabled() and _some_require_grad(given))):
        _reject(scheduler_metadata, softmax_scale, softcap, out_dtype, given)
    if _INVARIANT:
        num_splits, split_size = invariance.in_parts(num_splits, split_size)
    length, cache_seqlens = lengths_of(cache_seqlens)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = rows_of_table(page_table, cache_batch_idx, q, cu_seqlens_q)
    left, right = (-1, -1) if window_size == (-1, -1) else checks.window_sides(window_size)
    added = k.size(1) if k is not None and cu_seqlens_k_new is None and k.dim() > 1 else 0
    if v is not None and descale_by_page != (qv is not None) and v.dtype != v_cache.dtype:
        k_set, v_set, k_descale, v_descale = _descales_to_set(k_descale, v_descale, descale_by_page)
    own = attend_arguments.build(
        cache_seqlens, page_table, added, length, cache_batch_idx, cache_leftpad,
        None if k is None else cu_seqlens_k_new, checks.sinks_of(s_aux, q), softmax_scale, causal,
        left, right, attention_chunk, softcap, return_softmax_lse, num_splits, split_size,
        shared_prefix, cu_seqlens_q, longest(max_seqlen_q, q, cu_seqlens_q), pack_gqa, sm_margin,
        q_descale, k_descale, v_descale, tree_mask, descale_by_page, qv,
        out_dtype is torch.float16 and out is None and q.dtype == fp8.E4M3, indices is not None)
    own, functions = _served(own, q, functions_for(q, _OP, split_size), return_max_logits)
    if shared_prefix != 0:
        prefix_rules.check(tensors, Attend(*own))
    pick = indices is not None or index_counts is not None or index_block != 1
    if k is None and v is None and rotary_cos is None and rotary_sin is None and not pick:
        return _attend(functions, tensors, own, return_softmax_lse)
    rotary = (rotary_cos, rotary_sin, None if rotary_cos is None else rotary_seqlens,
              rotary_interleaved, bool(causal) or left != -1 or right != -1 or pick)
    return _append(functions, tensors, (k, v, k_set, v_set), rotary, own,
                   return_softmax_lse, Choice(indices, index_block, index_counts) if pick else None)


def flash_attn_sparse_func(
        q: Tensor | None, k: Tensor | None, v: Tensor, indices: Tensor, *,
        qv: Tensor | None = None, index_block: int = 1, index_counts: Tensor | None = None,
        softmax_scale: float | None = None, s_aux: Tensor | None = None,
        return_softmax_lse: bool = False, deterministic: bool = False,
        return_max_logits: bool = False) -> Tensor | tuple[Tensor, ...]:
    """Attention of each query to the keys that it chooses; q, k, v, qv and s_aux have gradients.

    Args:
        q: (total_q, heads_q, head_dim).
        k, v: (total_k, heads_k, head_dim), contiguous if each KV head has lists.
        indices: (total_q, n) for all KV heads or (total_q, heads_k, n) int32: rows of k; -1: none.
            index_block: 64 or 128 if they count blocks of rows, which divide total_k.
        qv: absorbed MLA, (total_q, heads_q, head_dim_v): scores are (q k^T + qv v^T) *
            (head_dim + head_dim_v) ** -0.5. Without rotary columns q and k are None.
        index_counts: (total_q,) int32: indices of a list that count.
        softmax_scale, s_aux: as in `flash_attn_func`. deterministic: the gradients of k and v sum
            in a fixed order, in plain PyTorch, which is slower.

    Returns:
        out, (total_q, heads_q, head_dim_v), or a tuple of it, with return_softmax_lse lse
        (heads_q, total_q), and with return_max_logits max_logits: as lse, the largest score,
        without s_aux. A query without keys has out 0 and LSE -inf, with s_aux the sink.
    """
    if q is None or k is None:
        q, k, softmax_scale = rope_free.tensors_of(SPARSE, dict(
            q=q, k=k, v=v, qv=qv, softmax_scale=softmax_scale))
        k = k.detach()    # a stand-in for no keys
    given = q, k, v, qv, s_aux
    for name, x in zip('qkv', given):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise RuntimeError(checks.error(
                SPARSE.name, f'{name} to have 3 dimensions',
                str(x.dim()) if isinstance(x, Tensor) else type(x).__name__))
    if (type(q) is not Tensor or forward_ad._current_level >= 0
            or (softmax_scale is not None and type(softmax_scale) is not float)):
        named = dict(zip(_OF_SPARSE, given)) | {'out': None}
        reject(SPARSE.name, softmax_scale, 0.0, None, named, None)
    needs_grad = is_grad_enabled() and _some_require_grad(given, SPARSE.name, _OF_SPARSE)
    own = Attend(sinks=checks.sinks_of(s_aux, q), softmax_scale=softmax_scale, qv=qv,
                 return_lse=return_softmax_lse or needs_grad, keys_chosen=True,
                 split_size=invariance.split_size_of(0))
    tensors = q, k.unsqueeze(0), v.unsqueeze(0), None
    choice = Choice(indices, index_block, index_counts)
    layout = layout_of(tensors, own, choice, SPARSE)
    own, (attend, _) = _served(own, q, functions_for(q, SPARSE.name, own.split_size),
                               return_max_logits)
    call = attend, tensors, own, choice, layout, SPARSE
    if needs_grad:
        out, lse = chosen_gradients.attention(attend_to_chosen, call, qv, own.sinks,
                                              softmax_scale, deterministic)
    else:
        out, lse = attend_to_chosen(*call)
    results = (out, *[lse] * return_softmax_lse, *[own.max_logits_out] * return_max_logits)
    return results if len(results) > 1 else out


def get_scheduler_metadata(
        batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
        headdim: int, cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
        page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
        window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0,
        has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
        sm_margin: int = 0) -> Tensor:
    """A placeholder for the scheduler_metadata that upstream's clients pass on.

    `flash_attn_with_kvcache` checks it and does not use it: each call splits its work on the GPU.
    One serves all layers, steps and lengths.

    Args:
        cache_seqlens: a tensor on the device of the calls.
        others: upstream's; not used.

    Returns:
        (1,) int32, on the device of cache_seqlens.
    """
    if not isinstance(cache_seqlens, Tensor):
        raise RuntimeError(checks.error('get_scheduler_metadata', 'cache_seqlens to be a tensor',
                                        repr(cache_seqlens)))
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def arguments_of(call: Mapping) -> tuple[Attend, Rotary]:
    """What `flash_attn_with_kvcache` passes to its ops, given all of its arguments by name. The
    planner calls this; it is slower and reads no table.

    Raises:
        RuntimeError: as the function does.
    """
    q, k, k_cache, starts = (call[name] for name in ('q', 'k', 'k_cache', 'cu_seqlens_q'))
    scales = names('scales')
    descales = descales_of(tuple(map(call.get, scales)), (q, k_cache, call['v_cache']), starts,
                           call['descale_by_page'], call['qv'])
    length, lengths = lengths_of(call['cache_seqlens'])
    table, rows = call['page_table'], call['cache_batch_idx']
    if table is not None and rows is not None:
        table, rows = rows_of_table(table, rows, q, starts, reads=False)
    general = general_of(q, **{name: call[name] for name in public_names('score')})
    is_dense = k is not None and call['cu_seqlens_k_new'] is None and k.dim() > 1
    own = Attend(**{name: call[name] for name in Attend._fields if name in call}
                 | {name: getattr(general, name) for name in names('score')}
                 | dict(zip(scales, descales)))._replace(
        cache_seqlens=lengths, cache_length=length, page_table=table, cache_batch_idx=rows,
        cu_seqlens_k_new=None if k is None else call['cu_seqlens_k_new'],
        appended=k.size(1) if is_dense else 0, return_lse=call['return_softmax_lse'],
        max_seqlen_q=longest(call['max_seqlen_q'], q, starts),
        float16_out=call['out_dtype'] == torch.float16 and q.dtype == fp8.E4M3,
        keys_chosen=call['indices'] is not None,
        max_logits_out=(attend_cache.empty_rows(q) if call['return_max_logits']
                        and call['split_size'] == 0 else None))    # with it by another call
    window = checks.window_sides(call['window_size'])
    positions = None if call['rotary_cos'] is None else call['rotary_seqlens']
    return own, Rotary(call['rotary_cos'], call['rotary_sin'], positions,
                       call['rotary_interleaved'],
                       own.causal or own.keys_chosen or window != (-1, -1))


def functions_for(q: Tensor, op: str, split_size: int = 0) -> tuple:
    """The functions that serve q: (attend, append and attend)."""
    if q.get_device() in library.SERVED_DEVICES and not is_compiling():
        return _EAGER
    if not q.is_cuda or library.kernels_serve(q.device):
        return _TRACED if is_compiling() else _EAGER
    if split_size != 0:
        raise RuntimeError(checks.error(op, 'split_size of 0 with a GPU without our kernels',
                                        str(split_size), invariance.HINT if _INVARIANT else ''))
    fallback.warn_once(q.device, op, depth=4)
    return _PLAIN


def rows_of_table(page_table: Tensor, cache_batch_idx: Tensor, q: Tensor,
                  cu_seqlens_q: Tensor | None,
                  reads: bool = True) -> tuple[Tensor, Tensor | None]:
    """The page table of the sequences: cache_batch_idx pick its rows, and a missing row has no
    pages. A wrong table or list is returned unchanged, for the op to refuse. reads=False gives only
    a table of the right shape.
    """
    table, rows, batch = page_table, cache_batch_idx, batch_of(q, cu_seqlens_q)
    if (table.dim() != 2 or table.size(0) == 0 or rows.dim() != 1 or table.dtype != torch.int32
            or rows.dtype != torch.int32 or table.device != rows.device or rows.numel() != batch):
        return page_table, cache_batch_idx
    if not reads:
        return table.new_empty(batch, table.size(1)), None
    last = table.size(0) - 1
    is_none = (rows < 0) | (rows > last)
    if (checks.reads_contents(rows) and not is_compiling() and not checks.has_no_data(rows)
            and is_none.any()):
        first = is_none.nonzero()[0].item()
        raise RuntimeError(checks.error(
            _OP, f'cache_batch_idx[{first}] to be from 0 to {last}, the rows of page_table',
            str(rows[first].item())))
    return table.index_select(0, rows.clamp(0, last)).masked_fill_(is_none[:, None], -1), None


def descales_of(given: tuple, tensors: tuple,
                 cu_seqlens_q: Tensor | None, is_by_page: bool,
                qv: Tensor | None) -> list[Tensor | None]:
    """Descales as the op takes them: numbers as tensors. tensors: q and the caches first."""
    q, k_cache, v_cache, *_ = tensors
    checks.reject_non_tensors(_OP, q=q, k_cache=k_cache, v_cache=v_cache, cu_seqlens_q=cu_seqlens_q)
    by_sequence = fp8.head_scales(batch_of(q, cu_seqlens_q), k_cache)
    by_k = (*k_cache.shape[:1], by_sequence[1]) if is_by_page else by_sequence
    by_v = by_k if qv is None else (*v_cache.shape[:2], 1)
    return [fp8.descale_tensor(_OP, name, scale, shape, q.device)
            for name, scale, shape in zip(names('scales'), given, (by_sequence, by_k, by_v))]


def _descales_to_set(k_descale: Tensor | None, v_descale: Tensor | None,
                     is_by_page: bool) -> tuple[Tensor | None, Tensor, None, None]:
    """The descales that an append of 16-bit rows to an e4m3 cache writes: those of pages, or
    v_descale of latents. Then those that it does not write.

    Raises:
        RuntimeError: one is missing, or latents have a k_descale.
    """
    if v_descale is None or (k_descale is None) == is_by_page:
        raise RuntimeError(checks.error(
            _OP, 'both k_descale and v_descale with descale_by_page' if is_by_page else
            'v_descale with 16-bit v for latents of float8_e4m3fn' if v_descale is None else
            'k_descale to be None with qv',
            'None' if is_by_page or v_descale is None else 'a tensor'))
    return k_descale, v_descale, None, None


def _served(own: tuple, q: Tensor, functions: tuple,
            return_max_logits: bool) -> tuple[tuple, tuple]:
    """The arguments with memory for max_logits, if asked for, and the functions that serve them.
    With split_size another call gives max_logits. WHY: kernels round otherwise where they know the
    exact maxima, and the bits with split_size are one set.
    """
    if not return_max_logits:
        return own, functions
    own = Attend(*own)._replace(max_logits_out=attend_cache.empty_rows(q.detach()))
    if own.split_size == 0:
        return own, functions
    attend, append_and_attend = functions

    def give_largest(q: Tensor, k: Tensor, v: Tensor, own: Attend) -> None:
        attend(q, k, v, None, *own._replace(split_size=0, return_lse=False))

    def attend_twice(q, k, v, out, *arguments, **named):
        own = Attend(*arguments, **named)
        results = attend(q, k, v, out, *own._replace(max_logits_out=None))
        give_largest(q, k, v, own)
        return results

    def append_and_attend_twice(q, k, v, *given):
        count = len(Attend._fields)
        *new, k_scales, v_scales = given[:5]
        rotary, own = given[5:-count], Attend(*given[-count:])
        results = append_and_attend(q, k, v, *new, k_scales, v_scales, *rotary,
                                    *own._replace(max_logits_out=None))
        if not own.keys_chosen:    # the next call attends to those
            is_rotated = Rotary(*rotary).rotary_cos is not None
            own = attend_cache.with_descales(own, k_scales, v_scales)
            give_largest(results[2] if is_rotated else q, k, v, own)
        return results

    return own, (attend_twice, append_and_attend_twice)


def _attend(functions: tuple, tensors: tuple, own: tuple, return_lse: bool) -> Result:
    """What flash_attn_with_kvcache returns. tensors: q, the caches and out; own: the fields of
    Attend up to the last one that differs from its default.
    """
    q, k_cache, v_cache, out = tensors
    attend, _ = functions
    if env.CHECK_CONTENTS and not is_compiling():
        attend_cache.check_cuda_contents(tensors, own)
    result, lse = attend(q, k_cache, v_cache, out, *own)
    return _returned(result if out is None else out, lse, return_lse, own)


def check_chosen(tensors: tuple, own: Attend, choice: Choice, appends: bool) -> Layout:
    """Raises RuntimeError if the keys cannot be chosen."""
    lengths = own.cache_seqlens if own.cache_length == -1 else own.cache_length
    if not appends and (own.page_table is not None or own.cache_batch_idx is not None
                        or lengths is not None):
        name, got = next((name, x) for name, x in (
            ('page_table', own.page_table), ('cache_batch_idx', own.cache_batch_idx),
            ('cache_seqlens', lengths)) if x is not None)
        raise RuntimeError(checks.error(
            _OP, f'{name} to be None with indices',
            'a tensor' if isinstance(got, Tensor) else str(got),
            'it only says where new k and v go'))
    return layout_of(tensors, own, choice, KVCACHE)


def layout_of(tensors: tuple, own: Attend, choice: Choice, function: Function) -> Layout:
    """How chosen keys are attended to. Raises RuntimeError for a wrong choice or tensor."""
    indices, block, counts = choice
    return chosen_keys.check(
        (*tensors, indices, counts, own.qv, own.sinks, own.cu_seqlens_q, own.k_descale,
         own.v_descale), block, own.descale_by_page, function)


def attend_to_chosen(op: Callable, tensors: tuple, own: Attend, choice: Choice, layout: Layout,
                     function: Function = KVCACHE) -> tuple[Tensor, Tensor]:
    """(out, lse) of the op `attend_cache`, for a choice that has passed its check."""
    q, k, v, out = tensors
    if not layout.has_rows and not is_compiling():    # the op does not see out
        _refuse_chosen(tensors, own, choice, function)
    try:
        lowered, arguments = lower(tensors, own, choice, layout)
        result, lse = op(*lowered, **arguments)
    except RuntimeError:
        if not is_compiling():
            _refuse_chosen(tensors, own, choice, function)
        raise
    if out is not None:
        *_, result = lowered
    if layout.rows is not None:
        if own.max_logits_out is not None:
            largest = arguments['max_logits_out'].view(q.shape[:-1])
            own.max_logits_out.copy_(largest.transpose(-1, -2))
        result = result.view(*q.shape[:-1], v.size(-1))
        has_later_sinks = own.sinks is not None and 'sinks' not in arguments
        if own.return_lse or has_later_sinks:
            lse = lse.view(q.shape[:-1])
        if has_later_sinks:    # the heads of a row have other sinks in each row
            is_none = lse == -math.inf
            result.mul_(torch.sigmoid(lse - own.sinks).masked_fill_(is_none, 0)[..., None])
            lse = torch.logaddexp(lse, own.sinks)
        lse = lse.transpose(-1, -2).contiguous() if own.return_lse else lse
    if out is not None:
        result = out if layout.has_rows else out.copy_(result)
    return result, lse


def lower(tensors: tuple, own: Attend, choice: Choice, layout: Layout) -> tuple[tuple, dict]:
    """The tensors and arguments of `attend_cache` for chosen keys (ops/chosen_keys.py)."""
    q, k, v, out = tensors
    heads, (k_view, v_view, scale_view) = layout.heads, layout.views
    arguments = attend_arguments.given(own)
    for name in _OF_APPENDS:
        arguments.pop(name, None)
    arguments['page_table'] = chosen_keys.table_of(choice, layout)
    if choice.counts is not None:
        arguments['cache_seqlens'] = chosen_keys.slots_of(choice, heads)
    if own.qv is not None:
        arguments['qv'] = chosen_keys.rows_of(own.qv, layout)
        if own.v_descale is not None:
            arguments['v_descale'] = chosen_keys.view_of(own.v_descale, scale_view)
    else:
        for name in ('k_descale', 'v_descale'):
            if name in arguments:
                arguments[name] = chosen_keys.scales_of(
                    arguments[name], q, own.cu_seqlens_q, heads, own.descale_by_page)
    if heads > 1 and own.sinks is not None:
        del arguments['sinks']
        arguments.setdefault('return_lse', True)
    rows = chosen_keys.rows_of(q, layout)
    if own.max_logits_out is not None and layout.rows is not None:
        arguments['max_logits_out'] = attend_cache.empty_rows(rows)
    return (rows, chosen_keys.view_of(k, k_view),
            chosen_keys.view_of(v, v_view), chosen_keys.out_of(out, layout)), arguments


def _refuse_chosen(tensors: tuple, own: Attend, choice: Choice, function: Function) -> None:
    """Raises RuntimeError for what is wrong with the call as the user made it."""
    q, k, v, out = tensors
    starts = own.cu_seqlens_q
    if q.dim() == 3 and starts is None:
        starts = choice.indices.new_empty(q.size(0) + 1)
    own = own._replace(
        page_table=choice.indices.new_empty(batch_of(q, starts), 1), cu_seqlens_q=starts,
        cache_seqlens=None, cache_length=-1, cache_batch_idx=None, cu_seqlens_k_new=None,
        appended=0)
    text = checks.number_text(function.name, own) or checks.problem_text(
        dict(q=q, k=k, v=v, out=out), own, check=_plan.check_cache)
    if text:
        for known, name in (*zip(KVCACHE[:3], function), ('return_lse', 'return_softmax_lse')):
            text = text.replace(known, name)
        raise RuntimeError(text)


def _returned(out: Tensor, lse: Tensor, return_lse: bool, own: tuple) -> Result:
    largest = own[-1:] if len(own) == len(Attend._fields) and own[-1] is not None else ()
    if return_lse:
        empty = lse.new_empty(0)
        return out, lse, empty, empty, *largest
    return (out, *largest) if largest else out


def _append(functions: tuple, tensors: tuple, new: tuple, rotary: tuple, own: tuple,
            return_lse: bool, choice: Choice | None = None) -> Result:
    """What flash_attn_with_kvcache returns for new keys, for rotary alone, and for chosen keys.
    new: k, v and the descales that they set; rotary: the fields of Rotary; others: as in _attend.
    """
    attend, append_and_attend = functions
    q, k_cache, v_cache, out = tensors
    k, v, k_descale, v_descale = new
    appends = k is not None or v is not None or rotary[0] is not None or rotary[1] is not None
    if choice is not None:
        read = attend_cache.with_descales(own, k_descale, v_descale)
        layout = check_chosen(tensors, read, choice, appends)
        if appends and not is_compiling():
            q, qv = (attend_cache.apart(x, (k_cache, v_cache)) for x in (q, read.qv))
            read = read._replace(qv=qv)
    if appends:
        if not is_compiling():
            _check_contents(tensors, new, rotary, own)
        result, lse, rotated = append_and_attend(q, k_cache, v_cache, k, v, out, k_descale,
                                                 v_descale, *rotary, *own)
        if choice is None:
            return _returned(result if out is None else out, lse, return_lse, own)
        q, out = q if rotary[0] is None else rotated, result if out is None else out
    result, lse = attend_to_chosen(attend, (q, k_cache, v_cache, out), read, choice, layout)
    return _returned(result, lse, return_lse, own)


def _check_contents(tensors: tuple, new: tuple, rotary: tuple, own: tuple) -> None:
    """Raises RuntimeError for wrong values in the lists of an append, where they can be read, and
    for memory that PyTorch does not let the call write. Takes the arguments of _append.
    """
    q, _, _, out = tensors
    k, v, *set_descales = new
    attend_cache.check_writable(_OP, out=out)
    if not q.is_cuda and not checks.has_no_data(q):
        # No op would run, and so none would check, if some lists have no data.
        attend_cache.check_attend(tensors, attend_cache.with_descales(own, *set_descales))
    elif q.is_cuda and checks.reads_contents(q):
        named = attend_cache.check_attend(
            tensors, attend_cache.with_descales(own, *set_descales), rules_of='cuda')
        appended = attend_cache.append_of(named, Rotary(*rotary))
        attend_cache.check_append(tensors, (k, v), appended, 'cuda')


def _some_require_grad(tensors: Sequence[Tensor | None], op: str = _OP,
                       known: tuple[str, ...] = TENSORS) -> bool:
    try:
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    except AttributeError:
        checks.reject_non_tensors(op, **dict(zip(known, tensors)))
        raise
    return False


def longest(max_seqlen_q: int | Tensor | None, q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """The hint as a number; a dense q needs none."""
    if max_seqlen_q is None:
        return 0
    bound = checks.length_bound('max_seqlen_q', max_seqlen_q, q)
    return 0 if cu_seqlens_q is None else bound


def lengths_of(cache_seqlens: int | Tensor | None) -> tuple[int, Tensor | None]:
    """cache_length and cache_seqlens of the ops: a number, -1 for none, and a tensor."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return -1, cache_seqlens
    is_number = isinstance(cache_seqlens, (int, torch.SymInt))
    if isinstance(cache_seqlens, bool) or not is_number or cache_seqlens < 0:
        raise RuntimeError(checks.error(
            _OP, 'cache_seqlens to be a tensor, or a number of 0 or more', repr(cache_seqlens)))
    return cache_seqlens, None


def _reject(metadata: Tensor | None, softmax_scale: float | None, softcap: float,
            out_dtype: torch.dtype | None, tensors: Sequence[Tensor | None]) -> None:
    """Raises an error for what no op checks: derivatives, metadata, a wrong dtype of results."""
    q, *_ = tensors
    reject(_OP, softmax_scale, softcap, out_dtype, dict(zip(TENSORS, tensors)))
    if metadata is not None and (metadata.dtype != torch.int32 or metadata.dim() != 1
                                 or metadata.device != q.device):
        raise RuntimeError(checks.error(
            _OP, f'scheduler_metadata to be one-dimensional int32 on {q.device}',
            f'{metadata.dim()}, {checks.dtype_name(metadata.dtype)}, {metadata.device}'))


def reject(op: str, softmax_scale: float | None, softcap: float, out_dtype: torch.dtype | None,
           tensors: dict[str, Tensor | None], why: str | None = ' with a cache') -> None:
    """Raises an error for derivatives or a wrong dtype of results in any function on a cache. why:
    there are no gradients; None: there are.
    """
    q, out = tensors['q'], tensors['out']
    checks.reject_non_tensors(op, **tensors)
    dtensors.reject(op, q)
    derivatives.reject_forward_mode(*tensors.values())
    numbers = dict(softmax_scale=softmax_scale, softcap=softcap)
    derivatives.reject_of_scalars(op, **numbers)
    if text := checks.number_text(op, numbers):
        raise RuntimeError(text)
    if why is not None and checks.needs_grad(*tensors.values()):
        raise RuntimeError(checks.error(
            op, f'requires_grad=False{why}', checks.requires_grad_text(**tensors),
            'call it under torch.no_grad()'))
    if out_dtype is not None and (out_dtype != q.dtype or q.dtype == fp8.E4M3):
        fp8.eight_bit_of(op, q, (None, None, None), out, out_dtype, 'fast')
