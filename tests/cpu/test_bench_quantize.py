"""benchmarks/bench_quantize.py on the CPU: cells, counts of bytes, the file."""
import json

import pytest
import torch

from benchmarks import bench_quantize
from benchmarks.bench_quantize import Cell

CPU = torch.device('cpu')


def test_bytes_are_those_of_the_results():
    """2 bytes read and 1 written of a column, 4 of the scale of a block."""
    x = bench_quantize.input_of(Cell(128, 32, tokens=64), torch.bfloat16, CPU)
    assert x.shape == (1, 64, 16, 128)
    assert bench_quantize.bytes_of(x, {'block': 32}) == 3 * x.numel() + 4 * 2 * 16


@pytest.mark.parametrize('tokens', [256, 16384])
def test_packed_lengths_fill_the_tensor(tokens):
    options = bench_quantize.options_of(Cell(64, 64, packed=True, tokens=tokens), CPU)
    assert options['cu_seqlens'][-1] == tokens
    assert len(set(options['cu_seqlens'].diff().tolist())) == 2


def test_file_has_the_share_of_every_cell(tmp_path, capsys):
    bench_quantize.main(['--device', 'cpu', '--quick', '--rounds', '1', '--out', str(tmp_path)])
    record, = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert [cell['cell']['block'] for cell in record['cells']] == [32, 'head']
    for cell in record['cells']:
        own, copy = cell['results']
        assert own['gb_per_s'] == pytest.approx(cell['bytes'] / own['ms'] / 1e6)
        assert cell['share'] == pytest.approx(copy['ms'] / own['ms'])
    assert capsys.readouterr().out.count('copy') == 2
