"""The ops on a KV cache: their arguments, what they do on CPU tensors, their fakes.

The plain functions append to the cache, gather the keys of one sequence at a time, and attend as
`reference` does. They serve CPU tensors and, called directly, GPUs without our kernels, where they
wait for the lengths. The schemas are in library.py; importing this file registers the rest.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flash_attn3 import _plan
from flash_attn3.cpu import reference, reference_fp8
from flash_attn3.ops import checks, dense_and_varlen, library
from flash_attn3.arguments import OPS, tuple_of
from flash_attn3.ops.dense_and_varlen import batch_of, inputs_of, rank_of, score_of
from flash_attn3.cpu.quantize import E4M3
from flash_attn3.cpu.reference import Outputs, Score, Sequences
from flash_attn3.cpu.reference_fp8 import Scales
from flash_attn3.api.trees import COLUMNS, unpacked

OP = 'flash_attn_with_kvcache'    # the function whose arguments errors name
# What follows the tensors of `attend_cache`, and the rotary arguments of `append_and_attend`.
Attend = tuple_of('Attend', __name__, *OPS['attend_cache'].takes[2:])
# The arguments that an append reads.
Append = tuple_of('Append', __name__, 'cache', 'rotary', 'cu_seqlens_q', 'k_descale', 'v_descale',
                  'by_page')
Rotary = tuple_of('Rotary', __name__, 'rotary')
_Own = Attend | Append


# ------------------------------------------------------------------------------------------ lengths
def _numbers(x: Tensor | None, otherwise: list[int]) -> list[int]:
    return otherwise if x is None else x.tolist()


def _differences(starts: Tensor) -> list[int]:
    return starts.diff().tolist()


def _capacity_of(cache: Tensor, own: _Own) -> int:
    """Slots of a sequence."""
    return cache.size(1) * (1 if own.page_table is None else own.page_table.size(1))


def _spans(cache: Tensor, own: _Own, batch: int) -> list[tuple[int, int, int]]:
    """(first slot with a key, keys before the append, new keys) of each sequence."""
    capacity = _capacity_of(cache, own)
    before = _numbers(own.cache_seqlens,
                      [capacity if own.cache_length < 0 else own.cache_length] * batch)
    new = ([own.appended] * batch if own.cu_seqlens_k_new is None else
           _differences(own.cu_seqlens_k_new))
    return list(zip(_numbers(own.cache_leftpad, [0] * batch), before, new))


def _index(cache: Tensor, own: _Own, sequence: int, slots: Tensor) -> tuple:
    """The index by which cache[...] gives these slots of a sequence, (slots, heads_k, head_dim)."""
    if own.page_table is None:
        row = sequence if own.cache_batch_idx is None else own.cache_batch_idx[sequence].item()
        return row, slots
    pages = own.page_table[sequence].long()
    return pages[slots // cache.size(1)], slots % cache.size(1)


def _bytes(x: Tensor) -> Tensor:
    """x as bytes if it is e4m3, which cannot be indexed on every device."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


# ----------------------------------------------------------------------------------------- contents
def _contents_problem(tensors: tuple[Tensor | None, Tensor, int | None], own: _Own,
                      batch: int) -> tuple[str, str] | None:
    """What is wrong with the contents of the lists: (expected, got), or None.

    tensors: q, the cache of the keys, and the rows of packed new keys, if known.
    """
    q, cache, new_rows = tensors
    for name, starts, rows in (('q', own.cu_seqlens_q, None if q is None else q.size(0)),
                               ('k_new', own.cu_seqlens_k_new, new_rows)):
        if starts is not None:
            values = starts.tolist()
            end = values[-1] if rows is None else rows
            if problem := checks.sequences_problem(name, values, [], end):
                return problem
    capacity = _capacity_of(cache, own)
    for sequence, (first, before, new) in enumerate(_spans(cache, own, batch)):
        shared = getattr(own, 'shared_prefix', 0) if sequence > 0 else 0    # keys of sequence 0
        begin = max(first, shared) if isinstance(own, Attend) else before
        problem = _span_problem(sequence, (first, before, new), capacity) or _place_problem(
            cache, own, sequence, range(begin, before + new))
        if problem:
            return problem
    return None


def _span_problem(sequence: int, span: tuple[int, int, int],
                  capacity: int) -> tuple[str, str] | None:
    first, before, new = span
    if not 0 <= before <= capacity:
        return (f'cache_seqlens[{sequence}] to be from 0 to {capacity}, the slots of a sequence',
                str(before))
    if before + new > capacity:
        return (f'room for {new} new keys after the {before} of sequence {sequence}',
                f'{capacity} slots')
    if not 0 <= first <= before + new:
        return (f'cache_leftpad[{sequence}] to be from 0 to {before + new}, the keys of '
                f'sequence {sequence}', str(first))
    return None


def _prefix_problem(q: Tensor, cache: Tensor, own: Attend,
                    batch: int) -> tuple[str, str] | None:
    """What is wrong with the lengths of a call with shared keys: (expected, got), or None. Each
    query must see all shared keys.
    """
    first, queries = own.shared_prefix, _query_counts(q, own, batch)
    for sequence, (_, before, new) in enumerate(_spans(cache, own, batch)):
        if before < first:
            return (f'cache_seqlens[{sequence}] to be at least {first}, the shared keys',
                    str(before))
        if (own.causal or own.tree_mask is not None) and before + new - first < queries[sequence]:
            return (f'at least as many keys after the {first} shared ones as queries of sequence '
                    f'{sequence}, {queries[sequence]}, under causal', str(before + new - first))
    return None


def _tree_problem(q: Tensor, own: Attend, batch: int) -> tuple[str, str] | None:
    """The problem of a sequence with more queries than a tree mask has bits."""
    if own.tree_mask is None:
        return None
    longest = max(_query_counts(q, own, batch), default=0)
    return None if longest <= COLUMNS else (
        f'at most {COLUMNS} queries of a sequence with tree_mask', str(longest))


def _place_problem(cache: Tensor, own: _Own, sequence: int,
                   slots: range) -> tuple[str, str] | None:
    """The problem of the row or the pages that hold these slots. Chosen ones may be no pages."""
    if getattr(own, 'keys_chosen', False):
        return None
    if own.page_table is None:
        row = sequence if own.cache_batch_idx is None else own.cache_batch_idx[sequence].item()
        if not 0 <= row < cache.size(0):
            return (f'cache_batch_idx[{sequence}] to be from 0 to {cache.size(0) - 1}, the rows of '
                    'the cache', str(row))
        return None
    size, ids = cache.size(1), own.page_table[sequence].tolist()
    for entry in range(slots.start // size, math.ceil(slots.stop / size)) if slots else ():
        if not 0 <= ids[entry] < cache.size(0):
            return (f'page_table[{sequence}, {entry}] to be from 0 to {cache.size(0) - 1}, the '
                    'pages of the cache', str(ids[entry]))
    return None


def _check_contents(tensors: tuple[Tensor | None, Tensor, int | None], own: _Own,
                    batch: int) -> None:
    if problem := _contents_problem(tensors, own, batch):
        raise RuntimeError(checks.error(OP, *problem))


def check_cuda_contents(tensors: Sequence[Tensor | None], arguments: tuple) -> None:
    """Raises RuntimeError for bad contents of the lists of `attend_cache` on a GPU, if they are
    read (`checks.reads_contents`). tensors: q, the caches and out.
    """
    q, cache, *_ = tensors
    if q.is_cuda and checks.reads_contents(q):
        check_attend(tensors, arguments, rules_of='cuda')


def check_attend(tensors: Sequence[Tensor | None], arguments: tuple,
                 rules_of: str = 'cpu') -> Attend:
    """The arguments by name. Raises RuntimeError if `attend_cache` cannot serve them, or for bad
    contents of the lists. tensors: q, k, v and out; rules_of: as in `checks.problem_text`.
    """
    q, k, v, out = tensors
    own = Attend(*arguments)
    text = checks.problem_text(dict(q=q, k=k, v=v, out=out), own, check=_plan.check_cache,
                               rules_of=rules_of)
    if text:
        raise RuntimeError(text)
    if own.cu_seqlens_k is not None:
        dense_and_varlen.check_contents(q, k, own)
    elif own.seqused_q is not None:
        used = own.seqused_q.tolist()
        if problem := checks.sequences_problem('q', own.cu_seqlens_q.tolist(), used, q.size(0)):
            raise RuntimeError(checks.error(OP, *problem))
    if own.cu_seqlens_k is None:
        batch = batch_of(q, own.cu_seqlens_q)
        problem = _prefix_problem(q, k, own, batch) if own.shared_prefix > 0 else None
        if problem := problem or _tree_problem(q, own, batch):
            raise RuntimeError(checks.error(OP, *problem))
        _check_contents((q, k, None), own, batch)
    return own


# ---------------------------------------------------------------------------------------- attention
def _keys_of(x: Tensor, own: Attend, batch: int) -> list[Tensor]:
    """The keys or values of each sequence, (keys, heads_k, head_dim)."""
    if own.cu_seqlens_k is not None:
        return [x[rows] for rows in Sequences(own.cu_seqlens_k, own.seqused_k).slices()]
    return [_bytes(x)[index].view(x.dtype) for index in _indices_of(x, own, batch)]


def _indices_of(x: Tensor, own: Attend, batch: int) -> list[tuple]:
    """The indices by which x[...] gives the keys of each sequence in a cache."""
    indices = []
    for sequence, (first, before, new) in enumerate(_spans(x, own, batch)):
        end = min(_capacity_of(x, own), before + new)
        slots = torch.arange(min(first, end), end, device=x.device)
        if own.keys_chosen:
            pages = own.page_table[sequence][slots // x.size(1)]
            slots = slots[(pages >= 0) & (pages < x.size(0))]
        index = _index(x, own, sequence, slots)
        if sequence > 0 and own.shared_prefix > 0:
            index = _with_prefix(index, _index(x, own, 0, slots), slots < own.shared_prefix)
        indices.append(index)
    return indices


def _with_prefix(index: tuple, first_index: tuple, is_shared: Tensor) -> tuple:
    """An index that takes shared slots from the first sequence."""
    return tuple(torch.where(is_shared, torch.as_tensor(first), torch.as_tensor(own))
                 for own, first in zip(index, first_index))


def _scales_of(scale: Tensor | None, x: Tensor, own: Attend, batch: int) -> list[Tensor | None]:
    """The scales of the keys or values x of each sequence: (keys or 1, heads_k), for latents (keys,
    blocks of columns).
    """
    if scale is None:
        return [None] * batch
    if own.qv is not None:
        return [scale[index] for index in _indices_of(x, own, batch)]
    if own.descale_by_page:
        return [scale[pages] for pages, _ in _indices_of(x, own, batch)]
    return list(scale.split(1))


def empty_rows(q: Tensor) -> Tensor | None:
    """Memory of the shape of the LSE; None for a q that no op takes."""
    if q.dim() < 3:
        return None
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=reference.lse_dtype(q.dtype))


def _rows_of(x: Tensor, cu_seqlens: Tensor | None,
             seqused: Tensor | None = None) -> Sequence[int] | list[slice]:
    """The index of the rows of each sequence in x."""
    return (range(x.size(0)) if cu_seqlens is None else
            Sequences(cu_seqlens, seqused).slices())


def _with_tree(score: Score, rows: Tensor) -> Score:
    return replace(score, mask=replace(score.mask, tree=unpacked(rows)))


def _scaled(x: Tensor, scale: Tensor | None, scaling: Callable = torch.mul) -> Tensor:
    """x (..., keys, heads_k, head_dim) multiplied or divided by its scales, (keys or 1, heads_k or
    blocks of columns).
    """
    if scale is None:
        return x
    by_scale = x.flatten(-2).unflatten(-1, (scale.size(1), -1))
    return scaling(by_scale, scale[..., None].to(x.dtype)).view(x.shape)


@reference.without_autocast
def _attend(q: Tensor, k: Tensor, v: Tensor, own: Attend) -> Outputs:
    """Attention in the dtype of computation; nothing is checked."""
    wide = torch.float32 if q.dtype == E4M3 else reference.wide_dtype(q.dtype)
    rows = _rows_of(q, own.cu_seqlens_q, own.seqused_q)
    out = q.new_zeros((*q.shape[:-1], v.size(-1)), dtype=wide)
    heads_last = q.new_full(q.shape[:-1], -math.inf, dtype=reference.lse_dtype(wide))
    wants_largest = own.max_logits_out is not None
    largest = heads_last.clone() if wants_largest else None
    batch = len(rows)
    keys, values = _keys_of(k, own, batch), _keys_of(v, own, batch)
    q_scales, k_scales, v_scales = (_scales_of(scale, x, own, batch) for scale, x in (
        (own.q_descale, q), (own.k_descale, k), (own.v_descale, v)))
    if own.qv is not None:    # the values are keys too
        q = torch.cat([q, own.qv], dim=-1)
        values = [_scaled(x.to(wide), scale) for x, scale in zip(values, v_scales)]
        keys = [torch.cat([x.to(wide), latent], dim=-1) for x, latent in zip(keys, values)]
        v_scales = [None] * batch
    score = score_of(q, own)
    for sequence, (row, one_k, one_v) in enumerate(zip(rows, keys, values)):
        one = inputs_of(q[row][None], one_k[None], one_v[None], own)
        score = score if own.tree_mask is None else _with_tree(score, own.tree_mask[row])
        if q.dtype == E4M3:
            scales = Scales(q_scales[sequence], k_scales[sequence], v_scales[sequence])
            part = reference_fp8.attend(one, scales, score, compute_dtype=wide,
                                        with_row_max=wants_largest)
        else:
            one = one._replace(k=_scaled(one.k.to(wide), k_scales[sequence]),
                               v=_scaled(one.v.to(wide), v_scales[sequence]))
            part = reference.attend(one.to(wide), score, with_row_max=wants_largest)
        out[row], heads_last[row] = part.out[0], part.lse[0].transpose(0, 1)
        if wants_largest:
            largest[row] = part.row_max[0].transpose(0, 1)
    if wants_largest:
        own.max_logits_out.copy_(largest.transpose(-1, -2))
    return Outputs(out, heads_last.transpose(-1, -2).contiguous())


def _out_dtype(q: Tensor, own: Attend) -> torch.dtype:
    if q.dtype != E4M3:
        return q.dtype
    return torch.float16 if own.float16_out else torch.bfloat16


def _results(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None,
             own: Attend) -> tuple[Tensor, Tensor]:
    """Attention as the ops return it."""
    result, lse, _ = _attend(q, k_cache, v_cache, own)
    result = result.to(_out_dtype(q, own)) if out is None else out.copy_(result).new_empty(0)
    return result, lse if own.return_lse else lse.new_empty(0)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None,
                   *arguments) -> tuple[Tensor, Tensor]:
    """The op `attend_cache` on any device."""
    return _results(q, k, v, out, check_attend((q, k, v, out), arguments))


# ------------------------------------------------------------------------------------------- append
def check_append(tensors: Sequence[Tensor | None], new: tuple[Tensor | None, Tensor | None],
                 own: Append, rules_of: str = 'cpu') -> None:
    """Raises RuntimeError if new keys cannot be appended, or q cannot be rotated. tensors: q and
    the caches; new: k and v.
    """
    q, *caches = tensors[:3]
    k, v = new
    tensors = dict(k=caches[0], v=caches[1], k_new=k, v_new=v, q=q)
    text = checks.problem_text(tensors, own, check=_plan.check_append, rules_of=rules_of)
    if text:
        raise RuntimeError(text)
    batch = batch_of(q, own.cu_seqlens_q)
    rows = None if k is None else k.size(0)
    _check_contents((q, caches[0], rows), own, batch)
    if own.rotary_cos is not None:
        _check_positions(caches[0], q, own, batch)


def _check_positions(cache: Tensor, q: Tensor, own: Append, batch: int) -> None:
    """Raises RuntimeError if a rotary table lacks the position of a new key or a query."""
    spans = _spans(cache, own, batch)
    firsts = _numbers(own.rotary_seqlens, [before for _, before, _ in spans])
    queries = _query_counts(q, own, batch) if own.rotary_per_query else [1] * batch
    for sequence, (first, (_, _, new), count) in enumerate(zip(firsts, spans, queries)):
        if first < 0 or first + max(new, count) > own.rotary_cos.size(0):
            raise RuntimeError(checks.error(
                OP, f'rotary_cos to have a row for each position from {first} to '
                f'{first + max(new, count) - 1} of sequence {sequence}',
                f'{own.rotary_cos.size(0)} rows'))


def _query_counts(q: Tensor, own: _Own, batch: int) -> list[int]:
    return [q.size(1)] * batch if own.cu_seqlens_q is None else _differences(own.cu_seqlens_q)


def _rotated(x: Tensor, positions: Tensor, own: Append) -> Tensor:
    """x (rows, heads, head_dim) with the first columns rotated, rounded once."""
    wide = torch.float32 if x.dtype == E4M3 else reference.wide_dtype(x.dtype)
    cos, sin = (_bytes(table)[positions].view(table.dtype).to(wide).unsqueeze(1)
                for table in (own.rotary_cos, own.rotary_sin))
    half = cos.size(-1)
    result = x.to(wide, copy=True)
    columns = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if own.rotary_interleaved else (
        slice(0, half), slice(half, 2 * half))
    first, second = (x[..., part].to(wide) for part in columns)
    result[..., columns[0]] = first * cos - second * sin
    result[..., columns[1]] = first * sin + second * cos
    return result.to(x.dtype)


def _rotated_queries(q: Tensor, own: Append, firsts: list[int]) -> Tensor:
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    if own.cu_seqlens_q is not None:
        result.copy_(q)    # rows of no sequence
    for row, first in zip(_rows_of(q, own.cu_seqlens_q), firsts):
        steps = torch.arange(q[row].size(0), device=q.device)
        result[row] = _rotated(q[row], first + steps * own.rotary_per_query, own)
    return result


def _quantised(x: Tensor, scale: Tensor | None) -> Tensor:
    """x divided by its scales, as e4m3: rounded to nearest even, clamped to 448."""
    wide = _scaled(x.to(reference.wide_dtype(x.dtype)), scale, torch.div)
    most = torch.finfo(E4M3).max
    return wide.clamp(-most, most).to(E4M3)


def _page_scales(x: Tensor, scale: Tensor, index: tuple) -> Tensor:
    """(rows, heads_k): the scales of the pages of new rows x. Sets those of pages that begin with a
    new row. index: the page of each row and its slot there.
    """
    pages, slots = index
    for page in pages[slots == 0].tolist():
        sizes = x[pages == page].float().abs().nan_to_num(nan=0.0)    # infinity: the largest float
        # Half of the largest e4m3: later rows of the page may be twice as large.
        scale[page] = _scale_of_largest(sizes.amax((0, 2)), 224)
    return scale[pages]


def _key_scales(x: Tensor, scale: Tensor, index: tuple) -> Tensor:
    """(rows, blocks): sets the scales of new latents x (rows, 1, columns)."""
    sizes = x[:, 0].unflatten(-1, (scale.size(2), -1)).float().abs().nan_to_num(nan=0.0)
    scale[index] = _scale_of_largest(sizes.amax(2), 448)
    return scale[index]


def _scale_of_largest(largest: Tensor, most: float) -> Tensor:
    """The smallest power of two that, as divisor, brings these values down to at most `most`."""
    least = (largest / most).clamp(min=2.0 ** -60)
    mantissa = torch.frexp(least).mantissa
    return torch.where(mantissa == 0.5, least, least / mantissa)


def append_and_attend_plainly(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
        v: Tensor | None = None, out: Tensor | None = None, k_scales: Tensor | None = None,
        v_scales: Tensor | None = None, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The op `append_and_attend` on any device."""
    rotary = Rotary(*arguments[:len(Rotary._fields)])
    own = with_descales(arguments[len(Rotary._fields):], k_scales, v_scales)
    is_dense = k is not None and k.dim() == 4
    own = own._replace(appended=k.size(1) if is_dense else 0)
    caches = k_cache, v_cache
    check_attend((q, *caches, out), own)
    append = append_of(own, rotary)
    check_append((q, *caches), (k, v), append)
    check_writable(OP, k_cache=k_cache, v_cache=v_cache, out=out,
                   k_descale=k_scales, v_descale=v_scales)
    if v_scales is None and k is not None and v.dtype != v_cache.dtype and (
            own.descale_by_page or own.qv is not None):
        raise RuntimeError(checks.error(OP, 'k_scales or v_scales, those that new keys set',
                                        'None'))
    q, qv, k, v = (apart(x, caches) for x in (q, own.qv, k, v))
    own = own._replace(qv=qv)
    firsts = _firsts(k_cache, append, batch_of(q, append.cu_seqlens_q))
    if k is not None:
        _append(caches, k, v, append)
    rotated = None if rotary.rotary_cos is None else _rotated_queries(q, append, firsts)
    attend = _attend_fake if own.keys_chosen else _results    # the next call attends
    results = attend(q if rotated is None else rotated, k_cache, v_cache, out, own)
    return *results, q.new_empty(0) if rotated is None else rotated


def with_descales(arguments: tuple, k_scales: Tensor | None, v_scales: Tensor | None) -> Attend:
    """The arguments of attention, with the descales that an append sets."""
    is_full = len(arguments) == len(Attend._fields)    # _make takes a third of the time
    own = Attend._make(arguments) if is_full else Attend(*arguments)
    return own if v_scales is None else own._replace(k_descale=k_scales, v_descale=v_scales)


def append_of(own: Attend, rotary: Rotary) -> Append:
    return Append(*(getattr(rotary if name in Rotary._fields else own, name)
                    for name in Append._fields))


def apart(x: Tensor | None, caches: tuple[Tensor, Tensor]) -> Tensor | None:
    """x, copied if the append might overwrite it."""
    def span(x: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize * (x.numel() > 0)

    if x is None:
        return x
    first, end = span(x)
    shares = any(first < own_end and own_first < end for own_first, own_end in map(span, caches))
    return x.clone() if shares else x


def check_writable(op: str, **tensors: Tensor | None) -> None:
    """Raises RuntimeError for an inference tensor, which PyTorch allows only inference mode to
    write.
    """
    for name, x in tensors.items():
        if x is not None and x.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(checks.error(
                op, f'{name} not to be an inference tensor', 'an inference tensor',
                'call the function under torch.inference_mode()'))


def _firsts(k_cache: Tensor, own: Append, batch: int) -> list[int]:
    """The position of the first new key of each sequence, and of its first query."""
    return _numbers(own.rotary_seqlens, [before for _, before, _ in _spans(k_cache, own, batch)])


def _append(caches: tuple[Tensor, Tensor], k: Tensor, v: Tensor, own: Append) -> None:
    k_cache, v_cache = caches
    batch = k.size(0) if own.cu_seqlens_k_new is None else own.cu_seqlens_k_new.numel() - 1
    spans = _spans(k_cache, own, batch)
    firsts = _firsts(k_cache, own, batch)
    rows_of = _rows_of(k, own.cu_seqlens_k_new)
    for sequence, ((_, before, new), row) in enumerate(zip(spans, rows_of)):
        steps = torch.arange(new, device=k.device)
        new_k = k[row] if own.rotary_cos is None else _rotated(k[row], firsts[sequence] + steps,
                                                               own)
        for cache, rows, scale in ((k_cache, new_k, own.k_descale),
                                   (v_cache, v[row], own.v_descale)):
            index = _index(cache, own, sequence, before + steps)
            if rows.dtype != cache.dtype:
                rows = _quantised(rows, None if scale is None
                                  else _page_scales(rows, scale, index) if own.descale_by_page
                                  else _key_scales(rows, scale, index) if scale.dim() == 3
                                  else scale[sequence:sequence + 1])
            _bytes(cache)[index] = _bytes(rows)


# -------------------------------------------------------------------------------------------- fakes
# Fakes check only what they rely on; the ops check the rest on real tensors.
def _attend_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None,
                 own: Attend) -> tuple[Tensor, Tensor]:
    rank = rank_of(own)
    checks.check_rank(OP, 'q', q, dense_and_varlen.LAYOUTS[rank], rank)
    result = (q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=_out_dtype(q, own)) if out is None
              else out.new_empty(0))
    lse = empty_rows(q)
    return result, lse if own.return_lse else lse.new_empty(0)


def _append_and_attend_fake(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
        v: Tensor | None = None, out: Tensor | None = None, k_scales: Tensor | None = None,
        v_scales: Tensor | None = None, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    count = len(Rotary._fields)
    results = _attend_fake(q, k_cache, v_cache, out, Attend(*arguments[count:]))
    is_rotated = Rotary(*arguments[:count]).rotary_cos is not None
    return *results, q.new_empty(q.shape if is_rotated else 0)


library.register('attend_cache', attend_plainly,
                 lambda q, k, v, out=None, *own: _attend_fake(q, k, v, out, Attend(*own)))
library.register('append_and_attend', append_and_attend_plainly, _append_and_attend_fake)
library.register_vmap_by_loop('attend_cache')
