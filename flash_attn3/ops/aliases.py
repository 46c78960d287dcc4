"""Ops under the names that they had in 0.1.0. They go with the next release.

Each calls the op that replaces it, also where PyTorch traces: a graph never holds an alias.
"""
from __future__ import annotations

from collections.abc import Callable

import torch

from flash_attn3.ops import library
from flash_attn3.arguments import ALIASES, names, op_of


def _call(alias: str) -> Callable:
    target = getattr(torch.ops.flash_attn3, ALIASES[alias]).default
    taken = names(*op_of(alias).takes)

    def call(*arguments, **named):
        return target(**dict(zip(taken, arguments)), **named)
    return call


for _name in ALIASES:
    library.LIBRARY.impl(_name, _call(_name), 'CompositeImplicitAutograd')
