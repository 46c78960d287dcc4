"""`python -m flash_attn3.explain`: prints the plan of a call given by its sizes.

The function `flash_attn3.explain` is in planning.py; this file is its command line.
"""
from __future__ import annotations

import argparse

import torch

from flash_attn3 import planning

_DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
_PACK_GQA = {'auto': None, 'yes': True, 'no': False}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='python -m flash_attn3.explain',
        description='Prints how a Hopper GPU would compute flash_attn_func and its gradients.')
    parser.add_argument('--batch', type=int, default=1, help='default: 1')
    parser.add_argument('--seqlen-q', type=int, default=4096, help='default: 4096')
    parser.add_argument('--seqlen-k', type=int, help='default: that of q')
    parser.add_argument('--heads', type=int, default=16, help='query heads; default: 16')
    parser.add_argument('--heads-k', type=int, help='KV heads; default: those of q')
    parser.add_argument('--head-dim', type=int, default=128, help='default: 128')
    parser.add_argument('--dtype', choices=_DTYPES, default='bf16', help='default: bf16')
    parser.add_argument('--causal', action='store_true')
    parser.add_argument('--pack-gqa', choices=_PACK_GQA, default='auto', help='default: auto')
    parser.add_argument('--deterministic', action='store_true', help='gradients that repeat')
    parser.add_argument('--sm-margin', type=int, default=0, help='multiprocessors left to others')
    parser.add_argument('--sm-count', type=int, help='multiprocessors of the GPU; default: 132')
    return parser.parse_args()


def main() -> None:
    options = _options()
    seqlen_k = options.seqlen_q if options.seqlen_k is None else options.seqlen_k
    heads_k = options.heads if options.heads_k is None else options.heads_k
    planning.explain(
        (options.batch, options.seqlen_q, options.heads, options.head_dim),
        (options.batch, seqlen_k, heads_k, options.head_dim),
        causal=options.causal, dtype=_DTYPES[options.dtype], sm_margin=options.sm_margin,
        pack_gqa=_PACK_GQA[options.pack_gqa], deterministic=options.deterministic,
        sm_count=options.sm_count)


if __name__ == '__main__':
    main()
