"""With split_size a sequence on a cache has the same bits in every batch: they depend on its own
queries, keys and lengths, not on the others, the form of the call or the multiprocessors. Latent
caches, whose parts a launch of its own combines, and all others.
"""
from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from tests.support import compare
from tests.support.cache_cases import CacheCase, alone, call
from tests.support.cache_oracle import check_same, one_of

MOST_QUERIES = 16
LATENT_HEADS = (5, 16, 17, 64, 128)
HEADS = ((8, 1), (8, 2), (14, 2), (17, 1), (4, 4))
# (dtype, head dim of q and k, that of v, whether the cache is e4m3)
KINDS = (('bf16', 64, 64, False), ('fp16', 128, 128, False), ('bf16', 192, 128, False),
         ('fp16', 256, 256, False), ('bf16', 64, 512, False), ('e4m3', 128, 128, False),
         ('bf16', 128, 128, True), ('fp16', 256, 256, True))
FEATURES = ({}, {}, {'causal': True}, {'causal': True}, {'causal': True, 'window': (150, 0)},
            {'window': (700, 3)}, {'causal': True, 'chunk': 400})


def check_alone(case: CacheCase, device: torch.device, chosen: Sequence[int]) -> None:
    """The chosen sequences, alone and in their batch, packed and not, on fewer multiprocessors."""
    with compare.naming(case):
        arguments = case.arguments(device)
        together = call(case, arguments)
        margin = 120 if device.type == 'cuda' else 2
        check_same(call(case, arguments, sm_margin=margin), together)
        for b in chosen:
            for is_packed in (False, True):
                own_case, own = alone(case, arguments, b, is_packed)
                check_same(one_of(own_case, call(own_case, own), 0), one_of(case, together, b))


def others(device: torch.device) -> int:
    """Sequences next to the long ones: enough for another way through the combining launch."""
    return 40 if device.type == 'cuda' else 2


def drawn(seed: int, latent: bool, device: torch.device) -> CacheCase:
    """Three sequences with 9 parts and more, and others with two."""
    pick = random.Random(seed)
    split_size = pick.choice((64, 64, 128, 256))
    is_packed = pick.random() < 0.5
    count = pick.choice((1, 1, 2, pick.randint(1, MOST_QUERIES)))
    most = min(20 * split_size, 9 * split_size + 1200)
    keys = [pick.randint(9 * split_size, most) for _ in range(3)]
    keys += [pick.randint(split_size, 3 * split_size) for _ in range(others(device))]
    lengths = tuple((pick.randint(1, MOST_QUERIES) if is_packed else count, one) for one in keys)
    options = dict(page_size=pick.choice((0, 1, 16, 17, 64)), split_size=split_size,
                   sinks=pick.choice(('', 'fp32', 'bf16')), is_packed=is_packed,
                   softmax_scale=pick.choice((None, 0.01)), **pick.choice(FEATURES))
    if pick.random() < 0.5:
        options['leftpad'] = tuple(pick.randint(0, min(2 * split_size, one)) for one in keys)
    if latent:
        kv8 = pick.random() < 0.25
        return CacheCase(lengths, head_dim=64, head_dim_v=512, latent=True, kv8=kv8,
                         blocks=4 if kv8 else 1, dtype=pick.choice(('bf16', 'fp16')),
                         heads=(pick.choice(LATENT_HEADS), 1), **options)
    dtype, head_dim, head_dim_v, kv8 = KINDS[seed % len(KINDS)]
    return CacheCase(lengths, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, kv8=kv8,
                     heads=pick.choice(HEADS), **options)


LATENT = dict(head_dim=64, head_dim_v=512, latent=True)
CASES = {
    # Launches that combine few rows and many, on a GPU of 3 multiprocessors too.
    'small': CacheCase(((1, 1000), (1, 900), (1, 1090), (2, 70)), heads=(12, 1), is_packed=True,
                       softmax_scale=0.1, split_size=64, **LATENT),
    'packed': CacheCase(tuple((count, 4029) for count in (1, 8, 8, 1, 1, 1)), heads=(17, 1),
                        page_size=17, length_as='none', is_packed=True, causal=True, sinks='fp32',
                        split_size=256, **LATENT),
    'dense': CacheCase(tuple((16, keys) for keys in (511, 700, 700, 314)), heads=(16, 1),
                       dtype='fp16', page_size=16, leftpad=(0,) * 4, causal=True, sinks='fp32',
                       softmax_scale=0.01, split_size=64, **LATENT),
    # More parts than lie in shared memory at a time.
    'long': CacheCase(((1, 26000), (1, 12300)) + ((1, 300),) * 50, heads=(12, 1), page_size=64,
                      split_size=64, **LATENT),
}


@pytest.mark.smoke
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_latent_examples(case, device):
    check_alone(case, device, range(min(4, case.batch)))


@pytest.mark.smoke
@pytest.mark.parametrize('seed', range(30))
def test_latent(seed, device):
    check_alone(drawn(seed, True, device), device, (0, 1, 2, 4))


@pytest.mark.parametrize('seed', range(24))
def test_other_caches(seed, device):
    check_alone(drawn(seed, False, device), device, (0, 1, 2, 4))


@pytest.mark.parametrize('change', [dict(heads=(64, 1)), dict(heads=(128, 1), dtype='fp16'),
                                    dict(heads=(32, 1), kv8=True, blocks=4)], ids=str)
def test_each_number_of_parts(change, device):
    """1 to 30 parts, alone and in a launch with many rows."""
    lengths = tuple((1, 64 * parts - 3) for parts in range(1, 31))
    case = dataclasses.replace(
        CacheCase(lengths, split_size=64, page_size=64, **LATENT), **change)
    check_alone(case, device, range(0, 30, 1 if device.type == 'cuda' else 9))
