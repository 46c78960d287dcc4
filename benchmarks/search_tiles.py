"""Builds candidate tiles of the forward kernel and times them against each other and the package.

    python -m benchmarks.search_tiles benchmarks/tiles.txt [--seqlens 512,4096] [--build-only]

Each line of the file is a candidate: a name and fields of FwdDefaults. Every candidate becomes a
library of its own (benchmarks/candidate.cu.in), compiled for both masks and cached like the units
of the package; on a machine without the package index CUTLASS_DIR must be set. The results are
compared with fp32, the figures are taken as in bench_forward.py. Winners go to
csrc/config/fwd_tiles.h with reason and date.
"""
from __future__ import annotations

import argparse
import ctypes
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import flash_attn3
from benchmarks import harness, shapes
from build_tools import native, toolchain, units
from flash_attn3 import _measure

TEMPLATE = pathlib.Path(__file__).with_name('candidate.cu.in')
SOURCES = units.BUILD / 'search'
DTYPES = {'bf16': 'kBFloat16', 'fp16': 'kFloat16'}
BASELINE = 'flash_attn3'


@dataclass(frozen=True)
class Candidate:
    name: str
    fields: tuple[tuple[str, str], ...]

    @property
    def head_dim(self) -> int:
        return int(dict(self.fields)['kHeadDim'])

    def source(self, dtype: str) -> str:
        fields = dict(self.fields)
        fields.setdefault('kHeadDimV', fields['kHeadDim'])
        lines = (f'  static constexpr auto {name} = {value};' for name, value in fields.items())
        text = TEMPLATE.read_text()
        for mark, value in (('@NAME@', self.name), ('@FIELDS@', '\n'.join(lines)),
                            ('@DTYPE@', DTYPES[dtype])):
            text = text.replace(mark, value)
        return text


def read_candidates(text: str) -> list[Candidate]:
    candidates = []
    for number, line in enumerate(text.splitlines(), 1):
        name, *words = line.partition('#')[0].split() or ['']
        if not name:
            continue
        pairs = tuple(tuple(word.split('=', 1)) for word in words)
        if not name.isidentifier() or any(len(pair) != 2 for pair in pairs):
            raise SystemExit(f'search_tiles: expected "name field=value ...", got line {number}: '
                             f'{line!r}')
        if not {'kHeadDim', 'kTileN'} <= dict(pairs).keys():
            raise SystemExit(f'search_tiles: expected kHeadDim and kTileN, got line {number}: '
                             f'{line!r}')
        candidates.append(Candidate(name, pairs))
    return candidates


def build(candidates: Sequence[Candidate], dtype: str) -> dict[str, pathlib.Path]:
    """A library for each candidate. ninja shows the progress; a failure ends the program."""
    native.generate_instances()
    cuda = toolchain.find_cuda()
    SOURCES.mkdir(parents=True, exist_ok=True)
    kernels = {}
    for candidate in candidates:
        source = SOURCES / f'{candidate.name}.cu'
        source.write_text(candidate.source(dtype))
        kernels[candidate.name] = native.kernel_unit(source, cuda)
    dispatch = native.dispatch_units()
    objects = units.compile_units([*kernels.values(), *dispatch])
    libraries = {}
    for name, unit in kernels.items():
        libraries[name] = SOURCES / f'{name}.so'
        libraries[name].unlink(missing_ok=True)
        native.link([objects[unit], *(objects[shared] for shared in dispatch)],
                    native.runtime_libraries(cuda), libraries[name])
    return libraries


def attention_of(library: pathlib.Path, causal: bool) -> Callable[..., torch.Tensor]:
    """function(q, k, v) that runs a candidate on the current stream."""
    call = ctypes.CDLL(str(library)).candidate_forward
    properties = torch.cuda.get_device_properties(0)
    error = ctypes.create_string_buffer(1024)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        data = (ctypes.c_void_p * 5)(*(x.data_ptr() for x in (q, k, v, out, lse)))
        strides = (ctypes.c_int64 * 12)(*(s for x in (q, k, v, out) for s in x.stride()[:3]))
        sizes = (ctypes.c_int64 * 8)(
            q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], causal,
            properties.multi_processor_count, properties.L2_cache_size)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        scale = ctypes.c_float(q.shape[-1] ** -0.5)
        if call(data, strides, sizes, scale, stream, error, len(error)):
            raise RuntimeError(error.value.decode())
        return out
    return attention


def measure(shape: _measure.Shape, libraries: dict[str, pathlib.Path],
            args: argparse.Namespace) -> dict[str, float]:
    """TFLOP/s of the package and of each candidate that runs and is right."""
    device = torch.device('cuda')
    functions = {BASELINE: lambda q, k, v: flash_attn3.flash_attn_func(q, k, v,
                                                                       causal=shape.causal)}
    functions |= {name: attention_of(path, shape.causal) for name, path in libraries.items()}
    sets = _measure.make_inputs(shape, device)
    calls = {}
    for name, function in functions.items():
        try:
            error = _measure.relative_error(function(*sets[0]), sets[0], shape.causal)
        except RuntimeError as failure:
            print(f'{shape.label()}: {failure}', file=sys.stderr)
            continue
        if error < 0.02:
            calls[name] = _measure.Contender(name, function).rotating(sets)
        else:
            print(f'{shape.label()}: {name} is wrong, error {error:.2g}', file=sys.stderr)
    figures = _measure.interleaved(
        calls, _measure.Timer(device, args.target_ms), args.rounds,
        lambda name, failure: print(f'{shape.label()}: {name}: {failure}', file=sys.stderr))
    return {name: shape.flops / figure.ms / 1e9 for name, figure in figures.items()}


def show(cells: Sequence[dict], console: Console) -> None:
    """A table for each head dim and mask: candidates by lengths, and the mean over the package."""
    for head_dim, causal in dict.fromkeys((c['head_dim'], c['causal']) for c in cells):
        mine = [c for c in cells if (c['head_dim'], c['causal']) == (head_dim, causal)]
        table = Table(title=f'd{head_dim} {"causal" if causal else "full"}, TFLOP/s')
        for header in ('tile', *(str(c['seqlen']) for c in mine), f'/ {BASELINE}'):
            table.add_column(header, justify='left' if header == 'tile' else 'right')
        for name in dict.fromkeys(name for c in mine for name in c['tflops']):
            rates = [c['tflops'].get(name) for c in mine]
            ratios = [rate / c['tflops'][BASELINE] for rate, c in zip(rates, mine) if rate]
            table.add_row(name, *(f'{rate:.0f}' if rate else 'n/a' for rate in rates),
                          f'{_measure.geometric_mean(ratios):.3f}')
        console.print(table)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tiles', type=pathlib.Path, help='a file of candidates')
    parser.add_argument('--seqlens', default='512,1024,4096,16384')
    parser.add_argument('--dtype', choices=tuple(DTYPES), default='bf16')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--target-ms', type=float, default=5.0, help='work in a turn')
    parser.add_argument('--build-only', action='store_true', help='no GPU needed')
    parser.add_argument('--commit', help='of the sources, where git cannot tell')
    parser.add_argument('--out', type=pathlib.Path, default=harness.RESULTS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    candidates = read_candidates(args.tiles.read_text())
    libraries = build(candidates, args.dtype)
    if args.build_only:
        return 0
    record = harness.new_record('tiles', torch.device('cuda'), args.commit,
                                dict(rounds=args.rounds, target_ms=args.target_ms))
    for head_dim in dict.fromkeys(candidate.head_dim for candidate in candidates):
        here = {c.name: libraries[c.name] for c in candidates if c.head_dim == head_dim}
        for causal in (False, True):
            for seqlen in map(int, args.seqlens.split(',')):
                shape = shapes.square(head_dim, seqlen, causal, dtype=args.dtype)
                record['cells'].append(dict(head_dim=head_dim, causal=causal, seqlen=seqlen,
                                            tflops=measure(shape, here, args)))
    show(record['cells'], Console(width=120))
    print(harness.save(record, args.out))
    return 0


if __name__ == '__main__':
    sys.exit(main())
