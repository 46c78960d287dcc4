"""Keys that each query chooses by index (token-sparse MLA as in DeepSeek-V3.2, arXiv 2512.02556).

A call with indices becomes a call of `attend_cache`: each query is a sequence of its own, a block
of slots is a page, and the indices are the page table. If each KV head has its own list, each
(query, KV head) is a sequence, and each head of a block is a page. Caches become views.

`check` holds all tensors of a call to their shapes, because the op sees those of the call that it
becomes. What follows from shapes and strides is a Layout, which is remembered: a decode step takes
microseconds.
"""
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.compiler import is_compiling

from flash_attn3.ops import checks

BLOCKS = 1, 64, 128
MOST_PAGES = 2 ** 31 - 1


class Choice(NamedTuple):
    """Which blocks of slots each query attends to.

    indices: (*tokens, n) for all KV heads or (*tokens, heads_k, n), where tokens is the shape of q
        without heads and columns. counts: (*tokens), how many indices of a list count.
    """
    indices: Tensor
    block: int = 1
    counts: Tensor | None = None


class Function(NamedTuple):
    """How errors name a function and its caches."""
    name: str
    k: str
    v: str
    slots: str     # what index_block divides
    hidden: int    # leading dimensions of the caches that its user does not see


KVCACHE = Function('flash_attn_with_kvcache', 'k_cache', 'v_cache', 'k_cache.size(1)', 0)
SPARSE = Function('flash_attn_sparse_func', 'k', 'v', 'k.size(0)', 1)

# The tensors of a call with a choice, in order.
NAMES = ('q', 'k', 'v', 'out', 'indices', 'index_counts', 'qv', 's_aux', 'cu_seqlens_q',
         'k_descale', 'v_descale')
_NEEDED = 'q', 'k', 'v', 'indices'


class Form(NamedTuple):
    """What a Layout reads of a tensor."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class View(NamedTuple):
    """A cache whose pages are blocks, or heads of blocks, which need strides of their own."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class Layout(NamedTuple):
    """What the shapes and strides of a call say about the call that it becomes."""
    heads: int                        # heads_k if each KV head has its own list, else 1
    blocks: int                       # in the whole cache
    step: int                         # page ids from a block to the next one
    rows: tuple[int, ...] | None      # shape of q, qv and out without columns; None: as it is
    has_rows: bool                    # whether out can be viewed in the shape `rows`
    views: tuple[View | None, ...]    # how to view k, v and the scales of latents; None: as given


# ------------------------------------------------------------------------------------------- checks
def check(given: tuple, block: int, by_page: bool, function: Function) -> Layout:
    """Raises RuntimeError for a wrong choice, a tensor of a wrong shape, and wrong values in lists
    where they can be read. given: NAMES, None for those that the call lacks.
    """
    forms = tuple([
        None if x is None else (x.shape, x.stride(), x.dtype, x.device)
        if isinstance(x, Tensor) else type(x) for x in given])
    facts = forms, block if type(block) is int else repr(block), by_page, function
    is_traced = is_compiling()
    try:
        layout = layout_of(*facts) if is_traced else _known_layout(*facts)
    except TypeError:    # symbolic sizes of other tracers have no hash
        layout = layout_of(*facts)
    q, _, _, _, indices, counts, _, _, starts, *_ = given
    if not is_traced and checks.reads_contents(q) and not checks.has_no_data(q):
        _check_values('indices', indices, (-1, layout.blocks - 1), function)
        _check_values('index_counts', counts, (0, indices.size(-1)), function)
        if starts is not None and (problem := checks.sequences_problem(
                'q', starts.tolist(), [], q.size(0))):
            raise RuntimeError(checks.error(function.name, *problem))
    return layout


def layout_of(forms: tuple, block: int | str, by_page: bool, function: Function) -> Layout:
    """forms: the fields of a Form for each of NAMES, None, or the type of what is no tensor."""
    given = {name: Form(*form) if isinstance(form, tuple) else form
             for name, form in zip(NAMES, forms)}
    problem = (_type_problem(given, block, function) or _list_problem(given)
               or _shape_problem(given, by_page, function)
               or _block_problem(given, block, by_page, function))
    if not problem:
        layout, problem = _lay_out(given, block, by_page, function)
    if problem:
        raise RuntimeError(checks.error(function.name, *problem))
    return layout


_known_layout = functools.lru_cache(maxsize=1024)(layout_of)


def _type_problem(given: dict, block: int | str, function: Function) -> tuple | None:
    """What was expected, what it is instead, and a hint."""
    if block not in BLOCKS:
        return f'index_block to be one of {BLOCKS}', str(block)
    ranks = {'q': (3, 4), 'k': (4,), 'v': (4,)}
    for name, form in given.items():
        public = getattr(function, name, name)
        if form is None and name in _NEEDED or not (form is None or isinstance(form, Form)):
            return f'{public} to be a tensor', 'None' if form is None else form.__name__
        if name in ranks and len(form.shape) not in ranks[name]:
            hidden = function.hidden if name != 'q' else 0
            known = ' or '.join(str(rank - hidden) for rank in ranks[name])
            return f'{public} to have {known} dimensions', str(len(form.shape) - hidden)
    return None


def _list_problem(given: dict) -> tuple | None:
    q, indices, counts, starts = (given[name] for name in (
        'q', 'indices', 'index_counts', 'cu_seqlens_q'))
    tokens, heads = tuple(q.shape[:-2]), given['k'].shape[2]
    if tuple(indices.shape[:-1]) not in (tokens, (*tokens, heads)):
        listed = ', '.join(map(str, tokens))
        return (f'indices of shape ({listed}, n) or ({listed}, {heads}, n)',
                str(tuple(indices.shape)))
    if counts is not None and tuple(counts.shape) != tokens:
        return f'index_counts of shape {tokens}', str(tuple(counts.shape))
    for name, form in (('indices', indices), ('index_counts', counts), ('cu_seqlens_q', starts)):
        if form is not None and (form.dtype != torch.int32 or form.device != q.device):
            return (f'{name} to be int32 on {q.device}',
                    f'{checks.dtype_name(form.dtype)} on {form.device}')
    if indices.shape[-1] > 1 and indices.stride[-1] != 1:
        return 'indices with a contiguous last dimension', f'stride {indices.stride[-1]}'
    if starts is None:
        return None
    if len(tokens) != 1:
        return 'q to have 3 dimensions with cu_seqlens_q', '4'
    if len(starts.shape) != 1 or starts.shape[0] == 0:
        return 'cu_seqlens_q of shape (batch + 1,)', str(tuple(starts.shape))
    return None


def _shape_problem(given: dict, by_page: bool, function: Function) -> tuple | None:
    """The op sees views, and would take some wrong shapes."""
    q, k, v, starts = (given[name] for name in ('q', 'k', 'v', 'cu_seqlens_q'))
    *rows, head_dim = q.shape
    *places, heads_k, _ = k.shape
    if heads_k == 0 or rows[-1] % heads_k != 0:
        return (f'the heads of q to be a multiple of the heads of {function.k}, {heads_k}',
                str(rows[-1]))
    if k.shape[3] != head_dim:
        return f'the head_dim of {function.k} to be that of q, {head_dim}', str(k.shape[3])
    batch, columns = q.shape[0] if starts is None else starts.shape[0] - 1, v.shape[3]
    scale_k = scale_v = (places[0] if by_page else batch, heads_k)
    if given['qv'] is not None and given['v_descale'] is not None:
        scale_v = (*places, *given['v_descale'].shape[2:3])
    for name, shape in (
            ('v', (*places, heads_k, columns)), ('qv', (*rows, columns)),
            ('out', (*rows, columns)), ('s_aux', rows[-1:]), ('k_descale', scale_k),
            ('v_descale', scale_v)):
        form, hidden = given[name], function.hidden if name == 'v' else 0
        if form is not None and tuple(form.shape) != tuple(shape):
            return (f'{getattr(function, name, name)} of shape {tuple(shape[hidden:])}',
                    str(tuple(form.shape[hidden:])))
    for name, form in given.items():
        if form is not None and form.device != q.device:
            return f'{getattr(function, name, name)} on {q.device}', str(form.device)
    if starts is not None and batch == 0 and q.shape[0] > 0:
        return 'cu_seqlens_q of one sequence or more', 'none'
    return None


def _block_problem(given: dict, block: int, by_page: bool, function: Function) -> tuple | None:
    k, scale = given['k'], None if given['qv'] is None else given['v_descale']
    size = k.shape[1]
    if size % block != 0:
        return f'{function.slots} to be a multiple of index_block, {block}', str(size)
    if by_page and size != block:
        return f'index_block to be the page size, {size}, with descale_by_page', str(block)
    for name, x in ((function.k, k), (function.v, given['v']), ('v_descale', scale)):
        if x is not None and size != block and not flattens(x.shape, x.stride):
            return (f'{name} with a page stride of {size} * {x.stride[1]}, so that slots follow '
                    'one another', str(x.stride[0]), 'a cache is never copied')
    return None


def _check_values(name: str, x: Tensor | None, limits: tuple[int, int],
                  function: Function) -> None:
    if x is None or is_batchedtensor(x):    # vmap reads no values
        return
    is_wrong = (x < limits[0]) | (x > limits[1])
    if is_wrong.any():
        place = is_wrong.nonzero()[0].tolist()
        raise RuntimeError(checks.error(
            function.name, f'{name}{place} to be from {limits[0]} to {limits[1]}',
            str(x[tuple(place)].item())))


# ------------------------------------------------------------------------------------------- layout
def flattens(sizes: tuple, strides: tuple, count: int = 2) -> bool:
    """Whether the first dimensions are one in memory."""
    kept = [i for i in range(count) if sizes[i] != 1]
    return all(strides[i] == sizes[j] * strides[j] for i, j in zip(kept, kept[1:])) or 0 in sizes


def _lay_out(given: dict, block: int, by_page: bool,
             function: Function) -> tuple[Layout | None, tuple | None]:
    """The layout, or what was expected, what it is instead, and a hint."""
    q, k, v, out = (given[name] for name in ('q', 'k', 'v', 'out'))
    *tokens, heads_q, _ = q.shape
    pages, size, heads_k, _ = k.shape
    is_by_head = len(given['indices'].shape) == len(q.shape) and heads_k > 1
    heads, blocks, step = heads_k if is_by_head else 1, pages * size // block, 1
    if is_by_head:
        step, *others = (_step_of(x, block, blocks) for x in (k, v))
        if step == 0 or others != [step] or (by_page and step != heads):
            memory = 'contiguous' if function.hidden else (
                '(pages, heads_k, slots, head_dim) in memory' if by_page else
                'contiguous, or (pages, heads_k, slots, head_dim) in memory')
            return None, (
                f'{function.k} and {function.v} {memory}, for indices by KV head' + (
                    ' with descale_by_page' if by_page else ''),
                f'strides {tuple(k.stride[function.hidden:])} and '
                f'{tuple(v.stride[function.hidden:])}', 'a cache is never copied')
        if blocks * step + heads > MOST_PAGES:
            return None, (f'at most {MOST_PAGES} places for indices by KV head',
                          str(blocks * step + heads))
    is_row = heads == 1 and len(tokens) == 2 and tokens[1] == 1
    has_rows = out is None or flattens(
        (*tokens, heads), (*out.stride[:-2], heads_q // heads * out.stride[-2]), len(tokens) + 1)
    scale = None if given['qv'] is None else given['v_descale']
    return Layout(heads, blocks, step,
                  None if is_row else (math.prod(tokens) * heads, 1, heads_q // heads), has_rows,
                  tuple(None if x is None else _view_of(x, block, is_by_head, step)
                        for x in (k, v, scale))), None


def _step_of(x: Form, block: int, blocks: int) -> int:
    """Page ids from a block to the next one, if they count KV heads; 0: they cannot."""
    heads, distance = x.shape[2], x.stride[2]
    if blocks <= 1:
        return heads
    stride = x.stride[0] if x.shape[1] == block else block * x.stride[1]
    return stride // distance if distance > 0 and stride % distance == 0 and (
        stride >= heads * distance) else 0


def _view_of(x: Form, block: int, is_by_head: bool, step: int) -> View | None:
    pages, size, *others = x.shape
    blocks = pages * size // block
    if is_by_head:
        count = (blocks - 1) * step + others[0] if blocks > 0 else 0
        return View((count, block, 1, others[1]), (x.stride[2], x.stride[1], 1, x.stride[3]))
    return None if size == block else View((blocks, block, *others))


# -------------------------------------------------------------------------------------------- views
def view_of(x: Tensor, view: View | None) -> Tensor:
    if view is None:
        return x
    sizes, strides = view
    return x.view(sizes) if strides is None else x.as_strided(sizes, strides)


def rows_of(x: Tensor | None, layout: Layout) -> Tensor | None:
    """(*tokens, heads_q, columns) as (tokens * heads, 1, heads_q / heads, columns)."""
    return x if x is None or layout.rows is None else x.reshape(*layout.rows, x.size(-1))


def out_of(out: Tensor | None, layout: Layout) -> Tensor | None:
    """The rows of out, or other memory if they have no view."""
    if out is None or layout.has_rows:
        return rows_of(out, layout)
    return out.new_empty(*layout.rows, out.size(-1))


def table_of(choice: Choice, layout: Layout) -> Tensor:
    """The page table: (tokens, n), or (tokens * heads, n) pages of a head. What is no block is no
    page.
    """
    indices, heads = choice.indices, layout.heads
    if heads > 1:
        head = torch.arange(heads, dtype=torch.int32, device=indices.device).unsqueeze(1)
        indices = torch.add(head, indices.clamp(-1, layout.blocks), alpha=layout.step)
    return indices if indices.dim() == 2 else indices.flatten(0, -2)


def slots_of(choice: Choice, heads: int) -> Tensor:
    """Slots that count in each row of the table."""
    counts, block = choice.counts.flatten(), choice.block
    if block > 1 or (is_compiling() and not counts.is_cuda):    # the CPU path refuses others
        counts = counts.clamp(0, choice.indices.size(-1))
    counts = counts if block == 1 else counts * block
    return counts if heads == 1 else counts.repeat_interleave(heads)


def scales_of(scale: Tensor, q: Tensor, starts: Tensor | None, heads: int,
              by_page: bool) -> Tensor:
    """(sequences, heads_k) as scales of each query, (tokens, heads_k) or (tokens * heads, 1); those
    of pages as scales of the pages of the table.
    """
    if q.dim() == 4 and not by_page and q.size(1) != 1:
        scale = scale[:, None].expand(-1, q.size(1), -1).flatten(0, 1)
    elif starts is not None and not by_page:
        tokens = torch.arange(q.size(0), device=q.device, dtype=starts.dtype)
        scale = scale[torch.searchsorted(starts[1:-1].contiguous(), tokens, right=True)]
    return scale if heads == 1 else scale.reshape(-1, 1)
