"""The index arithmetic of an append: the rows of CTAs, the chunks of threads, the sequence of a
token. By brute force.
"""
from bisect import bisect_right
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu.drawn import examples
from tests.host import _host

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@examples(80)
@given(tokens=st.integers(0, 300), heads=st.integers(0, 70), chunks=st.integers(0, 40))
def test_every_pair_has_one_thread(tokens, heads, chunks):
    schedule = _host.RowSchedule(tokens, heads, chunks)
    items = schedule.items(0, schedule.ctas)
    pairs = -(-chunks // 2)
    found = Counter(item for item in items if item[0] >= 0)
    assert found == {(token, head, pair): 1 for token in range(tokens) for head in range(heads)
                     for pair in range(pairs)}
    # Half of the threads of all CTAs but the last have work.
    work, threads = tokens * heads * pairs, schedule.ctas * _host.append_threads
    assert threads <= 2 * work + _host.append_threads


@pytest.mark.parametrize('tokens, heads, chunks', [
    (1 << 30, 1, 1), (1 << 30, 8, 16), (1 << 25, 128, 64), (3, 1 << 26, 16)])
def test_the_last_rows_of_large_tensors(tokens, heads, chunks):
    schedule = _host.RowSchedule(tokens, heads, chunks)
    last = [item for item in schedule.items(schedule.ctas - 1, schedule.ctas) if item[0] >= 0]
    assert last[-1] == (tokens - 1, heads - 1, -(-chunks // 2) - 1)


@pytest.mark.parametrize('is_in_halves', [False, True])
@pytest.mark.parametrize('chunks', range(1, 34))
def test_chunks(chunks, is_in_halves):
    """Each chunk once. Those that a rotation takes together, in one pair, with the same columns of
    the tables, 8 of which a pair uses.
    """
    for rotary_pairs in range(chunks // 2 + 1):
        found = [_host.chunks_of_pair(pair, rotary_pairs, is_in_halves)
                 for pair in range(-(-chunks // 2))]
        each = [chunk for pair in found for chunk in pair]
        assert sorted(each)[:chunks] == list(range(chunks)) and len(each) <= chunks + 1
        half = 8 * rotary_pairs
        for pair, (first, second) in enumerate(found[:rotary_pairs]):
            columns = [8 * chunk + i for chunk in (first, second) for i in range(8)]
            used = {column % half if is_in_halves else column // 2 for column in columns}
            assert used == set(range(8 * pair, 8 * pair + 8)) and max(columns) < 2 * half


@examples(200)
@given(page_size=st.integers(1, 40), heads=st.integers(1, 5), packed=st.booleans(),
       rows=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6))
def test_pages_have_a_unit(page_size, heads, packed, rows):
    """Each page that new rows touch has one, of its own sequence; the CTAs are as many as all need.
    rows: slots before, and new ones.
    """
    rows = rows if packed else [(length, rows[0][1]) for length, _ in rows]
    begins = [sum(new for _, new in rows[:b]) for b in range(len(rows) + 1)]
    schedule = _host.PageSchedule(len(rows), begins[-1], -1 if packed else rows[0][1], heads,
                                  page_size)
    units = [schedule.first_unit(b, begin) for b, begin in enumerate(begins)]
    assert units[0] == 0 and units == sorted(units)
    for (length, new), first, end in zip(rows, units, units[1:]):
        spans = schedule.spans(length, first, end)
        found = [slot for _, page, begin, stop in spans for slot in range(begin, stop)
                 if slot < length + new and slot // page_size == page]
        assert found == list(range(length, length + new))
    assert schedule.ctas == (-(-units[-1] * heads // _host.append_warps) if begins[-1] else 0)


@examples(200)
@given(numbers=st.one_of(st.lists(st.integers(-5, 60), max_size=200), st.lists(INT32, max_size=5)),
       number=st.integers(-10, 70))
def test_search(numbers, number):
    numbers.sort()
    assert _host.count_up_to(numbers, number)[0] == bisect_right(numbers, number)


@pytest.mark.parametrize('size, most', [(1, 1), (32, 1), (33, 2), (1023, 2), (1024, 2), (32767, 3)])
def test_rounds_of_a_search(size, most):
    for number in (-1, 0, size // 2, size):
        found, rounds = _host.count_up_to(list(range(size)), number)
        assert found == min(number + 1, size) and rounds <= most


@examples(100)
@given(numbers=st.lists(INT32, max_size=80), number=INT32)
def test_search_of_nonsense_ends_inside(numbers, number):
    assert 0 <= _host.count_up_to(numbers, number)[0] <= len(numbers)
