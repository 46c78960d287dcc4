"""benchmarks.plot_peers: the comparison with peers, and the README's tables against their files."""
import json
import re

import pytest

from benchmarks import harness, plot_peers
from flash_attn3 import _measure

README = (harness.ROOT / 'README.md').read_text()
TABLES = re.findall(r'^<!-- table: (\w+) of (\S+) -->\n((?:\|.*\n)+)', README, re.MULTILINE)


def peer_record(group: str, peer: str, seqlen: int, rate: float, **facts) -> dict:
    cell = dict(D=64, mask='causal', S=seqlen)
    return dict(dict(section='fwd', group=group, cell=cell, peer=peer, rate=rate, wrong=False),
                **facts)


FORWARD = [
    peer_record('main', 'ours', 512, 300.0), peer_record('main', 'fa3', 512, 250.0),
    peer_record('main', 'triton', 512, 900.0, wrong=True),
    peer_record('other', 'ours', 512, 240.0), peer_record('other', 'cudnn_fe', 512, 300.0),
    peer_record('main', 'ours', 1024, 500.0), peer_record('main', 'fa3', 1024, 400.0)]
BACKWARD = [
    peer_record('main', 'ours', 512, 180.0, section='bwd'),
    peer_record('main', 'cudnn', 512, 200.0, section='bwd')]
NO_FIGURES = [
    dict(section='fwd', group='main', cell=dict(D=64, mask='full', S=512), peer='fa3', na='no'),
    peer_record('main', 'fa3', 512, 9000.0, section='gqa')]
FORWARD_LINES = [
    '<!-- table: fwd of 2026-01-02_abcdef0_yardstick.json -->',
    '| D, mask | S = 512 | S = 1024 |', '|---|---|---|',
    '| 64, causal | 0.800 cuDNN fe | 1.250 FA3 |', '',
    'Geometric mean 1.000 over 2 cells, worst 0.800 (D = 64, causal, S = 512, cuDNN fe).', '']
BACKWARD_LINES = [
    '<!-- table: bwd of 2026-01-02_abcdef0_yardstick.json -->',
    '| D, mask | S = 512 |', '|---|---|', '| 64, causal | 0.900 cuDNN |', '',
    'Geometric mean 0.900 over 1 cells, worst 0.900 (D = 64, causal, S = 512, cuDNN).', '']


def is_png(path) -> bool:
    return path.read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('records, lines, has_second', [
    (FORWARD, FORWARD_LINES, False), (BACKWARD, BACKWARD_LINES, False),
    (FORWARD + BACKWARD, FORWARD_LINES + BACKWARD_LINES, True)], ids=['fwd', 'bwd', 'both'])
def test_peers_are_compared_within_their_group(records, lines, has_second, tmp_path, capsys):
    path = tmp_path / '2026-01-02_abcdef0_yardstick.json'
    path.write_text(json.dumps(dict(records=records + NO_FIGURES)))
    assert plot_peers.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert is_png(path.with_suffix('.png'))
    second = path.with_name('2026-01-02_abcdef0_yardstick_bwd.png')
    assert is_png(second) if has_second else not second.exists()


def test_a_file_without_figures_is_refused(tmp_path, capsys):
    path = tmp_path / '2026-01-02_abcdef0_yardstick.json'
    path.write_text(json.dumps(dict(records=NO_FIGURES)))
    assert plot_peers.main([str(path)]) == 1
    assert 'expected a section fwd or bwd' in capsys.readouterr().err
    assert not path.with_suffix('.png').exists()


def test_every_table_of_speed_in_the_readme_names_its_file():
    assert README.count('\n| D, mask |') == len(TABLES) >= 2


@pytest.mark.parametrize('section, name, table', TABLES, ids=[f'{s}-{n}' for s, n, _ in TABLES])
def test_the_tables_of_the_readme_are_those_of_their_files(section, name, table):
    record = json.loads((harness.RESULTS / name).read_text())
    points = plot_peers.read_points(record, section)
    ratios = [ratio for ratio, _ in plot_peers.best_peers(points).values()]
    expected = record['ratios'][section]
    assert len(ratios) == expected['compared']
    assert _measure.geometric_mean(ratios) == pytest.approx(expected['geometric_mean'])
    assert min(ratios) == pytest.approx(expected['worst'])
    assert plot_peers.markdown(points).split('\n\n')[0] == table.rstrip()
