"""benchmarks.plot_peers: the comparison with peers, and the record's own summary."""
import json

import pytest

from benchmarks import harness, plot_peers
from flash_attn3 import _measure

RUN = dict(time='2026-01-02 03:04:05', commit='abcdef0', environment=dict(device='NVIDIA H200'))


def peer_record(group: str, peer: str, seqlen: int, rate: float, **facts) -> dict:
    cell = dict(D=64, mask='causal', S=seqlen)
    return dict(dict(section='fwd', group=group, cell=cell, peer=peer, rate=rate, wrong=False),
                **facts)


FORWARD = [
    peer_record('main', 'ours', 512, 300.0), peer_record('main', 'fa3_13', 512, 250.0),
    peer_record('main', 'triton', 512, 900.0, wrong=True),
    peer_record('other', 'ours', 512, 240.0), peer_record('other', 'cudnn_fe', 512, 300.0),
    peer_record('main', 'ours', 1024, 500.0), peer_record('main', 'fa3', 1024, 400.0)]
BACKWARD = [
    peer_record('main', 'ours', 512, 180.0, section='bwd'),
    peer_record('main', 'cudnn', 512, 200.0, section='bwd')]
NO_FIGURES = [
    dict(section='fwd', group='main', cell=dict(D=64, mask='full', S=512), peer='fa3', na='no'),
    peer_record('main', 'fa3', 512, 9000.0, section='gqa')]


def write(path, records) -> None:
    path.write_text(json.dumps(dict(RUN, records=records + NO_FIGURES)))


def test_peers_are_compared_within_their_group():
    """FA3, of either build, has no name in the table."""
    text = plot_peers.markdown(plot_peers.read_points(dict(records=FORWARD), 'fwd'))
    assert text.splitlines() == [
        '| D, mask | 512 | 1024 |', '|---|---|---|', '| 64, causal | 0.800 cuDNN | 1.250 |', '',
        'Geometric mean 1.000 over 2 cells, worst 0.800 (D = 64, causal, S = 512, cuDNN).']


@pytest.mark.parametrize('records, names', [
    (FORWARD, ['yardstick_fwd']), (BACKWARD, ['yardstick_bwd']),
    (FORWARD + BACKWARD, ['yardstick', 'yardstick_bwd', 'yardstick_fwd'])],
    ids=['fwd', 'bwd', 'both'])
def test_plots(records, names, tmp_path):
    path = tmp_path / 'yardstick.json'
    write(path, records)
    assert plot_peers.main([str(path)]) == 0
    plots = sorted(tmp_path.glob('*.png'))
    assert [plot.stem for plot in plots] == names
    assert all(plot.read_bytes().startswith(b'\x89PNG') for plot in plots)


def test_a_file_without_figures_is_refused(tmp_path, capsys):
    path = tmp_path / 'yardstick.json'
    write(path, [])
    assert plot_peers.main([str(path)]) == 1
    assert 'expected a section fwd, bwd or fp8' in capsys.readouterr().err
    assert not list(tmp_path.glob('*.png'))


@pytest.mark.parametrize('subject, section', [
    ('yardstick', 'fwd'), ('yardstick', 'bwd'), ('yardstick', 'fp8'),
    ('yardstick_fwd_d96_d192', 'fwd'), ('yardstick_bwd_d96_d192', 'bwd')])
def test_the_ratios_are_those_of_the_record(subject, section):
    record = json.loads((harness.RESULTS / f'{subject}.json').read_text())
    points = plot_peers.read_points(record, section)
    ratios = [ratio for ratio, _ in plot_peers.best_peers(points).values()]
    expected = record['ratios'][section]
    assert len(ratios) == expected['compared']
    assert _measure.geometric_mean(ratios) == pytest.approx(expected['geometric_mean'])
    assert min(ratios) == pytest.approx(expected['worst'])
