"""Two thousand random calls, forward and backward, held to the bar of tests/compare.py.

A case is made from its seed alone. A failure prints it; to repeat it:
`python -c "from tests.gpu.test_random import *; check_case(random_case(SEED), 'cuda')"`.
"""
from __future__ import annotations

import random

import pytest

from tests.general_cases import SINKS, GeneralCase
from tests.general_oracle import check_case

CASES, SMOKE = 2000, 100
# At the edges of tiles and warpgroups, and almost nothing.
EDGES = (0, 1, 2, 16, 63, 64, 65, 80, 96, 127, 128, 129, 191, 192, 193)
HEADS = ((4, 4), (4, 2), (6, 2), (4, 1), (8, 1), (3, 3))
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (40, 40), (72, 72), (32, 32),
             (192, 128), (128, 64), (64, 128), (64, 256), (96, 64), (80, 40))
MOST_ROWS = 500    # of q and of k, all sequences together
# Of q and of k in some sequence: with few pairs plain PyTorch's errors may all be small by luck.
LEAST_ROWS = 64


def random_length(pick: random.Random) -> int:
    return pick.choice(EDGES) if pick.random() < 0.5 else pick.randint(1, 260)


def random_lengths(pick: random.Random, is_packed: bool) -> tuple[tuple[int, int], ...]:
    lengths = [(pick.randint(LEAST_ROWS, 260), pick.randint(LEAST_ROWS, 260))]
    count = pick.randint(1, 6 if is_packed else 2)
    while len(lengths) < count:
        one = (random_length(pick), random_length(pick)) if is_packed else lengths[0]
        if any(sum(x) > MOST_ROWS for x in zip(*lengths, one)):
            break
        lengths.append(one)
    pick.shuffle(lengths)
    return tuple(lengths)


def random_used(pick: random.Random, length: int) -> int:
    least = LEAST_ROWS if length >= LEAST_ROWS else 0
    return pick.choice((length, pick.randint(least, length)))


def random_mask(pick: random.Random) -> dict:
    """Half of the cases have windows or chunks, some both."""
    sides = -1, 0, pick.randint(1, 20), pick.randint(20, 300)
    window = (pick.choice(sides), pick.choice(sides)) if pick.random() < 0.4 else (-1, -1)
    chunk = pick.choice((1, 7, 64, pick.randint(2, 300))) if pick.random() < 0.2 else 0
    return {'causal': pick.random() < 0.5, 'window': window, 'chunk': chunk}


def random_case(seed: int) -> GeneralCase:
    pick = random.Random(seed)
    is_packed = pick.random() < 0.7
    lengths = random_lengths(pick, is_packed)
    used, behind = None, (0, 0)
    if is_packed and pick.random() < 0.3:
        used = tuple(tuple(random_used(pick, length) for length in one) for one in lengths)
    if is_packed and pick.random() < 0.3:
        behind = pick.randint(0, 70), pick.randint(0, 70)
    head_dim, head_dim_v = pick.choice(HEAD_DIMS)
    return GeneralCase(
        lengths, head_dim, head_dim_v, pick.choice(('bf16', 'fp16')), pick.choice(HEADS), is_packed,
        used, behind, **random_mask(pick),
        softcap=pick.choice((0.0, 0.0, 0.0, 1.0, 15.0, 50.0)),
        sinks=pick.choice(tuple(SINKS)) if pick.random() < 0.3 else '',
        max_logits=pick.random() < 0.2,
        softmax_scale=pick.choice((None, None, 0.02, 0.3)),
        pack_gqa=pick.choice((None, True, False)), deterministic=pick.random() < 0.3,
        data=pick.choice(('normal', 'normal', 'onehot')),
        logit_std=pick.choice((1.0, 1.0, 4.0)), dlse=pick.random() < 0.5)


@pytest.mark.parametrize('seed', [pytest.param(seed, marks=[pytest.mark.smoke] * (seed < SMOKE))
                                  for seed in range(CASES)])
def test_random(seed, device):
    check_case(random_case(seed), device)


def test_the_cases_are_varied():
    """Each feature is in many of them, and in many together with each other."""
    cases = [random_case(seed) for seed in range(CASES)]
    features = {'packed': lambda x: x.is_packed, 'causal': lambda x: x.causal,
                'window': lambda x: x.window != (-1, -1), 'chunk': lambda x: x.chunk > 0,
                'softcap': lambda x: x.softcap > 0, 'sinks': lambda x: x.sinks != '',
                'gqa': lambda x: x.heads[0] != x.heads[1], 'used': lambda x: x.used is not None,
                'values': lambda x: x.columns_v != x.head_dim, 'fp16': lambda x: x.dtype == 'fp16',
                'deterministic': lambda x: x.deterministic, 'dlse': lambda x: x.dlse}
    for name, one in features.items():
        for other_name, other in features.items():
            together = sum(one(case) and other(case) for case in cases)
            assert together >= 40, f'{name} with {other_name}: {together}'
    assert len(set(map(str, cases))) == CASES
