"""benchmarks/bench_fp8.py on the CPU: cells, what each contender computes, the file."""
import json

import pytest
import torch

from benchmarks import bench_fp8, harness
from benchmarks.bench_fp8 import FP8
from flash_attn3 import _measure
from flash_attn3._measure import Shape
from flash_attn3.quantize import KV_BLOCK

CPU = torch.device('cpu')
TINY = bench_fp8.tiny('bf16')
GROUPED, PACKED = TINY[0], TINY[-1]


def test_cells_are_of_so_many_tokens_and_counted_once():
    cells = bench_fp8.select(False, False, 'bf16')
    assert len(set(cells)) == len(cells) == 29
    packed, = (shape for shape in cells if shape.lengths)
    assert len(packed.lengths) == 24
    assert min(packed.lengths) >= 64 and max(packed.lengths) == packed.seqlen_q == 5361
    assert packed.flops == 4 * 128 * 16 * sum(length ** 2 / 2 for length in packed.lengths)
    assert {shape.tokens[0] for shape in cells if shape != packed} == {16384}


@pytest.mark.parametrize('shape', TINY, ids=Shape.label)
def test_every_contender_is_near_the_reference(shape):
    """Each on both sets; a sequence, head or scale in a wrong place would be far from it."""
    sets = bench_fp8.make_sets(shape, CPU)
    assert not torch.equal(sets[0][0], sets[1][0])
    calls = bench_fp8.make_calls(shape, sets)
    assert list(calls) == ['bf16', *FP8]
    for name, of_sets in calls.items():
        outs = [call() for call in of_sets]
        assert all(out.dtype == torch.bfloat16 for out in outs)
        errors = [_measure.error_of(shape, *both) for both in zip(outs, sets, strict=True)]
        low, high = (0.02, 0.06) if name in FP8 else (0, 0.004)
        assert all(low < error < high for error in errors), (name, errors)


@pytest.mark.parametrize('shape', [GROUPED, PACKED], ids=Shape.label)
def test_what_differs_between_the_contenders(shape):
    inputs = bench_fp8.make_sets(shape, CPU)[:1]
    calls = {name: call.keywords for name, (call,) in
             bench_fp8.make_calls(shape, inputs).items()}
    sizes = {name: [tuple(calls[name][f'{x}_descale'].shape) for x in 'qkv'] for name in FP8[:3]}
    assert sizes['e4m3'] == sizes['e4m3 promote'] == [(shape.batch, shape.heads_k)] * 3
    batch, count = (1, shape.batch) if shape.lengths else (shape.batch, 0)
    rows = shape.tokens[0]
    blocks = rows // KV_BLOCK + count if shape.lengths else -(-rows // shape.batch // KV_BLOCK)
    by_kv = (batch, shape.heads_k, blocks)
    assert sizes['e4m3 by block'] == [(batch, shape.heads, rows // 64 + count), by_kv, by_kv]
    promotes = [name for name in calls if calls[name].get('fp8_accum') == 'promote']
    assert promotes == ['e4m3 promote']
    assert all(call['causal'] for call in calls.values())


def test_shares_and_limits_are_those_of_fp8():
    fp8, wide = (bench_fp8.result_of(dict(name=name, error=0.05, wrong=True, peak_share=0.8))
                 for name in ('e4m3', 'bf16'))
    assert not fp8['wrong'] and fp8['peak_share'] == 0.4
    assert wide['wrong'] and wide['peak_share'] == 0.8
    far = bench_fp8.result_of(dict(name='fp8_func', error=float('nan'), peak_share=None))
    assert far['wrong'] and far['peak_share'] is None


def test_what_does_not_run_is_named(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError('no such kernel')
    monkeypatch.setattr(bench_fp8, 'flash_attn_fp8_func', refuse)
    results = bench_fp8.measure(GROUPED, CPU, 1, 0.1)
    cell = dict(shape=GROUPED.as_dict(), results=results)
    cell['ratios'] = bench_fp8.ratios_of(cell)
    assert results[-1] == dict(name='fp8_func', na='no such kernel')
    assert list(cell['ratios']) == list(FP8[:3])
    assert bench_fp8.failures([cell]) == [f'{GROUPED.label()}: fp8_func: no such kernel']
    assert bench_fp8.line_of(cell).endswith('fp8_func n/a')


def test_file_has_the_ratios_of_every_cell(tmp_path, capsys):
    assert bench_fp8.main(['--device', 'cpu', '--quick', '--rounds', '1', '--target-ms', '0.1',
                           '--commit', 'abc', '--out', str(tmp_path)]) == 0
    path, = tmp_path.iterdir()
    assert path.name == 'fp8_cpu.json'
    record = json.loads(path.read_text())
    assert [Shape(**cell['shape']) for cell in record['cells']] == TINY
    for cell in record['cells']:
        assert [result['name'] for result in cell['results']] == record['settings']['contenders']
        base = cell['results'][0]
        for result in cell['results'][1:]:
            assert result['tflops'] == pytest.approx(cell['flops'] / result['ms'] / 1e9)
            assert cell['ratios'][result['name']] == pytest.approx(base['ms'] / result['ms'])
    for name, found in record['summary'].items():
        ratios = [cell['ratios'][name] for cell in record['cells']]
        assert (found['worst'], found['best']) == (min(ratios), max(ratios))
        assert found['geometric_mean'] ** len(TINY) == pytest.approx(
            torch.tensor(ratios).prod().item(), rel=1e-4)
    printed = capsys.readouterr().out
    assert all(printed.count(f'{shape.label()} ') == 1 for shape in TINY)
    assert f"e4m3 {harness.figure_text(record['cells'][0]['results'][1])} (" in printed
