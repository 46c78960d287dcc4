"""Packed batches for tests of the tables and of the work of CTAs."""
from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Batch:
    """Lengths as a call gives them; cu and used may be nonsense."""
    cu_q: list[int]
    cu_k: list[int]
    used_q: list[int] | None
    used_k: list[int] | None
    total_q: int
    total_k: int
    heads_q: int
    heads_k: int

    @property
    def sizes(self):
        """(batch, seqlen_q, seqlen_k, heads_q, heads_k), with the longest that there can be."""
        return len(self.cu_q) - 1, self.total_q, self.total_k, self.heads_q, self.heads_k

    @property
    def lengths(self):
        return self.cu_q, self.cu_k, self.used_q, self.used_k, self.total_q, self.total_k


def running_sum(lengths, first):
    sums = [first]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


@st.composite
def sides(draw, count):
    """cu, used and the rows of a tensor, with rows that no sequence has at either end."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=count,
                            max_size=count))
    cu = running_sum(lengths, draw(st.integers(0, 5)))
    used = draw(st.one_of(st.none(), st.tuples(*(st.integers(0, n) for n in lengths)).map(list)))
    return cu, used, cu[-1] + draw(st.integers(0, 5))


@st.composite
def batches(draw, most=5):
    """Fine ones."""
    count = draw(st.integers(1, most))
    (cu_q, used_q, total_q), (cu_k, used_k, total_k) = draw(sides(count)), draw(sides(count))
    heads_k = draw(st.integers(1, 3))
    return Batch(cu_q, cu_k, used_q, used_k, max(1, total_q), total_k,
                 heads_k * draw(st.integers(1, 2)), heads_k)


@st.composite
def nonsense(draw):
    """Lengths that decrease, overlap, are negative or lie outside the tensors."""
    count = draw(st.integers(1, 6))
    wild = st.one_of(st.integers(-50, 700), st.sampled_from([-2**31, 2**31 - 1]))
    cu = st.lists(wild, min_size=count + 1, max_size=count + 1)
    used = st.one_of(st.none(), st.lists(wild, min_size=count, max_size=count))
    return Batch(draw(cu), draw(cu), draw(used), draw(used), draw(st.integers(1, 500)),
                 draw(st.integers(0, 500)), 2, 1)
