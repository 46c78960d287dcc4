"""Checks of a call that all ranks of a group make together.

A rank with wrong arguments raises an error at once; the others wait for it until the process group
times out. With FLASH_ATTN3_CHECKS=1 ranks exchange their arguments first, and all raise the same
error, which names the rank and the argument.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from flash_attn3 import env
from flash_attn3.ops import checks
from flash_attn3.distributed import exchange

_HINT = 'all ranks of the group make the same call, each on its rows'


def facts_of(tensors: Mapping[str, Tensor | None], scalars: Mapping[str, object]) -> dict:
    """What ranks compare, by name, as an error can quote it."""
    facts = {}
    for name, x in tensors.items():
        facts[f'{name}.shape'] = None if x is None else tuple(x.shape)
        facts[f'{name}.dtype'] = None if x is None else checks.dtype_name(x.dtype)
    return facts | dict(scalars)


def check(op: str, group: str, problem: str, facts: Mapping[str, object]) -> None:
    """Raises RuntimeError for the problem of this rank ('': none). With FLASH_ATTN3_CHECKS=1 also
    for that of any rank, and if ranks differ.
    """
    texts = [problem]
    if env.CHECK_CONTENTS and exchange.place_of(group)[1] > 1:
        texts = _compared(op, group, problem, facts)
    for text in texts:
        if text:
            raise RuntimeError(text)


def _compared(op: str, group: str, problem: str, facts: Mapping[str, object]) -> list[str]:
    """The texts of all ranks, then the first argument in which one differs from rank 0."""
    told: list = [None] * exchange.place_of(group)[1]
    with exchange.peers_named(op, 'all ranks of the group'):
        dist.all_gather_object(told, (problem, dict(facts)), group=exchange.group_of(group))
    texts = [f'{text} (on rank {rank} of the group)' for rank, (text, _) in enumerate(told) if text]
    first = told[0][1]
    texts += [checks.error(op, f'the same {name} on all ranks of the group',
                           f'{theirs.get(name)} on rank {rank} and {value} on rank 0', _HINT)
              for name, value in first.items() for rank, (_, theirs) in enumerate(told)
              if theirs.get(name) != value]
    return texts[:1]
