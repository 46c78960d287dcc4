"""The grid of upstream's own tests as cases of ours: a sample in which every two values of two axes
meet, where they can.

What the axes are is a fact of upstream's test file of August 2026. qv is not among them:
`test_compat_grid.test_kvcache_with_qv`; what this package refuses is in `test_compat_grid.REFUSED`.
"""
from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

from tests.support.cache_cases import CacheCase
from tests.support.general_cases import GeneralCase

Row = dict    # a value of each axis, by its name
HEADS = ((6, 6), (6, 1), (6, 2), (6, 3))
MASKS = ('full', 'causal', 'local')
LEAST = 5     # rows that have a value
CPU_SCORES = 2 ** 17    # more, in all sequences of a head together, take a GPU


# -------------------------------------------------------------------------------------- the sample
def _pairs(row: Row) -> list[tuple]:
    return list(itertools.combinations(row.items(), 2))


def sample(axes: dict[str, tuple], allows: Callable[[Row], bool], seed: int) -> list[Row]:
    """Rows with every pair of values that `allows` lets be together, and each value LEAST times.

    Greedy: the row of 30 drawn ones around a missing pair that adds the most pairs.
    """
    pick = random.Random(seed)

    def drawn(fixed: Row) -> list[Row]:
        rows = ({name: pick.choice(values) for name, values in axes.items()} | fixed
                for _ in range(200))
        return list(itertools.islice(filter(allows, rows), 30))

    rows, counts = [], Counter()
    values = [[(name, value) for value in own] for name, own in axes.items()]
    missing = dict.fromkeys(pair for two in itertools.combinations(values, 2)
                            for pair in itertools.product(*two))
    while missing:
        wanted = next(iter(missing))
        del missing[wanted]    # where nothing is drawn, they cannot be together
        if found := drawn(dict(wanted)):
            rows.append(max(found, key=lambda row: sum(pair in missing for pair in _pairs(row))))
            for pair in _pairs(rows[-1]):
                missing.pop(pair, None)
            counts.update(rows[-1].items())
    for value in itertools.chain.from_iterable(values):
        while counts[value] < LEAST:
            rows.append(drawn(dict([value]))[0])
            counts.update(rows[-1].items())
    return rows


def name_of(row: Row) -> str:
    """The row in an id of pytest."""
    def text(name: str, value) -> str:
        if isinstance(value, tuple):
            return 'x'.join(map(str, value))
        return value if isinstance(value, str) else f'{name}{value:g}' if value is not None else ''
    return '-'.join(filter(None, itertools.starmap(text, row.items())))


def _pick(row: Row) -> random.Random:
    """A generator of random numbers that depend on the row alone."""
    return random.Random(repr(sorted(row.items())))


def _mask(row: Row, pick: random.Random) -> dict:
    """A window is drawn below the longest number of keys, a chunk up to twice as long."""
    keys = row['lengths'][1]
    window = (pick.randrange(keys), pick.randrange(keys)) if row['mask'] == 'local' else (-1, -1)
    return dict(causal=row['mask'] == 'causal', window=window,
                chunk=pick.randint(1, 2 * keys) if row['chunk'] else 0)


# ------------------------------------------------------------------------------- dense and packed
LENGTHS = ((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128),
           (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256),
           (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224))
DENSE = dict(
    lengths=LENGTHS, dtype=('bf16', 'fp16', 'e4m3'), heads=HEADS, mask=MASKS, softcap=(0.0, 15.0),
    dims=((64, 64), (64, 256), (64, 512), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)),
    chunk=(0, 1), splits=(1, 3), pack=(None, 0, 1), deterministic=(0, 1))
PACKED = DENSE | dict(empty=(0, 1), used=(0, 1))


def allows_dense(row: Row) -> bool:
    """Values of e4m3 have at most 256 columns, also upstream."""
    return row['dtype'] != 'e4m3' or row['dims'][1] <= 256


def _batch(row: Row) -> int:
    """From 9 down to 1, as upstream's, by what the reference costs."""
    return next(batch for batch, most in ((9, 2 ** 9), (3, 2 ** 13), (2, 2 ** 21), (1, 2 ** 62))
                if row['lengths'][0] * row['lengths'][1] <= most)


def general_case(row: Row) -> GeneralCase:
    """The case of a row, e4m3 included: its dtype is then that of the tensors before they are
    rounded. There are gradients where upstream's test takes them.
    """
    pick = _pick(row)
    lengths, used = (row['lengths'],) * _batch(row), None
    if 'used' in row:
        lengths = [row['lengths'], *(_drawn_lengths(row, pick) for _ in lengths[1:])]
        if row['used']:    # rows that do not count lie after those that do
            used = tuple(lengths)
            lengths = [tuple(n + pick.randint(0, 9) for n in one) for one in used]
    head_dim, head_dim_v = row['dims']
    return GeneralCase(
        tuple(lengths), head_dim, head_dim_v, 'bf16' if row['dtype'] == 'e4m3' else row['dtype'],
        row['heads'], is_packed='used' in row, used=used, softcap=row['softcap'],
        pack_gqa=None if row['pack'] is None else bool(row['pack']),
        deterministic=bool(row['deterministic']), dlse=False,
        gradients=row['dtype'] != 'e4m3' and not row['chunk'], **_mask(row, pick))


def _drawn_lengths(row: Row, pick: random.Random) -> tuple[int, int]:
    """One sequence; with `empty` every second one lacks its queries, its keys or both."""
    queries, keys = (pick.randint(1, n) for n in row['lengths'])
    if row['empty'] and pick.random() < 0.5:
        return pick.choice(((0, keys), (queries, 0), (0, 0)))
    return queries, keys


# ------------------------------------------------------------------------------------------ caches
CACHE = dict(
    lengths=((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
             (128, 128), (256, 512), (2048, 3577)),
    dtype=('bf16', 'e4m3'), heads=HEADS, mask=MASKS, new=('none', 'all', 'some'),
    rotary=(0.0, 0.5, 1.0), interleaved=(0, 1), positions=(0, 1), page=(0, 1, 4, 128),
    leftpad=(0, 1), rows=(0, 1), packed=(0, 1), chunk=(0, 1), splits=('1', '0', 'metadata'))


def allows_cache(row: Row) -> bool:
    """What upstream's test skips, but for rotary without new keys: that its interface takes."""
    queries, keys = row['lengths']
    return (not row['page'] or keys % row['page'] == 0) and (row['new'] == 'none' or
                                                             queries <= keys)


def cache_case(row: Row) -> CacheCase:
    """A batch of 5, or of 2 where the reference would take long."""
    pick = _pick(row)
    queries, keys = row['lengths']
    batch = 5 if queries * keys <= 2 ** 18 else 2
    counts = [pick.randint(1, queries) if row['packed'] else queries for _ in range(batch)]
    new = {'none': [0] * batch, 'all': counts,
           'some': [pick.randint(1, n) for n in counts]}[row['new']]
    if not row['packed']:
        new = new[:1] * batch
    # As upstream: under an append no query is after the last slot.
    written = counts if any(new) and row['rotary'] and row['mask'] != 'full' else new
    before = [pick.randint(row['new'] == 'none', keys - n) for n in map(max, new, written)]
    return CacheCase(
        tuple(zip(counts, before)), keys, row['page'], dtype=row['dtype'], heads=row['heads'],
        is_packed=bool(row['packed']), new=() if row['new'] == 'none' else tuple(new),
        new_packed=bool(row['packed']) and row['new'] != 'none', rotary=row['rotary'],
        interleaved=bool(row['interleaved']), own_positions=bool(row['positions']),
        batch_idx=bool(row['rows']),
        leftpad=tuple(pick.randint(0, n) for n in before) if row['leftpad'] else (),
        num_splits=int(row['splits'] == '1'), metadata=row['splits'] == 'metadata',
        **_mask(row, pick))


# ---------------------------------------------------------------------------------------- combine
COMBINE = dict(
    dtype=('float32', 'float16', 'bfloat16'), dim=(64, 96, 128, 192, 256, 512),
    rows=(1, 2, 3, 32, 64, 65, 113, 256, 1024), parts=(1, 2, 3, 5, 17, 32, 55, 97, 133))


def scores(case: GeneralCase | CacheCase) -> int:
    """How many a head has."""
    ends = case.lengths if isinstance(case, GeneralCase) else \
        [(n, end) for n, (_, end) in zip(case.queries, case.filled())]
    return sum(queries * keys for queries, keys in ends)
