"""flash_attn3/bench on the CPU: counts of work, the check of results, medians, order of turns."""
from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flash_attn3 import bench
from flash_attn3.cpu import reference
from flash_attn3.bench import Contender, Figure, Shape, Turn
from flash_attn3.bench.__main__ import main

pytestmark = pytest.mark.slow

CPU = torch.device('cpu')
CAUSAL = Shape(2, 40, 56, 4, 2, 32, causal=True, dtype='fp32')
PACKED = Shape(3, 33, 33, 4, 2, 32, causal=True, dtype='fp32', lengths=(20, 33, 9))
SHAPES = [CAUSAL, replace(CAUSAL, causal=False), replace(CAUSAL, seqlen_q=56, seqlen_k=40),
          replace(CAUSAL, window_left=9), replace(CAUSAL, causal=False, window_right=3),
          replace(CAUSAL, sinks=True), replace(CAUSAL, head_dim_v=16), PACKED,
          replace(PACKED, causal=False),
          replace(PACKED, head_dim_v=16, window_left=4, sinks=True)]
EVERY = pytest.mark.parametrize('shape', [
    replace(shape, backward=backward) for shape in SHAPES for backward in (False, True)],
    ids=Shape.label)
TINY = '--device cpu --dtype fp32 --seqlen 32 --heads 4 --head-dim 16 --causal --rounds 1'.split()


def sequences(shape: Shape) -> list[tuple[int, int]]:
    return [(length, length) for length in shape.lengths] or [
        (shape.seqlen_q, shape.seqlen_k)] * shape.batch


def score_of(shape: Shape) -> reference.Score:
    mask = reference.Mask(shape.causal, (shape.window_left, shape.window_right))
    return reference.Score(shape.head_dim ** -0.5, mask=mask)


def right_result(shape: Shape, inputs: tuple[torch.Tensor, ...]):
    """In float64: the output, or the three gradients."""
    q, k, v, *dout = (x.double() for x in inputs)
    wide = reference.Inputs(q, k, v, bench.rules_of(shape, CPU).sinks)
    packed = ()
    if shape.lengths:
        starts = torch.tensor([0, *shape.lengths]).cumsum(0)
        packed = (reference.Lengths(starts, starts),)
    if not dout:
        attend = reference.attend_packed if packed else reference.attend
        return attend(wide, score_of(shape), *packed).out
    attend = reference.attend_packed_backward if packed else reference.attend_backward
    return tuple(attend(dout[0], None, wide, score_of(shape), *packed)[:3])


@EVERY
def test_work_counts_visible_pairs(shape):
    """A causal diagonal counts half, but not in a window."""
    visible = sum((~score_of(shape).mask.hidden(*lengths, CPU)).sum().item()
                  for lengths in sequences(shape))
    if shape.causal and not shape.has_window:
        visible -= sum(min(lengths) / 2 for lengths in sequences(shape))
    columns, columns_v = (3, 2) if shape.backward else (1, 1)
    per_pair = 2 * (columns * shape.head_dim + columns_v * shape.columns_v)
    assert shape.flops == per_pair * shape.heads * visible
    inputs, = bench.make_inputs(shape, CPU)
    out = inputs[-1].nbytes if shape.backward else 0
    assert shape.input_bytes == sum(x.nbytes for x in inputs) + out


@EVERY
def test_the_error_knows_a_right_result_from_wrong_ones(shape):
    inputs, = bench.make_inputs(shape, CPU)
    right = right_result(shape, inputs)
    assert bench.error_of(shape, right, inputs) < 1e-6
    others = [replace(shape, causal=not shape.causal, window_right=-1)]
    others += [replace(shape, window_left=shape.window_left + 1)] * shape.has_window
    others += [replace(shape, sinks=False)] * shape.sinks
    for other in others:
        assert bench.error_of(other, right, inputs) > 0.01, other
    for number in range(3 if shape.backward else 1):
        wrong = list(right) if shape.backward else [right]
        wrong[number] = 1.03 * wrong[number]
        result = tuple(wrong) if shape.backward else wrong[0]
        assert bench.error_of(shape, result, inputs) == pytest.approx(0.03, rel=1e-3)
        wrong[number][..., 0] = torch.nan
        assert bench.error_of(shape, result, inputs) == float('inf')


def test_sequences_at_both_ends_are_checked():
    shape = replace(PACKED, lengths=(9,) * 40)
    inputs, = bench.make_inputs(shape, CPU)
    right = right_result(shape, inputs)
    for row, is_seen in ((0, True), (9 * 7, True), (9 * 8, False), (9 * 31, False),
                         (9 * 32, True), (359, True)):
        wrong = right.clone()
        wrong[row] += 1
        assert (bench.error_of(shape, wrong, inputs) > 0.01) is is_seen, row


@EVERY
def test_contenders_agree_or_say_why_not(shape):
    names = (bench.OURS, bench.PADDED, 'sdpa') if shape.lengths else (bench.OURS, 'sdpa')
    results = {r['name']: r for r in bench.measure(shape, CPU, names, rounds=1, target_ms=0.1)}
    assert all(r['error'] < 1e-5 for r in results.values() if 'na' not in r)
    reasons = {name: r['na'] for name, r in results.items() if 'na' in r}
    assert bench.OURS not in reasons and (reasons.get('sdpa') == 'has no sinks') == shape.sinks
    if shape.causal and not shape.sinks:
        assert not reasons
    for result in results.values():
        assert 'na' in result or result['tflops'] == pytest.approx(
            shape.flops / result['ms'] / 1e9)


# ------------------------------------------------------------------------------------------ timing
class FakeTimer:
    """Gives out preset milliseconds, and writes down who was timed when."""

    def __init__(self, times: dict[str, list[float]]) -> None:
        self.times = {name: iter(values) for name, values in times.items()}
        self.asked: list[tuple] = []

    def calibrate(self, call):
        return 5 + len(call()), len(call()) / 100

    def turn(self, call, count, ahead_s):
        self.asked.append((call(), count, ahead_s))
        return Turn(next(self.times[call()]), clock_mhz=1000.0 + len(self.asked))


def test_interleaved_rotates_with_one_sleep_for_all_and_skips_what_fails():
    def fails() -> str:
        raise KeyError('never')

    timer, errors = FakeTimer({'a': [1.0, 5.0, 2.0], 'bb': [30.0, 10.0, 20.0]}), {}
    figures = bench.interleaved({'a': lambda: 'a', 'no': fails, 'bb': lambda: 'bb'}, timer, 3,
                                lambda name, error: errors.update({name: type(error)}))
    assert [name for name, _, _ in timer.asked] == ['a', 'bb', 'bb', 'a', 'a', 'bb']
    assert {(name, count) for name, count, _ in timer.asked} == {('a', 6), ('bb', 7)}
    assert {ahead_s for *_, ahead_s in timer.asked} == {0.02}
    assert {name: figure.ms for name, figure in figures.items()} == {'a': 2.0, 'bb': 20.0}
    assert errors == {'no': KeyError}


def test_figures():
    figure = Figure.of([Turn(3.0, 1500.0), Turn(1.0, 1700.0), Turn(2.0), Turn(10.0, 1600.0)])
    assert dataclasses.astuple(figure) == (2.5, 9.0 / 2.5, [3.0, 1.0, 2.0, 10.0], 1600.0)
    assert bench.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


# ----------------------------------------------------------------------------------- the command
def test_the_command(capsys, tmp_path):
    path = tmp_path / 'both.json'
    assert main([*TINY, '--heads-k', '2', '--pass', 'both', '--json', str(path)]) == 0
    text = capsys.readouterr().out
    forward, backward = json.loads(path.read_text())
    assert 'd16 causal: 0.00 GFLOP' in text and 'd16 causal backward: 0.00 GFLOP' in text
    assert backward['flops'] == 2.5 * forward['flops']
    for found in forward['results'] + backward['results']:
        assert 'na' in found or f"{found['ms'] * 1e3:.1f}" in text


def test_a_wrong_result_is_an_error_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(bench.contenders, 'ours', lambda shape, device: Contender(
        bench.OURS, lambda q, k, v: q * k.mean() + v))
    assert main(TINY) == 1
    assert main([*TINY, '--only', 'flash_attn3,fa9']) == 2
    said = capsys.readouterr()
    assert '!' in said.out and 'got fa9' in said.err


def test_import_flash_attn3_imports_none_of_it():
    code = "import sys, flash_attn3; print(*(m for m in sys.modules if '.bench' in m))"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith('flash_attn3')]
