"""The cells of support_matrix.py as calls: their tensors, and what they have to give.

tests/cpu/test_support.py walks them on the CPU, tests/gpu/test_matrix.py on a GPU.
"""
from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flash_attn3 import flash_attn_func, flash_attn_varlen_func
from flash_attn3.cpu import reference
from flash_attn3.cpu.reference import Inputs, Lengths, Mask, Score
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare, fp8_data
from tests.support.bad_inputs import UNSUPPORTED
from tests.support.lists import lengths_of, starts
from tests.support.support_matrix import COLUMNS, FEATURES, Feature, KernelRule


@dataclass(frozen=True)
class Cell:
    feature: Feature
    column: str

    def __str__(self) -> str:
        return f'{self.feature.name}: {self.column}'.replace(' ', '_')

    @property
    def error(self) -> str | None:
        return self.feature.cell(self.column)

    @property
    def is_packed(self) -> bool:
        return self.column.endswith('packed')

    @property
    def has_gradients(self) -> bool:
        return self.column.startswith('backward')

    @property
    def function(self):
        return flash_attn_varlen_func if self.is_packed else flash_attn_func

    @property
    def score(self) -> Score:
        options = self.feature.options
        mask = Mask(options.get('causal', False), options.get('window_size', (-1, -1)),
                    options.get('attention_chunk', 0))
        return Score(self.feature.head_dims[0] ** -0.5, options.get('softcap', 0.0), mask)


EVERY_CELL = [Cell(feature, column) for feature, column in itertools.product(FEATURES, COLUMNS)]
SUPPORTED = [cell for cell in EVERY_CELL if cell.error is None]
REFUSED = [cell for cell in EVERY_CELL if cell.error]
every_supported = pytest.mark.parametrize('cell', SUPPORTED, ids=str)
every_refused = pytest.mark.parametrize('cell', REFUSED, ids=str)
# Cells of the public functions; the others are rules of the kernels.
REFUSED_EVERYWHERE = [cell for cell in REFUSED
                      if not isinstance(cell.error, KernelRule)]


def check_refused(cell: Cell, arguments: dict) -> None:
    """The error that the cell names, of the type that goes with it: NotImplementedError is for
    arguments that this version has no other value for.
    """
    with pytest.raises(RuntimeError) as raised:
        call(cell, arguments)
    assert str(raised.value).startswith(cell.error)
    is_fp8 = cell.feature.dtype == 'float8_e4m3fn'
    names = UNSUPPORTED.keys() & {*cell.feature.options, *cell.feature.tensors}
    is_missing = ((names and not is_fp8) or cell.error.endswith(' on a GPU')
                  or 'requires_grad=False with float8' in cell.error)
    assert type(raised.value) is (NotImplementedError if is_missing else RuntimeError)


def _lists(feature: Feature, device: torch.device) -> dict:
    """The arguments that only packed tensors have; seqused counts all rows but two."""
    lists = {}
    for name, lengths in (('q', feature.lengths_q), ('k', feature.lengths_k)):
        lists[f'cu_seqlens_{name}'] = starts(lengths, device)
        lists[f'max_seqlen_{name}'] = max(lengths)
        if f'seqused_{name}' in feature.tensors:
            used = [max(0, length - 2) for length in lengths]
            lists[f'seqused_{name}'] = torch.tensor(used, dtype=torch.int32, device=device)
    return lists


def arguments_of(cell: Cell, device: torch.device) -> dict:
    """All of the call, by name; inputs require their gradients where the cell is about them."""
    feature = cell.feature
    generator = torch.Generator(device).manual_seed(zlib.crc32(feature.name.encode()))

    def normal(lengths: Sequence[int], heads: int, head_dim: int) -> Tensor:
        rows = (sum(lengths),) if cell.is_packed else (len(lengths), max(lengths))
        x = torch.randn((*rows, heads, head_dim), generator=generator, device=device)
        return x.to(getattr(torch, feature.dtype))

    (heads_q, heads_k), (head_dim, head_dim_v) = feature.heads, feature.head_dims
    arguments = {'q': normal(feature.lengths_q, heads_q, head_dim),
                 'k': normal(feature.lengths_k, heads_k, head_dim),
                 'v': normal(feature.lengths_k, heads_k, head_dim_v)}
    if 's_aux' in feature.tensors:
        arguments['s_aux'] = torch.randn(heads_q, generator=generator, device=device)
    for x in arguments.values():
        x.requires_grad_(cell.has_gradients)
    if 'out' in feature.tensors:
        arguments['out'] = torch.full_like(arguments['q'], torch.nan, requires_grad=False)
    given = {name: torch.ones((), device=device) for name in feature.tensors if name == 'qv'}
    scales = torch.linspace(0.5, 2, len(feature.lengths_q) * heads_k, device=device)
    given |= {name: scales.unflatten(0, (-1, heads_k)) for name in feature.tensors
              if name.endswith('_descale')}
    lists = _lists(feature, device) if cell.is_packed else {}
    return arguments | given | lists | dict(feature.options)


def call(cell: Cell, arguments: dict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results by name, and gradients by the name of the input."""
    results = cell.function(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    names = ['out'] + [name for name, option in (('lse', 'return_attn_probs'),
                                                 ('max_logits', 'return_max_logits'))
                       if arguments.get(option)]
    named = dict(zip(names, results, strict=True))
    if not cell.has_gradients:
        return named, {}
    leaves = {name: arguments[name] for name in ('q', 'k', 'v', 's_aux') if name in arguments}
    outputs = [named[name] for name in ('out', 'lse') if name in named]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), _incoming(named))
    return {name: x.detach() for name, x in named.items()}, dict(zip(leaves, gradients))


def _incoming(results: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of out and lse."""
    given = []
    for name in ('out', 'lse'):
        if name in results:
            x = results[name]
            generator = torch.Generator(x.device).manual_seed(len(name))
            given.append(torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype))
    return given


def check(cell: Cell, device: torch.device) -> None:
    """Holds the call of a supported cell to the bar of compare.py."""
    arguments = arguments_of(cell, device)
    results, gradients = call(cell, arguments)
    with torch.no_grad():
        _check_forward(cell, arguments, results)
        if gradients:
            _check_gradients(cell, arguments, results, gradients)
    if cell.feature.options.get('deterministic'):
        again = call(cell, arguments)
        for name, x in (results | gradients).items():
            compare.check_equal((again[0] | again[1])[name], x, name)


def _inputs(arguments: dict) -> Inputs:
    return Inputs(*(arguments.get(name) for name in ('q', 'k', 'v', 's_aux')))


def _lengths(arguments: dict) -> Lengths:
    return lengths_of(*map(arguments.get, ('cu_seqlens_q', 'cu_seqlens_k', 'seqused_q',
                                           'seqused_k')))


def _check_fp8(cell: Cell, arguments: dict, results: dict[str, Tensor]) -> None:
    inputs = _inputs(arguments)
    scales = Scales(*(arguments.get(f'{name}_descale') for name in 'qkv'))
    own = inputs, scales, cell.score, _lengths(arguments) if cell.is_packed else None
    assert results['out'].dtype == arguments.get('out_dtype', torch.bfloat16)
    fp8_data.check_fp8(results['out'], *own)
    if 'lse' in results:
        fp8_data.check_fp8_lse(results['lse'], *own)


def _check_forward(cell: Cell, arguments: dict, results: dict[str, Tensor]) -> None:
    inputs = _inputs(arguments)
    if inputs.q.dtype == fp8_data.E4M3:
        _check_fp8(cell, arguments, results)
        return

    def expected(inputs: Inputs) -> reference.Outputs:
        own = inputs, cell.score
        return (reference.attend_packed(*own, _lengths(arguments), with_row_max=True)
                if cell.is_packed else reference.attend(*own, with_row_max=True))

    ref, pt = expected(inputs.to(torch.float64)), expected(inputs)
    assert results['out'].dtype == inputs.q.dtype
    compare.check_close(results['out'], ref.out, pt.out, 'out')
    for name, x in (('lse', ref.lse), ('max_logits', ref.row_max)):
        if name in results:
            assert results[name].dtype == torch.float32
            compare.check_lse(results[name], x)


def _sink_floor(cell: Cell, arguments: dict, dout: Tensor) -> float:
    inputs = _inputs(arguments)
    ref = (reference.attend_packed(inputs.to(torch.float64), cell.score, _lengths(arguments))
           if cell.is_packed else reference.attend(inputs.to(torch.float64), cell.score))
    out, lse = ref.out, ref.lse
    if not cell.is_packed:
        out, dout, lse = out.flatten(0, 1), dout.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return compare.sink_floor(out, lse, dout, inputs.s_aux, inputs.q.dtype)


def _check_gradients(cell: Cell, arguments: dict, results: dict[str, Tensor],
                     gradients: dict[str, Tensor]) -> None:
    dout, *dlse = _incoming(results)
    dlse = dlse[0] if dlse else None

    def expected(inputs: Inputs) -> reference.Gradients:
        own = dout.to(inputs.q.dtype), dlse, inputs, cell.score
        return (reference.attend_packed_backward(*own, _lengths(arguments)) if cell.is_packed
                else reference.attend_backward(*own))

    inputs = _inputs(arguments)
    ref, pt = expected(inputs.to(torch.float64)), expected(inputs)
    with_batch = [x if x.dim() == 4 else x[None] for x in (*inputs[:3], dout)]
    floors = compare.cancellation_floors(tuple(with_batch[:3]), with_batch[3], cell.score.scale)
    if 's_aux' in gradients:
        floors['ds_aux'] = _sink_floor(cell, arguments, dout)
    for name, one_ref, one_pt in zip(('q', 'k', 'v', 's_aux'), ref, pt):
        if name in gradients:
            assert gradients[name].dtype == arguments[name].dtype
            compare.check_close(gradients[name], one_ref, one_pt, f'd{name}',
                                floors.get(f'd{name}', 0.0))
