"""Keys that each query chooses by index (token-sparse MLA as in DeepSeek-V3.2, arXiv 2512.02556).

A call with indices becomes a call of `attend_cache`: each query is a sequence of its own, a block
of slots is a page, and the indices are the page table. If each KV head has its own list, each
(query, KV head) is a sequence, and the pages hold one head each. Caches become views.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.ops import checks

BLOCKS = 1, 64, 128


class Choice(NamedTuple):
    """Which blocks of slots each query attends to.

    indices: (*tokens, n) for all KV heads or (*tokens, heads_k, n), where tokens is the shape of q
        without heads and columns. counts: (*tokens), how many indices of a list count.
    """
    indices: Tensor
    block: int = 1
    counts: Tensor | None = None


class Function(NamedTuple):
    """How errors name the function and its caches."""
    name: str
    k: str
    v: str
    slots: str    # what index_block divides


KVCACHE = Function('flash_attn_with_kvcache', 'k_cache', 'v_cache', 'k_cache.size(1)')
SPARSE = Function('flash_attn_sparse_func', 'k', 'v', 'k.size(0)')


def heads_of(q: Tensor, k: Tensor, choice: Choice) -> int:
    """The KV heads that have lists of their own, or 1."""
    return k.size(2) if choice.indices.dim() == q.dim() else 1


# ------------------------------------------------------------------------------------------- checks
def check(tensors: tuple, choice: Choice, function: Function = KVCACHE) -> None:
    """Raises RuntimeError for a wrong choice, and for wrong values in it where they can be read.

    tensors: q, the caches and the scales of the keys in a cache of latents, or None.
    """
    q, k, *_ = tensors
    if problem := (_rank_problem(tensors, choice, function) or _list_problem(q, k, choice)
                   or _layout_problem(tensors, choice, function)):
        raise RuntimeError(checks.error(function.name, *problem))
    if not torch.compiler.is_compiling() and checks.reads_contents(q) and not checks.has_no_data(q):
        blocks = k.size(0) * k.size(1) // choice.block
        _check_values('indices', choice.indices, (-1, blocks - 1), function)
        _check_values('index_counts', choice.counts, (0, choice.indices.size(-1)), function)


def _rank_problem(tensors: tuple, choice: Choice, function: Function) -> tuple | None:
    """What was expected, what it is instead, and a hint."""
    if type(choice.block) is not int or choice.block not in BLOCKS:
        return f'index_block to be one of {BLOCKS}', repr(choice.block)
    if choice.indices is None:
        return 'indices with index_block or index_counts', 'None'
    for name, x, ranks in zip(('q', function.k, function.v), tensors, ((3, 4), (4,), (4,))):
        if x.dim() not in ranks:
            return f'{name} to have {" or ".join(map(str, ranks))} dimensions', str(x.dim())
    return None


def _list_problem(q: Tensor, k: Tensor, choice: Choice) -> tuple | None:
    tokens, heads = tuple(q.shape[:-2]), k.size(2)
    indices, counts = choice.indices, choice.counts
    if indices.shape[:-1] not in (tokens, (*tokens, heads)):
        listed = ', '.join(map(str, tokens))
        return (f'indices of shape ({listed}, n) or ({listed}, {heads}, n)',
                str(tuple(indices.shape)))
    if counts is not None and counts.shape != tokens:
        return f'index_counts of shape {tokens}', str(tuple(counts.shape))
    for name, x in (('indices', indices), ('index_counts', counts)):
        if x is not None and (x.dtype != torch.int32 or x.device != q.device):
            return (f'{name} to be int32 on {q.device}',
                    f'{checks.dtype_name(x.dtype)} on {x.device}')
    if indices.size(-1) > 1 and indices.stride(-1) != 1:
        return 'indices with a contiguous last dimension', f'stride {indices.stride(-1)}'
    return None


def _layout_problem(tensors: tuple, choice: Choice, function: Function) -> tuple | None:
    q, k, v, scale = tensors
    if k.size(1) % choice.block != 0:
        return (f'{function.slots} to be a multiple of index_block, {choice.block}',
                str(k.size(1)))
    by_head = heads_of(q, k, choice) > 1
    for name, x in ((function.k, k), (function.v, v), ('v_descale', scale)):
        if x is None or x.dim() < 3:
            continue
        if x.size(1) != choice.block and not flattens(x):
            return (f'{name} with a page stride of {x.size(1)} * {x.stride(1)}, so that slots '
                    'follow one another', str(x.stride(0)), 'a cache is never copied')
        if by_head and not flattens(blocks_of(x, choice.block).transpose(1, 2)):
            return (f'{name} with the slots or blocks of all KV heads at equal distances, for '
                    'indices by KV head', f'strides {x.stride()}', 'a cache is never copied')
    return None


def _check_values(name: str, x: Tensor | None, limits: tuple[int, int],
                  function: Function) -> None:
    is_wrong = None if x is None else (x < limits[0]) | (x > limits[1])
    if x is not None and is_wrong.any():
        place = is_wrong.nonzero()[0].tolist()
        raise RuntimeError(checks.error(
            function.name, f'{name}{place} to be from {limits[0]} to {limits[1]}',
            str(x[tuple(place)].item())))


# -------------------------------------------------------------------------------------------- views
def flattens(x: Tensor, count: int = 2) -> bool:
    """Whether the first dimensions are one in memory."""
    sizes, strides = x.shape, x.stride()
    kept = [i for i in range(count) if sizes[i] != 1]
    return all(strides[i] == sizes[j] * strides[j] for i, j in zip(kept, kept[1:])) or (
        x.numel() == 0)


def blocks_of(x: Tensor, block: int) -> Tensor:
    """(pages, slots, ...) as (blocks, block, ...)."""
    blocks = x.size(0) * x.size(1) // block
    return x if x.size(1) == block else x.view(blocks, block, *x.shape[2:])


def cache_of(x: Tensor, block: int, heads: int) -> Tensor:
    """A cache whose pages are blocks; with lists by head those of one head each."""
    x = blocks_of(x, block)
    return x if heads == 1 else x.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def rows_of(x: Tensor | None, heads: int) -> Tensor | None:
    """(*tokens, heads_q, columns) as (tokens * heads, 1, heads_q / heads, columns)."""
    if x is None:
        return None
    *tokens, heads_q, columns = x.shape
    return x.reshape(math.prod(tokens) * heads, 1, heads_q // heads, columns)


def has_rows(x: Tensor, heads: int) -> bool:
    """Whether `rows_of` is a view."""
    x = x.unflatten(-2, (heads, x.size(-2) // heads))
    return flattens(x, x.dim() - 2)


def table_of(k: Tensor, choice: Choice, heads: int) -> Tensor:
    """The page table: (tokens, n), or (tokens * heads, n) pages of a head. What is no block is no
    page.
    """
    indices = choice.indices
    if heads > 1:
        head = torch.arange(heads, dtype=torch.int32, device=indices.device)[:, None]
        blocks = k.size(0) * k.size(1) // choice.block
        indices = torch.add(head, indices.clamp(-1, blocks), alpha=heads)
    return indices.flatten(0, -2)


def slots_of(choice: Choice, heads: int) -> Tensor | None:
    """Slots that count in each row of the table; None: all."""
    if choice.counts is None:
        return None
    counts = choice.counts.flatten()
    if choice.block > 1:
        counts = counts.clamp(0, choice.indices.size(-1)) * choice.block
    return counts if heads == 1 else counts.repeat_interleave(heads)


def scales_of(scale: Tensor | None, q: Tensor, starts: Tensor | None,
              heads: int) -> Tensor | None:
    """(sequences, heads_k) as scales of each query, (tokens, heads_k) or (tokens * heads, 1)."""
    if scale is None:
        return None
    if q.dim() == 4:
        scale = scale[:, None].expand(-1, q.size(1), -1).flatten(0, 1)
    elif starts is not None:
        tokens = torch.arange(q.size(0), device=q.device, dtype=starts.dtype)
        scale = scale[torch.searchsorted(starts[1:-1].contiguous(), tokens, right=True)]
    return scale if heads == 1 else scale.reshape(-1, 1)
