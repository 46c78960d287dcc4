"""Training the GPT of examples/train_gpt.py: losses against plain attention, speed against SDPA.

    python -m benchmarks.training losses                       # on a Hopper GPU, 90 s
    python -m benchmarks.training losses --fp8                 # and with its forward in FP8
    python -m benchmarks.training speed                        # 40 s
    python -m benchmarks.training losses --device cpu --quick  # tries the machinery, seconds

Other options are those of the example: --head-dim 128, --heads-kv 1, --layers 12.

`losses` trains the same model on the same data with flash_attn3, with SDPA (the backend that
PyTorch picks) and with plain attention in float32, for several seeds. All else is equal: autocast
to bfloat16, float32 weights, and q, k and v in bfloat16 from the same GEMM. So a difference from
plain attention comes from the roundings of the attention alone. Training amplifies any difference,
and the final loss is partly chance. Three measures show that: the largest difference over all
steps, the mean, and the largest of the first steps, before much is amplified. A control, with the
first seed, is plain attention in float64: it shows the effect of one float32 rounding. With --fp8,
one more contender has flash_attn3's forward in FP8 and its backward in bfloat16. The record has the
measures and the last losses, the plot has the losses of every step.

`speed` is tokens/s end to end: forward, backward, clipping and optimizer, eager. The contenders
take turns of a few steps in rounds; the figure is that of the median turn, host time included.
"""
from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks import harness
from examples import train_gpt
from flash_attn3 import bench

OURS, SDPA, EXACT, CONTROL, FP8 = 'flash_attn3', 'sdpa', 'math', 'math in fp64', 'fp8'
EARLY_STEPS = 20
UNTIMED_STEPS = 3
# Options of the example, and those that --quick adds.
LOSSES = '--steps 240 --seqlen 1024 --batch 8 --layers 6 --d-model 384'.split()
SPEED = '--layers 12 --d-model 768'.split()
SEQLENS, TOKENS = (2048, 8192, 16384), 32768    # TOKENS: in a step
QUICK = '--layers 2 --d-model 64 --head-dim 16'.split()
QUICK_LOSSES = '--steps 6 --seqlen 48 --batch 4'.split()
QUICK_SEQLENS, QUICK_TOKENS = (32, 64), 128

MEASURES: dict[str, Callable[[Sequence[float]], float]] = {
    'largest': max, 'mean': statistics.fmean,
    'early': lambda differences: max(differences[:EARLY_STEPS])}


def fp64_attention(qkv: Tensor, heads_q: int) -> Tensor:
    return checkpoint(train_gpt.plain_attention, qkv.double(), heads_q, use_reentrant=False).float()


def cudnn_attention(qkv: Tensor, heads_q: int) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return train_gpt.sdpa_attention(qkv, heads_q)


# ----------------------------------------------------------------------------------------- losses
def contenders(has_fp8: bool, has_control: bool) -> dict[str, train_gpt.Attention]:
    names = OURS, SDPA, EXACT, *[FP8] * has_fp8
    return {name: train_gpt.ATTENTIONS[name] for name in names} | (
        {CONTROL: fp64_attention} if has_control else {})


def losses_of_seed(seed: int, model: Sequence[str], text: Tensor,
                   attentions: dict[str, train_gpt.Attention]) -> tuple[dict[str, list], dict]:
    """The losses of every attention, step by step, and the seconds that they took."""
    options = train_gpt.parse([*model, '--seed', str(seed)])
    losses, seconds = {}, {}
    for name, attend in attentions.items():
        start = time.perf_counter()
        losses[name] = torch.stack(list(train_gpt.training(attend, text, options))).tolist()
        seconds[name] = time.perf_counter() - start
    return losses, seconds


def differences(losses: dict[str, list[float]], name: str) -> list[float]:
    """|loss - loss of plain attention|, step by step."""
    return [abs(a - b) for a, b in zip(losses[name], losses[EXACT])]


def compare(losses: dict[str, list[float]]) -> dict:
    """`differences` from plain attention, by measure and attention; `ratios`: ours / SDPA's."""
    found = {measure: {name: take(differences(losses, name)) for name in losses if name != EXACT}
             for measure, take in MEASURES.items()}
    ratios = {measure: values[OURS] / values[SDPA] if values[SDPA] else None
              for measure, values in found.items()}
    return dict(differences=found, ratios=ratios)


def summarize_losses(cells: Sequence[dict]) -> dict:
    """Over the seeds, by each of MEASURES: the lowest, median and highest ratio."""
    summary: dict = dict(seeds=len(cells))
    for measure in MEASURES:
        ratios = [cell['ratios'][measure] for cell in cells if cell['ratios'][measure] is not None]
        if ratios:
            summary[measure] = dict(lowest=min(ratios), median=statistics.median(ratios),
                                    highest=max(ratios))
    return summary


def plot_losses(runs: Sequence[dict[str, list]], title: str, path: pathlib.Path) -> None:
    """The losses of the first seed; next to them the differences of every seed."""
    figure = Figure(figsize=(11, 4), layout='constrained')
    left, right = figure.subplots(1, 2)
    colors = {OURS: 'C0', SDPA: 'C1', EXACT: 'C2', FP8: 'C3', CONTROL: '0.6'}
    for number, run in enumerate(runs):
        for name, losses in run.items():
            style = dict(color=colors[name], label='' if number else name)
            if number == 0:
                left.plot(losses, linewidth=1, **style)
            if name != EXACT:
                right.semilogy(differences(run, name), linewidth=0.6, **style)
    for axis, label in ((left, 'loss, first seed'), (right, '|loss - loss of math|, every seed')):
        axis.set(xlabel='step', ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def show_losses(record: dict, console: Console) -> None:
    table = Table('seed', 'last loss', 'attention', *MEASURES, 'seconds',
                  title=f'|loss - loss of {EXACT}|, {title_of(record)}')
    for cell in record['cells']:
        for name, loss in cell['last_loss'].items():
            values = [f"{cell['differences'][measure][name]:.2e}" if name != EXACT else ''
                      for measure in MEASURES]
            table.add_row(str(cell['seed']), f'{loss:.4f}', name, *values,
                          f"{cell['seconds'][name]:.1f}")
        table.add_row('', '', f'{OURS} / {SDPA}', *map(ratio_text, cell['ratios'].values()),
                      end_section=True)
    console.print(table)
    for measure in MEASURES:
        if found := record['summary'].get(measure):
            console.print(f"{OURS} / {SDPA}, {measure}: median {found['median']:.2f}, "
                          f"{found['lowest']:.2f} to {found['highest']:.2f}", highlight=False)


def run_losses(args: argparse.Namespace, model: Sequence[str], text: Tensor,
               console: Console) -> int:
    record, runs, path = new_record('losses', args, model, early_steps=EARLY_STEPS), [], None
    for seed in range(args.seeds):
        losses, seconds = losses_of_seed(seed, model, text,
                                         contenders(args.fp8, has_control=seed == 0))
        runs.append(losses)
        cell = dict(seed=seed, last_loss={name: found[-1] for name, found in losses.items()},
                    seconds=seconds, **compare(losses))
        record['cells'].append(cell)
        record['summary'] = summarize_losses(record['cells'])
        path = harness.save(record, args.out)
        plot_losses(runs, title_of(record), path.with_suffix('.png'))
        ratios = ', '.join(f'{measure} {ratio_text(r)}' for measure, r in cell['ratios'].items())
        console.print(f'seed {seed}, {OURS} / {SDPA}: {ratios}', highlight=False)
    show_losses(record, console)
    console.print(f'written: {path} and .png', highlight=False)
    return 0


# ------------------------------------------------------------------------------------------ speed
def take_turns(options: argparse.Namespace, text: Tensor, args: argparse.Namespace) -> list[dict]:
    """One dict a contender: `name`, and tokens/s or 'na' with the reason."""
    contenders = {name: train_gpt.ATTENTIONS[name] for name in (OURS, SDPA)}
    if options.device.type == 'cuda':
        contenders['sdpa cudnn'] = cudnn_attention
    options.steps = UNTIMED_STEPS + args.rounds * args.turn_steps
    runs: dict[str, Iterator[Tensor]] = {}
    reasons: dict[str, str] = {}
    for name, attend in contenders.items():
        try:
            runs[name] = train_gpt.training(attend, text, options)
            advance(runs[name], UNTIMED_STEPS)
        except Exception as failure:
            reasons[name] = bench.reason(failure)
            del runs[name]
    tokens = args.turn_steps * options.batch * options.seqlen
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for name in bench.turn_order(list(runs), args.rounds):
        start = train_gpt.now(options.device)
        advance(runs[name], args.turn_steps)
        rates[name].append(tokens / (train_gpt.now(options.device) - start))
    return [dict(name=name, na=reasons[name]) if name in reasons
            else speed_result(name, rates[name]) for name in contenders]


def advance(training: Iterator[Tensor], steps: int) -> None:
    for _ in islice(training, steps):
        pass


def speed_result(name: str, rates: Sequence[float]) -> dict:
    middle = statistics.median(rates)
    return dict(name=name, tokens_per_second=middle, spread=(max(rates) - min(rates)) / middle)


def speed_ratio(results: Sequence[dict]) -> tuple[str, float] | None:
    """(fastest other, our speed / its speed)."""
    rates = {r['name']: r['tokens_per_second'] for r in results if 'na' not in r}
    own = rates.pop(OURS, None)
    if own is None or not rates:
        return None
    best = max(rates, key=rates.get)
    return best, own / rates[best]


def show_speed(record: dict, console: Console) -> None:
    names = [result['name'] for result in record['cells'][0]['results']]
    table = Table('seqlen', 'batch', *names, 'fastest other', 'ratio',
                  title=f'tokens/s, {title_of(record)}')
    for cell in record['cells']:
        best, ratio = cell['best'] or ('', None)
        table.add_row(str(cell['seqlen']), str(cell['batch']), *map(speed_text, cell['results']),
                      best, ratio_text(ratio))
    console.print(table)
    for cell in record['cells']:
        for result in cell['results']:
            if 'na' in result:
                console.print(f"{result['name']}: {result['na']}", highlight=False)


def speed_text(result: dict) -> str:
    if 'na' in result:
        return 'n/a'
    mark = '~' if result['spread'] > harness.NOISY else ''
    return f"{result['tokens_per_second']:,.0f}{mark}"


def run_speed(args: argparse.Namespace, model: Sequence[str], text: Tensor,
              console: Console) -> int:
    seqlens, tokens = (QUICK_SEQLENS, QUICK_TOKENS) if args.quick else (SEQLENS, TOKENS)
    record, path = new_record('speed', args, model, rounds=args.rounds,
                              turn_steps=args.turn_steps, tokens=tokens), None
    with harness.Monitor(torch.device(record['settings']['model']['device'])) as monitor:
        for seqlen in seqlens:
            batch = tokens // seqlen
            options = train_gpt.parse([*model, '--seqlen', str(seqlen), '--batch', str(batch)])
            monitor.clear()
            results = take_turns(options, text, args)
            record['cells'].append(dict(seqlen=seqlen, batch=batch, results=results,
                                        best=speed_ratio(results)))
            ratios = [cell['best'][1] for cell in record['cells'] if cell['best']]
            record['summary'] = dict(cells=len(record['cells']), ratios=ratios)
            path = harness.save(record, args.out)
            console.print(f'{seqlen} tokens  {monitor.text()}', highlight=False)
    show_speed(record, console)
    console.print(f'written: {path}', highlight=False)
    return 0


# ------------------------------------------------------------------------------------------- both
def ratio_text(ratio: float | None) -> str:
    return 'n/a' if ratio is None else f'{ratio:.2f}'


def new_record(kind: str, args: argparse.Namespace, model: Sequence[str], **settings) -> dict:
    options = train_gpt.parse(list(model))
    kept = 'layers', 'd_model', 'head_dim', 'heads_kv', 'device'
    kept += ('steps', 'seqlen', 'batch') if kind == 'losses' else ()
    facts = {name: getattr(options, name) for name in kept}
    settings['model'] = dict(facts, device=str(options.device))
    subject = f'training_{kind}' + '_fp8' * (kind == 'losses' and args.fp8)
    return harness.new_record(subject, options.device, args.commit, settings)


def title_of(record: dict) -> str:
    model = record['settings']['model']
    return (f"{model['layers']} layers of {model['d_model']}, head dim {model['head_dim']}, "
            f"{record['environment']['device']}, commit {record['commit']}")


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the words that the example parses."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks.training', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('kind', choices=('losses', 'speed'))
    parser.add_argument('--quick', action='store_true', help='a tiny model, for a CPU')
    parser.add_argument('--fp8', action='store_true', help='for losses: also a forward in FP8')
    parser.add_argument('--seeds', type=int, help='for losses: 5; 2 with --quick')
    parser.add_argument('--rounds', type=int, default=5, help='for speed: %(default)s')
    parser.add_argument('--turn-steps', type=int, default=3, help='steps in a turn: %(default)s')
    harness.add_record_arguments(parser.add_argument)
    args, others = parser.parse_known_args(argv)
    args.seeds = args.seeds or (2 if args.quick else 5)
    model = LOSSES if args.kind == 'losses' else SPEED
    if args.quick:
        model = QUICK + (QUICK_LOSSES if args.kind == 'losses' else [])
    return args, [*model, *others]


def main(argv: Sequence[str] | None = None) -> int:
    args, model = parse(argv)
    torch.set_num_threads(train_gpt.parse(model).threads)
    console = harness.console()
    run = run_losses if args.kind == 'losses' else run_speed
    return run(args, model, train_gpt.library_text(), console)


if __name__ == '__main__':
    sys.exit(main())
