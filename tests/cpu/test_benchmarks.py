"""The timing code and the benchmarks, run on the CPU with tiny problems: medians, order of turns,
counts of work, the files that are written. Their figures on a GPU are not tested."""
import itertools
import json
import math
import sys

import pytest
import torch

from benchmarks import ab, bench_forward, bench_quantize, harness, shapes
from flash_attn3 import _measure, bench
from flash_attn3._measure import Figure, Shape, Turn

CPU = torch.device('cpu')
TINY = Shape(1, 48, 48, 4, 2, 32, causal=True, dtype='fp32')


def visible_pairs(shape: Shape) -> int:
    """Query i sees keys up to i + seqlen_k - seqlen_q."""
    return sum(1 for i in range(shape.seqlen_q) for j in range(shape.seqlen_k)
               if not shape.causal or j <= i + shape.seqlen_k - shape.seqlen_q)


# ------------------------------------------------------------------------ problems
@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('lengths', [(7, 7), (5, 11), (11, 5), (1, 9), (9, 1)])
def test_work_counts_visible_pairs_with_half_of_the_diagonal(lengths, causal):
    shape = Shape(3, *lengths, 4, 2, 16, causal)
    half_diagonal = min(lengths) / 2 if causal else 0
    assert shape.pairs == visible_pairs(shape) - half_diagonal
    assert shape.flops == 4 * 3 * 4 * 16 * shape.pairs


def test_square_causal_is_half_of_full():
    full, causal = Shape(1, 512, 512, 8, 8, 64), Shape(1, 512, 512, 8, 8, 64, causal=True)
    assert full.flops == 4 * 8 * 64 * 512 * 512
    assert causal.flops * 2 == full.flops


def test_forward_suite_is_the_36_cells_of_16k_tokens():
    cells = shapes.forward()
    assert len(set(cells)) == 36
    assert {cell.batch * cell.seqlen_q for cell in cells} == {16384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2048}
    assert cells[0].flops == 4 * 32 * 32 * 64 * 512**2


def test_inputs_have_the_shape_and_are_repeatable():
    (q, k, v), = _measure.make_inputs(TINY, CPU)
    assert (q.shape, k.shape, v.shape) == ((1, 48, 4, 32), (1, 48, 2, 32), (1, 48, 2, 32))
    assert sum(x.nbytes for x in (q, k, v)) == TINY.input_bytes
    assert 0.9 < torch.cat([x.flatten() for x in (q, k, v)]).std() < 1.1
    assert torch.equal(_measure.make_inputs(TINY, CPU)[0][0], q)


@pytest.mark.parametrize('lengths', [(48, 48), (20, 48), (48, 20)])
def test_relative_error_knows_attention_from_a_wrong_mask(lengths):
    shape = Shape(1, *lengths, 2, 2, 32, causal=True, dtype='fp32')
    q, k, v = _measure.make_inputs(shape, CPU)[0]
    scores = torch.einsum('bqhd,bkhd->bhqk', q.double(), k.double()) / 32**0.5
    hidden = torch.ones(lengths, dtype=torch.bool).triu(1 + lengths[1] - lengths[0])
    p = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
    right = torch.einsum('bhqk,bkhd->bqhd', p, v.double())
    assert _measure.relative_error(right, (q, k, v), causal=True) < 1e-6
    assert _measure.relative_error(right, (q, k, v), causal=False) > 0.1
    assert _measure.relative_error(right * 1.03, (q, k, v), True) == pytest.approx(0.03, rel=1e-3)
    assert _measure.relative_error(right * math.nan, (q, k, v), causal=True) == math.inf


# ------------------------------------------------------------------------ timing
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


def test_figure_is_the_median_over_rounds():
    figure = Figure.of([Turn(3.0, 1500.0), Turn(1.0, 1700.0), Turn(2.0), Turn(10.0, 1600.0)])
    assert figure.ms == 2.5
    assert figure.spread == 9.0 / 2.5
    assert figure.rounds == [3.0, 1.0, 2.0, 10.0]
    assert figure.clock_mhz == 1600.0
    assert Figure.of([Turn(4.0)]).clock_mhz is None


def test_rounds_rotate():
    assert ''.join(_measure.turn_order('abc', 4)) == 'abc' 'bca' 'cab' 'abc'
    assert list(_measure.turn_order([], 3)) == []


def test_interleaved_takes_turns_with_one_sleep_for_all():
    times = {'a': [1.0, 5.0, 2.0], 'bb': [30.0, 10.0, 20.0]}
    timer = FakeTimer(times)
    calls = {name: (lambda name=name: name) for name in times}
    figures = _measure.interleaved(calls, timer, 3, on_error=pytest.fail)
    assert [name for name, _, _ in timer.asked] == ['a', 'bb', 'bb', 'a', 'a', 'bb']
    assert {(name, count) for name, count, _ in timer.asked} == {('a', 6), ('bb', 7)}
    assert {ahead_s for *_, ahead_s in timer.asked} == {0.02}
    assert {name: figure.ms for name, figure in figures.items()} == {'a': 2.0, 'bb': 20.0}


def test_a_call_that_fails_leaves_the_others():
    calls_of_bad = itertools.count()

    def fails_later():
        if next(calls_of_bad) >= 3:
            raise ValueError('gone')
        return 'bad'

    def fails_at_once():
        raise KeyError('never')

    errors = {}
    timer = FakeTimer({'good': [1.0, 2.0, 3.0], 'bad': [1.0] * 3})
    calls = {'never': fails_at_once, 'bad': fails_later, 'good': lambda: 'good'}
    figures = _measure.interleaved(
        calls, timer, 3, lambda name, error: errors.update({name: type(error)}))
    assert errors == {'never': KeyError, 'bad': ValueError}
    assert {name: figure.ms for name, figure in figures.items()} == {'good': 2.0}


def test_turn_on_the_cpu_is_the_median_of_its_calls(monkeypatch):
    ticks = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(_measure.time, 'perf_counter', lambda: next(ticks))
    turn = _measure.Timer(CPU).turn(lambda: None, 3, 0.0)
    assert turn == Turn(2000.0, None)


class FakeGpu:
    """A GPU that is a number: the milliseconds it has worked. A sleep costs its launch as well."""

    def __init__(self, mhz: float) -> None:
        self.now, self.mhz, self.slept = 0.0, mhz, []

    def event(self, enable_timing: bool) -> 'FakeGpu.Event':
        assert enable_timing
        return FakeGpu.Event(self)

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles)
        self.now += cycles / (self.mhz * 1e3) + 0.004

    class Event:
        def __init__(self, gpu: 'FakeGpu') -> None:
            self.gpu = gpu

        def record(self) -> None:
            self.at = self.gpu.now

        def elapsed_time(self, end: 'FakeGpu.Event') -> float:
            return end.at - self.at


def test_turn_on_a_gpu_leaves_out_the_first_call_and_reads_the_clock(monkeypatch):
    gpu = FakeGpu(mhz=1700.0)
    monkeypatch.setattr(torch.cuda, 'Event', gpu.event)
    monkeypatch.setattr(torch.cuda, '_sleep', gpu.sleep)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    milliseconds = iter([50.0, 2.0, 4.0, 3.0])

    def call():
        gpu.now += next(milliseconds)

    turn = _measure.Timer(torch.device('cuda')).turn(call, 3, ahead_s=0.01)
    assert turn.ms == pytest.approx(3.0)
    assert turn.clock_mhz == pytest.approx(1700.0)
    assert gpu.slept[0] == int(0.01 * _measure.CYCLES_PER_SECOND)


def test_calibration_on_a_gpu_counts_the_calls_of_a_turn(monkeypatch):
    gpu, calls = FakeGpu(mhz=1700.0), []
    monkeypatch.setattr(torch.cuda, 'Event', gpu.event)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)

    def call():
        calls.append(gpu)
        gpu.now += 0.5

    count, ahead_s = _measure.Timer(torch.device('cuda'), target_ms=4.0).calibrate(call)
    assert count == 8
    assert len(calls) == 2 + 15 / 0.5
    assert 3e-4 + 8 * 15e-6 <= ahead_s <= 0.02


def test_peak_is_the_dense_16_bit_rate_at_the_measured_clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, 'get_device_properties',
                        lambda device: type('Properties', (), {'multi_processor_count': 132}))
    assert _measure.peak_share(989.4, 1830.0, torch.device('cuda')) == pytest.approx(1.0, rel=1e-4)
    assert _measure.peak_share(500.0, None, CPU) is None


def test_calls_per_turn_follow_the_target():
    short, sustained = _measure.Timer(CPU, 8.0), _measure.Timer(CPU, 2000.0)
    assert [short.calls_per_turn(ms) for ms in (0.01, 1.0, 100.0)] == [20, 8, 5]
    assert [sustained.calls_per_turn(ms) for ms in (0.01, 10.0, 1000.0)] == [1000, 200, 5]


def test_rotation_takes_the_sets_in_turn():
    sets = [(torch.tensor(1),), (torch.tensor(2),), (torch.tensor(3),)]
    call = _measure.Contender('x', lambda q: int(q)).rotating(sets)
    assert [call() for _ in range(5)] == [1, 2, 3, 1, 2]


def test_geometric_mean():
    assert _measure.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


# ------------------------------------------------------------------------ the GPU's state
def test_monitor_reads_samples_and_names_throttle_reasons():
    lines = ('1980, 350.5, 40, 0x0000000000000000', '[N/A]', '1700, 700.0, 61, 0x0000000000000024',
             '1800, 690, 60, 0x4')
    monitor = harness.Monitor(CPU, [sys.executable, '-c', f"print(*{lines!r}, sep='\\n')"])
    monitor.thread.join(timeout=60)
    assert monitor.take() == dict(
        samples=3, clock_mhz=[1700.0, 1800.0, 1980.0], power_w=[350.5, 690.0, 700.0],
        temperature_c=61.0, throttle_reasons=['power_cap', 'sw_thermal'])
    assert monitor.take() is None
    monitor.stop()


def test_monitor_without_a_gpu_or_without_nvidia_smi_has_nothing():
    for monitor in (harness.Monitor(CPU), harness.Monitor(CPU, ['no-such-program-here'])):
        assert monitor.take() is None
        monitor.stop()
    assert harness.gpu_text(None) == ''


# ------------------------------------------------------------------------ flash_attn3.bench
def test_measure_times_and_checks_every_contender():
    results = {r['name']: r for r in bench.measure(TINY, CPU, rounds=3, target_ms=0.1)}
    assert list(results) == list(bench.NAMES)
    for name in ('flash_attn3', 'sdpa', 'sdpa math'):
        found = results[name]
        assert found['error'] < 1e-5 and not found['wrong']
        assert len(found['rounds']) == 3 and found['ms'] == sorted(found['rounds'])[1]
        assert found['tflops'] == pytest.approx(TINY.flops / found['ms'] / 1e9)
        assert found['clock_mhz'] is found['peak_share'] is found['host_us'] is None
    assert results['sdpa cudnn'] == dict(name='sdpa cudnn', na='does not take this problem')


def test_contenders_agree_on_bottom_right_causal():
    shape = Shape(2, 24, 40, 4, 4, 32, causal=True, dtype='fp32')
    names = 'flash_attn3', 'sdpa', 'sdpa cudnn'
    results = {r['name']: r for r in bench.measure(shape, CPU, names, rounds=1)}
    assert results['flash_attn3']['error'] < 1e-5
    assert results['sdpa']['error'] < 1e-5
    assert 'bottom-right' in results['sdpa cudnn']['na']


def test_large_score_matrices_are_left_out():
    with pytest.raises(RuntimeError, match='score matrix takes 1.1 GiB'):
        bench.contender('sdpa math', Shape(1, 4096, 4096, 17, 17, 64))
    assert bench.contender('sdpa math', Shape(1, 4096, 4096, 16, 16, 64)).name == 'sdpa math'


def test_bench_command_prints_a_table(capsys, tmp_path):
    path = tmp_path / 'one.json'
    code = bench.main('--device cpu --dtype fp32 --seqlen 32 --heads 4 --heads-k 2 --head-dim 16 '
                      f'--causal --rounds 1 --json {path}'.split())
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[1].startswith('fp32 b1 s32 h4/2 d16 causal: 0.00 GFLOP')
    rows = {line.split('  ')[0]: line for line in lines[3:]}
    record = json.loads(path.read_text())
    assert record['flops'] == 4 * 4 * 16 * 32 * 32 / 2
    assert f"{record['results'][0]['ms'] * 1e3:.1f}" in rows['flash_attn3']
    assert 'n/a' in rows['sdpa cudnn']


def test_bench_command_rejects_unknown_contenders(capsys):
    assert bench.main(['--device', 'cpu', '--only', 'flash_attn3,fa9']) == 2
    assert 'got fa9' in capsys.readouterr().err


# ------------------------------------------------------------------------ benchmarks.bench_forward
def fake_cell(ours: dict, rival: dict) -> dict:
    valid = dict(wrong=False, spread=0.0, tflops=1.0, peak_share=None)
    results = [dict(valid, name='flash_attn3', **ours), dict(valid, name='sdpa flash', **rival)]
    return dict(shape=TINY.as_dict(), flops=TINY.flops, gpu=None, results=results)


def test_summary_takes_the_best_valid_rival():
    cells = [fake_cell(dict(ms=2.0), dict(ms=1.0)), fake_cell(dict(ms=1.0), dict(ms=8.0))]
    cells[0]['results'].append(dict(cells[0]['results'][1], name='sdpa cudnn', ms=0.1, wrong=True))
    assert bench_forward.compare(cells[0]) == ('sdpa flash', 0.5)
    assert bench_forward.summarize(cells) == dict(
        cells=2, compared=2, ours_missing_or_wrong=[], worst=0.5, best=8.0,
        geometric_mean=pytest.approx(2.0))
    cells[1]['results'][0]['wrong'] = True
    assert bench_forward.summarize(cells)['ours_missing_or_wrong'] == [TINY.label()]


@pytest.fixture(scope='module')
def forward_run(tmp_path_factory):
    out = tmp_path_factory.mktemp('forward')
    code = bench_forward.main('--device cpu --quick --rounds 2 --target-ms 0.1 '
                              f'--commit abcdef0123 --out {out}'.split())
    path, = out.glob('*.json')
    return code, path


def test_forward_benchmark_writes_its_record(forward_run):
    code, path = forward_run
    record = json.loads(path.read_text())
    assert code == 0
    assert path.name == 'forward_cpu.json' and record['commit'] == 'abcdef0123'
    assert record['schema'] == harness.SCHEMA
    assert record['environment']['torch'] == torch.__version__
    assert record['environment']['device'] == 'cpu'
    assert record['settings'] == dict(rounds=2, target_ms=0.1, suite='forward',
                                      contenders=['flash_attn3', 'sdpa flash', 'sdpa cudnn'])
    assert [Shape(**cell['shape']) for cell in record['cells']] == shapes.tiny()
    for cell in record['cells']:
        assert [result['name'] for result in cell['results']] == list(bench_forward.CONTENDERS)
        own = harness.measured(cell, 'flash_attn3')
        assert own['error'] < 1e-5 and len(own['rounds']) == 2
        assert own['tflops'] == pytest.approx(cell['flops'] / own['ms'] / 1e9)
    ratios = [bench_forward.compare(cell)[1] for cell in record['cells']]
    assert record['summary']['geometric_mean'] == pytest.approx(_measure.geometric_mean(ratios))


def test_forward_benchmark_draws_and_tabulates(forward_run, capsys):
    _, path = forward_run
    assert path.with_suffix('.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    capsys.readouterr()
    assert bench_forward.main(['--markdown', str(path)]) == 0
    text = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert text.count('\n| fp32 ') == len(record['cells'])
    assert f"{record['cells'][0]['results'][0]['tflops']:.4g}" in text


def test_all_backends_are_timed_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shapes, 'tiny', lambda: [TINY])
    code = bench_forward.main('--device cpu --quick --all-backends --rounds 1 --target-ms 0.1 '
                              f'--out {tmp_path}'.split())
    path, = tmp_path.glob('*.json')
    record = json.loads(path.read_text())
    names = [result['name'] for result in record['cells'][0]['results']]
    assert code == 0
    assert names == record['settings']['contenders'] == list(bench_forward.ALL_CONTENDERS)
    assert harness.measured(record['cells'][0], 'sdpa math')['error'] < 1e-5
    assert 'sdpa math' in capsys.readouterr().out


def test_an_interrupted_run_keeps_its_cells(tmp_path, monkeypatch):
    measure, done = bench.measure, []

    def stopped_at_the_third(shape, *settings):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(shape)
        return measure(shape, *settings)

    monkeypatch.setattr(bench, 'measure', stopped_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        bench_forward.main('--device cpu --quick --rounds 1 --target-ms 0.1 '
                           f'--out {tmp_path}'.split())
    path, = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert [Shape(**cell['shape']) for cell in record['cells']] == done == shapes.tiny()[:2]
    assert record['summary']['cells'] == 2
    assert bench_forward.markdown(record).count('\n| fp32 ') == 2


# ------------------------------------------------------------------------ benchmarks.ab
STUB = '''import time
import torch.nn.functional as F
print('a library that talks on stdout')
def flash_attn_func(q, k, v, causal=False):
    time.sleep({sleep})
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return {factor} * out.transpose(1, 2)
'''


def make_build(folder, sleep=0.0, factor=1.0):
    package = folder / 'flash_attn3'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text(STUB.format(sleep=sleep, factor=factor))
    return folder


def run_ab(a, b, out):
    code = ab.main(f'--a {a} --b {b} --device cpu --quick --rounds 2 --target-ms 0.1 '
                   f'--out {out}'.split())
    path = out / 'ab_forward_cpu.json'
    return code, path.read_text()


def test_sides_alternate_who_goes_first():
    assert list(ab.sides_in_turn(3)) == [('a', 'b'), ('b', 'a'), ('a', 'b')]


def test_ab_compares_two_builds_in_processes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, 'tiny', lambda: [TINY])
    monkeypatch.setattr(ab, 'Worker', RecordedWorker)
    RecordedWorker.turns.clear()
    builds = make_build(tmp_path / 'slow', sleep=0.05), make_build(tmp_path / 'quick')
    code, text = run_ab(*builds, tmp_path / 'out')
    record = json.loads(text)
    cell, = record['cells']
    slow, quick = cell['results']
    assert code == 0
    assert [name.split()[0] for name in RecordedWorker.turns] == ['slow', 'quick', 'quick', 'slow']
    assert slow['ms'] >= 50 and slow['error'] < 1e-5 and quick['error'] < 1e-5
    assert cell['ratios'] == [a / b for a, b in zip(slow['rounds'], quick['rounds'])]
    assert cell['ratio'] == pytest.approx(sum(cell['ratios']) / 2)
    assert cell['ratio'] > 1.2
    assert record['summary']['geometric_mean'] == pytest.approx(cell['ratio'])
    assert str(tmp_path) not in text


class RecordedWorker(ab.Worker):
    turns: list[str] = []

    def ask(self, **command):
        if 'turn' in command:
            self.turns.append(self.name)
        return super().ask(**command)


def test_ab_leaves_a_wrong_build_out_of_the_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, 'tiny', lambda: [TINY])
    builds = make_build(tmp_path / 'right'), make_build(tmp_path / 'wrong', factor=1.1)
    code, text = run_ab(*builds, tmp_path / 'out')
    record = json.loads(text)
    assert code == 1
    assert record['cells'][0]['results'][1]['error'] == pytest.approx(0.1, rel=1e-3)
    assert record['summary'] == dict(cells=1, compared=0)


QUANTIZE_STUB = '''import torch
def quantize_fp8(x, block, rotate, cu_seqlens=None):
    return (x + {added}).to(torch.float8_e4m3fn), torch.ones(3)
'''


@pytest.mark.parametrize('added', [0, 1])
def test_ab_of_quantize_fp8_compares_bits(added, tmp_path, monkeypatch):
    cell = bench_quantize.Cell(64, 64, lengths=(3, 5))
    monkeypatch.setattr(bench_quantize, 'TINY_CELLS', (cell,))
    builds = make_build(tmp_path / 'one'), make_build(tmp_path / 'two')
    for build, number in zip(builds, (0, added)):
        (build / 'flash_attn3' / '__init__.py').write_text(QUANTIZE_STUB.format(added=number))
    code = ab.main(f'--a {builds[0]} --b {builds[1]} --device cpu --quick --rounds 2 --suite '
                   f'quantize --target-ms 0.1 --out {tmp_path}'.split())
    path = tmp_path / 'ab_quantize_cpu.json'
    record = json.loads(path.read_text())
    done, = record['cells']
    assert code == added and done['label'] == cell.label()
    for result in done['results']:
        size = 8 * 2048 * 3 + 12
        assert result['gb_per_s'] == pytest.approx(size / result['ms'] / 1e6)
        assert result['wrong'] == bool(added)
    assert record['summary']['compared'] == 1 - added


def test_ab_finds_builds(tmp_path):
    build = make_build(tmp_path / 'one')
    assert ab.find_build(build).folder == ab.find_build(build / 'flash_attn3').folder == build
    library = tmp_path / 'old' / '_C.abi3.so'
    library.parent.mkdir()
    library.touch()
    found = ab.find_build(library)
    assert found.name == 'old/_C.abi3.so'
    assert found.variables == {'FLASH_ATTN3_LIBRARY': str(library)}
    with pytest.raises(SystemExit, match='expected a folder that holds flash_attn3'):
        ab.find_build(tmp_path / 'old')
