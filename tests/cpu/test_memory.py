"""benchmarks.memory: the bytes that are expected of a call, and how a peak is read."""
import json

import pytest
import torch

from benchmarks import memory
from flash_attn3._measure import Shape


@pytest.mark.parametrize('head_dim', [64, 128, 256])
def test_expected_bytes_of_whole_tiles(head_dim):
    """16-bit out, dq, dk and dv; three float32 a row (the LSE twice, delta); float32 dq."""
    parts = memory.expected_bytes(Shape(3, 1024, 1024, 8, 8, head_dim, causal=True))
    rows = 3 * 1024 * 8
    assert sum(parts.values()) == rows * (4 * 2 * head_dim + 3 * 4 + 4 * head_dim)
    assert parts['workspace'] == rows * (2 * 4 + 4 * head_dim)


def test_expected_bytes_of_grouped_heads_and_ragged_lengths():
    parts = memory.expected_bytes(Shape(2, 1000, 700, 8, 2, 128))
    assert parts['out'] == parts['dq'] == 2 * 1000 * 8 * 128 * 2
    assert parts['dk'] == parts['dv'] == 2 * 700 * 2 * 128 * 2
    assert parts['lse'] == 2 * 8 * 1000 * 4
    whole = memory.expected_bytes(Shape(2, 1024, 700, 8, 2, 128))
    assert parts['workspace'] == whole['workspace']    # whole tiles of queries


def test_cells_are_linear_in_the_length():
    cells = memory.cells_of(memory.SEQLENS)
    assert len(set(cells)) == len(cells) == 3 * (2 * 8 - 1)
    assert all(cell.causal and cell.heads * cell.head_dim == 2048 for cell in cells)
    for head_dim in (64, 128, 256):
        a_token = {sum(memory.expected_bytes(cell).values()) / (cell.batch * cell.seqlen_q)
                   for cell in cells if cell.head_dim == head_dim}
        assert len(a_token) == 1


class FakeAllocator:
    """torch.cuda.memory_stats() of a device that hands out what step() asks for; the allocator's
    own count is twice that."""

    def __init__(self, monkeypatch) -> None:
        self.current, self.peak, self.is_first = 1000, 5000, True
        monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
        monkeypatch.setattr(torch.cuda, 'memory_stats', self.stats)
        monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', self.reset)

    def stats(self) -> dict:
        counts = dict(current=self.current, peak=self.peak)
        return {f'{name}_bytes.all.{key}': value * factor for key, value in counts.items()
                for name, factor in (('requested', 1), ('allocated', 2))}

    def reset(self) -> None:
        self.peak = self.current

    def step(self) -> None:
        """Needs 70 bytes, of which 30 stay for a while; the first call keeps 400 for good."""
        self.current += 400 * self.is_first
        self.peak = max(self.peak, self.current + 70)
        self.is_first = False


def test_a_peak_is_what_a_later_call_adds(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    assert memory.peak_bytes(allocator.step) == dict(requested=70, allocated=140)


def test_what_the_step_before_gives_back_late_is_no_gain(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    late = iter([0, 50, 0, 0])

    def step() -> None:
        allocator.current -= next(late)
        allocator.step()

    assert memory.peak_bytes(step) == dict(requested=70, allocated=140)


def test_summary_takes_the_highest_ratio():
    def cell(ours: int, rival: dict) -> dict:
        return dict(expected=dict(out=60, lse=40), results=[
            dict(name='flash_attn3', requested=ours, allocated=2 * ours), dict(rival, name='fa3')])

    cells = [cell(100, dict(requested=80, allocated=400)), cell(110, dict(na='out of memory'))]
    assert memory.summarize(cells, ['flash_attn3', 'fa3']) == dict(
        cells=2, requested=dict(expected=1.1, fa3=1.25), allocated=dict(expected=2.2, fa3=0.5))


def test_without_a_gpu_the_expected_bytes_are_tabled(tmp_path, capsys):
    assert memory.main(f'--device cpu --quick --commit abcdef0 --out {tmp_path}'.split()) == 0
    path = tmp_path / 'memory_cpu.json'
    record = json.loads(path.read_text())
    assert len(record['cells']) == 3 * 5
    text = capsys.readouterr().out
    for cell in record['cells']:
        shape = Shape(**cell['shape'])
        assert cell['expected'] == memory.expected_bytes(shape) and cell['results'] == []
        row = next(line for line in text.splitlines() if shape.label() in line)
        assert f"{sum(cell['expected'].values()) / 2**20:.1f}" in row


def test_the_step_of_a_contender_gives_output_and_gradients():
    shape = Shape(1, 24, 24, 2, 2, 32, causal=True)
    inputs = [torch.randn(1, 24, 2, 32).bfloat16() for _ in range(4)]
    outs, gradients = zip(*(memory.STEPS[name](shape, tuple(inputs))()
                            for name in ('flash_attn3', 'sdpa flash')))
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)
    torch.testing.assert_close(*gradients, rtol=0.03, atol=0.03)
    assert not any(x.requires_grad for x in inputs)
