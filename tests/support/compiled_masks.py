"""Calls with an AttentionMask under torch.compile and under activation checkpointing, beside the
same eager calls: on the CPU (tests/cpu/test_compiled_masks.py) and on a GPU (tests/gpu).
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attn3 import AttentionMask, flash_attn_func, flash_attn_varlen_func

from tests.support.lists import ints, starts

ROWS, LENGTHS = 100, (30, 0, 70)


def _prefix(device) -> AttentionMask:
    return AttentionMask.prefix_lm(ints([7, 40], device), ROWS)


def _blocks(device) -> AttentionMask:
    shown = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool, device=device)
    return AttentionMask.from_blocks(torch.stack([shown, shown.T]).contiguous(), 64, 64)


def _packed_prefix(device) -> AttentionMask:
    return AttentionMask.prefix_lm(ints([7, 0, 40], device), ROWS, starts(LENGTHS, device))


MASKS: dict[str, Callable[..., AttentionMask]] = {
    'intervals': _prefix, 'blocks': _blocks,
    'both': lambda device: _prefix(device) & _blocks(device),
    'documents': lambda device: AttentionMask.documents(ints([0, 30, ROWS], device), ROWS),
    'packed': _packed_prefix,
    'packed blocks': lambda device: _packed_prefix(device) & _blocks(device)}


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: AttentionMask,
           cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    options = dict(s_aux=sinks, mask=mask, return_attn_probs=True, deterministic=True)
    if cu_seqlens is None:
        out, lse = flash_attn_func(q * 2, k, v, **options)
    else:
        out, lse = flash_attn_varlen_func(q * 2, k, v, cu_seqlens, cu_seqlens, max(LENGTHS),
                                          max(LENGTHS), **options)
    return out.sin(), lse * 2


def inputs(name: str, device, dtype: torch.dtype, head_dim: int) -> tuple:
    """q, k, v and sinks, which require gradients, and cu_seqlens."""
    is_packed = name.startswith('packed')
    shape = (ROWS,) if is_packed else (2, ROWS)
    tensors = [torch.randn(*shape, heads, head_dim, device=device, dtype=dtype,
                           requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, device=device, requires_grad=True)
    return *tensors, sinks, starts(LENGTHS, device) if is_packed else None


def results(function: Callable, given: tuple, mask: AttentionMask) -> list[Tensor]:
    """What it returns, then the gradients of its tensors, then what it returns without any."""
    *leaves, cu_seqlens = given
    found = function(*leaves, mask, cu_seqlens)
    gradients = torch.autograd.grad(sum(x.square().sum() for x in found), leaves)
    with torch.no_grad():
        return [*found, *gradients, *function(*leaves, mask, cu_seqlens)]


def check(function: Callable, name: str, device, dtype: torch.dtype, head_dim: int) -> None:
    """Another mask and the lists that an eager call has kept give what eager calls give."""
    for _ in range(2):
        mask, given = MASKS[name](device), inputs(name, device, dtype, head_dim)
        got = results(function, given, mask)
        torch.testing.assert_close(got, results(attend, given, MASKS[name](device)))
        eager = results(attend, given, mask)
        torch.testing.assert_close(results(function, given, mask), eager)


def check_compiled(name: str, device, dtype: torch.dtype, head_dim: int, **options) -> None:
    check(torch.compile(attend, fullgraph=True, **options), name, device, dtype, head_dim)


def check_inductor(name: str, device, dtype: torch.dtype, head_dim: int) -> None:
    """The error beside float64 is at most 1.5 times that of eager calls, or 1e-6. WHY not the
    values of eager calls: Inductor rounds a chain of 16-bit operations once.
    """
    given = inputs(name, device, dtype, head_dim)
    *leaves, cu_seqlens = given
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    wanted = results(attend, (*wide, None if cu_seqlens is None else cu_seqlens.cpu()),
                     MASKS[name]('cpu'))
    got, eager = (results(function, given, MASKS[name](device))
                  for function in (torch.compile(attend, fullgraph=True), attend))
    for number, (one, usual, exact) in enumerate(zip(got, eager, wanted, strict=True)):
        own, limit = ((x.cpu().double() - exact).norm() for x in (one, usual))
        assert own <= 1.5 * limit + 1e-6 * exact.norm(), f'result {number}: {own} > {limit}'


def checkpointed(*arguments, use_reentrant: bool) -> tuple[Tensor, ...]:
    return checkpoint(attend, *arguments, use_reentrant=use_reentrant)


def check_checkpointed(use_reentrant: bool, name: str, device, dtype: torch.dtype,
                       head_dim: int) -> None:
    """Reentrant checkpoints want .backward()."""
    function = functools.partial(checkpointed, use_reentrant=use_reentrant)
    *leaves, cu_seqlens = given = inputs(name, device, dtype, head_dim)
    mask = MASKS[name](device)
    wanted = results(attend, given, mask)
    found = function(*leaves, mask, cu_seqlens)
    sum(x.square().sum() for x in found).backward()
    torch.testing.assert_close([*found, *(x.grad for x in leaves)], wanted[:6])
