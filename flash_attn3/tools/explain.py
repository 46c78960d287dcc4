"""`python -m flash_attn3.explain`: prints the plan of a call given by its sizes.

The function `flash_attn3.explain` is in planning.py; this file is its command line.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from flash_attn3 import arguments
from flash_attn3.arguments import Argument
from flash_attn3.tools import planning

_DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
_CHOICES = {'auto': None, 'yes': True, 'no': False}    # an argument that may be None takes these
# Numbers that change the scores; 0 turns each off.
_SCORES = [argument for argument in arguments.select('score')
           if type(argument.default) in (int, float) and argument.default == 0]
_EXECUTION = arguments.select('pack_gqa', 'sm_margin')
_GRADIENTS = arguments.select('gradients')
_CACHE = [argument for argument in arguments.select('latent', 'splits', 'split_size', 'prefix')
          if argument.type in ('Tensor?', 'SymInt')]


def _add(parser: argparse.ArgumentParser, title: str, wanted: Sequence[Argument]) -> None:
    """Adds an option for each argument. A tensor is given or not."""
    group = parser.add_argument_group(title)
    kinds = {'bool': dict(action='store_true'), 'Tensor?': dict(action='store_const', const=True),
             'bool?': dict(choices=_CHOICES, default='auto', help='default: auto')}
    for argument in wanted:
        number = dict(type=type(argument.default), default=argument.default, help='default: 0')
        group.add_argument('--' + argument.name.replace('_', '-'),
                           **kinds.get(argument.type, number))


def _given(options: argparse.Namespace, wanted: Sequence[Argument]) -> dict:
    """The values of these arguments."""
    values = {argument.name: getattr(options, argument.name) for argument in wanted}
    return {name: _CHOICES.get(value, value) for name, value in values.items()}


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
    parser.add_argument('--head-dim-v', type=int, help='of the values; default: that of q and k')
    parser.add_argument('--dtype', choices=_DTYPES, default='bf16', help='default: bf16')
    parser.add_argument('--causal', action='store_true')
    parser.add_argument('--window-size', type=int, nargs=2, default=(-1, -1),
                        metavar=('LEFT', 'RIGHT'), help='-1: no limit')
    parser.add_argument('--max-logits', action='store_true', help='return_max_logits')
    parser.add_argument('--packed', action='store_true',
                        help='a batch of packed sequences of at most these lengths')
    parser.add_argument('--cache', action='store_true', help='k and v are a cache')
    parser.add_argument('--page-size', type=int, default=0, help='of a cache; default: dense')
    parser.add_argument('--sm-count', type=int, help='multiprocessors of the GPU; default: 132')
    _add(parser, 'scores; 0 is none', _SCORES)
    _add(parser, 'a cache; qv: absorbed MLA', _CACHE)
    _add(parser, 'the forward', _EXECUTION)
    _add(parser, 'the gradients', _GRADIENTS)
    return parser.parse_args()


def _lengths(options: argparse.Namespace, seqlen_k: int) -> dict:
    """The lists of packed sequences, or nothing."""
    features = {}
    if options.packed:
        for name, seqlen in (('q', options.seqlen_q), ('k', seqlen_k)):
            features[f'cu_seqlens_{name}'] = [seqlen * i for i in range(options.batch + 1)]
            features[f'max_seqlen_{name}'] = seqlen
    return features


def _explain_cache(options: argparse.Namespace, shapes: tuple, features: dict) -> None:
    """shapes: of q, k and v; a dense batch of k and v is laid out in pages, if there are any."""
    q, *caches = shapes
    batch, slots = caches[0][:2]
    size = options.page_size
    features = features | _given(options, _CACHE)
    if size > 0:
        pages = -(-slots // size)
        caches = [(batch * pages, size, *shape[2:]) for shape in caches]
        features |= dict(page_table=(batch, pages))
    planning.explain(q, *caches, cache=True, **features)


def main() -> None:
    options = _options()
    seqlen_k = options.seqlen_q if options.seqlen_k is None else options.seqlen_k
    heads_k = options.heads if options.heads_k is None else options.heads_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v

    def shape(seqlen: int, heads: int, head_dim: int, is_packed: bool) -> tuple[int, ...]:
        rows = (options.batch * seqlen,) if is_packed else (options.batch, seqlen)
        return *rows, heads, head_dim

    has_packed_keys = options.packed and not options.cache
    shapes = (shape(options.seqlen_q, options.heads, options.head_dim, options.packed),
              shape(seqlen_k, heads_k, options.head_dim, has_packed_keys),
              shape(seqlen_k, heads_k, head_dim_v, has_packed_keys))
    features = _lengths(options, seqlen_k) | _given(options, [*_SCORES, *_EXECUTION]) | dict(
        causal=options.causal, window_size=tuple(options.window_size),
        dtype=_DTYPES[options.dtype], sm_count=options.sm_count)
    if options.cache:
        for name in ('cu_seqlens_k', 'max_seqlen_k'):
            features.pop(name, None)
        _explain_cache(options, shapes, features)
        return
    planning.explain(*shapes, return_max_logits=options.max_logits,
                     **features, **_given(options, _GRADIENTS))


if __name__ == '__main__':
    main()
