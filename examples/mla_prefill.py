"""MLA prefill: K and V of (192, 128) come from cached latents, a chunk of the context at a time.

Queries see all of the context, and causally the new tokens. A float32 out is not rounded at each
chunk.
"""
import torch

from flash_attn3 import flash_attn_func, merge_states

context, new, heads, chunk = 1000, 200, 16, 256
latents, rotary, up = (torch.randn(shape).bfloat16() for shape in (
    (1, context + new, 512), (1, context + new, 1, 64), (512, heads * 256)))
up *= 512 ** -0.5    # to K and V
q = torch.randn(1, new, heads, 192).bfloat16()


def attend(first, last, causal=False):
    k, v = (latents[:, first:last] @ up).unflatten(-1, (heads, 256)).split(128, dim=-1)
    k = torch.cat([k, rotary[:, first:last].expand(-1, -1, heads, -1)], dim=-1)
    return flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)


out, lse = attend(context, context + new, causal=True)
out = out.float()
for first in range(0, context, chunk):
    out, lse = merge_states(*zip((out, lse), attend(first, min(first + chunk, context))))

print(f'{new} queries on {context + new} keys: out {tuple(out.shape)}')
