"""examples/sparse_decode.py: the choice of pages by brute force, attention to it against float64,
and the needle that bounds by page must find.
"""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from examples import sparse_decode
from examples.sparse_decode import SCORES, attend_to_pages, choose_pages

from tests.support import compare

HEADS, GROUP, DIM, SIZE, PAGES = 2, 3, 16, 4, 7
LENGTHS = [0, 1, 4, 5, 27, 28, 17]    # none, one page, full and partly filled last pages


@pytest.fixture(autouse=True)
def one_thread():
    """Many small products: threads that wait for a busy core take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Problem:
    """Sequences in shuffled pages; NaN where no key is, ids of no page past the need."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0):
        torch.manual_seed(seed)
        batch = len(LENGTHS)
        self.q = torch.randn(batch, 1, HEADS * GROUP, DIM).to(dtype)
        self.keys = [[torch.randn(length, HEADS, DIM).to(dtype) for _ in 'kv']
                     for length in LENGTHS]
        ids = torch.randperm(batch * PAGES).int().view(batch, PAGES)
        self.caches = torch.full((2, batch * PAGES, SIZE, HEADS, DIM), math.nan, dtype=dtype)
        for row, pair in zip(ids.tolist(), self.keys):
            for cache, x in zip(self.caches, pair):
                for place, key in enumerate(x):
                    cache[row[place // SIZE], place % SIZE] = key
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        needed = -(-self.lengths // SIZE)
        self.table = ids.where(torch.arange(PAGES) < needed[:, None], -10 ** 6)

    def choose(self, budget: int, score: str) -> Tensor:
        return choose_pages(self.q, self.caches[0], self.lengths, self.table, budget, score)

    def attend(self, chosen: Tensor) -> Tensor:
        return attend_to_pages(self.q, *self.caches, self.lengths, self.table, chosen)


def page_score(score: str, q: Tensor, keys: Tensor, groups_q: Tensor) -> float:
    """By the definition, for one query and the keys of one page; q is scaled, all float64."""
    if score == 'quest':
        return sum(max((a * b).item() for b in column) for a, column in zip(
            q, torch.stack([keys.amin(0), keys.amax(0)], 1)))
    if score == 'mean':
        return (keys @ q).mean().item()
    if score == 'sparq':
        read = groups_q.abs().sum(0).argsort(descending=True)[:DIM // 8]
        temperature = (q[read].abs().sum() / q.abs().sum()).sqrt()
        return (keys[:, read] @ q[read] / temperature).exp().sum().log().item()
    return (keys @ q).exp().sum().log().item()


@pytest.mark.parametrize('score', SCORES)
@pytest.mark.parametrize('budget', [1, 2, 4, 7, 9])
def test_choice_by_brute_force(score, budget):
    """The best full pages by their share in each query head, summed over a KV head's, and the last
    page behind them.
    """
    problem = Problem(seed=budget)
    chosen = problem.choose(budget, score)
    assert chosen.shape == (len(LENGTHS), HEADS, min(budget, PAGES))
    for sequence, (length, (k, _)) in enumerate(zip(LENGTHS, problem.keys)):
        count = -(-length // SIZE)
        for head in range(HEADS):
            q = problem.q[sequence, 0, head * GROUP:(head + 1) * GROUP].double() * DIM ** -0.5
            shares = torch.tensor([[page_score(score, one, page[:, head].double(), q)
                                    for page in k.split(SIZE)[:count - 1]] for one in q])
            best = shares.softmax(-1).sum(0).argsort(descending=True)[:budget - 1].tolist() \
                if count > 1 else []
            wanted = sorted(best) + [count - 1] * (count > 0)
            got = chosen[sequence, head].tolist()
            assert got[:len(wanted)] == wanted
            assert all(entry >= count for entry in got[len(wanted):])


def check_out(problem: Problem, chosen: Tensor) -> None:
    """Output of each sequence and KV head against the keys of its chosen pages, in float64."""
    out = problem.attend(chosen)
    assert out.shape == problem.q.shape and out.dtype == problem.q.dtype
    for sequence, (length, pair) in enumerate(zip(LENGTHS, problem.keys)):
        for head in range(HEADS):
            group = slice(head * GROUP, (head + 1) * GROUP)
            places = [place for page in chosen[sequence, head].tolist()
                      for place in range(page * SIZE, min(length, (page + 1) * SIZE))]
            inputs = (problem.q[sequence:sequence + 1, :, group],
                      *(x[None, places, head:head + 1] for x in pair))
            compare.check_forward(out[sequence:sequence + 1, :, group], None, inputs, False)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('budget', [1, 3, 5])
def test_attention_to_chosen_pages(budget, dtype):
    problem = Problem(dtype, seed=budget)
    chosen = problem.choose(budget, 'quest')
    assert not torch.equal(chosen[4, 0], chosen[4, 1]) or budget == 1    # each head has its own
    check_out(problem, chosen)


@pytest.mark.parametrize('score', SCORES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_all_pages_are_full_attention(score, dtype):
    problem = Problem(dtype)
    chosen = problem.choose(PAGES + 1, score)
    out = problem.attend(chosen)
    for sequence, pair in enumerate(problem.keys):
        compare.check_forward(out[sequence:sequence + 1], None,
                              (problem.q[sequence:sequence + 1], *(x[None] for x in pair)), False)
    check_out(problem, chosen)


def test_the_bound_of_quest_is_one():
    """No key of a page scores higher, and a page of one key scores what its key does."""
    torch.manual_seed(0)
    q, keys = torch.randn(2, HEADS, GROUP, DIM), torch.randn(2, 5, SIZE, HEADS, DIM)
    scores = torch.einsum('bhgd,bpshd->bhgps', q, keys)
    assert (sparse_decode.quest(q, keys) >= scores.amax(-1) - 1e-5).all()
    alone = keys[:, :, :1]
    for name in ('quest', 'mean', 'exact'):
        torch.testing.assert_close(SCORES[name](q, alone), scores[..., 0])


def needles(drift: float, *options: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Recalls and errors of each score at 4, 16 and 64 pages of 128."""
    parsed = sparse_decode.parse(['--device', 'cpu', '--tokens', '2041', '--batch', '4', *options])
    hay = sparse_decode.haystack(parsed, drift)
    results = {name: sparse_decode.qualities(hay, (4, 16, 64), name) for name in SCORES}
    return tuple({name: [one[part] for one in rows] for name, rows in results.items()}
                 for part in (0, 1))


def test_needles_are_found():
    """Keys that are like their neighbours: Quest and SparQ find each needle as the exact choice
    does, and lose little more than it; a mean key hides the needle, and then the output is lost.
    """
    recalls, errors = needles(sparse_decode.DRIFTS['drifting'])
    for name in ('quest', 'sparq', 'exact'):
        assert recalls[name] == [1, 1, 1]
        assert errors[name] == sorted(errors[name], reverse=True) and errors[name][0] < 0.25
        assert all(a <= 1.5 * b for a, b in zip(errors[name], errors['exact']))
    assert recalls['mean'][0] < 0.5 and errors['mean'][0] > 0.5


def test_needles_among_independent_keys():
    """Bounds by page are loose there, and a needle must be strong; the exact choice and SparQ,
    which read keys, find it.
    """
    recalls, errors = needles(0.0)
    assert recalls['exact'] == recalls['sparq'] == [1, 1, 1] and recalls['quest'][0] < 0.9
    assert errors['exact'][0] < 0.25 < errors['quest'][0]
    recalls, errors = needles(0.0, '--strength', '14')
    assert recalls['quest'] == recalls['exact'] == [1, 1, 1]
    assert errors['quest'][0] < 0.01


def test_the_needle_dominates():
    """The haystack is what it says: the needle is where it is said to be, with the score that was
    asked for, in each KV head; all else is of size 1.
    """
    options = sparse_decode.parse(['--device', 'cpu', '--tokens', '203', '--batch', '2'])
    hay = sparse_decode.haystack(options, 0.9)
    k_cache = hay.caches[0]
    keys = k_cache[hay.table.long()].flatten(1, 2)[:, :203]
    rows = hay.q[:, 0].unflatten(1, (4, 2))
    scores = torch.einsum('bhgd,bshd->bhgs', rows, keys) * 128 ** -0.5
    best, place = scores.max(-1)
    assert torch.equal(place // 16, hay.needles[..., None].expand(-1, -1, 2))
    torch.testing.assert_close(best.amin(-1), torch.full((2, 4), 10.0))
    others = scores.sort(-1).values[..., :-1]
    assert 0.8 < others.std() < 1.2 and len(hay.needles.unique()) > 3


def test_errors():
    problem = Problem()
    q, (k_cache, v_cache), lengths, table = (problem.q, problem.caches, problem.lengths,
                                             problem.table)
    for changes, text in (
            (dict(q=q.expand(-1, 2, -1, -1)), 'one query a sequence'),
            (dict(q=q[..., :8]), 'with the head_dim of q'),
            (dict(q=q[:, :, :5]), 'heads_k that divides its heads'),
            (dict(q=q[:2]), r'page_table \(batch, pages\)'),
            (dict(cache_seqlens=lengths[:2]), r'cache_seqlens \(batch,\), got \(7, 7\) and \(2,\)'),
            (dict(budget=0), 'a budget of 1 page or more, got 0'),
            (dict(score='best'), "a score of quest, sparq, mean, exact, got 'best'")):
        given = dict(q=q, k_cache=k_cache, cache_seqlens=lengths, page_table=table, budget=2)
        with pytest.raises(ValueError, match=text):
            choose_pages(**given | changes)
    chosen = problem.choose(2, 'quest')
    with pytest.raises(RuntimeError, match='k_cache with a page stride of'):
        attend_to_pages(q, k_cache.transpose(0, 1).contiguous().transpose(0, 1), v_cache, lengths,
                        table, chosen)


def test_script(capsys):
    sparse_decode.main(['--device', 'cpu', '--tokens', '300', '--batch', '1',
                        '--budgets', '3', '19'])
    text = capsys.readouterr().out
    assert '19 pages of 16' in text and 'drifting' in text
    assert text.count('1.00  0.000') == 2 * len(SCORES)    # all pages
