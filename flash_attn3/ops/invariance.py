"""invariant(): every call in this process splits its keys at the same places, so that the bits of a
row are a function of its own query, keys and mask. What that promises: docs/invariance.md.

The public functions read OPEN, which is empty in most processes: one test of a list, on which
torch.compile has a guard.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flash_attn3 import env
from flash_attn3.ops import checks

DEFAULT_SPLIT_SIZE = 2048    # keys of a part; of the sizes that were measured the fastest for all

HINT = 'flash_attn3.invariant() or FLASH_ATTN3_INVARIANT=1 asks for it'


class _Entry:
    """What an open context asks for. Two are never equal, so each closes its own."""

    def __init__(self, split_size: int):
        self.split_size = split_size


# The open contexts, the last opened last. WHY: of the process, not of a thread: checkpointing
# computes a forward again in a thread of autograd. A list's append and remove are atomic.
OPEN = [_Entry(DEFAULT_SPLIT_SIZE)] if env.INVARIANT else []


@contextlib.contextmanager
def invariant(split_size: int | None = None) -> Iterator[None]:
    """Makes bits independent of batch, layout and cutting: a context manager, or a decorator.

        with flash_attn3.invariant():
            out = flash_attn3.flash_attn_func(q, k, v, causal=True)    # as split_size=2048

    Calls of flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func and
    flash_attn_with_kvcache without split_size, also those that clients make, have this one; their
    num_splits is ignored. It counts in all threads until it is closed, so that a backward which
    computes a checkpoint again belongs inside; contexts may overlap, then the last that was opened
    counts. FLASH_ATTN3_INVARIANT=1 opens one at import.

    Args:
        split_size: keys of a part, as in `flash_attn_func`. Default: 2048.

    Raises:
        RuntimeError: a split_size that is not a number above 0. From calls: where no such bits can
            be promised, as for FP8 without a cache and a GPU without our kernels.
    """
    if split_size is not None and (type(split_size) is not int or split_size < 1):
        raise RuntimeError(checks.error('invariant', 'split_size to be None or above 0',
                                        repr(split_size)))
    entry = _Entry(DEFAULT_SPLIT_SIZE if split_size is None else split_size)
    OPEN.append(entry)
    try:
        yield
    finally:
        OPEN.remove(entry)


def split_size_of(split_size: int) -> int:
    """That of a call which names this one, 0 for none."""
    if split_size == 0 and (last := OPEN[-1:]):    # another thread may close the last
        return last[0].split_size
    return split_size


def in_parts(num_splits: int, split_size: int) -> tuple[int, int]:
    """num_splits and split_size of a call that names these, while contexts are open."""
    size = split_size_of(split_size)
    return (num_splits if size == split_size else 0), size


def reject(op: str, argument: str) -> None:
    """Raises RuntimeError for an argument with which the bits depend on more than the sequence, if
    a context is open.
    """
    if OPEN:
        raise RuntimeError(checks.error(op, f'no {argument} under flash_attn3.invariant()',
                                        argument, 'close it, or unset FLASH_ATTN3_INVARIANT'))

