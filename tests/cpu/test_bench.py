"""flash_attn3/bench on the CPU: FLOPs, the check of results, the command."""
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flash_attn3 import bench
from flash_attn3.cpu import reference
from flash_attn3.bench import Contender, Shape
from flash_attn3.bench.__main__ import main
from tests.support.lists import lengths_of

pytestmark = pytest.mark.slow

CPU = torch.device('cpu')
CAUSAL = Shape(2, 40, 56, 4, 2, 32, causal=True, dtype='fp32')
PACKED = Shape(3, 33, 33, 4, 2, 32, causal=True, dtype='fp32', lengths=(20, 33, 9))
SHAPES = [CAUSAL, replace(CAUSAL, seqlen_q=56, seqlen_k=40),
          replace(CAUSAL, causal=False, window_right=3),
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
        packed = (lengths_of(starts, starts),)
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
