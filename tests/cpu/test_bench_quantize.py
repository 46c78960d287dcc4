"""benchmarks/bench_quantize.py on the CPU: cells, counts of bytes, the file."""
import json

import pytest
import torch

from flash_attn3 import quantize_fp8

from benchmarks import bench_quantize, quantize_cells
from benchmarks.quantize_cells import Cell

CPU = torch.device('cpu')


def test_bytes_are_those_of_the_results():
    """2 bytes read and 1 written of a column, 4 of the scale of a block."""
    x, = quantize_cells.make_inputs(Cell(128, 32, tokens=64), CPU, 1 << 20)
    assert x.shape == (1, 64, 16, 128)
    assert quantize_cells.bytes_of(x, quantize_fp8(x, block=32)) == 3 * x.numel() + 4 * 2 * 16


def test_packed_lengths_fill_the_tensor():
    for cell in bench_quantize.CELLS:
        if cell.lengths:
            assert quantize_cells.options_of(cell, CPU)['cu_seqlens'][-1] == cell.rows
    cell = Cell(64, 64, lengths=(3, 5))
    x, = quantize_cells.make_inputs(cell, CPU, 1 << 20)
    assert x.shape == (8, 32, 64) and cell.label() == 'd64, 8 tokens, block 64, rotated, 2 of 3-5'


def test_cells_have_labels_of_their_own():
    labels = [cell.label() for cell in bench_quantize.CELLS]
    assert len(set(labels)) == len(labels)


def test_digest_is_of_all_bits():
    x = torch.randn(4, 3)
    scale = torch.tensor(2.)
    same = quantize_cells.digest_of((x, scale))
    assert quantize_cells.digest_of((x.clone(), scale.clone())) == same
    assert quantize_cells.digest_of((x, -scale)) != same
    assert quantize_cells.digest_of((scale.expand(2),)) != quantize_cells.digest_of((scale,))


def test_file_has_the_share_of_every_cell(tmp_path, capsys):
    bench_quantize.main(['--device', 'cpu', '--quick', '--rounds', '1', '--out', str(tmp_path)])
    record, = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert [cell['cell']['block'] for cell in record['cells']] == [32, 'head']
    for cell in record['cells']:
        own, copy = cell['results']
        assert own['gb_per_s'] == pytest.approx(cell['bytes'] / own['ms'] / 1e6)
        assert cell['share'] == pytest.approx(copy['ms'] / own['ms'])
    assert capsys.readouterr().out.count('copy') == 2
