"""Decoding on a choice of the pages of a KV cache: scores of pages in PyTorch, and a needle test.

    python examples/sparse_decode.py                      # ten seconds on a CPU
    python examples/sparse_decode.py --tokens 16384 --page-size 64 --strength 12

A page that no query matches adds next to nothing to the output. So pages are scored, the slots of
the best are listed in `indices`, for each KV head its own, and one call of
`flash_attn_with_kvcache` attends to them alone. A cached key is rotated already and a single query
sees all keys, so positions play no part. The page of the last keys is always chosen.

The needle test hides one key that the queries match among random ones, in another page for each
sequence and KV head. It asks whether that page is chosen, and how far the output is from attention
to all keys. The other keys are independent, which is hard for bounds by page, or each is 0.9 of the
one before and noise: neighbours in real caches are alike.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flash_attn3 import flash_attn_with_kvcache

DRIFTS = {'independent': 0.0, 'drifting': 0.9}    # what a key has of the one before


# -------------------------------------------------------------------------------------- the scores
# q: (batch, heads_k, group, head_dim), times the softmax scale; keys: (batch, pages, page_size,
# heads_k, head_dim); both float32. The score: (batch, heads_k, group, pages), an estimate of the
# logarithm of a page's weight, up to a constant. A server keeps what depends on the keys alone.
def quest(q: Tensor, keys: Tensor) -> Tensor:
    """The largest score that a key between the page's smallest and largest components can have, as
    arXiv 2406.10774. Reads two vectors a page.
    """
    low, high = keys.aminmax(dim=2)
    return (torch.einsum('bhgd,bphd->bhgp', q.clamp(min=0), high)
            + torch.einsum('bhgd,bphd->bhgp', q.clamp(max=0), low))


def sparq(q: Tensor, keys: Tensor) -> Tensor:
    """The page's weight by the eighth of the components where the group's queries are largest, with
    the temperature of arXiv 2312.04985; its mean of V for what is not chosen is not there. Reads an
    eighth of the keys.
    """
    size = q.abs().sum(2, keepdim=True)
    is_read = torch.zeros_like(size).scatter_(
        -1, size.topk(max(1, q.size(-1) // 8)).indices, 1.0)
    part = q * is_read
    share = part.abs().sum(-1, keepdim=True) / q.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    return exact(part / share.clamp(min=1e-30).sqrt(), keys)


def mean(q: Tensor, keys: Tensor) -> Tensor:
    """The mean score of the page's keys, which is that of the mean key. Reads a vector a page."""
    return torch.einsum('bhgd,bphd->bhgp', q, keys.mean(2))


def exact(q: Tensor, keys: Tensor) -> Tensor:
    """The page's weight itself: the best choice that there is. Reads all keys."""
    return torch.einsum('bhgd,bpshd->bhgps', q, keys).logsumexp(-1)


SCORES = {'quest': quest, 'sparq': sparq, 'mean': mean, 'exact': exact}


# -------------------------------------------------------------------------------------- the choice
def choose_pages(q: Tensor, k_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor, budget: int,
                 score: str = 'quest') -> Tensor:
    """The `budget` best pages of each sequence and KV head.

    Args:
        q: (batch, 1, heads_q, head_dim).
        k_cache: (pages, page_size, heads_k, head_dim); cache_seqlens, page_table: int32, (batch,)
            and (batch, pages of a sequence); what comes after a sequence's keys may be anything.
        budget: pages, 1 or more; that of the last keys is one of them.
        score: a name of SCORES.

    Returns:
        (batch, heads_k, min(budget, page_table.size(1))) int64: entries of page_table in ascending
        order, so the page of the last keys comes after all others; then, where a sequence has
        fewer pages, entries past its need.

    Raises:
        ValueError: a wrong shape, budget or score.
    """
    _check(q, k_cache, cache_seqlens, page_table, budget, score)
    heads, page_size = k_cache.size(2), k_cache.size(1)
    last = (-(-cache_seqlens // page_size) - 1)[:, None]               # -1 without keys
    entries = torch.arange(page_table.size(1), device=q.device)
    is_full = entries < last                                           # and not the last
    keys = k_cache[page_table.where(is_full, 0).long()].float()
    rows = q[:, 0].unflatten(1, (heads, -1)).float() * q.size(-1) ** -0.5
    scores = SCORES[score](rows, keys).masked_fill(~is_full[:, None, None], -torch.inf)
    # A query head's share of a page, summed over the group; without a page it is NaN.
    shares = scores.log_softmax(-1).logsumexp(2).masked_fill(~is_full[:, None], -torch.inf)
    shares = shares.masked_fill((entries == last)[:, None], torch.inf)
    return shares.topk(min(budget, page_table.size(1))).indices.sort().values


def attend_to_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor,
                    page_table: Tensor, chosen: Tensor) -> Tensor:
    """Attention of one query of each sequence to the pages that `choose_pages` gives.

    Arguments as there; chosen: its result; v_cache: as k_cache. No cache is copied.

    Returns:
        (batch, 1, heads_q, head_dim of v), dtype of q.
    """
    size = k_cache.size(1)
    pages = page_table[:, None].expand(-1, chosen.size(1), -1).gather(2, chosen)
    place = torch.arange(size, device=q.device, dtype=torch.int32)
    holds = chosen[..., None] * size + place < cache_seqlens[:, None, None, None]
    slots = (pages[..., None] * size + place).where(holds, -1)
    return flash_attn_with_kvcache(q, k_cache, v_cache, indices=slots.flatten(2)[:, None])


def _check(q: Tensor, k_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor, budget: int,
           score: str) -> None:
    def expected(what: str, got: object) -> ValueError:
        return ValueError(f'choose_pages: expected {what}, got {got}')

    if q.dim() != 4 or q.size(1) != 1:
        raise expected('q (batch, 1, heads_q, head_dim): one query a sequence', tuple(q.shape))
    if k_cache.dim() != 4 or k_cache.size(3) != q.size(3) or q.size(2) % k_cache.size(2):
        raise expected('k_cache (pages, page_size, heads_k, head_dim) with the head_dim of q and '
                       'heads_k that divides its heads', tuple(k_cache.shape))
    if page_table.dim() != 2 or not q.shape[:1] == cache_seqlens.shape == page_table.shape[:1]:
        raise expected('page_table (batch, pages) and cache_seqlens (batch,)',
                       f'{tuple(page_table.shape)} and {tuple(cache_seqlens.shape)}')
    if budget < 1:
        raise expected('a budget of 1 page or more', budget)
    if score not in SCORES:
        raise expected(f'a score of {", ".join(SCORES)}', repr(score))


# --------------------------------------------------------------------------------- the needle test
@dataclass
class Haystack:
    """One query of each sequence, its cache, and the entry of page_table where each needle is."""
    q: Tensor                    # (batch, 1, heads_q, head_dim)
    caches: tuple[Tensor, Tensor]
    lengths: Tensor              # (batch,) int32
    table: Tensor                # (batch, pages) int32
    needles: Tensor              # (batch, heads_k)


def haystack(options: argparse.Namespace, drift: float) -> Haystack:
    """Random keys and values in shuffled pages; the query heads of a KV head are alike by half. The
    smallest score of a needle in its group is options.strength; the others are about normal.
    """
    generator = torch.Generator().manual_seed(options.seed)
    batch, heads, size, dim = options.batch, options.heads_kv, options.page_size, options.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, heads, *shape, generator=generator)

    k, v = draw(options.tokens, dim), draw(options.tokens, dim)
    for i in range(1, options.tokens if drift else 0):
        k[:, :, i] = drift * k[:, :, i - 1] + (1 - drift ** 2) ** 0.5 * k[:, :, i]
    q = (draw(1, dim) + draw(options.group, dim)) * 0.5 ** 0.5
    needle = q.sum(2)
    smallest = (q @ needle[..., None]).amin(2) * dim ** -0.5
    full_pages = (options.tokens - 1) // size                   # the last page is always chosen
    places = torch.randint(full_pages * size, (batch, heads), generator=generator)
    k.scatter_(2, places[..., None, None].expand(-1, -1, 1, dim),
               (needle * (options.strength / smallest))[:, :, None])

    table = torch.randperm(batch * (full_pages + 1), generator=generator).int().view(batch, -1)
    caches = torch.full((2, table.numel(), size, heads, dim), torch.nan)
    rows = torch.arange(options.tokens)
    for cache, x in zip(caches, (k, v)):
        cache[table[:, rows // size].long(), rows % size] = x.transpose(1, 2)
    dtype = torch.bfloat16 if options.device.type == 'cuda' else torch.float32
    k_cache, v_cache = caches.to(options.device, dtype)
    lengths = torch.full((batch,), options.tokens, dtype=torch.int32)
    return Haystack(q.flatten(1, 2)[:, None].to(options.device, dtype), (k_cache, v_cache),
                    lengths.to(options.device), table.to(options.device),
                    (places // size).to(options.device))


def qualities(hay: Haystack, budgets: Sequence[int], score: str) -> list[tuple[float, float]]:
    """(recall of the needles' pages, relative error of out against all keys) of each budget."""
    full = flash_attn_with_kvcache(hay.q, *hay.caches, cache_seqlens=hay.lengths,
                                   page_table=hay.table).float()
    results = []
    for budget in budgets:
        place = hay.lengths, hay.table
        chosen = choose_pages(hay.q, hay.caches[0], *place, budget, score)
        out = attend_to_pages(hay.q, *hay.caches, *place, chosen).float()
        recall = (chosen == hay.needles[..., None]).any(-1).float().mean()
        results.append((recall.item(), ((out - full).norm() / full.norm()).item()))
    return results


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value, text in (
            ('tokens', 4091, 'keys of a sequence'), ('page-size', 16, 'tokens of a page'),
            ('batch', 8, 'sequences'), ('heads-kv', 4, 'KV heads'),
            ('group', 2, 'query heads of a KV head'), ('head-dim', 128, 'columns of a head'),
            ('seed', 0, 'of the random numbers'), ('threads', 1, 'of the CPU')):
        parser.add_argument(f'--{name}', type=int, default=value, help=f'{text}: %(default)s')
    parser.add_argument('--strength', type=float, default=10.0,
                        help='score of a needle: %(default)s')
    parser.add_argument('--budgets', type=int, nargs='+', default=[4, 8, 16, 32, 64],
                        help='chosen pages: %(default)s')
    parser.add_argument('--device', type=torch.device,
                        default='cuda' if torch.cuda.is_available() else 'cpu')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    pages = -(-options.tokens // options.page_size)
    table = Table('keys', 'score', *(f'{x} pages ({x / pages:.1%})' for x in options.budgets),
                  title=f'Recall of the needle, relative error of out; {pages} pages of '
                  f'{options.page_size}, needles of score {options.strength:g}')
    for name, drift in DRIFTS.items():
        hay = haystack(options, drift)
        for score in SCORES:
            table.add_row(name, score, *(f'{recall:.2f}  {error:.3f}' for recall, error in
                                         qualities(hay, options.budgets, score)))
    Console(width=100).print(table)


if __name__ == '__main__':
    main()
