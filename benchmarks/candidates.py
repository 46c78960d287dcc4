"""Kernels that are not in variants.py, each built as a library of its own; shared by search_tiles
and ablation.

A candidate is a FwdConfig: a tile of csrc/config and the fields that differ. It is compiled for
both masks (candidate.cu.in) and cached like the units of the package; on a machine without the
package index CUTLASS_DIR must be set.
"""
from __future__ import annotations

import ctypes
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from build_tools import native, toolchain, units
from build_tools.toolchain import Cuda
from flash_attn3 import bench

TEMPLATE = pathlib.Path(__file__).with_name('candidate.cu.in')
FOLDER = units.BUILD / 'candidates'
DTYPES = {'bf16': 'kBFloat16', 'fp16': 'kFloat16'}


@dataclass(frozen=True)
class Candidate:
    name: str                            # the C++ struct
    head_dim: int
    fields: tuple[tuple[str, str], ...]  # those that differ from the base
    base: str = 'FwdConfig{}'
    header: str = 'config/fwd_config.h'  # that has the base

    def source(self, dtype: str) -> str:
        lines = (f'  tile.{name} = {value};' for name, value in self.fields)
        marks = {'@NAME@': self.name, '@BASE@': self.base, '@FIELDS@': '\n'.join(lines),
                 '@HEAD_DIM@': str(self.head_dim),
                 '@DTYPE@': DTYPES[dtype], '@HEADER@': self.header}
        text = TEMPLATE.read_text()
        for mark, value in marks.items():
            text = text.replace(mark, value)
        return text

    def library(self, dtype: str) -> pathlib.Path:
        return FOLDER / f'{self.name}_{dtype}.so'


def kernel_unit(source: pathlib.Path, cuda: Cuda) -> units.Unit:
    """As the package's units, and with the repository as a folder of headers."""
    unit = native.kernel_unit(source, cuda)
    return dataclasses.replace(unit, own_includes=(*unit.own_includes, units.ROOT))


def build(candidates: Sequence[Candidate], dtype: str) -> dict[str, pathlib.Path]:
    """A library for each candidate. ninja shows the progress; a failure ends the program."""
    native.generate_instances()
    cuda = toolchain.find_cuda()
    FOLDER.mkdir(parents=True, exist_ok=True)
    kernels = {}
    for candidate in candidates:
        source = candidate.library(dtype).with_suffix('.cu')
        source.write_text(candidate.source(dtype))
        kernels[candidate] = kernel_unit(source, cuda)
    dispatch = native.dispatch_units()
    objects = units.compile_units([*kernels.values(), *dispatch])
    for candidate, unit in kernels.items():
        library = candidate.library(dtype)
        library.unlink(missing_ok=True)
        native.link([objects[unit], *(objects[shared] for shared in dispatch)],
                    native.runtime_libraries(cuda), library)
    return {candidate.name: candidate.library(dtype) for candidate in candidates}


def forward_of(library: pathlib.Path,
               causal: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """function(q, k, v) that runs a candidate on the current stream and returns (out, lse)."""
    call = ctypes.CDLL(str(library)).candidate_forward
    properties = torch.cuda.get_device_properties(0)
    error = ctypes.create_string_buffer(1024)
    counter = torch.zeros(1, dtype=torch.int32, device='cuda')    # each launch leaves it zero

    def forward(q: torch.Tensor, k: torch.Tensor,
                v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        data = (ctypes.c_void_p * 6)(*(x.data_ptr() for x in (q, k, v, out, lse, counter)))
        strides = (ctypes.c_int64 * 12)(*(s for x in (q, k, v, out) for s in x.stride()[:3]))
        sizes = (ctypes.c_int64 * 8)(
            q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], causal,
            properties.multi_processor_count, properties.L2_cache_size)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        scale = ctypes.c_float(q.shape[-1] ** -0.5)
        if call(data, strides, sizes, scale, stream, error, len(error)):
            raise RuntimeError(error.value.decode())
        return out, lse
    return forward


def attention_of(library: pathlib.Path, causal: bool) -> Callable[..., torch.Tensor]:
    forward = forward_of(library, causal)
    return lambda q, k, v: forward(q, k, v)[0]


def compare(shape: bench.Shape, functions: dict[str, Callable[..., torch.Tensor]],
            timer: bench.Timer, rounds: int, device: torch.device) -> list[dict]:
    """A result (flash_attn3.bench.result) of each function(q, k, v), which take turns; name and
    `na`, the reason, of those that do not run or are wrong."""
    sets = bench.make_inputs(shape, device)
    calls, errors, left_out = {}, {}, {}
    for name, function in functions.items():
        try:
            errors[name] = bench.relative_error(function(*sets[0]), sets[0], shape.causal)
        except RuntimeError as failure:
            left_out[name] = bench.reason(failure)
            continue
        if errors[name] < bench.WRONG:
            calls[name] = bench.Contender(name, function).rotating(sets)
        else:
            left_out[name] = f'wrong, error {errors[name]:.2g}'
    figures = bench.interleaved(
        calls, timer, rounds, lambda name, error: left_out.update({name: bench.reason(error)}))
    return [dict(name=name, na=left_out[name]) if name in left_out
            else bench.result(shape, device, name, figures[name], errors[name], None)
            for name in functions]
