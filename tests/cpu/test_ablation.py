"""benchmarks/ablation.py without a GPU: rows, their sources, the arithmetic of the table."""
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import ablation, candidates
from benchmarks.ablation import FULL, PAPER, ROWS, TILES, UNSPECIALISED
from build_tools import toolchain
from flash_attn3 import _measure, reference
from flash_attn3._measure import Shape, Timer

ROOT = Path(ablation.__file__).resolve().parents[1]
CPU = torch.device('cpu')
TINY = Shape(1, 48, 48, 2, 2, 128, dtype='fp32')
EVERY_ROW = [(row, head_dim) for head_dim in (64, 128, 256) for row in ablation.rows_of(head_dim)]


def attention(q, k, v):
    return reference.forward(q, k, v, q.size(-1) ** -0.5, causal=False)[0]


def failing(q, k, v):
    raise RuntimeError('no such kernel\nand more')


def names(head_dim: int) -> list[str]:
    return [row.name for row in ablation.rows_of(head_dim)]


# ------------------------------------------------------------------------ rows and their kernels
def test_the_paper_counts_work_as_we_do():
    """Its milliseconds and its TFLOP/s."""
    published = {FULL: 3.538, 'without intra-warpgroup overlap': 4.021, UNSPECIALISED: 4.105}
    figures = {row.name: row.paper_tflops for row in ROWS if row.paper_tflops}
    assert figures == {name: round(PAPER.flops / ms / 1e9) for name, ms in published.items()}


def test_rows_that_a_tile_makes_equal_are_left_out():
    """FwdTileD128Short has all the parts, FwdTileD64 (three warpgroups) no turns, FwdTileD256
    (one Q buffer) no tile overlap."""
    assert ablation.rows_of(128) == list(ROWS)
    no_overlap, tile = 'without intra-warpgroup overlap', 'without tile overlap'
    assert names(64) == [FULL, tile, no_overlap, UNSPECIALISED]
    assert names(256) == [FULL, no_overlap, 'without ping-pong', 'without ping-pong, any overlap',
                          UNSPECIALISED]


@pytest.mark.parametrize('row, head_dim', EVERY_ROW,
                         ids=lambda part: getattr(part, 'name', str(part)))
def test_source_of_a_row(row, head_dim):
    one = ablation.candidate(row, head_dim)
    source = one.source('fp16')
    assert '@' not in source
    assert f'struct {one.name} : {row.tile or TILES[head_dim]} {{\n' in source
    assert re.findall(r'static constexpr auto (\w+) = (\w+);', source) == list(row.fields)
    header, = re.findall(r'#include "((?:forward|benchmarks)/\w+\.h)"', source)
    launch, = re.findall(r'^  (\w+)<Config>\(params, stream\);', source, re.MULTILINE)
    assert (launch == 'launch_unspecialised') == (row.name == UNSPECIALISED)
    folder = ROOT if header.startswith('benchmarks/') else ROOT / 'csrc'
    assert f'void {launch}(FwdParams const& p, void* stream)' in (folder / header).read_text()


def test_configs_of_the_rows_say_what_their_names_say(tmp_path):
    """g++ reads the Configs, on top of the shipped tiles."""
    text = '#include "config/fwd_tiles.h"\n'
    for row, head_dim in EVERY_ROW:
        one = ablation.candidate(row, head_dim)
        structs = re.search(r'^struct .*?(?=^template)', one.source('bf16'), re.M | re.S)[0]
        text += f'namespace fa3 {{\n{structs}'
        overlap = 'intra' not in row.name and 'any' not in row.name
        tiles = head_dim != 256 and row.name in (FULL, 'three warpgroups', 'without ping-pong')
        turns = (head_dim != 64 and 'ping-pong' not in row.name
                 and row.name not in (UNSPECIALISED, 'three warpgroups'))
        facts = f'fwd_facts<{one.name}Full>("")'
        text += (f'static_assert({facts}.head_dim == {head_dim});\n'
                 f'static_assert({facts}.intra_overlap == {str(overlap).lower()});\n'
                 f'static_assert({facts}.tile_overlap == {str(tiles).lower()});\n'
                 f'static_assert({facts}.ping_pong == {str(turns).lower()});\n}}\n')
    source = tmp_path / 'configs.cpp'
    source.write_text(text)
    done = subprocess.run([toolchain.find_cxx(), '-std=c++20', '-fsyntax-only',
                           f'-I{ROOT / "csrc"}', source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_special_kernel_is_part_of_the_key_of_its_unit():
    """A change in unspecialised.h compiles that row anew."""
    unit = candidates.kernel_unit(Path('row.cu'), toolchain.Cuda(Path('nvcc'), '13.0', ROOT, ROOT))
    assert any((folder / 'benchmarks/unspecialised.h').exists() for folder in unit.own_includes)


def test_libraries_of_another_machine_are_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(candidates, 'FOLDER', tmp_path)
    args = ablation.parse(['--no-build', '--dtype', 'fp16'])
    with pytest.raises(SystemExit, match='expected .*d128_full_fp16.so, found none; hint: --build'):
        ablation.libraries_of(ablation.rows_of(128), args)
    for row in ROWS:
        ablation.candidate(row, 128).library('fp16').touch()
    paths = ablation.libraries_of(ablation.rows_of(128), args)
    assert list(paths) == [row.name for row in ROWS]
    assert len(set(paths.values())) == len(ROWS)


# ------------------------------------------------------------------------ figures and the table
def test_compare_leaves_out_what_is_wrong_or_does_not_run():
    functions = {'right': attention, 'wrong': lambda q, k, v: 1.1 * attention(q, k, v),
                 'failing': failing}
    right, wrong, failed = candidates.compare(TINY, functions, Timer(CPU, 0.1), 2, CPU)
    assert right['name'] == 'right' and right['error'] < 1e-5 and len(right['rounds']) == 2
    assert right['tflops'] == pytest.approx(TINY.flops / right['ms'] / 1e9)
    assert wrong == dict(name='wrong', na='wrong, error 0.1')
    assert failed == dict(name='failing', na='no such kernel')


def result(name: str, ms: float) -> dict:
    figure = _measure.Figure(ms, 0.01, [ms])
    return ablation.candidates.bench.result(PAPER, CPU, name, figure, 1e-4, None)


def record_of(shape: Shape, results: list[dict]) -> dict:
    cell = dict(shape=shape.as_dict(), flops=shape.flops, gpu=None, results=results)
    return dict(cells=[cell], summary=ablation.summarize(cell))


def test_ratios_beside_those_of_the_paper():
    results = [result('full', 4.0), result('without ping-pong', 5.0),
               dict(name=UNSPECIALISED, na='no')]
    record = record_of(Shape(**dict(PAPER.as_dict(), dtype='bf16')), results)
    summary = record['summary']
    assert summary['ratios'] == pytest.approx({'full': 1.0, 'without ping-pong': 0.8})
    assert summary['missing_or_wrong'] == [UNSPECIALISED]
    assert summary['paper_ratios'][UNSPECIALISED] == pytest.approx(570 / 661)
    headers, rows = ablation.table_rows(record)
    assert headers == ['kernel', 'ms', 'TFLOP/s', '/ full', 'of peak', 'MHz', 'paper',
                       'paper / full']
    assert rows == [['full', '4.000', '584.7', '1.000', '', '', '661', '1.000'],
                    ['without ping-pong', '5.000', '467.7', '0.800', '', '', '', ''],
                    [UNSPECIALISED, '', 'n/a', '', '', '', '570', '0.862']]


def test_another_problem_has_no_figures_of_the_paper():
    record = record_of(Shape(4, 4096, 4096, 16, 16, 128), [result('full', 1.0)])
    assert record['summary'] == dict(ratios={'full': 1.0}, missing_or_wrong=[])
    assert ablation.table_rows(record)[1][0][6:] == ['', '']


def test_without_full_there_are_no_ratios():
    record = record_of(PAPER, [dict(name='full', na='no'), result(UNSPECIALISED, 1.0)])
    assert record['summary']['ratios'] == {}
    assert ablation.table_rows(record)[1][1][3] == ''


def test_a_run_is_written_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(ablation, 'libraries_of', lambda rows, args: {r.name: None for r in rows})
    monkeypatch.setattr(candidates, 'attention_of', lambda path, causal: attention)
    measure = ablation.measure
    monkeypatch.setattr(ablation, 'measure', lambda shape, functions, device, args: measure(
        Shape(**dict(shape.as_dict(), dtype='fp32')), functions, CPU, args))
    code = ablation.main('--batch 1 --seqlen 32 --heads 1 --rounds 2 --target-ms 0.1 --commit '
                         f'0123456789 --out {tmp_path}'.split())
    path, = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert code == 0 and path.name == 'ablation_d128_fp32_cpu.json'
    assert [r['name'] for r in record['cells'][0]['results']] == [row.name for row in ROWS]
    assert record['settings']['fields']['without ping-pong, tile overlap'] == dict(
        kPingPong='false', kTileOverlap='false')
    assert record['settings']['tile'] == 'FwdTileD128Short'
    assert set(record['summary']['ratios']) == {row.name for row in ROWS}
    text = capsys.readouterr().out
    assert all(row.name in text for row in ROWS) and str(path) in text
