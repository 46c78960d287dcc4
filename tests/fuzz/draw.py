"""What a case of the fuzzer is made of. Small shapes, at the edges of tiles half of the time."""
from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from tests.fuzz import cache_call, chosen_call, mask_call
from tests.fuzz.cache_call import CacheCall, has_lone_sink
from tests.fuzz.call import LAYOUTS, Call
from tests.fuzz.chosen_call import ChosenCall
from tests.fuzz.fp8_call import Fp8Call
from tests.fuzz.mask_call import MaskCall
from tests.support.general_cases import SINKS, GeneralCase

# At the edges of tiles and warpgroups, and almost nothing.
EDGES = (0, 1, 2, 16, 63, 64, 65, 80, 96, 127, 128, 129, 191, 192, 193)
HEADS = ((4, 4), (4, 2), (6, 2), (4, 1), (8, 1), (3, 3))
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (40, 40), (72, 72), (32, 32),
             (192, 128), (128, 64), (64, 128), (64, 256), (96, 64), (80, 40), (512, 512),
             (320, 264))
FP8_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (96, 96), (48, 48), (192, 128), (64, 128))
MOST_ROWS = 500    # in q and in k, all sequences together
# Rows of q and k in some sequence: with few pairs plain PyTorch's errors may all be small by luck.
LEAST_ROWS = 64


def length(pick: random.Random) -> int:
    return pick.choice(EDGES) if pick.random() < 0.5 else pick.randint(1, 260)


def lengths(pick: random.Random, is_packed: bool) -> tuple[tuple[int, int], ...]:
    """A batch has equal lengths, seldom none of q or of k."""
    many = pick.randint(LEAST_ROWS, 260), pick.randint(LEAST_ROWS, 260)
    if not is_packed:
        if pick.random() < 0.03:
            many = pick.choice(((0, many[1]), (many[0], 0)))
        return (many,) * (1 if 2 * max(many) > MOST_ROWS else pick.randint(1, 2))
    found = [many]
    count = pick.randint(1, 6)
    while len(found) < count:
        one = length(pick), length(pick)
        if any(sum(x) > MOST_ROWS for x in zip(*found, one)):
            break
        found.append(one)
    pick.shuffle(found)
    return tuple(found)


def used_of(pick: random.Random, count: int) -> int:
    least = LEAST_ROWS if count >= LEAST_ROWS else 0
    return pick.choice((count, pick.randint(least, count)))


def mask(pick: random.Random) -> dict:
    """Half of the cases have windows or chunks, some both."""
    sides = -1, 0, pick.randint(1, 20), pick.randint(20, 300)
    window = (pick.choice(sides), pick.choice(sides)) if pick.random() < 0.4 else (-1, -1)
    chunk = pick.choice((1, 7, 64, pick.randint(2, 300))) if pick.random() < 0.2 else 0
    return {'causal': pick.random() < 0.5, 'window': window, 'chunk': chunk}


def score(pick: random.Random) -> dict:
    """A third of the cases have nothing but a mask: the short way of a call."""
    if pick.random() < 0.33:
        return {'causal': pick.random() < 0.5}
    return {**mask(pick), 'softcap': pick.choice((0.0, 0.0, 0.0, 1.0, 15.0, 50.0)),
            'sinks': pick.choice(tuple(SINKS)) if pick.random() < 0.3 else '',
            'softmax_scale': pick.choice((None, None, 0.02, 0.3))}


def packing(pick: random.Random) -> dict:
    """Sequences in one tensor, rows that do not count among them."""
    found = lengths(pick, is_packed=True)
    used, behind = None, (0, 0)
    if pick.random() < 0.3:
        used = tuple(tuple(used_of(pick, count) for count in one) for one in found)
    if pick.random() < 0.3:
        behind = pick.randint(0, 70), pick.randint(0, 70)
    return {'lengths': found, 'is_packed': True, 'used': used, 'behind': behind}


def sizes(pick: random.Random, is_packed: bool) -> dict:
    own = packing(pick) if is_packed else {'lengths': lengths(pick, False), 'is_packed': False}
    head_dim, head_dim_v = pick.choice(HEAD_DIMS)
    return {**own, 'head_dim': head_dim, 'head_dim_v': head_dim_v, 'heads': pick.choice(HEADS),
            'dtype': pick.choice(('bf16', 'fp16'))}


def execution(pick: random.Random) -> dict:
    return {'pack_gqa': pick.choice((None, True, False)), 'deterministic': pick.random() < 0.3,
            'data': pick.choice(('normal', 'normal', 'onehot')),
            'logit_std': pick.choice((1.0, 1.0, 4.0)), 'dlse': pick.random() < 0.5,
            'lse': pick.random() < 0.8, 'max_logits': pick.random() < 0.2,
            'gradients': pick.random() < 0.75}


def layout(pick: random.Random) -> str:
    return pick.choice(tuple(LAYOUTS)) if pick.random() < 0.4 else ''


def call_of(pick: random.Random, case: GeneralCase, form: str) -> Call:
    interleaved = ''
    if form != 'qkvpacked' and case.head_dim == case.columns_v and pick.random() < 0.2:
        (rows_q, rows_k), (heads_q, heads_k) = case.rows(), case.heads
        interleaved = 'qkv' if rows_q == rows_k and heads_q == heads_k else 'kv'
    has_out = not case.has_gradients and pick.random() < 0.4
    out = (layout(pick) or 'packed') if has_out else ''
    return Call(case, form, tuple(layout(pick) for _ in range(3)), interleaved, out,
                sm_margin=pick.choice((0, 0, 0, 1, 20)))


def dense(pick: random.Random) -> Call:
    return call_of(pick, GeneralCase(**sizes(pick, False), **score(pick), **execution(pick)),
                   'dense')


def varlen(pick: random.Random) -> Call:
    return call_of(pick, GeneralCase(**sizes(pick, True), **score(pick), **execution(pick)),
                   'varlen')


def qkvpacked(pick: random.Random) -> Call:
    own = sizes(pick, False)
    rows = max(own['lengths'][0][0], 1)
    own |= {'lengths': ((rows, rows),) * len(own['lengths']), 'head_dim_v': own['head_dim']}
    return call_of(pick, GeneralCase(**own, **score(pick), **execution(pick)), 'qkvpacked')


def fp8(pick: random.Random) -> Fp8Call:
    head_dim, head_dim_v = pick.choice(FP8_HEAD_DIMS)
    own = sizes(pick, pick.random() < 0.5)
    own |= {'head_dim': head_dim, 'head_dim_v': head_dim_v, 'dtype': 'bf16'}
    case = GeneralCase(**own, **score(pick), pack_gqa=pick.choice((None, True, False)),
                       data=pick.choice(('normal', 'onehot', 'outliers')), gradients=False)
    if has_lone_sink(case):
        case = dataclasses.replace(case, sinks='')
    return Fp8Call(case, pick.choice(('tensor', 'head', 'block')), pick.random() < 0.5,
                   pick.choice(('fast', 'promote')), pick.choice(('bf16', 'fp16')),
                   tuple(layout(pick) for _ in range(3)), layout(pick) if pick.random() < 0.4
                   else '')


def cache(pick: random.Random) -> CacheCall:
    return cache_call.drawn(pick)


def chosen(pick: random.Random) -> ChosenCall:
    return chosen_call.drawn(pick)


def attention_mask(pick: random.Random) -> MaskCall:
    return mask_call.drawn(pick, lengths)


AnyCall = Call | Fp8Call | CacheCall | ChosenCall | MaskCall
# How often each kind of call is drawn, of 33.
KINDS: dict[Callable[[random.Random], AnyCall], int] = {
    dense: 6, varlen: 8, qkvpacked: 3, fp8: 3, cache: 8, chosen: 2, attention_mask: 3}
NAMES = {draw.__name__: draw for draw in KINDS}


def case_of(seed: int, number: int, kind: str = '') -> AnyCall:
    """kind: a name in NAMES; '': any."""
    pick = random.Random(f'{seed}/{number}')
    draw, = [NAMES[kind]] if kind else pick.choices(list(KINDS), list(KINDS.values()))
    return draw(pick)
