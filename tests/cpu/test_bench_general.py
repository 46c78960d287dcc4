"""Benchmarks of packed sequences, windows, sinks and unequal head dims: counts of work, the check
of results, the contenders. On the CPU, with tiny problems.
"""
import json
from dataclasses import replace

import pytest
import torch

from benchmarks import ab_worker, bench_forward, harness, shapes
from flash_attn3 import _measure, bench, reference
from flash_attn3._measure import Shape

CPU = torch.device('cpu')
WINDOW = Shape(2, 40, 56, 4, 2, 32, causal=True, dtype='fp32', window_left=9)
SINKS = replace(WINDOW, sinks=True, window_left=-1)
UNEQUAL = replace(WINDOW, head_dim_v=16)
PACKED = Shape(3, 33, 33, 4, 2, 32, causal=True, dtype='fp32', lengths=(20, 33, 9))
EVERY = pytest.mark.parametrize('shape', [
    WINDOW, replace(WINDOW, causal=False, window_right=3), SINKS, UNEQUAL, PACKED,
    replace(PACKED, causal=False), replace(PACKED, head_dim_v=16, window_left=4, sinks=True)],
    ids=Shape.label)
BOTH = pytest.mark.parametrize('backward', [False, True])


def sequences(shape: Shape) -> list[tuple[int, int]]:
    return [(length, length) for length in shape.lengths] or [
        (shape.seqlen_q, shape.seqlen_k)] * shape.batch


def score_of(shape: Shape) -> reference.Score:
    mask = reference.Mask(shape.causal, (shape.window_left, shape.window_right))
    return reference.Score(shape.head_dim ** -0.5, mask=mask)


@EVERY
@BOTH
def test_work_counts_visible_pairs(shape, backward):
    """A causal diagonal counts half, but not in a window."""
    shape = replace(shape, backward=backward)
    visible = sum((~score_of(shape).mask.hidden(*lengths, CPU)).sum().item()
                  for lengths in sequences(shape))
    if shape.causal and not shape.has_window:
        visible -= sum(min(lengths) / 2 for lengths in sequences(shape))
    columns, columns_v = (3, 2) if backward else (1, 1)
    per_pair = 2 * (columns * shape.head_dim + columns_v * shape.columns_v)
    assert shape.flops == per_pair * shape.heads * visible
    inputs, = _measure.make_inputs(shape, CPU)
    out = inputs[-1].nbytes if backward else 0
    assert shape.input_bytes == sum(x.nbytes for x in inputs) + out


def right_result(shape: Shape, inputs: tuple[torch.Tensor, ...]):
    """In float64: the output, or the three gradients."""
    q, k, v, *dout = (x.double() for x in inputs)
    sinks = _measure.rules_of(shape, CPU).sinks
    wide = reference.Inputs(q, k, v, None if sinks is None else sinks.double())
    starts = torch.tensor([0, *torch.tensor(shape.lengths).cumsum(0)], dtype=torch.int32)
    lengths = reference.Lengths(starts, starts) if shape.lengths else None
    if not dout:
        return (reference.attend_packed(wide, score_of(shape), lengths) if lengths else
                reference.attend(wide, score_of(shape))).out
    own = dout[0], None, wide, score_of(shape)
    return tuple(reference.attend_packed_backward(*own, lengths) if lengths else
                 reference.attend_backward(*own))[:3]


@EVERY
@BOTH
def test_the_error_knows_a_right_result_from_wrong_ones(shape, backward):
    shape = replace(shape, backward=backward)
    inputs, = _measure.make_inputs(shape, CPU)
    right = right_result(shape, inputs)
    assert _measure.error_of(shape, right, inputs) < 1e-6
    others = [replace(shape, causal=not shape.causal, window_right=-1)]
    if shape.has_window:
        others.append(replace(shape, window_left=shape.window_left + 1))
    if shape.sinks:
        others.append(replace(shape, sinks=False))
    for other in others:
        assert _measure.error_of(other, right, inputs) > 0.01, other
    wrong = tuple(1.03 * x for x in right) if backward else 1.03 * right
    assert _measure.error_of(shape, wrong, inputs) == pytest.approx(0.03, rel=1e-3)


def test_sequences_at_both_ends_are_checked():
    shape = replace(PACKED, lengths=(9,) * 40)
    inputs, = _measure.make_inputs(shape, CPU)
    right = right_result(shape, inputs)
    for row, is_seen in ((0, True), (9 * 7, True), (9 * 8, False), (9 * 31, False),
                         (9 * 32, True), (359, True)):
        wrong = right.clone()
        wrong[row] += 1
        assert (_measure.error_of(shape, wrong, inputs) > 0.01) is is_seen, row


@EVERY
@BOTH
def test_contenders_agree_or_say_why_not(shape, backward):
    shape = replace(shape, backward=backward)
    names = (bench.OURS, bench.PADDED, 'sdpa') if shape.lengths else (bench.OURS, 'sdpa')
    results = {r['name']: r for r in bench.measure(shape, CPU, names, rounds=1, target_ms=0.1)}
    assert results[bench.OURS]['error'] < 1e-5
    if shape.sinks:
        assert results['sdpa']['na'] == 'has no sinks'
    for name in names[1:]:
        if shape.lengths and not shape.causal:
            assert results[name]['na'] == 'would need a mask of the lengths'
        elif 'na' not in results[name]:
            assert results[name]['error'] < 1e-5
    if shape.causal and not shape.sinks:
        assert all('ms' in result for result in results.values())


def test_padding_is_no_part_of_the_work():
    """Both contenders are credited with the pairs of the sequences alone."""
    results = bench.measure(PACKED, CPU, (bench.OURS, bench.PADDED), rounds=1, target_ms=0.1)
    for result in results:
        assert result['tflops'] == pytest.approx(PACKED.flops / result['ms'] / 1e9)


# ---------------------------------------------------------------------------------------- suites
def test_suites():
    mixed, equal, thousands = shapes.mixed_lengths(), (2048,) * 8, shapes.packed()[-1].lengths
    assert mixed == shapes.mixed_lengths() and sum(mixed) == 32768
    assert len(set(mixed)) > 15 and 16 <= min(mixed) and max(mixed) <= 8192
    assert len(thousands) == 8192 and {min(thousands), max(thousands)} == {1, 64}
    assert {cell.lengths for cell in shapes.packed()} == {mixed, equal, thousands}
    assert all((cell.heads, cell.heads_k, cell.head_dim, cell.sinks) == (64, 8, 64, True)
               for cell in shapes.gpt_oss())
    assert {cell.window_left for cell in shapes.gpt_oss()} == {128, 1024, -1}
    assert [(cell.head_dim, cell.columns_v, cell.heads, cell.seqlen_q, cell.causal)
            for cell in shapes.mla()] == [(192, 128, 16, 2048, True), (192, 128, 16, 8192, True)]
    assert all(cell.has_window and cell.causal for cell in shapes.windows())


def test_suites_of_the_gradients():
    assert set(shapes.BACKWARD_SUITES) == {'backward'} | {
        f'backward_{name}' for name in shapes.FORWARD_SUITES if name != 'forward'}
    for name in ('packed', 'window', 'gpt_oss', 'mla'):
        cells = shapes.select(f'backward_{name}', False, cpu=False, dtype='bf16')
        assert cells == shapes.backward_of(shapes.select(name, False, cpu=False, dtype='bf16'))


def test_records_say_what_was_measured(tmp_path, monkeypatch):
    cells = [WINDOW, SINKS, UNEQUAL, PACKED]
    monkeypatch.setattr(shapes, 'select', lambda *_: cells)
    code = bench_forward.main('--device cpu --suite packed --rounds 1 --target-ms 0.1 '
                              f'--commit abcdef0123 --out {tmp_path}'.split())
    path = tmp_path / 'packed_cpu.json'
    record = json.loads(path.read_text())
    assert code == 0 and record['settings']['contenders'][-1] == bench.PADDED
    assert [Shape(**cell['shape']) for cell in record['cells']] == cells
    assert [title.split(', ', 1)[1] for title, _ in harness.panels(record)] == [
        'head dim 32, 4/2 heads, causal, window 9,-1', 'head dim 32, 4/2 heads, causal, sinks',
        'head dim 32x16, 4/2 heads, causal, window 9,-1', 'head dim 32, 4/2 heads, causal, packed']
    ours, padded = (harness.measured(record['cells'][-1], name)
                    for name in (bench.OURS, bench.PADDED))
    assert ours['error'] < 1e-5 and padded['error'] < 1e-5
    assert bench_forward.compare(record['cells'][-1])[0] == 'sdpa flash', 'not ours, padded'


def test_labels():
    packed = replace(PACKED, backward=True)
    assert [shape.label() for shape in (WINDOW, SINKS, UNEQUAL, packed)] == [
        'fp32 b2 s40x56 h4/2 d32 causal window 9,-1', 'fp32 b2 s40x56 h4/2 d32 causal sinks',
        'fp32 b2 s40x56 h4/2 d32x16 causal window 9,-1',
        'fp32 b3 s9-33 h4/2 d32 causal packed backward']


@EVERY
def test_a_side_of_ab_times_every_problem(shape):
    side = ab_worker.Side(_measure, __import__('flash_attn3'), 'cpu', 0.1)
    with torch.no_grad():
        assert side.prepare(json.loads(json.dumps(shape.as_dict())))['error'] < 1e-5


def test_bench_command_takes_a_window(capsys):
    code = bench.main('--device cpu --dtype fp32 --seqlen 32 --heads 4 --head-dim 32 '
                      '--head-dim-v 16 --causal --window 8 0 --sinks --rounds 1'.split())
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[1].startswith('fp32 b1 s32 h4 d32x16 causal window 8,0 sinks: ')
