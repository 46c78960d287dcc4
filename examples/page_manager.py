"""The pages of one paged KV cache: which sequence has which, shared after a fork until one writes.

    pages = PageManager(k_cache, v_cache)                  # (pages, page_size, heads_k, head_dim)
    one = pages.allocate()
    table, lengths = pages.append([one], len(prompt))      # then attention with its k and v
    others = [pages.fork(one) for _ in range(3)]           # no copy, no page
    table, lengths = pages.append([one, *others], 1)       # copies the last page, if it has room
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths,
                                  page_table=table, causal=True)

As arXiv 2309.06180, section 4.4, has it: a page counts its owners. Full pages are never written
again, so only the last page of a sequence is ever copied: when it is partly filled, has several
owners, and one of them appends. The last owner left writes in place.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class OutOfPages(RuntimeError):
    """More pages are needed than are free; nothing has changed."""


class UnknownSequence(LookupError):
    """No such sequence: never allocated, or freed."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)    # as many as its tokens need
    length: int = 0


class PageManager:
    """Sequences, named by numbers, on the pages of all caches that it is given.

    caches: (pages, page_size, ...) each, the same pages in all, else ValueError. An append copies
    pages in all of them, on the current stream.
    """

    def __init__(self, *caches: Tensor) -> None:
        if not caches or min(x.dim() for x in caches) < 2 or len({x.shape[:2] for x in caches}) > 1:
            raise ValueError('PageManager: expected caches (pages, page_size, ...) with the same '
                             f'pages, got {[tuple(x.shape) for x in caches]}')
        count, self.page_size = caches[0].shape[:2]
        self._caches = caches
        self._free = list(range(count))[::-1]
        self._owners = [0] * count
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def allocate(self) -> int:
        """A new sequence without tokens."""
        return self._add(_Sequence())

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, on the same pages."""
        parent = self._find(sequence)
        for page in parent.pages:
            self._owners[page] += 1
        return self._add(_Sequence(list(parent.pages), parent.length))

    def free(self, sequence: int) -> None:
        """Forgets a sequence. Pages that have no other owner become free."""
        for page in reversed(self._find(sequence).pages):
            self._drop(page)
        del self._sequences[sequence]

    def append(self, sequences: Sequence[int],
               tokens: int | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Room for new tokens, of all these sequences or of none.

        Args:
            sequences: each of them once.
            tokens: new tokens of each, 0 or more; or one number for all.

        Returns:
            page_table, (sequences, pages) int32 with -1 past the need, and cache_seqlens,
            (sequences,) int32, *before* the append: what `flash_attn_with_kvcache` takes with k
            and v of the new tokens.

        Raises:
            OutOfPages, UnknownSequence, ValueError: nothing has changed.
        """
        counts = [tokens] * len(sequences) if isinstance(tokens, int) else list(tokens)
        if len(counts) != len(sequences) or min(counts, default=0) < 0 or (
                len(set(sequences)) < len(sequences)):
            raise ValueError('PageManager.append: expected different sequences and a number of '
                             f'tokens, 0 or more, for each, got {list(sequences)} and {counts}')
        found = [self._find(name) for name in sequences]
        lengths = [one.length for one in found]
        needed = self._needed(found, counts)
        if needed > len(self._free):
            raise OutOfPages(f'PageManager.append: expected {needed} free pages, got '
                             f'{len(self._free)}; hint: free a sequence, or append to fewer')
        copies = [copy for one, count in zip(found, counts) for copy in self._extend(one, count)]
        for cache in self._caches if copies else ():
            raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache    # FP8 has no indexing
            sources, targets = zip(*copies)
            raw[list(targets)] = raw[list(sources)]
        return self.tables(sequences)[0], self._ints(lengths)

    def tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """page_table and cache_seqlens as of `append`, with all tokens counted: for no new ones."""
        found = [self._find(name) for name in sequences]
        width = max((len(one.pages) for one in found), default=0) or 1
        table = [one.pages + [-1] * (width - len(one.pages)) for one in found]
        return self._ints(table).view(-1, width), self._ints([one.length for one in found])

    def _needed(self, found: Sequence[_Sequence], counts: Sequence[int]) -> int:
        """Free pages that an append takes. The last owner of a page needs no copy of it."""
        writers = Counter(one.pages[-1] for one, count in zip(found, counts)
                          if count and one.length % self.page_size)
        copies = sum(min(count, self._owners[page] - 1) for page, count in writers.items())
        return copies + sum(-(-(one.length + count) // self.page_size) - len(one.pages)
                            for one, count in zip(found, counts))

    def _extend(self, one: _Sequence, count: int) -> list[tuple[int, int]]:
        """Room for `count` tokens; returns the (source, target) of a page to copy, if any."""
        copies = []
        if count and one.length % self.page_size and self._owners[one.pages[-1]] > 1:
            copies.append((one.pages[-1], self._take()))
            self._drop(one.pages[-1])
            one.pages[-1] = copies[0][1]
        one.length += count
        while len(one.pages) * self.page_size < one.length:
            one.pages.append(self._take())
        return copies

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free.append(page)

    def _add(self, one: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next] = one
        return self._next

    def _find(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise UnknownSequence(f'PageManager: expected an allocated sequence, got {sequence!r}')
        return self._sequences[sequence]

    def _ints(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._caches[0].device)
