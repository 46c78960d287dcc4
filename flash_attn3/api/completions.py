"""Attention for training on prompts that completions share: each prompt is there once.

Two calls of the general op: every segment onto itself, causal; and all completions of a tree, as
one sequence, onto the keys of its prompt, unmasked. `merge_states` joins them. The gradients do not
go through the merge: `bwd`, given out and LSE of all keys, computes the part of the keys
that it sees, and the parts add up.
"""
from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from flash_attn3.api import merging
from flash_attn3.arguments import OPS, tuple_of
from flash_attn3.cpu import fallback
from flash_attn3.ops import autograd, checks, dense_and_varlen, derivatives, dtensors, library
from flash_attn3.ops.dense_and_varlen import Execution, General

_OP = 'flash_attn_completions_func'
_DEPRECATED = checks.error(
    _OP, 'flash_attn_func with a mask', 'a function that the next release has not',
    'mask=AttentionMask.completions(cu_seqlens, cu_trees, seqlen), once for all layers')
_attend = torch.ops.flash_attn3.attend.default
_bwd = torch.ops.flash_attn3.bwd.default
_fwd_traced = torch.ops.flash_attn3.fwd_completions.default


# What follows q, k and v of the op `fwd_completions`.
Completions = tuple_of('Completions', __name__, *OPS['fwd_completions'].takes[1:])


def flash_attn_completions_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_trees: Tensor,
        max_seqlen: int | Tensor = 0, softmax_scale: float | None = None, softcap: float = 0.0,
        pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
        return_attn_probs: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of prompts and their completions, where completions share a prompt.

    Deprecated: `flash_attn_func` with `mask=AttentionMask.completions(...)` is one call of our
    kernels where this is two, and has sinks.

    A tree is a prompt and any number of completions of it, each a segment of rows: the prompt of
    tree 0, its completions one after the other, the prompt of tree 1, and so on. A query sees the
    keys of its own segment up to itself, and one of a completion also the whole prompt. That is
    causal attention of each completion after a copy of its prompt, without the copies. Gradients
    of q, k and v are exact; those of a prompt's keys and values sum over its completions. Nothing
    waits for a Hopper GPU. There are no windows, no sinks and no FP8.

    Args:
        q: (total, heads_q, head_dim); dtype and strides of q, k and v as in `flash_attn_func`.
        k, v: (total, heads_k, head_dim), that of v may be another one (head_dim_v); heads_k divides
            heads_q.
        cu_seqlens: (segments + 1,) int32, contiguous, on the device of q: where segments begin, and
            the end of the last; from 0 on, never falling, up to at most total. A segment may have
            no rows. Rows after the last are never read: there out is 0, lse -inf, gradients 0.
        cu_trees: (trees + 1,) int32, likewise: which segments are prompts, and the number of
            segments; from 0 on, never falling. A tree may have no completions, or no segment.
            What both contain is checked on the CPU; on CUDA devices with FLASH_ATTN3_CHECKS=1.
        max_seqlen: length of the longest segment, a number or a tensor with one, which is not read
            from a GPU. A hint by which work is planned. Default 0: unknown.
        softmax_scale, softcap, pack_gqa, deterministic, sm_margin, return_attn_probs: as in
            `flash_attn_func`.

    Returns:
        out, (total, heads_q, head_dim_v), dtype of q; with return_attn_probs (out, lse), where lse
        is (heads_q, total), float32 (float64 for float64), over all keys that a query sees.

    Raises:
        RuntimeError: a wrong list, shape, dtype, stride, device or number.
        NotImplementedError: DTensors; derivatives as in `flash_attn_func`.

    Example:
        >>> q, k, v = (torch.randn(9, 16, 128, device='cuda').bfloat16() for _ in range(3))
        >>> starts = torch.tensor([0, 4, 6, 9], dtype=torch.int32, device='cuda')
        >>> tree = torch.tensor([0, 3], dtype=torch.int32, device='cuda')    # a prompt of 4 rows
        >>> out = flash_attn3.flash_attn_completions_func(q, k, v, starts, tree)
    """
    if not is_compiling():
        warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)
    dtensors.reject(_OP, q)
    derivatives.reject_of_scalars(_OP, softmax_scale=softmax_scale, softcap=softcap)
    longest = checks.length_bound('max_seqlen', max_seqlen, q, _OP)
    own = Completions(cu_seqlens, cu_trees, longest, softmax_scale, softcap, pack_gqa, sm_margin,
                      deterministic)
    if q.is_cuda and not library.kernels_serve(q.device):
        results = _fall_back(q, k, v, own)
    elif is_compiling() or derivatives.is_forward_mode():
        results = _fwd_traced(q, k, v, *own)
    elif checks.needs_grad(q, k, v):
        results = _differentiable(q, k, v, *own)
    else:
        results = _forward(q, k, v, *own)
    return results if return_attn_probs else results[0]


# ------------------------------------------------------------------------------------------ checks
def _check(q: Tensor, k: Tensor, v: Tensor, own: Completions, rules_of: str | None = None) -> None:
    """Raises RuntimeError for what `attend` does not check itself."""
    for name in ('cu_seqlens', 'cu_trees'):
        x = getattr(own, name)
        is_list = (isinstance(x, Tensor) and x.dim() == 1 and x.dtype == torch.int32
                   and x.numel() > 0 and x.is_contiguous())
        if not is_list or x.device != q.device:
            got = (f'{tuple(x.shape)}, {checks.dtype_name(x.dtype)} on {x.device}, strides '
                   f'{x.stride()}' if isinstance(x, Tensor) else repr(x))
            raise RuntimeError(checks.error(
                _OP, f'{name} to be a contiguous int32 tensor of one dimension, with a number or '
                f'more, on the device of q, {q.device}', got))
    if q.dim() == k.dim() == 3 and q.size(0) != k.size(0):
        raise RuntimeError(checks.error(_OP, f'k and v to have as many rows as q, {q.size(0)}',
                                        str(k.size(0))))
    has_contents = not (q.is_meta or type(q) is FakeTensor)
    if has_contents and (rules_of or checks.reads_contents(q)):
        checks.check_forward(dict(q=q, k=k, v=v), _onto_itself(own), _execution(own),
                             rules_of=rules_of)
        _check_contents(q, own)


def _check_contents(q: Tensor, own: Completions) -> None:
    """Raises RuntimeError for bad contents of the lists. Reading them waits for their device."""
    starts, trees = own.cu_seqlens.tolist(), own.cu_trees.tolist()
    if problem := checks.sequences_problem('q', starts, [], q.size(0), suffix=''):
        raise RuntimeError(checks.error(_OP, *problem))
    segments = len(starts) - 1
    if trees[0] != 0:
        raise RuntimeError(checks.error(_OP, 'cu_trees[0] to be 0', str(trees[0])))
    for tree, (first, end) in enumerate(zip(trees, trees[1:])):
        if not first <= end <= segments:
            raise RuntimeError(checks.error(
                _OP, f'cu_trees[{tree + 1}], the end of tree {tree}, to be from {first}, its '
                f'prompt, to {segments}, the segments', str(end)))
    if trees[-1] != segments:
        raise RuntimeError(checks.error(_OP, f'cu_trees to end at {segments}, the segments',
                                        str(trees[-1])))


# --------------------------------------------------------------------------------------- the calls
def _onto_itself(own: Completions) -> General:
    """Arguments of attention of each segment on itself."""
    return General(own.cu_seqlens, own.cu_seqlens, max_seqlen_q=own.max_seqlen,
                   max_seqlen_k=own.max_seqlen, softmax_scale=own.softmax_scale, causal=True,
                   softcap=own.softcap)


def _onto_prompts(own: Completions) -> General:
    """A sequence for each tree: queries of its completions, keys of its prompt. Before them stands
    one of no keys, whose queries are the first prompt.

    The queries of a sequence end where the next prompt does, its keys where the next tree begins;
    how many of them count is the difference of both.
    """
    segments = own.cu_seqlens.size(0) - 1
    trees = own.cu_trees.clamp(0, segments)    # unchecked values must not index past cu_seqlens
    begins = own.cu_seqlens.index_select(0, trees)
    prompts = torch.minimum(trees[:-1] + 1, trees[1:])    # a tree may have no segments
    prompt_ends = own.cu_seqlens.index_select(0, prompts)
    of_queries = torch.cat((begins[:1], prompt_ends, begins[-1:]))
    of_keys = torch.cat((begins[:1], begins))
    return General(of_queries, of_keys, of_keys[1:] - of_queries[:-1],
                   (of_queries - of_keys)[:-1], max_seqlen_k=own.max_seqlen,
                   softmax_scale=own.softmax_scale, softcap=own.softcap)


def _execution(own: Completions) -> Execution:
    return Execution(own.pack_gqa, own.sm_margin)


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    """The op `fwd_completions` on any device that the ops serve."""
    own = Completions(*arguments)
    _check(q, k, v, own)
    execution = _execution(own)[:-1]
    out, lse, _ = _attend(q, k, v, None, *_onto_itself(own), *execution)
    others, other_lse, _ = _attend(q, k, v, None, *_onto_prompts(own), *execution)
    return merging.merge_states((out, others), (lse, other_lse))


def _fall_back(q: Tensor, k: Tensor, v: Tensor, own: Completions) -> tuple[Tensor, Tensor]:
    """The call on CUDA devices without kernels, in plain PyTorch, which also differentiates it."""
    _check(q, k, v, own, rules_of='cpu')
    fallback.warn_once(q.device, _OP, depth=4)
    parts = [fallback.attention(q, k, v, call, True)[:2]
             for call in (_onto_itself(own), _onto_prompts(own))]
    return merging.merge_states(*zip(*parts))


# --------------------------------------------------------------------------------------- gradients
def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *arguments = inputs
    own = Completions(*arguments)
    ctx.save_for_backward(q, k, v, *output, own.cu_seqlens, own.cu_trees)
    ctx.scalars = own._replace(cu_seqlens=None, cu_trees=None,
                               deterministic=checks.wants_determinism(own.deterministic))
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    """Gradients for the inputs of `fwd_completions`."""
    *tensors, cu_seqlens, cu_trees = ctx.saved_tensors
    own = ctx.scalars._replace(cu_seqlens=cu_seqlens, cu_trees=cu_trees)
    if dout is None:
        dout = torch.zeros_like(tensors[3])
    gradients = autograd.first_derivatives(_OP, _gradients, dout, dlse, *tensors, *own)
    return (*gradients, *(None for _ in Completions._fields))


def _gradients(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
               lse: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    own = Completions(*arguments)
    given = dout, dlse, q, k, v, out, lse
    parts = [_bwd(*given, *dense_and_varlen.for_backward(call, own.deterministic))[:3]
             for call in (_onto_itself(own), _onto_prompts(own))]
    return tuple(one.add_(other) for one, other in zip(*parts))


# ----------------------------------------------------------------------------------------- the op
def _fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *_) -> tuple[Tensor, Tensor]:
    return dense_and_varlen.forward_fake(q, k, v, *General(cu_seqlens, cu_seqlens))[:2]


library.register('fwd_completions', _forward, _fake)
library.LIBRARY.impl('fwd_completions', _forward, 'CUDA')
_differentiable = autograd.define('fwd_completions', _forward, _setup_context, _backward)
