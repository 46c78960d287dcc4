"""Attention written out row by row in float64, for the tests of reference.py.

Shares no code with it, and its derivatives are autograd's. Called by test_reference_scores.py and
test_reference_packed.py.
"""
from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash_attn3.cpu.reference import Gradients, Inputs, Mask, Outputs, Score

WINDOW_SIDES = st.integers(-1, 12)
MASKS = st.builds(Mask, st.booleans(), st.tuples(WINDOW_SIDES, WINDOW_SIDES),
                  st.sampled_from([0, 0, 1, 2, 3, 5, 16]))
SCORES = st.builds(Score, st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0.0, 0.0, 0.5, 4.0]),
                   MASKS)


def random_inputs(q_shape: tuple[int, ...], k_shape: tuple[int, ...], head_dim_v: int,
                  sinks: bool) -> Inputs:
    """Float64 inputs of these shapes of q and k."""
    v_shape = (*k_shape[:-1], head_dim_v)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in (q_shape, k_shape, v_shape))
    return Inputs(q, k, v, torch.randn(q_shape[-2], dtype=torch.float64) if sinks else None)


def sees(mask: Mask, row: int, key: int, seqlen_q: int, seqlen_k: int) -> bool:
    """May the row see the key? Each rule alone, in plain numbers."""
    position = row + seqlen_k - seqlen_q
    left, right = mask.window
    rules = [not mask.causal or key <= position,
             left == -1 or key >= position - left,
             right == -1 or key <= position + right]
    if mask.chunk:
        first = position - position % mask.chunk
        rules.append(first <= key < first + mask.chunk)
    return all(rules)


def attend(inputs: Inputs, score: Score) -> Outputs:
    """What reference.attend computes, with the row maximum."""
    q, k, v, s_aux = inputs
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, group = k.size(1), heads_q // max(1, k.size(2))
    none = q.new_tensor(-math.inf)
    out, lse, row_max = {}, {}, {}
    for row in range(seqlen_q):
        seen = [key for key in range(seqlen_k) if sees(score.mask, row, key, seqlen_q, seqlen_k)]
        for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads_q)).tolist():
            logits = k[b, seen, h // group] @ q[b, row, h] * score.scale
            if score.softcap:
                logits = score.softcap * torch.tanh(logits / score.softcap)
            weights = logits.exp()
            total = weights.sum() + (0 if s_aux is None else s_aux[h].exp())
            out[b, row, h] = weights @ v[b, seen, h // group] / (total if total > 0 else 1)
            lse[b, h, row] = total.log() if total > 0 else none
            row_max[b, h, row] = logits.max() if seen else none
    return Outputs(_stacked(out, (batch, seqlen_q, heads_q, v.size(3))),
                   *(_stacked(x, (batch, heads_q, seqlen_q)) for x in (lse, row_max)))


def _stacked(parts: dict[tuple[int, ...], Tensor], shape: tuple[int, ...]) -> Tensor:
    ordered = [parts[key] for key in sorted(parts)]
    return torch.stack(ordered).view(shape) if ordered else torch.zeros(shape, dtype=torch.float64)


def gradients(dout: Tensor, dlse: Tensor, inputs: Inputs, score: Score) -> Gradients:
    """What reference.attend_backward computes, by autograd."""
    leaves = Inputs(*(None if x is None else x.detach().requires_grad_() for x in inputs))
    out, lse, _ = attend(leaves, score)
    dlse = dlse.masked_fill(lse.isneginf(), 0)
    loss = (out * dout).sum() + (lse.masked_fill(lse.isneginf(), 0) * dlse).sum()
    loss = loss + sum(x.sum() * 0 for x in leaves if x is not None)    # a gradient for all, if zero
    loss.backward()
    return Gradients(*(None if x is None else x.grad for x in leaves))
