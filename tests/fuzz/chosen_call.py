"""A call whose queries choose their keys as drawn, checked by tests/support/chosen_cases.py, and
its gradients by tests/support/chosen_gradients.py.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tests.support import chosen_cases, chosen_gradients
from tests.support.cache_oracle import check_same
from tests.support.chosen_cases import LATENT, ChosenCase
from tests.support.wrong_appends import expect_refused
from tests.support.wrong_choices import wrong_calls

# Places of a list, at the borders of K tiles half of the time.
EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 256, 257)
HEADS = ((4, 4), (4, 2), (8, 1), (7, 1), (16, 1), (14, 2))
LATENT_HEADS = (1, 5, 16, 40, 64, 128)


@dataclass(frozen=True)
class ChosenCall:
    case: ChosenCase

    function = 'chosen'

    def check(self, device: str | torch.device) -> None:
        """Out and LSE, twice with the same bits, then gradients. Before, a call is refused for one
        thing.
        """
        function, given = chosen_cases.named(self.case, self.case.arguments(device))
        what, change = random.Random(self.case.seed).choice(list(wrong_calls(given).items()))
        expect_refused(given, what, change, function)
        got = chosen_cases.check_case(self.case, device)
        check_same(chosen_cases.call(self.case, self.case.arguments(device)), got)
        if self.case.sparse:
            chosen_gradients.check_gradients(
                self.case, device, with_lse=self.case.seed % 2 == 0,
                rotary=not self.case.latent or self.case.seed % 3 != 0,
                deterministic=self.case.seed % 5 == 0)


def kind_of(pick: random.Random) -> dict:
    """Head dims, dtypes, and what scales the cache has."""
    kv8, dtype = pick.random() < 0.3, pick.choice(('bf16', 'bf16', 'fp16'))
    if pick.random() < 0.5:
        return LATENT | {'heads': (pick.choice(LATENT_HEADS), 1), 'kv8': kv8, 'dtype': dtype}
    head_dim = pick.choice((64, 128))
    return {'heads': pick.choice(HEADS), 'head_dim': head_dim, 'head_dim_v': head_dim, 'kv8': kv8,
            'dtype': dtype, 'by_head': pick.random() < 0.3,
            'softcap': pick.choice((0.0, 0.0, 0.0, 15.0))}


def places_of(pick: random.Random, by_head: bool) -> dict:
    """Blocks, pages and the lengths of lists."""
    block = pick.choice((1, 1, 1, 64, 128))
    if block == 1:
        return {'count': pick.choice(EDGES) if pick.random() < 0.5 else pick.randint(1, 700),
                'page_size': pick.choice((1, 16, 64, 100)), 'pages': pick.randint(5, 30)}
    heads_first = by_head and pick.random() < 0.5
    size = block * (1 if heads_first else pick.choice((1, 1, 2)))
    return {'block': block, 'count': pick.randint(0, 9), 'page_size': size,
            'pages': pick.randint(1, 9), 'heads_first': heads_first}


def drawn(pick: random.Random) -> ChosenCall:
    kind = kind_of(pick)
    places = places_of(pick, kind.get('by_head', False))
    splits = {'num_splits': pick.choice((0, 0, 1, 3, 40))}
    if pick.random() < 0.25:
        splits = {'split_size': pick.choice((64, 128, 200, 512))}
    packed = pick.random() < 0.4
    sparse = packed and not kind['kv8'] and not kind.get('softcap') and pick.random() < 0.5
    sparse &= not places.get('heads_first', False)    # packed rows have no pages
    return ChosenCall(ChosenCase(
        tokens=(pick.randint(1, 40),) if packed else (pick.choice((1, 2, 5)), pick.choice((1, 3))),
        counts=pick.random() < 0.5, sinks=pick.random() < 0.3, wild=pick.random() < 0.5,
        alike=pick.random() < 0.1, sparse=sparse, lse=pick.random() < 0.8,
        out=not sparse and pick.random() < 0.2, softmax_scale=pick.choice((None, None, 0.3)),
        sm_margin=pick.choice((0, 0, 0, 100)), seed=pick.randint(0, 999), **splits, **kind,
        **places))
