"""Draws of the bitwise test: a sequence, and ways to compute its prompt with split_size.

A draw is repeated by its seed and number alone. A way is a layout of the keys, the pieces that the
prompt is split into, a call for each, the sequences around it in that call, and how it is executed.
"""
from __future__ import annotations

import random
from dataclasses import dataclass, field

WAYS = 6           # ways of each draw, besides the whole prompt alone
MOST_PIECES = 4    # calls of one way, at most
LONGEST = 4000
HEAD_DIMS = ((64, 64), (128, 128), (64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (72, 72),
             (160, 160), (40, 40))
HEADS = ((4, 4), (8, 2), (6, 2), (8, 1), (2, 2))
SPLIT_SIZES = (128, 200, 256, 512, 1000, 1024, 2048)
# The first two compute pieces of a prompt with its first keys as k and v, without a cache.
LAYOUTS = ('dense', 'packed', 'cache', 'page 1', 'page 16', 'page 64', 'page 256')
FEATURES = ('', 'window', 'chunk', 'sinks', 'softcap', 'full', 'window and sinks', 'both sides')
CUTS = ('whole', 'chunks', 'steps')
EXECUTIONS = ('', '', 'graph', 'gradients', 'metadata', 'one pass')

Piece = tuple[int, int]    # rows [begin, end) of the prompt


@dataclass(frozen=True)
class Way:
    layout: str
    pieces: tuple[Piece, ...]
    before: tuple[tuple[int, int], ...]    # queries and keys of the sequences before
    after: tuple[tuple[int, int], ...]
    is_packed: bool      # queries on a cache come by cu_seqlens_q
    spare: int           # rows of a packed sequence that do not count; slots of a cache, empty
    rows: bool           # cache_batch_idx
    hint: int            # by which max_seqlen_q and max_seqlen_k are larger
    pack_gqa: bool | None
    sm_margin: int
    execution: str       # a name in EXECUTIONS

    @property
    def is_cache(self) -> bool:
        return self.layout not in ('dense', 'packed')

    @property
    def page_size(self) -> int:
        """0: a dense cache."""
        return int(self.layout[5:] or 0) if self.layout.startswith('page') else 0


@dataclass(frozen=True)
class Draw:
    seed: int
    number: int
    length: int
    head_dim: int
    head_dim_v: int
    heads: tuple[int, int]
    dtype: str
    feature: str
    split_size: int
    options: dict        # options of every call, without the sinks
    ways: tuple[Way, ...] = field(repr=False)

    @property
    def has_sinks(self) -> bool:
        return 'sinks' in self.feature

    def keys(self, piece: Piece) -> int:
        """The first keys of the sequence that a call with this piece has."""
        return self.length if self.feature in ('full', 'both sides') else piece[1]


def length_of(pick: random.Random, longest: int) -> int:
    """Short ones, those around a multiple of a tile, and any."""
    near = min(longest, 64 * pick.randint(1, max(1, longest // 64)) + pick.randint(-1, 1))
    return pick.choice((pick.randint(1, min(300, longest)), near, pick.randint(1, longest)))


def options_of(pick: random.Random, feature: str, length: int) -> dict:
    options: dict = {'causal': feature not in ('full', 'both sides')}
    if 'window' in feature:
        options['window_size'] = pick.choice((pick.randint(0, length), pick.randint(0, 300))), 0
    if feature == 'both sides':
        options['window_size'] = pick.randint(0, length), pick.randint(0, 200)
    if feature == 'chunk':
        options['attention_chunk'] = pick.randint(1, max(1, length))
    if feature == 'softcap':
        options['softcap'] = pick.choice((2.0, 20.0))
    if pick.random() < 0.2:
        options['softmax_scale'] = pick.choice((0.02, 0.3))
    return options


def pieces_of(pick: random.Random, cut: str, length: int) -> tuple[Piece, ...]:
    """Some of the calls that compute the prompt this way, the last one among them."""
    if cut == 'whole':
        return (0, length),
    most = pick.choice((16, 64, 200, 256, 512)) if cut == 'chunks' else pick.choice((1, 1, 3, 8))
    ends = sorted(pick.sample(range(1, length + 1), min(length, MOST_PIECES - 1))) + [length]
    return tuple((max(0, end - pick.randint(1 if cut == 'chunks' else most, most)), end)
                 for end in dict.fromkeys(ends))


def others_of(pick: random.Random, longest: int) -> tuple[tuple[int, int], ...]:
    """Queries and keys of other sequences, some without any."""
    count = pick.choice((0, 0, 1, 2, 5))
    found = ((pick.choice((0, 1, 1, 5, 64, pick.randint(1, 300))),
              pick.choice((0, 1, 129, pick.randint(1, 700)))) for _ in range(count))
    return tuple((min(queries, longest), min(keys, longest)) for queries, keys in found)


def way_of(pick: random.Random, feature: str, length: int, longest: int) -> Way:
    layout = pick.choice(LAYOUTS)
    cut = 'whole' if feature == 'both sides' else pick.choice(CUTS)
    executions = EXECUTIONS[:4] if layout in ('dense', 'packed') else (*EXECUTIONS[:3],
                                                                      *EXECUTIONS[4:])
    before, after = others_of(pick, longest), others_of(pick, longest)
    return Way(layout, pieces_of(pick, cut, length), before, after,
               pick.random() < 0.5, pick.choice((0, 0, 7, 64, 100)), pick.random() < 0.3,
               pick.choice((0, 0, 1, 500, 5000)), pick.choice((None, None, True, False)),
               pick.choice((0, 0, 5, 60, 120)), pick.choice(executions))


def draw_of(seed: int, number: int, longest: int = LONGEST) -> Draw:
    pick = random.Random(f'{seed} {number}')
    feature = FEATURES[number % len(FEATURES)]
    length = length_of(pick, longest)
    split_size = pick.choice((*SPLIT_SIZES, pick.randint(128, 2048)))
    head_dim, head_dim_v = pick.choice(HEAD_DIMS)
    return Draw(seed, number, length, head_dim, head_dim_v, pick.choice(HEADS),
                pick.choice(('bf16', 'fp16')), feature, split_size,
                options_of(pick, feature, length),
                tuple(way_of(pick, feature, length, longest) for _ in range(WAYS)))
