"""A call of flash_attn_with_kvcache as drawn, checked by tests/support/cache_oracle.py."""
from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch

from tests.support import cache_oracle
from tests.support.cache_cases import LAYOUTS, CacheCase, copied
from tests.support.general_cases import SINKS
from tests.support.wrong_appends import WRONG_NUMBERS, expect_refused

# Slots, at the borders of pages and K tiles half of the time.
EDGES = (0, 1, 2, 16, 63, 64, 65, 80, 127, 128, 129, 176, 192, 256, 257)
PAGE_SIZES = (0, 0, 0, 1, 4, 7, 16, 16, 48, 64, 64, 128, 256, 272)
HEADS = ((4, 4), (4, 2), (6, 2), (6, 6), (8, 1), (7, 1), (16, 1), (14, 2))
HEAD_DIMS = ((64, 64), (128, 128), (128, 128), (256, 256), (192, 128), (96, 96), (192, 192),
             (40, 40), (72, 72), (64, 128), (128, 64), (64, 512), (512, 512), (272, 320))
FP8_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (48, 48))
# Keys of the first sequence: with few, plain PyTorch's errors may all be small by luck.
LEAST_KEYS, MOST_KEYS = 64, 900


@dataclass(frozen=True)
class CacheCall:
    case: CacheCase

    function = 'cache'

    def check(self, device: str | torch.device) -> None:
        """The cache after the call, out and LSE; twice, with the same bits. Before, a call that
        appends is refused for one thing, which writes nothing.
        """
        if self.case.new:
            what, change = random.Random(self.case.seed).choice(list(WRONG_NUMBERS.items()))
            expect_refused(copied(self.case.arguments(device)), what, change)
        got, arguments = cache_oracle.check(self.case, device)
        cache_oracle.check_same(cache_oracle.run(self.case, arguments)[0], got)


def slots_of(pick: random.Random) -> int:
    if pick.random() < 0.5:
        return pick.choice(EDGES)
    return pick.randint(1, MOST_KEYS if pick.random() < 0.3 else 260)


def queries_of(pick: random.Random, is_packed: bool, batch: int) -> list[int]:
    """A step of decoding half of the time."""
    def one() -> int:
        return pick.choice((1, 1, 1, 2, 5, pick.randint(1, 130)))

    if not is_packed:
        return [one()] * batch
    return [one(), *(pick.choice((0, one(), one())) for _ in range(batch - 1))]


def append_of(pick: random.Random, queries: list[int], is_packed: bool, wide: bool) -> dict:
    rotary = {'rotary': pick.choice((0.25, 0.5, 1.0)), 'interleaved': pick.random() < 0.5,
              'own_positions': pick.random() < 0.2}
    if pick.random() < 0.5:
        return rotary if pick.random() < 0.15 else {}
    new = queries if pick.random() < 0.6 else [pick.choice((1, 2, 17, 64))] * len(queries)
    new_packed = len(set(new)) > 1 or (is_packed and pick.random() < 0.7)
    given = {'new': tuple(new), 'new_packed': new_packed}
    return given if pick.random() < (0.4 if wide else 0.7) else given | rotary


def mask_of(pick: random.Random) -> dict:
    sides = -1, 0, pick.randint(1, 20), pick.randint(20, 300)
    window = (pick.choice(sides), pick.choice(sides)) if pick.random() < 0.3 else (-1, -1)
    chunk = pick.choice((1, 7, 64, pick.randint(2, 300))) if pick.random() < 0.15 else 0
    return {'causal': pick.random() < 0.6, 'window': window, 'chunk': chunk}


def has_lone_sink(case: object) -> bool:
    """Whether rows see one key and a sink. Then P is 1, which e4m3 holds exactly, and all of the
    error is that of S in the tensor cores, which the measure of e4m3's bar does not have.
    """
    left, right = case.window
    return bool(case.sinks) and (case.chunk == 1 or (left == 0 and (case.causal or right == 0)))


def score_of(pick: random.Random) -> dict:
    return {'softcap': pick.choice((0.0, 0.0, 0.0, 0.0, 1.0, 15.0, 50.0)),
            'sinks': pick.choice(tuple(SINKS)) if pick.random() < 0.25 else '',
            'softmax_scale': pick.choice((None, None, 0.02, 0.3))}


def execution_of(pick: random.Random) -> dict:
    """How the work is split; parts of a fixed size exclude a number of them."""
    splits = {'num_splits': pick.choice((0, 0, 1, 2, 3, pick.randint(4, 40), 256))}
    if pick.random() < 0.25:
        splits = {'split_size': pick.choice((1, 64, 128, 200, 512))}
    return {**splits, 'pack_gqa': pick.choice((None, None, True, False)),
            'sm_margin': pick.choice((0, 0, 0, 1, 100)), 'metadata': pick.random() < 0.2,
            'out': pick.random() < 0.2, 'lse': pick.random() < 0.8,
            'data': pick.choice(('normal', 'normal', 'onehot')),
            'logit_std': pick.choice((1.0, 1.0, 4.0))}


def with_shared_keys(pick: random.Random, case: CacheCase) -> CacheCase:
    """Sometimes the same in front of shared keys, where that goes together."""
    has_window = case.window != (-1, -1) or case.chunk
    if pick.random() > 0.2 or has_window or case.leftpad or case.length_as != 'tensor':
        return case
    step = case.page_size or 1
    shared = step * pick.randint(1, max(1, pick.choice((64, 300)) // step))
    longest = max(case.queries) if case.causal or case.tree else 0
    lengths = tuple((count, used + shared + (count if case.causal or case.tree else 0))
                    for count, used in case.lengths)
    return dataclasses.replace(case, lengths=lengths, shared=shared,
                               capacity=case.capacity + shared + longest)


def with_latent(pick: random.Random, case: CacheCase) -> CacheCase:
    """Turns a case into absorbed MLA, with many heads if there are few queries."""
    heads = (16, 64, 128, 40) if sum(case.queries) < 20 else (1, 5, 16)
    return dataclasses.replace(case, latent=True, head_dim=64, head_dim_v=512, softcap=0.0,
                               heads=(pick.choice(heads), 1), kv8=pick.random() < 0.5,
                               blocks=pick.choice((1, 4)), descales=bool(case.new) or case.descales)


def with_scales_of_pages(pick: random.Random, case: CacheCase) -> CacheCase:
    is_some = case.kv8 and not case.latent and case.page_size > 0 and pick.random() < 0.5
    return dataclasses.replace(case, by_page=True) if is_some else case


def drawn(pick: random.Random) -> CacheCall:
    dtype = pick.choice(('bf16', 'bf16', 'fp16', 'e4m3'))
    wide = dtype != 'e4m3'
    kv8 = wide and pick.random() < 0.25    # its rows are aligned to 16 bytes
    tree = pick.random() < 0.1
    head_dim, head_dim_v = pick.choice(HEAD_DIMS if wide else FP8_HEAD_DIMS)
    heads = pick.choice(HEADS)
    is_packed, batch = pick.random() < 0.4, pick.choice((1, 2, 3, 5, 9))
    queries = queries_of(pick, is_packed, batch)
    own = append_of(pick, queries, is_packed, wide)
    mask = mask_of(pick)
    if mask['chunk'] and not mask['causal'] and mask['window'] == (-1, -1):
        own.pop('rotary', None)
    new = own.get('new', (0,) * batch)
    used = [max(LEAST_KEYS, slots_of(pick)), *(slots_of(pick) for _ in range(batch - 1))]
    if pick.random() < 0.1:
        own |= {'length_as': pick.choice(('int', 'int', 'none') if not own else ('int',))}
        used = [used[0]] * batch
    if pick.random() < 0.2:
        own['leftpad'] = tuple(pick.choice((0, pick.randint(0, n), pick.randint(0, min(n, 9))))
                               for n in used)
    page_size = pick.choice(PAGE_SIZES)
    most = max(sum(pair) for pair in zip(used, new))
    exact = own.get('length_as') == 'none'
    capacity = most if exact else most + pick.choice((0, 0, 1, 100))
    if exact and page_size and most % page_size:
        page_size = 0
    case = CacheCase(
        tuple(zip(queries, used)), capacity, page_size, head_dim, head_dim_v, dtype, heads,
        is_packed, batch_idx=pick.random() < (0.1 if page_size else 0.3),
        layout=pick.choice(LAYOUTS) if pick.random() < 0.4 else '',
        kv8=kv8 and head_dim % 16 == head_dim_v % 16 == 0,
        tree=tree and max(queries) <= 128, descales=pick.random() < 0.7,
        float16_out=not wide and pick.random() < 0.3,
        **own, **mask, **score_of(pick), **execution_of(pick))
    if not wide and has_lone_sink(case):
        case = dataclasses.replace(case, sinks='')
    if wide and not case.kv8 and pick.random() < 0.15:
        case = with_latent(pick, case)
    return CacheCall(with_scales_of_pages(pick, with_shared_keys(pick, case)))
