"""benchmarks.training: its arithmetic, and short runs of both kinds on the CPU."""
import json
import statistics

import pytest
import torch

from benchmarks import training
from examples import train_gpt

TINY = '--quick --device cpu --commit abcdef0'


def run(kind: str, folder, *more: str) -> tuple[dict, str]:
    """The record and the stem of its file."""
    threads = torch.get_num_threads()
    try:
        assert training.main([kind, *TINY.split(), '--out', str(folder), *more]) == 0
    finally:
        torch.set_num_threads(threads)
    path, = folder.glob('*.json')
    return json.loads(path.read_text()), path


def test_measures_of_a_difference():
    exact = [5.0] * 30
    ours = [5.0 - 0.001] * 20 + [5.1] * 10
    sdpa = [5.0 + 0.002] * 20 + [5.4] * 10
    found = training.compare({'flash_attn3': ours, 'sdpa': sdpa, 'math': exact})
    differences = found['differences']
    assert differences['largest'] == pytest.approx({'flash_attn3': 0.1, 'sdpa': 0.4})
    assert differences['mean'] == pytest.approx({'flash_attn3': 1.02 / 30, 'sdpa': 4.04 / 30})
    assert differences['early'] == pytest.approx({'flash_attn3': 0.001, 'sdpa': 0.002})
    assert found['ratios'] == pytest.approx(dict(largest=0.25, mean=1.02 / 4.04, early=0.5))


def test_no_difference_of_sdpa_gives_no_ratio():
    losses = {'flash_attn3': [1.0, 1.5], 'sdpa': [1.0, 2.0], 'math': [1.0, 2.0]}
    assert training.compare(losses)['ratios'] == dict.fromkeys(training.MEASURES)
    cells = [dict(ratios=dict.fromkeys(training.MEASURES)),
             dict(ratios=dict(largest=3.0, mean=1.0, early=2.0)),
             dict(ratios=dict(largest=1.0, mean=1.0, early=2.0))]
    summary = training.summarize_losses(cells)
    assert summary['seeds'] == 3
    assert summary['largest'] == dict(lowest=1.0, median=2.0, highest=3.0)


@pytest.mark.parametrize('attend', [training.fp64_attention, train_gpt.math_attention])
def test_the_control_is_plain_attention(attend):
    qkv = torch.randn(2, 20, 8, 16).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        out = attend(qkv, 4)
    exact = train_gpt.plain_attention(qkv.double(), 4)
    assert out.dtype == torch.float32
    assert (out - exact).norm() / exact.norm() < 1e-6


def test_losses(tmp_path, capsys):
    record, path = run('losses', tmp_path, '--heads-kv', '2')
    assert path.name == 'training_losses_cpu.json'
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    model = record['settings']['model']
    assert (model['heads_kv'], model['steps'], model['head_dim']) == (2, 6, 16)
    first, second = record['cells']
    assert list(first['losses']) == ['flash_attn3', 'sdpa', 'math', 'math in fp64']
    assert list(second['losses']) == ['flash_attn3', 'sdpa', 'math']
    for cell in (first, second):
        assert all(len(losses) == 6 for losses in cell['losses'].values())
        # 0 where a CPU rounds plain attention and this one alike, as an AMD EPYC did with a seed.
        assert 0 <= cell['differences']['largest']['flash_attn3'] < 0.01
        assert cell['ratios'] == training.compare(cell['losses'])['ratios']
    assert first['losses']['math'] != second['losses']['math']
    assert record['summary'] == training.summarize_losses(record['cells'])
    median = record['summary']['mean']['median']
    assert f'flash_attn3 / sdpa, mean: median {median:.2f}' in capsys.readouterr().out


def test_losses_with_fp8(tmp_path):
    """They are beside the others, further from plain attention than bfloat16, and not by much."""
    record, path = run('losses', tmp_path, '--fp8', '--seeds', '1')
    assert path.name == 'training_losses_fp8_cpu.json'
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    cell, = record['cells']
    assert list(cell['losses']) == ['flash_attn3', 'sdpa', 'math', 'fp8', 'math in fp64']
    found = cell['differences']['mean']
    assert found['flash_attn3'] < found['fp8'] < 1e-3
    assert cell['ratios']['mean'] == found['flash_attn3'] / found['sdpa']


def test_the_losses_are_those_of_the_example(tmp_path):
    record, _ = run('losses', tmp_path, '--seeds', '1')
    options = train_gpt.parse([*training.QUICK, *training.QUICK_LOSSES, '--device', 'cpu'])
    losses = list(train_gpt.training(train_gpt.flash_attention, train_gpt.library_text(), options))
    assert record['cells'][0]['losses']['flash_attn3'] == pytest.approx(
        torch.stack(losses).tolist(), rel=1e-6)


def test_speed(tmp_path, capsys):
    record, path = run('speed', tmp_path, '--rounds', '3', '--turn-steps', '1')
    assert path.name == 'training_speed_cpu.json'
    assert [(cell['seqlen'], cell['batch']) for cell in record['cells']] == [(32, 4), (64, 2)]
    text = capsys.readouterr().out
    for cell in record['cells']:
        ours, sdpa = cell['results']
        assert [ours['name'], sdpa['name']] == ['flash_attn3', 'sdpa']
        for result in (ours, sdpa):
            assert len(result['rounds']) == 3
            assert result['tokens_per_second'] == statistics.median(result['rounds']) > 0
            assert f"{result['tokens_per_second']:,.0f}" in text
        ratio = ours['tokens_per_second'] / sdpa['tokens_per_second']
        assert cell['best'] == ['sdpa', pytest.approx(ratio)]


def test_a_turn_counts_its_tokens_and_a_failure_its_reason(monkeypatch):
    """A clock that moves one second a step; the second contender fails in its first step."""
    seconds = [0.0]

    def steps(attend, text, options):
        for _ in range(options.steps):
            if attend is train_gpt.sdpa_attention:
                raise RuntimeError('no')
            seconds[0] += 1
            yield None

    monkeypatch.setattr(train_gpt, 'training', steps)
    monkeypatch.setattr(train_gpt, 'now', lambda device: seconds[0])
    args, model = training.parse(['speed', '--quick', '--rounds', '2', '--turn-steps', '4'])
    options = train_gpt.parse([*model, '--device', 'cpu', '--seqlen', '32', '--batch', '5'])
    ours, sdpa = training.take_turns(options, None, args)
    assert ours == dict(name='flash_attn3', tokens_per_second=5 * 32, rounds=[160, 160], spread=0)
    assert sdpa == dict(name='sdpa', na='no')
    assert training.speed_ratio([ours, sdpa]) is None
    assert seconds[0] == training.UNTIMED_STEPS + 2 * 4
