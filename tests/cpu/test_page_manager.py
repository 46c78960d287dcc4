"""examples/page_manager.py against plain copies: forks share pages until one of them writes."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples.page_manager import OutOfPages, PageManager, UnknownSequence
from flash_attn3 import flash_attn_with_kvcache

from tests.cpu.drawn import examples
from tests.support import compare

PAGES, SIZE = 12, 4


class Machine(RuleBasedStateMachine):
    """The manager beside the tokens of each sequence; a cache here holds one number a token."""

    def __init__(self):
        super().__init__()
        self.caches = torch.full((2, PAGES, SIZE), -1.0)
        self.pages = PageManager(*self.caches)
        self.tokens, self.written = {}, 0

    def state(self) -> tuple:
        tables = {name: [x.tolist() for x in self.pages.tables([name])] for name in self.tokens}
        return tables, self.pages.free_pages, self.caches.tolist()

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule()
    def allocate(self):
        name = self.pages.allocate()
        assert name not in self.tokens
        self.tokens[name] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        before = self.state()
        name = self.pages.fork(parent)
        assert self.state() == before and name not in self.tokens    # no page, no copy
        self.tokens[name] = list(self.tokens[parent])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        name = self.pick(data)
        self.pages.free(name)
        del self.tokens[name]
        with pytest.raises(UnknownSequence, match=f'got {name}'):
            self.pages.free(name)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        counts = [data.draw(st.integers(0, 2 * SIZE + 1)) for _ in names]
        if self.pages_for(names, counts) > PAGES:
            before = self.state()
            with pytest.raises(OutOfPages):
                self.pages.append(names, counts)
            assert self.state() == before
            return
        table, lengths = self.pages.append(names, counts)
        assert lengths.tolist() == [len(self.tokens[name]) for name in names]
        for name, count, row in zip(names, counts, table.tolist()):
            for _ in range(count):
                place = len(self.tokens[name])
                self.written += 1
                self.caches[:, row[place // SIZE], place % SIZE] = self.written
                self.tokens[name].append(self.written)

    def pages_for(self, names: list[int], counts: list[int]) -> int:
        """Pages of all sequences after an append: a page is what its tokens up to its end are, and
        two have it in common only if neither has written since they were one.
        """
        new = dict(zip(names, counts))
        distinct = set()
        for name, tokens in self.tokens.items():
            later = tokens + [(name, i) for i in range(new.get(name, 0))]
            distinct |= {tuple(later[:end + SIZE]) for end in range(0, len(later), SIZE)}
        return len(distinct)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        names = list(self.tokens)
        table, lengths = self.pages.tables(names)
        assert table.dtype == lengths.dtype == torch.int32
        for name, row, length in zip(names, table.long(), lengths.tolist()):
            assert length == len(self.tokens[name])
            used = row[:-(-length // SIZE)]
            assert bool((used >= 0).all()) and bool((row[len(used):] == -1).all())
            for cache in self.caches:
                assert cache[used].flatten()[:length].tolist() == self.tokens[name]

    @invariant()
    def counts_add_up_and_no_page_is_lost(self):
        owners = Counter(page for name in self.tokens
                         for page in self.pages.tables([name])[0][0].tolist() if page >= 0)
        assert self.pages._owners == [owners[page] for page in range(PAGES)]
        assert sorted([*self.pages._free, *owners]) == list(range(PAGES))
        assert len(owners) == self.pages_for([], [])    # as few as can be: copies only for writers


TestMachine = Machine.TestCase
TestMachine.settings = examples(60, stateful_step_count=30)


def test_only_a_partly_filled_page_of_several_owners_is_copied():
    cache = torch.arange(6.0 * 4).view(6, 4)
    pages = PageManager(cache)
    one = pages.allocate()
    pages.append([one], 6)
    two, three = pages.fork(one), pages.fork(one)
    assert pages.free_pages == 4
    table, lengths = pages.append([one, two, three], 1)
    assert pages.free_pages == 2 and lengths.tolist() == [6, 6, 6]    # one wrote in place
    assert len(set(table[:, 0].tolist())) == 1 and len(set(table[:, 1].tolist())) == 3
    assert len({tuple(cache[page].tolist()) for page in table[:, 1].tolist()}) == 1
    pages.append([one], 1)    # its last page is full now
    assert pages.free_pages == 2
    four = pages.fork(one)
    pages.append([one, four], 1)    # a page each and no copy
    assert pages.free_pages == 0
    for name in (one, two, three, four):
        pages.free(name)
    assert pages.free_pages == 6


def test_errors_come_before_any_change():
    cache = torch.zeros(3, 4)
    pages = PageManager(cache)
    one = pages.allocate()
    pages.append([one], 5)
    two = pages.fork(one)
    with pytest.raises(OutOfPages, match='expected 3 free pages, got 1; hint: free a sequence'):
        pages.append([one, two], 4)
    with pytest.raises(UnknownSequence, match='expected an allocated sequence, got 7'):
        pages.append([one, 7], 1)
    for sequences, tokens in (([one, one], 1), ([one, two], [1]), ([one], -1)):
        with pytest.raises(ValueError, match='expected different sequences and a number of tokens'):
            pages.append(sequences, tokens)
    for call in (pages.fork, pages.free, lambda name: pages.tables([name])):
        with pytest.raises(UnknownSequence):
            call(7)
    for caches in ((), (torch.zeros(3),), (cache, torch.zeros(4, 4))):
        with pytest.raises(ValueError, match='the same pages'):
            PageManager(*caches)
    assert pages.free_pages == 1 and pages.tables([one, two])[1].tolist() == [5, 5]
    assert pages.append([one, two], 1)[1].tolist() == [5, 5]    # one copy, the last owner writes


def new_rows(names: list[int], count: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(len(names), count, heads, 16).bfloat16() for heads in (4, 2, 2))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float8_e4m3fn])
def test_parallel_sampling_equals_separate_caches(dtype):
    """A prompt, three samples of it, a sample of a sample, some that end: each step gives the bits
    of a cache of each sequence alone, and in 16 bits is held to the bar.
    """
    torch.manual_seed(0)
    caches = torch.full((2, 24, 4, 2, 16), float('nan')).to(dtype)
    pages = PageManager(*caches)
    own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(names: list[int], count: int) -> None:
        q, k, v = (x.to(dtype) for x in new_rows(names, count))
        table, lengths = pages.append(names, count)
        out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, page_table=table,
                                      causal=True)
        for row, name in enumerate(names):
            new = [torch.cat([before.float(), x[row].float()]).to(dtype)
                   for before, x in zip(own[name], (k, v))]
            own[name] = new
            inputs = q[row:row + 1], *(x[None] for x in new)
            alone = flash_attn_with_kvcache(*inputs, causal=True)
            assert torch.equal(out[row:row + 1], alone)
            if dtype == torch.bfloat16:
                compare.check_forward(out[row:row + 1], None, inputs, causal=True)

    def fork(name: int) -> int:
        child = pages.fork(name)
        own[child] = own[name]
        return child

    first = pages.allocate()
    own[first] = [torch.empty(0, 2, 16).to(dtype)] * 2
    step([first], 10)
    names = [first, *(fork(first) for _ in range(3))]
    for number in range(9):
        step(names, 1)
        if number == 2:
            names.append(fork(names[1]))
        if number == 5:
            pages.free(names.pop(0))
    step(names[::-1], 3)
    for name in names:
        pages.free(name)
    assert pages.free_pages == 24
