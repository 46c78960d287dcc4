"""Many tiles a CTA: its warpgroups are at different K tiles when a kernel goes from one tile to the
next. Every entry of the batch has to give the result that it gives alone.
"""
import pytest
import torch

from flash_attn3 import flash_attn_func

from tests.gpu.common import check_same

FEATURES = {
    'causal': {'causal': True}, 'window': {'window_size': (700, 0)},
    'both_sides': {'window_size': (300, 130)}, 'narrow': {'window_size': (90, 0)},
    'chunk': {'attention_chunk': 450, 'causal': True}}
# More keys than queries, so that K tiles end within the rows of a warpgroup; and the reverse.
LENGTHS = [(1600, 1600), (1500, 1777), (1777, 1500)]


@pytest.mark.smoke
@pytest.mark.parametrize(('dtype', 'accumulation'), [
    (torch.bfloat16, 'fast'), (torch.float8_e4m3fn, 'fast'), (torch.float8_e4m3fn, 'promote')],
    ids=str)
@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize('lengths', LENGTHS, ids=str)
def test_entries_of_a_batch(lengths, features, head_dim, dtype, accumulation, cuda):
    generator = torch.Generator(cuda).manual_seed(0)
    rows = lengths[0], lengths[1], lengths[1]
    tensors = [torch.randn(16, n, 16, head_dim, device=cuda, generator=generator).to(dtype)
               for n in rows]
    options = features | {'return_attn_probs': True, 'fp8_accum': accumulation}
    expected = [flash_attn_func(*(x[b:b + 1] for x in tensors), **options) for b in range(16)]
    expected = tuple(torch.cat(results) for results in zip(*expected))
    for _ in range(5):
        check_same(flash_attn_func(*tensors, **options), expected)
