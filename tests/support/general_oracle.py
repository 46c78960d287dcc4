"""The expected result of a GeneralCase, by sequence, and the bar of tests/support/compare.py on
it.

`reference.attend` and `reference.attend_backward` of each sequence alone, in float64 and in plain
PyTorch of the input dtype. Beyond the bar: rows that do not count, and those that see no key, are
exactly what they have to be.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs

from tests.support import compare
from tests.support.general_cases import GeneralCase, Results, Tensors, run

OF_QUERIES, OF_KEYS = ('out', 'dq'), ('dk', 'dv')


class Rows(NamedTuple):
    """Indices of some sequences of equal lengths, (number of them, length)."""
    q: Tensor
    k: Tensor


def groups(case: GeneralCase, device: torch.device) -> Iterator[Rows]:
    """The rows that count; sequences of the same lengths together."""
    firsts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, count in case.sequences():
        firsts.setdefault(count, []).append(first)
    for counts, places in firsts.items():
        places = torch.tensor(places, device=device)
        yield Rows(*(places[:, i, None] + torch.arange(counts[i], device=device) for i in (0, 1)))


def as_packed(case: GeneralCase, x: Tensor | None, rows_last: bool = False) -> Tensor | None:
    """A tensor with a batch as one without; rows_last: it is like the LSE."""
    if x is None or case.is_packed:
        return x
    return x.transpose(0, 1).flatten(1) if rows_last else x.flatten(0, 1)


def packed_results(case: GeneralCase, results: Results) -> Results:
    return Results(*(as_packed(case, x, name in ('lse', 'max_logits')) if name != 'ds_aux' else x
                     for name, x in results._asdict().items()))


def _batch(tensors: Tensors, rows: Rows) -> tuple[Inputs, Tensor, Tensor | None]:
    """The inputs of a group, and its dO and dLSE, with a batch."""
    q, k, v, s_aux = tensors.inputs
    dlse = None if tensors.dlse is None else tensors.dlse[:, rows.q].transpose(0, 1)
    return Inputs(q[rows.q], k[rows.k], v[rows.k], s_aux), tensors.dout[rows.q], dlse


def expected(case: GeneralCase, tensors: Tensors, dtype: torch.dtype) -> Results:
    """Packed, whatever the case is; in dtype, with sums over sequences in float32 or float64."""
    q, k, v, s_aux = inputs = tensors.inputs.to(dtype)
    tensors = tensors._replace(inputs=inputs, dout=tensors.dout.to(dtype))
    wide = reference.lse_dtype(dtype)
    lse = q.new_full((q.size(1), q.size(0)), -math.inf, dtype=wide)
    want = Results(q.new_zeros(*q.shape[:2], v.size(2)), lse, lse.clone(), *(
        torch.zeros_like(x) for x in (q, k, v)), None if s_aux is None else s_aux.new_zeros(
        s_aux.shape, dtype=wide))
    for rows in groups(case, q.device):
        one, dout, dlse = _batch(tensors, rows)
        part = reference.attend(one, case.score, with_row_max=True)
        want.out[rows.q] = part.out
        want.lse[:, rows.q], want.max_logits[:, rows.q] = (
            x.transpose(0, 1) for x in (part.lse, part.row_max))
        if case.has_gradients:
            gradients = reference.attend_backward(dout, dlse, one, case.score)
            want.dq[rows.q], want.dk[rows.k], want.dv[rows.k] = gradients[:3]
            if s_aux is not None:
                want.ds_aux.add_(gradients.ds_aux)
    return want


def _floors(case: GeneralCase, tensors: Tensors) -> dict[str, float]:
    """The largest of the sequences."""
    floors = {}
    for rows in groups(case, tensors.dout.device):
        if rows.q.numel() and rows.k.numel():
            one, dout, _ = _batch(tensors, rows)
            for name, floor in compare.cancellation_floors(
                    one[:3], dout, case.score.scale).items():
                floors[name] = max(floor, floors.get(name, 0.0))
    return floors


def check(case: GeneralCase, tensors: Tensors, got: Results) -> None:
    """Holds results and gradients to the bar."""
    packed = Tensors(Inputs(*(as_packed(case, x) for x in tensors.inputs[:3]),
                            tensors.inputs.s_aux), as_packed(case, tensors.dout),
                     as_packed(case, tensors.dlse, rows_last=True), tensors.lists)
    check_shapes(case, tensors, got)
    got = packed_results(case, got)
    ref = expected(case, packed, torch.float64)
    pt = expected(case, packed, tensors.inputs.q.dtype)
    for name in ('lse', 'max_logits'):
        if getattr(got, name) is not None:
            compare.check_lse(getattr(got, name), getattr(ref, name), name)
    compare.check_close(got.out, ref.out, pt.out, 'out')
    if case.has_gradients:
        floors = _floors(case, packed)
        if got.ds_aux is not None:
            floors['ds_aux'] = compare.sink_floor(ref.out, ref.lse, packed.dout,
                                                  tensors.inputs.s_aux, got.out.dtype)
        for name in ('dq', 'dk', 'dv', 'ds_aux')[:3 if got.ds_aux is None else 4]:
            compare.check_close(*(getattr(x, name) for x in (got, ref, pt)), name,
                                floors.get(name, 0.0))
    check_zeros(case, got, ref)


def check_shapes(case: GeneralCase, tensors: Tensors, got: Results) -> None:
    q, k, v, s_aux = tensors.inputs
    out_shape = (*q.shape[:-1], v.size(-1))
    lse_shape = (*q.shape[:-3], q.size(-2), q.size(-3))
    shapes = {'out': (out_shape, q.dtype), 'lse': (lse_shape, torch.float32),
              'max_logits': (lse_shape, torch.float32), 'dq': (q.shape, q.dtype),
              'dk': (k.shape, q.dtype), 'dv': (v.shape, q.dtype)}
    if s_aux is not None:
        shapes['ds_aux'] = (s_aux.shape, s_aux.dtype)
    wanted = ['out'] + ['lse'] * case.lse + ['max_logits'] * case.max_logits
    if case.has_gradients:
        wanted += ['dq', 'dk', 'dv'] + ['ds_aux'] * (s_aux is not None)
    for name, x in got._asdict().items():
        assert (x is not None) == (name in wanted), name
        assert x is None or (x.shape, x.dtype) == shapes[name], name


def check_zeros(case: GeneralCase, got: Results, ref: Results) -> None:
    """Rows that do not count, and queries without a key, are 0 to the bit."""
    blind = (ref.max_logits == -math.inf).T
    counts = torch.zeros(got.dk.size(0) if case.has_gradients else 0, dtype=torch.bool,
                         device=blind.device)
    for name in OF_QUERIES[:2 if case.has_gradients else 1]:
        assert (getattr(got, name)[blind] == 0).all(), f'{name} of rows that see no key'
    if case.has_gradients:
        for rows in groups(case, blind.device):
            counts[rows.k.flatten()] = True
        for name in OF_KEYS:
            assert (getattr(got, name)[~counts] == 0).all(), f'{name} of rows that do not count'


def check_sequences(case: GeneralCase, tensors: Tensors, got: Results) -> None:
    """Holds each sequence of a packed case to the bar by itself, beside plain PyTorch's errors in
    it alone.
    """
    ref = expected(case, tensors, torch.float64)
    pt = expected(case, tensors, tensors.inputs.q.dtype)
    compare.check_lse(got.lse, ref.lse)
    check_zeros(case, got, ref)
    for rows in groups(case, got.out.device):
        one, dout, _ = _batch(tensors, rows)
        floors = compare.cancellation_floors(one[:3], dout, case.score.scale)
        for name in (*OF_QUERIES, *OF_KEYS):
            index = (rows.q if name in OF_QUERIES else rows.k).flatten()
            parts = (getattr(x, name)[index] for x in (got, ref, pt))
            compare.check_close(*parts, f'{name} of lengths {rows.q.size(1)}, {rows.k.size(1)}',
                                floors.get(name, 0.0))


def check_case(case: GeneralCase, device: str | torch.device) -> None:
    """Runs a case and holds it to the bar; an error says how to repeat it."""
    tensors = case.tensors(device)
    with compare.naming(case):
        check(case, tensors, run(case, tensors))


def check_same(got: Results, wanted: Results) -> None:
    """Bit for bit."""
    for name, *values in zip(Results._fields, got, wanted):
        assert (values[0] is None) == (values[1] is None), name
        if values[0] is not None:
            compare.check_equal(*values, name)
