"""Prefill of MLA models, head dims (192, 128), with the keys in chunks: one call gives the same."""
from __future__ import annotations

import runpy

import torch

from flash_attn3 import flash_attn_varlen_func, merge_states

from tests.cpu.test_docs import ROOT
from tests.support import compare, plain
from tests.support.lists import starts

SCALE = 192 ** -0.5


def test_example():
    """examples/mla_prefill.py against float64, with the keys that the code itself makes; out
    is float32, so nothing but the parts' own rounding is in it.
    """
    torch.manual_seed(0)
    found = runpy.run_path(str(ROOT / 'examples/mla_prefill.py'))
    names = ('latents', 'rotary', 'up', 'q', 'context', 'new', 'heads')
    latents, rotary, up, q, context, new, heads = (found[name] for name in names)
    k, v = (latents @ up).unflatten(-1, (heads, 256)).split(128, dim=-1)
    k = torch.cat([k, rotary.expand(-1, -1, heads, -1)], dim=-1)
    assert k.shape == (1, context + new, heads, 192) and v.shape == (1, context + new, heads, 128)
    ref, ref_lse = plain.forward(*(x.double() for x in (q, k, v)), SCALE, True)
    pt, _ = plain.forward(q, k, v, SCALE, True)
    assert found['out'].dtype == torch.float32
    compare.check_close(found['out'].bfloat16(), ref, pt, 'out')
    compare.check_lse(found['lse'], ref_lse)


def test_packed_sequences_with_contexts_of_different_lengths():
    """As a server has it: chunk c of each context that is so long, in one call; where a sequence
    has no key in a chunk its LSE is -inf, and the chunk changes nothing.
    """
    torch.manual_seed(1)
    contexts, new, chunk, heads = (0, 50, 130), (7, 1, 20), 64, 4
    rows = [torch.randn(one, heads, 192).bfloat16() for one in new]
    keys = [[torch.randn(c + n, heads, dim).bfloat16() for c, n in zip(contexts, new)]
            for dim in (192, 128)]
    q = torch.cat(rows)

    def attend(firsts: list[int], counts: list[int], causal: bool) -> tuple:
        k, v = (torch.cat([x[first:first + count]
                           for x, first, count in zip(parts, firsts, counts)]) for parts in keys)
        return flash_attn_varlen_func(q, k, v, starts(list(new)), starts(counts), max(new),
                                      max(counts), causal=causal, return_attn_probs=True)

    out, lse = attend(list(contexts), list(new), True)
    out = out.float()
    for first in range(0, max(contexts), chunk):
        counts = [min(max(context - first, 0), chunk) for context in contexts]
        part = attend([first] * 3, counts, False)
        assert bool(part[1][:, :7].isneginf().all())
        out, lse = merge_states(*zip((out, lse), part))
    begin = 0
    for row, k, v in zip(rows, *keys):
        end = begin + len(row)
        compare.check_forward(out[None, begin:end].bfloat16(), lse[None, :, begin:end],
                              (row[None], k[None], v[None]), True)
        begin = end
