"""Timing of the backward on the CPU, with tiny problems: counts of work, the check of gradients,
the benchmarks of it."""
import dataclasses
import json

import pytest
import torch

from benchmarks import ab_worker, bench_backward, bench_forward, harness, shapes
from flash_attn3 import _measure, bench, flash_attn_func, reference
from flash_attn3._measure import Contender, Shape

CPU = torch.device('cpu')
GROUPED = Shape(2, 40, 56, 4, 2, 32, causal=True, dtype='fp32', backward=True)


def attention(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def test_work_is_five_products_and_reads_five_tensors():
    full = dataclasses.replace(GROUPED, causal=False)
    pairs = 40 * 56
    assert full.flops == 5 * 2 * 2 * 4 * 32 * pairs
    rows = 3 * 4 * 40 + 2 * 2 * 56      # q, out and dout; k and v
    assert full.input_bytes == 2 * rows * 32 * 4
    assert full.label() == 'fp32 b2 s40x56 h4/2 d32 full backward'


def test_inputs_of_a_backward_are_those_of_the_forward_and_a_gradient():
    forward, = _measure.make_inputs(dataclasses.replace(GROUPED, backward=False), CPU)
    (*tensors, dout), = _measure.make_inputs(GROUPED, CPU)
    assert all(map(torch.equal, tensors, forward))
    assert dout.shape == tensors[0].shape and 0.9 < dout.std() < 1.1


@pytest.mark.parametrize('rows', [7, 1024])
@pytest.mark.parametrize('lengths', [(40, 40), (40, 56), (56, 40)])
def test_the_error_of_gradients(lengths, rows, monkeypatch):
    """Against float64 autograd; each of the three counts, in every part of its tensor."""
    monkeypatch.setattr(_measure, 'CHECKED_ROWS', rows)
    shape = dataclasses.replace(GROUPED, seqlen_q=lengths[0], seqlen_k=lengths[1])
    inputs, = _measure.make_inputs(shape, CPU)
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out, _ = reference.forward(*leaves, 32 ** -0.5, True)
    right = torch.autograd.grad(out, leaves, inputs[3].double())
    assert _measure.relative_error(right, inputs, causal=True) < 1e-6
    assert _measure.relative_error(right, inputs, causal=False) > 0.05
    for number in range(3):
        wrong = [x.clone() for x in right]
        wrong[number] *= 1.03
        assert _measure.relative_error(wrong, inputs, True) == pytest.approx(0.03, rel=1e-3)
        wrong[number][0, -1, 0, 0] = torch.nan
        assert _measure.relative_error(wrong, inputs, True) == float('inf')


def test_the_heads_of_a_group_are_all_checked():
    inputs, = _measure.make_inputs(GROUPED, CPU)
    dq, dk, dv = Contender('x', attention).prepare(inputs)()
    assert _measure.relative_error((dq, dk, dv), inputs, causal=True) < 1e-6
    dq[0, :, 1] *= 2        # the second query head of the first KV head
    assert _measure.relative_error((dq, dk, dv), inputs, causal=True) > 0.5


def test_the_forward_of_a_backward_runs_once_in_its_context():
    calls, entered = [], []

    class Context:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *_):
            entered.pop()

    def function(q, k, v):
        calls.append(bool(entered))
        return attention(q, k, v)

    shape = dataclasses.replace(GROUPED, batch=1)
    sets = [_measure.make_inputs(shape, CPU, seed)[0] for seed in (0, 1)]
    with torch.no_grad():
        call = Contender('x', function, Context).rotating(sets)
        results = [call() for _ in range(3)]
    assert calls == [True, True]
    assert all(map(torch.equal, results[0], results[2]))
    for result, (*tensors, dout) in zip(results, sets):
        expected = reference.backward(dout, None, *tensors, 32 ** -0.5, True)
        torch.testing.assert_close(result, expected)


def test_bench_prints_a_table_of_each_pass(capsys, tmp_path):
    path = tmp_path / 'both.json'
    code = bench.main('--device cpu --dtype fp32 --seqlen 32 --heads 4 --heads-k 2 --head-dim 16 '
                      f'--causal --rounds 1 --pass both --json {path}'.split())
    text = capsys.readouterr().out
    forward, backward = json.loads(path.read_text())
    assert code == 0
    assert 'd16 causal: 0.00 GFLOP' in text and 'd16 causal backward: 0.00 GFLOP' in text
    assert backward['flops'] == 2.5 * forward['flops']
    for name in ('flash_attn3', 'sdpa', 'sdpa math'):
        found = next(r for r in backward['results'] if r['name'] == name)
        assert found['error'] < 1e-5 and not found['wrong']
        assert found['tflops'] == pytest.approx(backward['flops'] / found['ms'] / 1e9)
        assert f"{found['ms'] * 1e3:.1f}" in text


def test_a_wrong_backward_is_an_error_of_bench(monkeypatch, capsys):
    def spoiled(q, k, v, causal):
        return flash_attn_func(q, k, v, causal=causal) + 0.1 * (v.sum() - v.detach().sum())

    monkeypatch.setattr(bench, 'ours', lambda shape, device: Contender(
        bench.OURS, lambda q, k, v: spoiled(q, k, v, shape.causal)))
    options = '--device cpu --dtype fp32 --seqlen 32 --heads 2 --head-dim 16 --rounds 1'.split()
    assert bench.main(options) == 0
    assert bench.main([*options, '--pass', 'backward']) == 1
    assert '!' in capsys.readouterr().out


def test_backward_suites_are_the_forward_ones():
    for name, other in (('backward', 'forward'), ('backward_grouped', 'grouped'),
                        ('backward_odd', 'odd')):
        for quick in (False, True):
            cells, forward = (shapes.select(suite, quick, cpu=False, dtype='fp16')
                              for suite in (name, other))
            assert all(cell.backward for cell in cells)
            assert [dataclasses.replace(cell, backward=False) for cell in cells] == forward
    assert len(shapes.select('backward', False, cpu=False, dtype='bf16')) == 36


def test_backward_benchmark_writes_its_record(tmp_path, capsys):
    code = bench_backward.main('--device cpu --quick --rounds 1 --target-ms 0.1 '
                               f'--commit abcdef0123 --out {tmp_path}'.split())
    path = tmp_path / 'backward_cpu.json'
    record = json.loads(path.read_text())
    assert code == 0
    cells = [Shape(**cell['shape']) for cell in record['cells']]
    assert cells == shapes.backward_of(shapes.tiny())
    for cell in record['cells']:
        own = harness.measured(cell, 'flash_attn3')
        assert own['error'] < 1e-5
        assert own['tflops'] == pytest.approx(cell['flops'] / own['ms'] / 1e9)
        assert harness.measured(cell, 'sdpa flash')['error'] < 1e-5
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    assert all(title.endswith(', backward') for title, _ in harness.panels(record))
    assert bench_forward.markdown(record).count(' causal backward |') == len(cells) / 2


def test_a_side_of_ab_times_gradients():
    side = ab_worker.Side(_measure, __import__('flash_attn3'), 'cpu', 0.1)
    with torch.no_grad():
        prepared = side.prepare(GROUPED.as_dict())
        assert prepared['error'] < 1e-5
        assert side.turn([prepared['count'], prepared['ahead_s']])['ms'] > 0
        assert [x.shape[1] for x in side.call()] == [40, 56, 56]
