"""benchmarks.fp8_long: its exact attention of some rows, its data, and a short run on the CPU."""
import json

import pytest
import torch

from benchmarks import fp8_accuracy, fp8_long
from flash_attn3 import reference
from flash_attn3.reference import Inputs

CPU = torch.device('cpu')
QUICK = ['--device', 'cpu', '--quick', '--commit', 'abc']
WAYS = ['bf16', 'head, rotated (emulation)', 'block, rotated (emulation)']


@pytest.fixture(scope='module')
def quick(tmp_path_factory) -> tuple[dict, object]:
    """The record of a run, and where its file is."""
    folder = tmp_path_factory.mktemp('results')
    assert fp8_long.main([*QUICK, '--out', str(folder)]) == 0
    path = folder / 'fp8_long_cpu.json'
    return json.loads(path.read_text()), path


@pytest.mark.parametrize('causal', [False, True])
def test_exact_rows(causal, monkeypatch):
    """Output and weights of sampled rows, taken in several parts."""
    monkeypatch.setattr(fp8_long, 'SCORES', 7 * 40)
    shape = fp8_long.shape_of(40, 16, causal)
    inputs = Inputs(*fp8_accuracy.make_inputs(shape, 1, CPU))
    rows = fp8_long.sample(0, 40, 20, 0)
    out, weights = fp8_long.attend_rows(inputs, rows, causal, key=5)
    wide = inputs.to(torch.float64)
    expected = reference.attend(wide, fp8_accuracy.score_of(shape)).out[0, rows, 0]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    # A value that is 1 at one key alone gives the weights of that key.
    one = torch.zeros(1, 40, 1, 1, dtype=torch.float64)
    one[0, 5] = 1
    expected = reference.attend(wide._replace(v=one), fp8_accuracy.score_of(shape)).out
    torch.testing.assert_close(weights, expected[0, rows, 0, 0], rtol=1e-12, atol=1e-13)
    assert not causal or weights[rows < 5].eq(0).all()


@pytest.mark.parametrize('first, count, expected', [(0, 512, 512), (600, 64, 64), (999, 64, 1),
                                                    (0, 2000, 1000)])
def test_sampled_rows(first, count, expected):
    rows = fp8_long.sample(first, 1000, count, 0)
    assert rows.numel() == expected == rows.unique().numel()
    assert rows[0] >= first and rows[-1] < 1000 and rows.equal(rows.sort()[0])


def test_data():
    """q and k are the same in both, v of `mean` has the mean 1 and no outliers."""
    shape = fp8_long.shape_of(4096, 64, False)
    outliers, mean = (fp8_long.data_of(data, shape, 0, CPU) for data in fp8_long.DATA)
    assert outliers[0].equal(mean[0]) and outliers[1].equal(mean[1])
    for v, average, deviation in ((outliers[2], 0, 1.1 ** 0.5), (mean[2], 1, 1)):
        assert v.float().mean().item() == pytest.approx(average, abs=0.01)
        assert v.float().std().item() == pytest.approx(deviation, rel=0.02)
    assert (mean[2] - 1).abs().max() < 6 < 20 < outliers[2].abs().max()


@pytest.mark.parametrize('data, way, rmse, relative, kernel', [
    ('outliers', 'bf16', 3.43e-4, 1.62e-3, 1.62e-3),
    ('outliers', 'head, rotated (emulation)', 1.31e-2, 6.11e-2, 7.51e-3),
    ('outliers', 'block, rotated (emulation)', 1.31e-2, 6.15e-2, 7.88e-3),
    ('mean', 'bf16', 1.79e-3, 1.75e-3, 1.75e-3),
    ('mean', 'head, rotated (emulation)', 1.33e-2, 1.31e-2, 2.77e-3),
    ('mean', 'block, rotated (emulation)', 1.28e-2, 1.26e-2, 2.74e-3)])
def test_sweep(quick, data, way, rmse, relative, kernel):
    """Of 1024 keys, as measured when this was written, and nearly the same bits everywhere."""
    cell = fp8_long.sweep_cells(quick[0], data)[-1]
    result, = (result for result in cell['results'] if result['name'] == way)
    assert len(result['seeds']) == 2
    for measure, measured in zip(fp8_long.MEASURES, (rmse, relative, kernel)):
        assert result[measure] == pytest.approx(measured, rel=0.05)


def test_sweep_cells(quick):
    """Every length and way; means of the seeds; growth from the fewest keys to the most."""
    record, path = quick
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    for data in fp8_long.DATA:
        cells = fp8_long.sweep_cells(record, data)
        assert [cell['shape']['seqlen'] for cell in cells] == [256, 512, 1024]
        for cell in cells:
            assert [result['name'] for result in cell['results']] == WAYS
            for result in cell['results']:
                one, two = (seed['relative'] for seed in result['seeds'])
                assert result['relative'] == pytest.approx((one + two) / 2)
                assert one == pytest.approx(result['seeds'][0]['rmse'] / result['seeds'][0]['rms'])
        growth = record['summary']['growth'][data]
        assert growth['bf16'] == pytest.approx(
            cells[-1]['results'][0]['relative'] / cells[0]['results'][0]['relative'])


def test_needles(quick):
    """Found at every place by every query that sees it, with errors of the output's rounding and
    of the weight that the other keys have."""
    cells = fp8_long.needle_cells(quick[0])
    assert [(cell['shape']['causal'], cell['key'], cell['queries']) for cell in cells] == [
        (False, 0, 64), (False, 1024, 64), (False, 2047, 64),
        (True, 0, 64), (True, 1024, 64), (True, 2047, 1)]
    for cell in cells:
        assert 0.999 < cell['weight'] < 1
        assert [result['name'] for result in cell['results']] == WAYS
        for result in cell['results']:
            assert result['found'] == cell['queries']
            assert result['error'] < 2 ** -8 + 1 - cell['weight']
        assert cell['results'][0]['relative'] < 2 ** -8
        assert all(0.01 < result['relative'] < 0.05 for result in cell['results'][1:])
    assert quick[0]['summary']['needle']['bf16']['queries'] == 5 * 64 + 1


def test_a_needle_that_is_lost_is_noticed(tmp_path, monkeypatch, capsys):
    """By a kernel that does not see the last keys."""
    def short_sighted(shape, device):
        def attend(values, scales):
            return fp8_long.flash_attn_func(*(x[:, :512].bfloat16() for x in values))
        return {'short': lambda values, scales: torch.cat(
            [attend(values, scales), values[0][:, 512:].bfloat16()], dim=1)}

    monkeypatch.setattr(fp8_long, 'contenders', short_sighted)
    arguments = [*QUICK, '--only', 'needle', '--needle-lengths', '576', '--out', str(tmp_path)]
    assert fp8_long.main(arguments) == 1
    record = json.loads(next(tmp_path.glob('*.json')).read_text())
    assert not list(tmp_path.glob('*.png'))
    last = fp8_long.needle_cells(record)[2]
    assert [result['found'] == 64 for result in last['results']] == [True, False, False]
    total = record['summary']['needle']['head, rotated (short)']
    assert f"head, rotated (short): found {total['found']} of 321" in capsys.readouterr().out


def test_a_head_dim_in_which_no_key_stands_out():
    shape = fp8_long.shape_of(512, 2, False)
    with pytest.raises(RuntimeError, match='one of 512 keys can stand out, got 2; hint: --head-d'):
        fp8_long.needle_inputs(shape, 0, torch.arange(64), 0, CPU)
