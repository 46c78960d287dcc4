"""What a backward in FP8 would cost: its gradients against float64, and a GPT trained with them.

    python -m benchmarks.fp8_backward                        # on a GPU: both, under 150 s
    python -m benchmarks.fp8_backward --device cpu           # the gradients alone, a minute
    python -m benchmarks.fp8_backward --device cpu --quick   # tries the machinery, seconds

There is no such kernel: fp8_emulation.py rounds what its GEMMs would read. Inputs are N(0, 1), or
N(0, 1) + N(0, 100) in one value of 1000, rounded to bfloat16. An error is |x - x of float64| / |x
of float64| (Frobenius) of dq, dk or dv, the mean over seeds. `predicted`: every e4m3 rounding on
the way to a gradient adds an independent 2.65 %, what N(0, 1) loses. The training is that of
examples/train_gpt.py; a loss is the mean of the last 50 steps. Writes results/fp8_backward.json.
"""
from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import fp8_emulation, harness
from benchmarks.fp8_accuracy import outliers
from benchmarks.fp8_emulation import BACKWARD, BF16, E4M3, E5M2, FORWARD, Roundings, roundings
from examples import train_gpt

INPUTS = {'normal': lambda shape, generator: torch.randn(shape, generator=generator,
                                                         device=generator.device),
          'outliers': outliers}
GRADIENTS = 'dq', 'dk', 'dv'
GEMMS = {'S': ('s.q', 's.k'), 'dP': ('dp.do', 'dp.v', 'delta.do'), 'dV': ('dv.p', 'dv.do'),
         'dK': ('ds', 'dk.q'), 'dQ': ('ds', 'dq.k')}
ROTATED = 's.q', 's.k', 'dk.q', 'dq.k'
ROTATED_TOO = 'o.v', 'dp.do', 'dp.v', 'dv.do', 'delta.do'
# The roundings on the way to a gradient, and what one adds to its error.
REACHING = {'dq': ('s.q', 's.k', 'dp.do', 'dp.v', 'ds', 'dq.k'),
            'dk': ('s.q', 's.k', 'dp.do', 'dp.v', 'ds', 'dk.q'),
            'dv': ('s.q', 's.k', 'dv.p', 'dv.do')}
LOSS = {E4M3: 0.0265, E5M2: 0.0527, BF16: 0.0017}
LAST_STEPS = 50
STEPS = {'cuda': 1000, 'cpu': 0}
# Options of the example, 1024 bytes a sequence on a GPU, and what attends; others are compared with
# the first.
BOTH = 'bf16', 'all in FP8'
MODELS = {'small': ('--batch 8', BOTH),
          'wide': ('--batch 8 --head-dim 128 --d-model 512 --layers 4', (*BOTH, 'FP8 forward'))}
QUICK = {'small': '--layers 1 --d-model 32 --head-dim 16 --seqlen 32 --batch 2',
         'wide': '--layers 1 --d-model 64 --head-dim 32 --seqlen 32 --batch 2'}


class Method(NamedTuple):
    """The roundings of both passes."""
    forward: Roundings
    backward: Roundings


# ----------------------------------------------------------------------------------------- methods
def in_fp8(scales: str = 'block', rotated: Sequence[str] = ROTATED, without: Sequence[str] = (),
           **dtypes: torch.dtype) -> Method:
    """All of both passes but the operands in `without`. dtypes: by the last part of a name."""
    found = {name: rounding._replace(dtype=dtypes.get(name.split('.')[-1], E4M3))
             for name, rounding in roundings((*FORWARD, *BACKWARD), scales, rotated).items()
             if name not in without}
    return Method(*({name: found[name] for name in names if name in found}
                    for names in (FORWARD, BACKWARD)))


def alone(*operands: str, rotated: Sequence[str] = ()) -> Method:
    found = roundings(operands, rotated=rotated)
    return Method({name: found[name] for name in FORWARD if name in found}, found)


def gradients_in_bf16() -> dict[str, Method]:
    """What exists: both passes in bf16, and FP8 forwards with the two choices of fp8_backward."""
    p_and_ds = roundings(('dv.p', 'ds'), dtype=BF16)
    inputs = 's.q', 's.k', 'dp.v', 'dk.q', 'dq.k'
    forward = in_fp8().forward
    return {'bf16': Method(roundings(('o.p',), dtype=BF16), p_and_ds),
            "FP8 forward, 'given'": Method(forward, p_and_ds),
            "FP8 forward, 'rounded'": Method(forward,
                                             p_and_ds | roundings(inputs, rotated=ROTATED))}


def methods() -> dict[str, Method]:
    """By name, from one rounding to all."""
    operands = [name for name in BACKWARD if name != 'delta.do']
    found = gradients_in_bf16()
    found |= {f'{name} alone': alone(name) for name in operands}
    found |= {f'{gemm} alone': alone(*names, rotated=ROTATED) for gemm, names in GEMMS.items()}
    found |= {f'all, by {scales}{", rotated" if rotated else ""}': in_fp8(scales, rotated)
              for scales, rotated in itertools.product(('tensor', 'head', 'block'), ((), ROTATED))}
    found |= {'all, v and dO rotated too': in_fp8(rotated=ROTATED + ROTATED_TOO),
              'all, delta of the given dO': in_fp8(without=('delta.do',)),
              'all, dO in e5m2': in_fp8(do=E5M2), 'all, dS in e5m2': in_fp8(ds=E5M2),
              'all, dO and dS in e5m2': in_fp8(do=E5M2, ds=E5M2)}
    found |= {f'all but {gemm}': in_fp8(without=[name for name in GEMMS[gemm] if name != 'ds'])
              for gemm in GEMMS}
    found |= {"all but the backward's S": in_fp8()._replace(backward=found['all but S'].backward),
              'all but S, forward in bf16': found['all but S']._replace(
                  forward=found['bf16'].forward)}
    return found | {'dV, dK and dQ': Method(found['bf16'].forward, in_fp8(
        without=(*GEMMS['S'], *GEMMS['dP'])).backward)}


def predicted(method: Method) -> dict[str, float]:
    """The errors on N(0, 1) if every rounding is independent of all others."""
    return {name: math.hypot(*(LOSS[method.backward[operand].dtype] for operand in operands
                               if operand in method.backward))
            for name, operands in REACHING.items()}


# ------------------------------------------------------------------------------------------ errors
def gradients(inputs: Sequence[Tensor], is_causal: bool, method: Method) -> tuple[Tensor, ...]:
    """dq, dk and dv of q, k, v and dO, each (batch, heads, rows, head_dim)."""
    *qkv, dout = inputs
    outputs = fp8_emulation.forward(*qkv, is_causal, method.forward)
    return fp8_emulation.backward(*qkv, outputs, dout, is_causal, method.backward)


def relative(x: Tensor, expected: Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm()).item()


def measure(shape: Mapping, kind: str, seeds: Sequence[int], device: torch.device) -> list[dict]:
    """One dict a method: its name, and the mean error of each gradient."""
    found: dict[str, list[list[float]]] = {}
    size = 1, shape['heads'], shape['seqlen'], shape['head_dim']
    for seed in seeds:
        generator = torch.Generator(device).manual_seed(seed)
        inputs = [INPUTS[kind](size, generator).bfloat16() for _ in range(4)]
        expected = gradients([x.double() for x in inputs], shape['causal'], Method({}, {}))
        for name, method in methods().items():
            results = gradients([x.float() for x in inputs], shape['causal'], method)
            found.setdefault(name, []).append(list(map(relative, results, expected)))
    return [dict(name=name, **dict(zip(GRADIENTS, map(statistics.fmean, zip(*errors)))))
            for name, errors in found.items()]


def cells(args: argparse.Namespace) -> Iterator[tuple[dict, str]]:
    for head_dim, seqlen, causal, kind in itertools.product(args.head_dims, args.seqlens,
                                                            (False, True), INPUTS):
        yield dict(seqlen=seqlen, heads=args.heads, head_dim=head_dim, causal=causal), kind


def label(cell: dict) -> str:
    shape = cell['shape']
    return (f"{shape['head_dim']}, {shape['seqlen']}, {'causal' if shape['causal'] else 'full'}, "
            f"{cell['inputs']}")


def show_errors(record: dict, console: Console) -> None:
    table = Table(title=f"Error of {' / '.join(GRADIENTS)}, %, {record['environment']['device']}, "
                        f"commit {record['commit']}, mean of {record['settings']['seeds']} seeds")
    for name in ('rounded to FP8', 'predicted', *map(label, record['cells'])):
        table.add_column(name)
    by_name = methods()
    for results in zip(*(cell['results'] for cell in record['cells'])):
        name = results[0]['name']
        table.add_row(name, *map(percents, (predicted(by_name[name]), *results)))
    console.print(table)


def percents(errors: Mapping) -> str:
    return ' / '.join(f'{100 * errors[name]:.1f}' for name in GRADIENTS)


# ---------------------------------------------------------------------------------------- training
def attention_of(method: Method) -> train_gpt.Attention:
    def attend(qkv: Tensor, heads_q: int) -> Tensor:
        heads_kv = (qkv.size(2) - heads_q) // 2
        return fp8_emulation.attention(*qkv.split((heads_q, heads_kv, heads_kv), dim=2), True,
                                       *method)
    return attend


def contenders() -> dict[str, train_gpt.Attention]:
    return {'bf16': train_gpt.sdpa_attention, 'all in FP8': attention_of(in_fp8()),
            'FP8 forward': attention_of(gradients_in_bf16()["FP8 forward, 'rounded'"])}


def train(name: str, args: argparse.Namespace, text: Tensor) -> Iterator[dict]:
    """One dict a contender: its name, the loss, the difference from the first, the seconds."""
    words, names = MODELS[name]
    options = train_gpt.parse([*(QUICK[name] if args.quick else words).split(), '--steps',
                               str(args.steps), '--device', args.device])
    first, attentions = None, contenders()
    for contender in names:
        start = time.perf_counter()
        losses = list(train_gpt.training(attentions[contender], text, options))
        loss = torch.stack(losses[-LAST_STEPS:]).mean().item()
        first = first or loss
        yield dict(name=contender, loss=loss, difference=loss / first - 1,
                   seconds=time.perf_counter() - start)


def show_training(record: dict, console: Console) -> None:
    table = Table('model', 'attention', 'loss', 'difference', 'seconds',
                  title=f"{record['settings']['steps']} steps, mean of the last {LAST_STEPS}")
    for run in record['training']:
        for result in run['results']:
            table.add_row(run['name'], result['name'], f"{result['loss']:.4f}",
                          f"{100 * result['difference']:+.2f} %", f"{result['seconds']:.0f}")
    console.print(table)


# -------------------------------------------------------------------------------------------- both
def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.parser_of('benchmarks.fp8_backward', __doc__, '200 keys, 1 seed, tiny models')
    is_gpu = torch.cuda.is_available()
    parser.add_argument('--head-dims', type=int, nargs='+', default=[128, 64] if is_gpu else [128])
    parser.add_argument('--seqlens', type=int, nargs='+', default=[2048] if is_gpu else [1024])
    parser.add_argument('--heads', type=int, default=2)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--models', choices=MODELS, nargs='+', default=list(MODELS))
    parser.add_argument('--steps', type=int, help='of training: 1000 on a GPU, none on a CPU')
    args = parser.parse_args(argv)
    if args.quick:
        args.head_dims, args.seqlens, args.seeds, args.steps = [48], [200], 1, 3
    if args.steps is None:
        args.steps = STEPS[torch.device(args.device).type]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device, console = torch.device(args.device), harness.console(200)
    settings = dict(heads=args.heads, seeds=args.seeds, steps=args.steps)
    record = harness.new_record('fp8_backward', device, args.commit, settings)
    for shape, kind in cells(args):
        results = measure(shape, kind, range(args.seeds), device)
        record['cells'].append(dict(shape=shape, inputs=kind, results=results))
        path = harness.save(record, args.out)
    show_errors(record, console)
    record['training'], text = [], train_gpt.library_text()
    if device.type == 'cuda':
        torch.set_float32_matmul_precision('high')    # TF32 loses nothing next to e4m3
    for name in args.models if args.steps else ():
        run = dict(name=name, results=[])
        record['training'].append(run)
        for result in train(name, args, text):
            run['results'].append(result)
            path = harness.save(record, args.out)
            console.print(f"{name}, {result['name']}: {result['loss']:.4f}, "
                          f"{result['seconds']:.0f} s", highlight=False)
    show_training(record, console)
    console.print(f'written: {path}', highlight=False)
    return 0


if __name__ == '__main__':
    sys.exit(main())
