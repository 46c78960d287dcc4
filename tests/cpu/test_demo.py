"""examples/demo.py: its attention really looks up what followed, and its figures are right."""
import os
import subprocess
import sys
from pathlib import Path

import torch

from examples import demo
from flash_attn3 import flash_attn_func

ROOT = Path(__file__).resolve().parents[2]


def test_text_is_the_library():
    text = bytes(demo.library_text(3000).tolist())
    assert len(text) == 3000 and b'import' in text


def test_a_text_that_repeats_itself_is_predicted():
    period = torch.randperm(256)[:50]
    text = period.repeat(6)[None]
    *inputs, codes = demo.attention_inputs(text)
    mean = flash_attn_func(*inputs, causal=True).double().mean(2)
    assert demo.predicted_share(mean[:, 60:], codes, text[:, 60:]) == 1.0


def test_errors_are_those_against_float64():
    text = demo.library_text(200)[None]
    *inputs, _ = demo.attention_inputs(text)
    out = flash_attn_func(*inputs, causal=True)
    spoiled = out.clone()
    spoiled[0, 17, 3, 5] += 0.25
    (error, spoiled_error), exact_mean = demo.largest_errors([out, spoiled], inputs, causal=True)
    assert error < 0.005 < 0.24 < spoiled_error < 0.26
    torch.testing.assert_close(exact_mean, out.double().mean(2), rtol=0, atol=0.005)


def test_it_runs():
    result = subprocess.run([sys.executable, 'examples/demo.py', '--seqlen', '200'], cwd=ROOT,
                            env=os.environ | {'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''},
                            text=True, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for part in ('1 x 200 bytes of the Python library', 'CPU path', 'largest error of SDPA',
                 'next bytes right', 'Not the kernel: flash_attn3.can_use: expected q on a CUDA'):
        assert part in result.stdout
