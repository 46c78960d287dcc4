"""Attention over the keys in parts, as ring attention has them: joined by their LSE, with gradients
part by part, from the joined out and LSE. tests/cpu/test_ring.py and tests/gpu/test_ring.py.

Part 0 ends with the last key of each sequence, part 1 `size` keys before it, and so on; the last
part has all that is left.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn3.cpu import reference
from flash_attn3.ops import checks
from flash_attn3.ops.dense_and_varlen import General, for_backward

from tests.support import general_oracle
from tests.support.general_cases import GeneralCase, Results, Tensors
from tests.support.lists import starts

OPS = torch.ops.flash_attn3
SIZE = 20    # keys of a part
FEATURES = {    # a left side reaches over the parts after the first
    'full': {}, 'causal': {'causal': True}, 'window': {'window': (70, 9)},
    'softcap': {'softcap': 3.0}, 'sinks': {'sinks': 'fp32'},
    'all': {'causal': True, 'window': (65, -1), 'softcap': 5.0, 'sinks': 'bf16'}}
every_feature = pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
every_count = pytest.mark.parametrize('count', [2, 3, 4])
DENSE = GeneralCase(((90, 75), (90, 75)), is_packed=False)    # causal: 15 rows see no key
PACKED = GeneralCase(((70, 95), (5, 0), (0, 31), (33, 81), (90, 75)))
every_layout = pytest.mark.parametrize('case', [DENSE, PACKED], ids=['dense', 'packed'])


class Part(NamedTuple):
    """Which rows of k and v, and the arguments that say what its queries see."""
    rows: Tensor
    general: General


def parts(case: GeneralCase, tensors: Tensors, count: int) -> Iterator[Part]:
    """Without sinks."""
    device = tensors.dout.device
    for i in range(count):
        ends = [max(0, keys - i * SIZE) for _, keys in case.lengths]
        firsts = [0 if i == count - 1 else max(0, end - SIZE) for end in ends]
        lengths = [end - first for first, end in zip(firsts, ends)]
        if not case.is_packed:
            rows = torch.arange(firsts[0], ends[0], device=device)
            yield Part(rows, General(**_score(case, i * SIZE)))
            continue
        before = tensors.lists['cu_seqlens_k'].tolist()
        rows = torch.cat([torch.arange(start + first, start + end, device=device)
                          for start, first, end in zip(before, firsts, ends)])
        yield Part(rows, General(
            tensors.lists['cu_seqlens_q'], starts(lengths, device),
            max_seqlen_q=tensors.lists['max_seqlen_q'], max_seqlen_k=max(lengths),
            **_score(case, i * SIZE)))


def _score(case: GeneralCase, keys_behind: int) -> dict:
    """The window as seen from a part that ends so many keys before the last one."""
    left, right = case.window[0], 0 if case.causal else case.window[1]
    assert left == -1 or left >= keys_behind
    return {'softmax_scale': case.score.scale, 'softcap': case.softcap,
            'window_left': left if left == -1 else left - keys_behind,
            'window_right': right if right == -1 else right + keys_behind}


def join(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and LSE over all keys and the sinks."""
    given = lses if sinks is None else [*lses, sinks.unsqueeze(-1).expand_as(lses[0])]
    lse = torch.logsumexp(torch.stack(given), dim=0)
    weights = [(one - lse).exp().masked_fill(lse == -math.inf, 0) for one in lses]
    out = sum(weight.mT.unsqueeze(-1) * one for weight, one in zip(weights, outs))
    return out.to(outs[0].dtype), lse


def run(case: GeneralCase, tensors: Tensors, count: int, op: str) -> Results:
    """op: the one that gives gradients."""
    q, k, v, s_aux = tensors.inputs
    sinks, dim = checks.sinks_of(s_aux, q), 0 if case.is_packed else 1
    ring = [(part, *(x.index_select(dim, part.rows) for x in (k, v)))
            for part in parts(case, tensors, count)]
    outs, lses, _ = zip(*(OPS.attend(q, *keys, None, *part.general) for part, *keys in ring))
    out, lse = join(outs, lses, sinks)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    dsinks = None
    for i, (part, *keys) in enumerate(ring):
        general = part.general._replace(sinks=sinks if i == 0 else None)
        given = tensors.dout, tensors.dlse, q, *keys, out, lse
        *gradients, own = backward(op, given, general)
        dsinks = own if i == 0 and sinks is not None else dsinks
        dq += gradients[0]
        dk.index_copy_(dim, part.rows, gradients[1].to(dk.dtype))
        dv.index_copy_(dim, part.rows, gradients[2].to(dv.dtype))
    of_inputs = (x.to(q.dtype) for x in (dq, dk, dv))
    return Results(out, lse, None, *of_inputs, None if dsinks is None else dsinks.to(s_aux.dtype))


def backward(op: str, given: tuple, general: General) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsinks). op: `bwd` with all arguments, or `bwd` or `bwd_out` without a mask."""
    if op == 'masked':
        return OPS.bwd(*given, *for_backward(general, False))
    if op == 'bwd':
        return OPS.bwd(*given, general.softmax_scale, False)
    gradients = [torch.full_like(x, math.nan) for x in given[2:5]]
    OPS.bwd_out(*given, *gradients, general.softmax_scale, False)
    return *gradients, None


def check(case: GeneralCase, count: int, device: str | torch.device,
          op: str = 'masked') -> None:
    """Holds the joined results and the sums of the gradients to those over all keys at once."""
    tensors = case.tensors(device)
    tensors = tensors._replace(dlse=tensors.dlse.to(reference.lse_dtype(tensors.inputs.q.dtype)))
    got = run(case, tensors, count, op)
    if case.dtype != 'fp64':
        general_oracle.check(case, tensors, got)
        return
    packed = tensors._replace(inputs=tensors.inputs._replace(**{
        name: general_oracle.as_packed(case, getattr(tensors.inputs, name)) for name in 'qkv'}),
        dout=general_oracle.as_packed(case, tensors.dout),
        dlse=general_oracle.as_packed(case, tensors.dlse, rows_last=True))
    ref = general_oracle.expected(case, packed, torch.float64)
    for name, one in general_oracle.packed_results(case, got)._asdict().items():
        if one is not None:
            wanted = getattr(ref, name)
            torch.testing.assert_close(one, wanted.to(one.dtype),
                                       msg=lambda text, name=name: f'{name}: {text}')
