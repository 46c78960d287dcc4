"""The scripts of examples/ run on the CPU; attention in them is attention, and the model learns."""
from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from examples import generate, on_policy, train_gpt, train_tree
from flash_attn3 import flash_attn_fp8_func
from flash_attn3.cpu.reference import Inputs, Mask, Score

from tests.support import compare, plain
from tests.support.fp8_data import given_gradients

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = ['--device', 'cpu', '--layers', '2', '--d-model', '64', '--head-dim', '16', '--heads-kv',
        '2', '--seqlen', '48', '--batch', '8']
BF16_ROUNDOFF, TOKENS = 2 ** -8, 8 * 48


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, text=True, capture_output=True,
                          env=os.environ | {'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_demo():
    text = run('examples/demo.py', '--seqlen', '200')
    for part in ('1 x 200 bytes of the Python library', 'CPU path', 'largest error of SDPA',
                 'next bytes right', 'Not the kernel: flash_attn3.can_use: expected q on a CUDA'):
        assert part in text


@pytest.mark.parametrize('heads_kv', [4, 1])
@pytest.mark.parametrize('name', [*train_gpt.COMPARED, 'fp8'])
def test_every_attention_is_attention(name, heads_kv):
    """Output and gradient against float64, from the same packed tensor, under autocast. FP8 is in
    the forward alone: it loses 3 to 4 % there, and the gradient is that of bfloat16, from it.
    """
    torch.manual_seed(heads_kv)
    qkv = torch.randn(2, 33, 4 + 2 * heads_kv, 16).bfloat16().requires_grad_()
    with torch.autocast('cpu', torch.bfloat16):
        out = train_gpt.ATTENTIONS[name](qkv, 4)
    dout = torch.randn(out.shape).bfloat16()
    gradient = torch.autograd.grad(out, qkv, dout.to(out.dtype))[0]

    inputs = qkv.detach().split((4, heads_kv, heads_kv), dim=2)
    ref, pt = (torch.cat(plain.backward(dout.to(dtype), None, *(x.to(dtype) for x in inputs),
                                        0.25, True), dim=2)
               for dtype in (torch.float64, torch.bfloat16))
    if name == 'fp8':
        exact, _ = plain.forward(*(x.double() for x in inputs), 0.25, True)
        results = flash_attn_fp8_func(*inputs, causal=True, return_attn_probs=True)
        expected = torch.cat(given_gradients(Inputs(*inputs), Score(0.25, mask=Mask(True)), results,
                                             (dout, 0.0)), dim=2)
        assert 0.02 < (out - exact).norm() / exact.norm() < 0.06
        assert (gradient - expected).norm() / expected.norm() < 0.003
    else:
        compare.check_forward(out.bfloat16(), None, inputs, causal=True)
        compare.check_close(gradient, ref, pt, 'gradient')


def train(attention: str) -> list[float]:
    options = train_gpt.parse([*TINY, '--steps', '25'])
    with Progress(disable=True) as progress:
        return train_gpt.train(attention, train_gpt.library_text(), options, progress).losses


def test_it_learns_the_same_with_every_attention(monkeypatch):
    """A rounding to bfloat16 moves the loss of a token by at most its own size; the loss is their
    mean, and their roundings are independent. One that sees the future is noticed.
    """
    exact = train('math')
    assert exact[0] == pytest.approx(math.log(256), abs=0.1)    # it knows nothing
    assert sum(exact[-3:]) / 3 < 0.8 * exact[0]
    attentions = {name: train(name) for name in ('flash_attn3', 'sdpa', 'fp8')}
    monkeypatch.setitem(train_gpt.ATTENTIONS, 'flash_attn3', lambda qkv, heads_q: (
        train_gpt.flash_attn3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads_q)))
    attentions['full'] = train('flash_attn3')
    shares = {name: max(abs(loss - other) / (BF16_ROUNDOFF * other / TOKENS ** 0.5)
                        for loss, other in zip(losses, exact))
              for name, losses in attentions.items()}
    assert 0 < shares['flash_attn3'] < 1 and 0 < shares['sdpa'] < 1 and shares['fp8'] < 0.8
    assert shares['full'] > 2


def test_the_comparison(tmp_path):
    text = run('examples/train_gpt.py', *TINY, '--compare', '--steps', '4', '--output',
               str(tmp_path / 'run'))
    for part in ('2 layers of 64', 'on a CPU', 'tokens/s', 'max |loss - loss of math|'):
        assert part in text
    record = json.loads((tmp_path / 'run.json').read_text())
    assert list(record['runs']) == list(train_gpt.COMPARED)
    assert (tmp_path / 'run.png').read_bytes().startswith(b'\x89PNG')


def test_context_parallel(tmp_path):
    """Two processes, a length that does not divide, 30 steps: the losses of one."""
    losses = []
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        start = ['-m', 'torch.distributed.run', '--nproc-per-node', '2'] * (ranks == 2)
        run(*start, 'examples/train_gpt.py', *TINY, '--seqlen', '45', '--steps', '30', '--output',
            str(output), *['--context-parallel', '2'] * (ranks == 2))
        record = json.loads(output.with_suffix('.json').read_text())
        losses.append(record['runs']['flash_attn3']['losses'])
    for one, two in zip(*losses, strict=True):
        assert abs(one - two) < BF16_ROUNDOFF * one / TOKENS ** 0.5
    assert losses[1][-1] < 0.9 * losses[1][0]


def test_generate(capsys):
    """More requests than places and pages; the same text with the cache as without."""
    generate.main([*TINY, '--steps', '10', '--requests', '6', '--running', '4', '--every', '1',
                   '--page-size', '5'])
    text = capsys.readouterr().out
    assert '6 of 6 texts are the same' in text and 'without a cache' in text


def test_on_policy(capsys):
    """Sampler and trainer differ by roundings; the CPU path promises no bits."""
    options = [*TINY, '--steps', '3', '--requests', '6', '--running', '4', '--every', '1',
               '--page-size', '5', '--rounds', '2']
    on_policy.main(options)
    lines = capsys.readouterr().out.splitlines()
    for name in ('as it is', 'invariant'):
        row, = [line for line in lines if line.startswith(f'│ {name}')]
        attention, log_probability, *_ = (float(x) for x in row.split('│')[2:4])
        assert attention < 1e-5 and log_probability < 1e-4


def test_train_tree(capsys):
    train_tree.main([*TINY, '--steps', '3', '--branches', '3'])
    text = capsys.readouterr().out
    assert '5 sequences' in text
    assert [float(x) < 1e-12 for x in re.findall(r'(\S+e-\d+)', text)] == [True, True]
