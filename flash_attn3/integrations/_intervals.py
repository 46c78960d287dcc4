"""Intervals of keys, as AttentionMask takes them, from masks of a bool for each pair."""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 2               # intervals that a query may see
_PAIRS = 1 << 24       # pairs of a query and a key that are looked at together


class Intervals(NamedTuple):
    """ends: (batch, queries, 2, 2) int32, begin and end of each; empty ones are 0. fit: a bool on
    the device: whether they show all.
    """
    ends: Tensor
    fit: Tensor


def of(shown: Tensor) -> Intervals:
    """The intervals of a mask that is True for keys that a query sees: (batch, queries, keys)."""
    edges = F.pad(shown.byte(), (1, 1)).diff(dim=-1)    # 1 at begins, 255 at ends
    begins, ends = ((edges == edge).cumsum(-1, dtype=torch.int32) for edge in (1, 255))
    count = begins[..., -1]
    pairs = [torch.stack([(x < number).sum(-1, dtype=torch.int32) for x in (begins, ends)], -1)
             .masked_fill((count < number)[..., None], 0) for number in range(1, MOST + 1)]
    return Intervals(torch.stack(pairs, -2), (count <= MOST).all())


def joined(parts: list[Intervals]) -> Intervals:
    """Those of all queries, from parts of them."""
    ends, fit = zip(*parts)
    return Intervals(torch.cat(ends, 1), torch.stack(fit).all())


def steps(queries: int, pairs: int) -> list[tuple[int, int]]:
    """(first query, number of queries) of the parts that are looked at one after another.

    pairs: how many there are for one query.
    """
    step = max(1, _PAIRS // max(1, pairs))
    return [(first, min(step, queries - first)) for first in range(0, queries, step)]
