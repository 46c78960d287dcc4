"""Attention in plain PyTorch, obvious rather than fast: CPU implementation and tests' oracle.

Called by `library.py` (CPU tensors), `fallback.py` and the tests (usually in float64, on any
device). Memory is that of the scores: (batch, heads_q, seqlen_q, seqlen_k) of the compute dtype.
`attend` and `attend_backward` know every variant of the scores that `Score` and `Mask` describe;
`attend_packed` and `attend_packed_backward` also sequences of several lengths in one tensor.

What it defines, and what the kernels must agree with:
- Causal and windows are aligned bottom-right: query i stands at key i + seqlen_k - seqlen_q.
- A row without a visible key gives O = 0, LSE = -inf and gradients 0; with a sink, LSE = sink.
  NaN in the inputs reaches the outputs.
- Query head h uses KV head h // (heads_q / heads_k).
- The softcap applies to scaled scores, before the mask.
- A sink is one more key of the softmax, of logit s_aux[head] in every row and of value 0. The LSE
  includes it, the row maximum does not.
- In packed tensors, a sequence's bottom-right corner is that of its used lengths. Rows that belong
  to no sequence or lie past its used length are never read: O = 0, LSE = -inf, gradients 0.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the CPU path computes in: float32 for 16-bit types, else the type itself."""
    return _WIDE_DTYPES.get(dtype, dtype)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the LSE of inputs of `dtype`: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees; a key must pass all rules.

    Query i stands at key p = i + seqlen_k - seqlen_q.

    Attributes:
        causal: no key after p; replaces the right side of the window.
        window: (left, right): keys p - left to p + right, both included; -1 is no limit.
        chunk: keys of the same chunk as p, where chunks of this size start at key 0; 0 is no limit.
        tree: (seqlen_q, seqlen_q) bool, which of the last keys; None: all.
        visible: (batch or 1, heads_q or 1, seqlen_q, seqlen_k) bool, which keys; of packed
            sequences one each; None: all.
    """
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    tree: Tensor | None = field(default=None, compare=False)
    visible: Tensor | list[Tensor] | None = field(default=None, compare=False)

    @property
    def is_full(self) -> bool:
        return self == Mask() and self.tree is None and self.visible is None

    def of_sequence(self, number: int) -> Mask:
        """The mask of one of several packed sequences."""
        return (self if self.visible is None else
                dataclasses.replace(self, visible=self.visible[number]))

    def hidden(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        """(seqlen_q, seqlen_k), True where the query does not see the key; visible aside."""
        position = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
        key = torch.arange(seqlen_k, device=device)
        left, right = self.window[0], 0 if self.causal else self.window[1]
        hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        if left != -1:
            hidden |= position - key > left
        if right != -1:
            hidden |= key - position > right
        if self.chunk:
            # The floor: positions before key 0 are in chunks that hold no key.
            hidden |= position // self.chunk != key // self.chunk
        if self.tree is not None and seqlen_k > 0:
            last = min(seqlen_q, seqlen_k)
            hidden[:, seqlen_k - last:] |= ~self.tree[:, seqlen_q - last:]
        return hidden


@dataclass(frozen=True)
class Score:
    """The logits of q and k: scale * q k^T, then softcap * tanh(. / softcap), then the mask.

    Attributes:
        scale: factor on q k^T.
        softcap: bound of the scaled scores; 0 is none.
        mask: masked keys have logit -inf.
    """
    scale: float
    softcap: float = 0.0
    mask: Mask = Mask()

    def of_sequence(self, number: int) -> Score:
        return dataclasses.replace(self, mask=self.mask.of_sequence(number))

    def logits(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits, (batch, heads_k, heads_q / heads_k, seqlen_q, seqlen_k), and their derivative
        with respect to the scaled scores: of the same shape, or None for 1 everywhere.
        """
        q = q.unflatten(2, (k.size(2), q.size(2) // k.size(2)))
        scores = torch.einsum('bqhgd,bkhd->bhgqk', q, k) * self.scale
        slope = None
        if self.softcap:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped * capped
        if not self.mask.is_full:
            hidden = self.mask.hidden(q.size(1), k.size(1), q.device)
            scores = scores.masked_fill(hidden, -math.inf)
        if self.mask.visible is not None:
            visible = self.mask.visible.expand(-1, q.size(2) * q.size(3), -1, -1)
            scores = scores.masked_fill(~visible.unflatten(1, q.shape[2:4]), -math.inf)
        return scores, slope


class Inputs(NamedTuple):
    """What attention is a function of.

    Dense: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim) and
    v (batch, seqlen_k, heads_k, head_dim_v); heads_k divides heads_q. Packed: without batch, the
    sequences one after the other. s_aux: sinks, (heads_q,) of any floating dtype, or None.
    """
    q: Tensor
    k: Tensor
    v: Tensor
    s_aux: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.q.device

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(None if x is None else x.to(dtype) for x in self))


class Outputs(NamedTuple):
    """out: (batch, seqlen_q, heads_q, head_dim_v), dtype of q. lse, natural logarithm, and row_max,
    the largest logit of a visible key (None unless asked for): (batch, heads_q, seqlen_q), float32
    (float64 when computed in float64). Packed: without batch. All contiguous.
    """
    out: Tensor
    lse: Tensor
    row_max: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of the inputs of these names, with their shapes and dtypes, contiguous.

    dk and dv of a KV head are summed over the query heads that use it, ds_aux over batch and rows;
    ds_aux is None without sinks.
    """
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds_aux: Tensor | None

    def like(self, inputs: Inputs) -> Gradients:
        """These values in the dtypes of the inputs."""
        return Gradients(*(None if grad is None else grad.to(x.dtype).contiguous()
                           for grad, x in zip(self, inputs)))


class Sequences(NamedTuple):
    """Where the sequences lie in a packed tensor.

    Attributes:
        cu_seqlens: (batch + 1,) integers; sequence b has rows cu_seqlens[b] up to
            cu_seqlens[b + 1].
        seqused: (batch,) integers, how many of them count; None for all.
    """
    cu_seqlens: Tensor
    seqused: Tensor | None = None

    def slices(self) -> list[slice]:
        """The rows that count, sequence by sequence."""
        starts = self.cu_seqlens[:-1]
        ends = self.cu_seqlens[1:] if self.seqused is None else starts + self.seqused
        return [slice(*pair) for pair in zip(starts.tolist(), ends.tolist())]


class Lengths(NamedTuple):
    """The sequences of q, and those of k and v."""
    q: Sequences
    k: Sequences

    def slices(self) -> list[tuple[slice, slice]]:
        """The rows of q and of k that count, sequence by sequence."""
        return list(zip(self.q.slices(), self.k.slices()))


def without_autocast(function: Callable) -> Callable:
    """The function with autocast off, so that its dtypes hold."""
    @functools.wraps(function)
    def wrapped(first: Tensor | Inputs, *others, **options):
        if first.device.type == 'meta':    # has no autocast
            return function(first, *others, **options)
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *others, **options)
    return wrapped


@without_autocast
def attend(inputs: Inputs, score: Score, compute_dtype: torch.dtype | None = None,
           with_row_max: bool = False, lengths: Lengths | None = None) -> Outputs:
    """softmax(logits) v over the keys and, if there is one, the sink (arXiv 2407.08608, 2.2).

    Args:
        inputs: dense tensors; with lengths those of `attend_packed`.
        score: how logits come from q and k.
        compute_dtype: dtype of every step in between; default: the dtype of q.
        with_row_max: also the row maximum.
    """
    if lengths is not None:
        return attend_packed(inputs, score, lengths, compute_dtype, with_row_max)
    result = _attend(inputs.to(compute_dtype or inputs.q.dtype), score, with_row_max)
    return result._replace(out=result.out.to(inputs.q.dtype))


@without_autocast
def attend_backward(dout: Tensor, dlse: Tensor | None, inputs: Inputs, score: Score,
                    compute_dtype: torch.dtype | None = None, outputs: Outputs | None = None,
                    lengths: Lengths | None = None) -> Gradients:
    """Gradients of `attend`.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads_q, head_dim_v).
        dlse: gradient of lse, (batch, heads_q, seqlen_q), or None for zero.
        inputs, score, compute_dtype, lengths: as in `attend`.
        outputs: out and lse of `attend`, or of more keys than these: then the gradients are the
            part of these keys. Default: everything is recomputed from the inputs.
    """
    if lengths is not None:
        return attend_packed_backward(dout, dlse, inputs, score, lengths, compute_dtype, outputs)
    dtype = compute_dtype or inputs.q.dtype
    return _gradients(dout.to(dtype), dlse, inputs.to(dtype), score, outputs).like(inputs)


@without_autocast
def attend_packed(inputs: Inputs, score: Score, lengths: Lengths,
                  compute_dtype: torch.dtype | None = None, with_row_max: bool = False) -> Outputs:
    """`attend` of packed tensors: of each sequence alone. lengths: which rows are a sequence."""
    q, k, v, s_aux = inputs.to(compute_dtype or inputs.q.dtype)
    out = q.new_zeros(*q.shape[:2], v.size(2))
    lse = q.new_full((q.size(1), q.size(0)), -math.inf, dtype=lse_dtype(q.dtype))
    row_max = lse.clone() if with_row_max else None
    for number, (rows, keys) in enumerate(lengths.slices()):
        one = Inputs(q[None, rows], k[None, keys], v[None, keys], s_aux)
        part = _attend(one, score.of_sequence(number), with_row_max)
        out[rows], lse[:, rows] = part.out[0], part.lse[0]
        if with_row_max:
            row_max[:, rows] = part.row_max[0]
    return Outputs(out.to(inputs.q.dtype), lse, row_max)


@without_autocast
def attend_packed_backward(dout: Tensor, dlse: Tensor | None, inputs: Inputs, score: Score,
                           lengths: Lengths, compute_dtype: torch.dtype | None = None,
                           outputs: Outputs | None = None) -> Gradients:
    """Gradients of `attend_packed`: those of each sequence alone; ds_aux is their sum."""
    dtype = compute_dtype or inputs.q.dtype
    wide, dout = inputs.to(dtype), dout.to(dtype)
    total = Gradients(*(None if x is None else torch.zeros_like(x) for x in wide))
    for number, (rows, keys) in enumerate(lengths.slices()):
        one = Inputs(wide.q[None, rows], wide.k[None, keys], wide.v[None, keys], wide.s_aux)
        own = None if outputs is None else Outputs(outputs.out[None, rows],
                                                   outputs.lse[None, :, rows])
        part = _gradients(dout[None, rows], None if dlse is None else dlse[None, :, rows], one,
                          score.of_sequence(number), own)
        total.dq[rows], total.dk[keys], total.dv[keys] = part.dq[0], part.dk[0], part.dv[0]
        if part.ds_aux is not None:
            total.ds_aux.add_(part.ds_aux)
    return total.like(inputs)


def _attend(inputs: Inputs, score: Score, with_row_max: bool) -> Outputs:
    """`attend` in the dtype of the inputs."""
    q, k, v, s_aux = inputs
    keys, _ = score.logits(q, k)                                    # (b, h_k, group, sq, sk)
    logits = _with_sink(keys, s_aux)                                # sk + 1 columns with a sink
    lse = torch.logsumexp(logits.to(lse_dtype(q.dtype)), dim=-1)    # (b, h_k, group, sq)
    p = _probabilities(logits, lse)[..., :k.size(1)]
    out = torch.einsum('bhgqk,bkhd->bqhgd', p, v)
    # A row that sees no key is 0, whatever v holds: 0 times NaN is not.
    sees_none = (keys == -math.inf).all(-1).permute(0, 3, 1, 2).unsqueeze(-1)
    out = out.masked_fill(sees_none, 0.0).flatten(2, 3)
    row_max = _row_max(keys).to(lse.dtype).flatten(1, 2) if with_row_max else None
    return Outputs(out.contiguous(), lse.flatten(1, 2).contiguous(), row_max)


def _gradients(dout: Tensor, dlse: Tensor | None, inputs: Inputs, score: Score,
               outputs: Outputs | None) -> Gradients:
    """`attend_backward` in the dtype of the inputs (arXiv 2407.08608, 2.2).

    With P = softmax(S): dV = P^T dO, dP = dO V^T, dS = P * (dP - delta + dLSE), of the sink, whose
    value is 0, with dP = 0. Then dS is taken through the softcap, and dQ = scale dS K,
    dK = scale dS^T Q. From outputs: P = exp(S - LSE), delta = rowsum(dO * O); without them
    delta = rowsum(P * dP), which is the same over all keys.
    """
    q, k, v, s_aux = inputs
    heads = (k.size(2), q.size(2) // k.size(2))
    logits, slope = score.logits(q, k)                              # (b, h_k, group, sq, sk)
    logits = _with_sink(logits, s_aux)                              # sk + 1 columns with a sink
    p = (_probabilities(logits, torch.logsumexp(logits, dim=-1)) if outputs is None else
         _given_probabilities(logits, outputs.lse.unflatten(1, heads)))
    dout = dout.unflatten(2, heads)                                 # (b, sq, h_k, group, d_v)

    dv = torch.einsum('bhgqk,bqhgd->bkhd', p[..., :k.size(1)], dout)
    dp = torch.einsum('bqhgd,bkhd->bhgqk', dout, v)
    dp = dp if s_aux is None else F.pad(dp, (0, 1))
    delta = ((p * dp).sum(-1, keepdim=True) if outputs is None else
             torch.einsum('bqhgd,bqhgd->bhgq', dout, outputs.out.to(dout.dtype).unflatten(2, heads)
                          ).unsqueeze(-1))
    ds = dp - delta
    if dlse is not None:
        ds = ds + dlse.to(ds.dtype).unflatten(1, heads).unsqueeze(-1)
    ds = p * ds
    ds_aux = None if s_aux is None else ds[..., -1].sum((0, 3)).flatten()
    ds = ds[..., :k.size(1)]
    ds = (ds if slope is None else ds * slope) * score.scale
    dq = torch.einsum('bhgqk,bkhd->bqhgd', ds, k).flatten(2, 3)
    dk = torch.einsum('bhgqk,bqhgd->bkhd', ds, q.unflatten(2, heads))
    return Gradients(dq, dk, dv, ds_aux)


def _with_sink(logits: Tensor, s_aux: Tensor | None) -> Tensor:
    """The logits, followed by a column of the sinks."""
    if s_aux is None:
        return logits
    column = s_aux.unflatten(0, logits.shape[1:3])[None, :, :, None, None]
    return torch.cat([logits, column.expand(*logits.shape[:4], 1)], dim=-1)


def _row_max(logits: Tensor) -> Tensor:
    """The largest logit of each row; -inf where there is no key at all."""
    if logits.size(-1) == 0:
        return logits.new_full(logits.shape[:-1], -math.inf)
    return logits.amax(-1)


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """softmax over keys; rows that see no key (LSE = -inf), 0/0 in the formula, are 0."""
    return torch.softmax(logits, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0)


def _given_probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse); 0 in rows of LSE = -inf."""
    lse = lse.to(logits.dtype).unsqueeze(-1)
    return torch.exp(logits - lse).masked_fill(lse == -math.inf, 0)
