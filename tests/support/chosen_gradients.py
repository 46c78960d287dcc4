"""Gradients of flash_attn_sparse_func against float64 autograd of attention to gathered rows, held
to the bar of tests/support/compare.py. Rows that nobody has chosen hold NaN; their gradients are 0.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn3 import flash_attn_sparse_func

from tests.support import compare
from tests.support.chosen_cases import DTYPES, ChosenCase, named

TENSORS = 'q', 'k', 'v', 'qv', 's_aux'


def inputs_of(case: ChosenCase, device: str | torch.device, rotary: bool = True) -> dict:
    """The arguments of a sparse case. rotary=False: latents alone."""
    _, given = named(case, case.arguments(device))
    return given if rotary else given | dict(q=None, k=None, softmax_scale=case.scale)


def upstream_of(case: ChosenCase, given: dict) -> tuple[Tensor, Tensor]:
    """Random gradients of out and LSE."""
    device = given['v'].device
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    total, heads = case.tokens[0], case.heads[0]
    dout = torch.randn(total, heads, case.head_dim_v, generator=generator, device=device)
    dlse = torch.randn(heads, total, generator=generator, device=device)
    return dout.to(DTYPES[case.dtype]), dlse


def gradients_of(given: dict, upstream: tuple[Tensor, Tensor | None],
                 **options) -> dict[str, Tensor]:
    """The gradients by the names of the arguments."""
    leaves = {name: given[name].detach().requires_grad_() for name in TENSORS
              if given.get(name) is not None}
    own = given | leaves | options | dict(return_softmax_lse=True)
    results = flash_attn_sparse_func(**own)
    wanted = [(x, grad) for x, grad in zip(results, upstream) if grad is not None]
    outs, grads = zip(*wanted)
    return dict(zip(leaves, torch.autograd.grad(outs, [*leaves.values()], grads)))


def expected(case: ChosenCase, given: dict, upstream: tuple[Tensor, Tensor | None],
             dtype: torch.dtype) -> dict[str, Tensor]:
    """The same, computed in a dtype by PyTorch's autograd."""
    leaves = {name: given[name].detach().to(dtype).requires_grad_() for name in TENSORS
              if given.get(name) is not None}
    slots, exists = case.chosen(given)
    head = torch.arange(case.heads[1], device=slots.device)[:, None]

    def rows_of(x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[slots.masked_fill(~exists, len(x)), head]    # (queries, heads_k, n, columns)

    v = rows_of(leaves['v'])
    parts = [(leaves['q'], rows_of(leaves['k']))] if 'q' in leaves else []
    parts += [(leaves['qv'], v)] if 'qv' in leaves else []
    q, k = (torch.cat(x, -1) for x in zip(*parts))
    logits = torch.einsum('thgd,thnd->thgn', q.unflatten(1, (case.heads[1], -1)), k) * case.scale
    logits = logits.masked_fill(~exists[:, :, None], -math.inf)
    if 's_aux' in leaves:
        sinks = leaves['s_aux'].view(1, case.heads[1], -1, 1)
        logits = torch.cat([logits, sinks.expand(len(q), -1, -1, 1)], -1)
    is_none = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(is_none, 0.0)
    lse = (logits.logsumexp(-1) if logits.size(-1) else logits.sum(-1)).masked_fill(is_none[..., 0],
                                                                                    0.0)
    p = logits.softmax(-1).masked_fill(is_none, 0.0)[..., :v.size(2)]
    results = torch.einsum('thgn,thnd->thgd', p, v).flatten(1, 2), lse.flatten(1, 2).T
    wanted = [(x, grad.to(dtype)) for x, grad in zip(results, upstream) if grad is not None]
    outs, grads = zip(*wanted)
    gradients = torch.autograd.grad(outs, [*leaves.values()], grads, allow_unused=True)
    return {name: torch.zeros_like(x) if grad is None else grad
            for (name, x), grad in zip(leaves.items(), gradients)}


def check_gradients(case: ChosenCase, device: str | torch.device, rotary: bool = True,
                    with_lse: bool = True, **options) -> dict[str, Tensor]:
    """Computes them, and holds each to the bar."""
    with compare.naming(case):
        given = inputs_of(case, device, rotary)
        dout, dlse = upstream_of(case, given)
        upstream = dout, dlse if with_lse else None
        got = gradients_of(given, upstream, **options)
        ref = expected(case, given, upstream, torch.float64)
        pt = expected(case, given, upstream, DTYPES[case.dtype])
        floors = _floors(case, given, upstream)
        assert got.keys() == ref.keys()
        for name, x in got.items():
            assert x.shape == given[name].shape and x.dtype == given[name].dtype
            floor = floors.get(name, 0.0)
            if x.dtype == torch.float32 and x.numel():    # each P has the rounding of the LSE
                floor += 2 ** -21 * ref[name].abs().max().item()
            compare.check_close(x, ref[name], pt[name], f'd{name}', floor)
    return got


def _floors(case: ChosenCase, given: dict, upstream: tuple) -> dict[str, float]:
    """compare.cancellation_floors(), and what rounding leaves in a sink's gradient."""
    used = {name: given[name].double().nan_to_num(nan=0.0) for name in TENSORS
            if given.get(name) is not None}
    q, k = (torch.cat([used[x] for x in names if x in used], -1) if used.keys() & {*names} else None
            for names in (('q', 'qv'), ('k',)))
    k = used['v'] if k is None else torch.cat([k, used['v']], -1) if 'qv' in used else k
    floors = compare.cancellation_floors((q[None], k[None], used['v'][None]), upstream[0],
                                         case.scale)
    found = {'q': floors['dq'], 'qv': floors['dq'], 'k': floors['dk'],
             'v': floors['dk'] if 'qv' in used else 0.0}
    if 's_aux' in used:
        dout = upstream[0].double()
        rows = (dout.norm(dim=-1) * used['v'].norm(dim=-1).max()).norm(dim=0).max().item()
        found['s_aux'] = rows * (2 ** -20 if case.dtype == 'fp32' else 2 ** -9)
    return found
