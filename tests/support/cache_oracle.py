"""The expected result of a CacheCase, computed without the package's own code for a cache.

The keys of each sequence are gathered by the page table or the row of the cache into packed
tensors (`inputs_of`). There `reference.attend_packed` in float64 is what is meant (on the CPU,
which runs that code, loops over rows: tests/cpu/test_kvcache.py), and plain PyTorch in the input
dtype is the measure of the bar (tests/support/compare.py; for e4m3 tests/support/fp8_data.py).
The rotation is spelled out here in float64.

What is in the cache after a call is checked first, to the bit where nothing was rotated; attention
is then held to what its rows hold. A rotated query is rounded once: where float64 is within TIE
of the middle of two neighbours either is right, and the LSE may differ by the score of the other.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.cpu import reference, reference_fp8
from flash_attn3.cpu.reference import Inputs, Lengths, Outputs, Score
from flash_attn3.cpu.reference_fp8 import Scales

from tests.support import compare, fp8_data
from tests.support.cache_cases import E4M3, CacheCase, Returned, as_bits, call, copied, pages_of
from tests.support.lists import lengths_of, starts

# Two candidates of a rotated element, relative to the sum of its terms.
TIES = {torch.float64: 2.0 ** -50, torch.float32: 2.0 ** -21}
TIE = 2.0 ** -18    # for narrower elements


class Rotated(NamedTuple):
    values: Tensor     # rounded
    exact: Tensor      # float64
    ties: Tensor       # how far the other neighbour is, 0 where there is no other


class Expected(NamedTuple):
    inputs: Inputs     # packed, of the input dtype
    lengths: Lengths
    ref: Outputs
    pt: Outputs | None
    lse_floor: Tensor  # (heads, rows)


# ------------------------------------------------------------------------------- where things are
def places(case: CacheCase, arguments: dict) -> list[tuple[Tensor, Tensor]]:
    """The row or page of the slots of each sequence, from 0 to its end, and the place in it."""
    found = []
    for b, (_, end) in enumerate(case.filled()):
        slot = torch.arange(end, device=arguments['q'].device)
        owner = torch.where(slot < case.shared, 0, b)
        if case.page_size:
            row = pages_of(arguments)[owner, slot // case.page_size]
            found.append((row, slot % case.page_size))
            continue
        rows = arguments['cache_batch_idx'].long() if case.batch_idx else owner.new_tensor(
            range(case.batch))
        found.append((rows[owner], slot))
    return found


def gathered(x: Tensor, found: list[tuple[Tensor, Tensor]], firsts: list[int]) -> Tensor:
    """The rows of all sequences, from these slots on, one sequence after another."""
    parts = [as_bits(x)[row[first:], place[first:]] for (row, place), first in zip(found, firsts)]
    if not parts:
        return x.new_zeros(0, *x.shape[2:])
    return torch.cat(parts).contiguous().view(x.dtype)


# -------------------------------------------------------------------------------------- rotation
def rotate(case: CacheCase, arguments: dict, x: Tensor, positions: Tensor) -> Rotated:
    """x: (rows, heads, head_dim)."""
    dim, exact = case.rotary_dim, x.double().clone()
    if not dim:
        return Rotated(x, exact, torch.zeros_like(exact))
    cos, sin = (arguments[name].double()[positions][:, None] for name in (
        'rotary_cos', 'rotary_sin'))
    first, second = ((slice(0, dim, 2), slice(1, dim, 2)) if case.interleaved
                     else (slice(0, dim // 2), slice(dim // 2, dim)))
    a, b = exact[..., first].clone(), exact[..., second].clone()
    exact[..., first] = a * cos - b * sin
    exact[..., second] = a * sin + b * cos
    size = torch.zeros_like(exact)     # the products' rounding in float32 may decide
    if x.dtype != E4M3:    # products of e4m3 and their sums are exact
        size[..., first] = (a * cos).abs() + (b * sin).abs()
        size[..., second] = (a * sin).abs() + (b * cos).abs()
    tie = TIES.get(x.dtype, TIE)
    low, high = ((exact + sign * tie * size).to(x.dtype).double() for sign in (-1, 1))
    return Rotated(exact.to(x.dtype), exact, high - low)


def query_positions(case: CacheCase, device: torch.device) -> Tensor:
    per_query = case.causal or case.window != (-1, -1)
    rows = [first + i * per_query for first, count in zip(case.positions(), case.queries)
            for i in range(count)]
    return torch.tensor(rows, dtype=torch.long, device=device)


def new_positions(case: CacheCase, device: torch.device) -> Tensor:
    rows = [first + i for first, count in zip(case.positions(), case.new) for i in range(count)]
    return torch.tensor(rows, dtype=torch.long, device=device)


# ------------------------------------------------------------------------------------- the cache
def check_cache(case: CacheCase, before: dict, after: dict) -> None:
    """New rows are where they belong, and nothing else has changed."""
    found = places(case, before)
    old = [one[1] for one in case.lengths]
    for name, column in (('k_cache', 'k'), ('v_cache', 'v')):
        wanted = as_bits(before[name]).clone().contiguous()
        got = as_bits(after[name])
        if case.new:
            new = before[column].flatten(0, 1) if not case.new_packed else before[column]
            row, place = (torch.cat([one[i][first:] for one, first in zip(found, old)])
                          for i in (0, 1))
            written = got[row, place].contiguous().view(after[name].dtype)
            is_quantised = case.kv8 and after[name].dtype == E4M3
            if case.by_page:
                check_new_scales(case, before, after, column)
            if is_quantised and case.latent:
                check_new_key_scales(new, (row, place), before['v_descale'], after['v_descale'])
            scale = scale_of_new(case, after, column) if is_quantised else None
            if column == 'k' and case.rotary_dim:
                rotated = rotate(case, before, new, new_positions(case, new.device))
                check_rotated(written, rotated, scale)
                wanted[row, place] = as_bits(written)
            else:
                new = quantised(new, scale) if is_quantised else new
                wanted[row, place] = as_bits(new.contiguous())
        bad = (wanted != got).flatten(2).any(-1)
        assert not bad.any(), (f'{name}: {bad.sum()} rows differ, first at '
                               f'{bad.nonzero()[0].tolist()}')


def power_from(x: Tensor) -> Tensor:
    """The least power of two that is no smaller. Exact on each device, which log2 is not."""
    mantissa = torch.frexp(x).mantissa
    return torch.where(mantissa == 0.5, x, x / mantissa)


def check_new_scales(case: CacheCase, before: dict, after: dict, column: str) -> None:
    """Pages that begin with new rows have the power of two by which these become at most 224,
    however rotated rows are rounded; all others keep theirs.
    """
    new = before[column] if case.new_packed else before[column].flatten(0, 1)
    rotated = rotate(case if column == 'k' else dataclasses.replace(case, rotary=0.0), before, new,
                     new_positions(case, new.device))
    low, high = (x.double().abs() for x in (rotated.values, rotated.values.double()))
    low, high = low - rotated.ties, high + rotated.ties
    scale, wanted = after[f'{column}_descale'], before[f'{column}_descale'].clone()
    first_row = 0
    for (pages, slots), (_, old), count in zip(places(case, before), case.lengths, case.new):
        for page in pages[old:][slots[old:] == 0].tolist():
            rows = first_row + (pages[old:] == page).nonzero()[:, 0]
            least, most = (power_from((x[rows].amax((0, 2)) / 224).clamp(min=2.0 ** -60))
                           for x in (low, high))
            wanted[page] = torch.where(scale[page] == least, least, most)
        first_row += count
    assert torch.equal(scale.nan_to_num(), wanted.nan_to_num()), f'{column}_descale'


def check_new_key_scales(new: Tensor, where: tuple, before: Tensor, after: Tensor) -> None:
    """New latents (rows, 1, columns) have the power of two by which they become at most 448, by
    block; other keys keep theirs.
    """
    sizes = new.float().abs().unflatten(-1, (after.size(-1), -1)).amax((1, 3))
    wanted = before.clone()
    wanted[where] = power_from((sizes / 448).clamp(min=2.0 ** -60))
    assert torch.equal(after.nan_to_num(), wanted.nan_to_num()), 'v_descale'


def scale_of_new(case: CacheCase, arguments: dict, column: str) -> Tensor | None:
    """(rows, heads, 1) or (rows, 1, columns), of all new rows of k or v."""
    scale = arguments.get(f'{column}_descale')
    rows = [[x[old:] for x in one] for one, (_, old) in zip(places(case, arguments), case.lengths)]
    if case.by_page:
        return scale[torch.cat([pages for pages, _ in rows])][..., None]
    if case.latent:
        of_rows = scale[tuple(torch.cat(x) for x in zip(*rows))]
        return of_rows.repeat_interleave(case.columns_v // case.blocks, -1)[:, None]
    counts = torch.tensor(case.new, device=arguments[column].device)
    return None if scale is None else scale.repeat_interleave(counts, 0)[..., None]


def quantised(x: Tensor, scale: Tensor | None) -> Tensor:
    """To nearest even, at most 448."""
    wide = x.float() if scale is None else x.float() / scale
    return wide.clamp(-448, 448).to(E4M3)


def check_rotated(got: Tensor, rotated: Rotated, scale: Tensor | None = None,
                  name: str = 'k of the cache') -> None:
    """Rounded once, from what float32 may give; then quantised, if it is e4m3."""
    low, high = (rotated.values.double() - rotated.ties, rotated.values.double() + rotated.ties)
    if got.dtype == E4M3:
        low, high = (quantised(x.to(rotated.values.dtype), scale).double() for x in (low, high))
    bad = (got.double() < low) | (got.double() > high) | got.isnan()
    assert not bad.any(), f'{name}: {bad.sum()} of {bad.numel()} elements are rotated otherwise'


# ------------------------------------------------------------------------------------- attention
def inputs_of(case: CacheCase, arguments: dict) -> tuple[Inputs, Lengths, Tensor]:
    """What attention gets, packed, and the ties of the rotated queries. An e4m3 cache under wider
    queries is dequantised, in float64. arguments: with the caches as the call has left them.
    """
    q = arguments['q'] if case.is_packed else arguments['q'].flatten(0, 1)
    device, filled = q.device, case.filled()
    firsts = [min(first, end) for first, end in filled]
    found = places(case, arguments)
    k, v = (gathered(arguments[name], found, firsts) for name in ('k_cache', 'v_cache'))
    lengths = lengths_of(starts(case.queries, device),
                         starts([end - first for first, (_, end) in zip(firsts, filled)], device))
    rotated = rotate(case, arguments, q, query_positions(case, device))
    if case.kv8 and case.latent:
        if 'v_descale' in arguments:
            scale = gathered(arguments['v_descale'], found, firsts)
            v = v.double() * scale.double().repeat_interleave(case.columns_v // case.blocks,
                                                              -1)[:, None]
        v = v.double()
    elif case.kv8:
        counts = torch.tensor([end - first for first, (_, end) in zip(firsts, filled)],
                              device=device)
        scales = {name: arguments.get(f'{name}_descale') for name in 'kv'}
        if case.by_page:
            pages = torch.cat([one[0][first:] for one, first in zip(found, firsts)])
            scales = {name: scale[pages] for name, scale in scales.items()}
            counts = torch.ones_like(pages)
        k, v = (dequantised(x, scales[name], counts) for name, x in (('k', k), ('v', v)))
    inputs = Inputs(rotated.values, k, v, arguments.get('s_aux'))
    if case.latent:
        inputs = with_latent(inputs, arguments['qv'])
    return inputs, lengths, rotated.ties


def expected(case: CacheCase, arguments: dict) -> Expected:
    """arguments: with the caches as the call has left them."""
    inputs, lengths, ties = inputs_of(case, arguments)
    narrow = inputs.q.dtype
    floor = torch.zeros(inputs.q.shape[1::-1], dtype=torch.float64, device=inputs.q.device)
    if case.wide == E4M3:
        ref = None
        if not case.tree:
            ref = reference_fp8.attend(inputs, scales_of(arguments), case.score, lengths,
                                       with_row_max=True)
        return Expected(inputs, lengths, ref, None, floor)
    if ties.any():
        floor = _tie_floor(case, ties, inputs.k[..., :case.head_dim], lengths)
    tree = arguments.get('tree_mask')
    ref = attend(inputs.to(torch.float64), case, lengths, tree)
    inputs = inputs._replace(k=inputs.k.to(narrow), v=inputs.v.to(narrow))
    if case.by_page or (case.latent and case.kv8):    # K is rounded to 16 bits
        rounded = attend(inputs.to(torch.float64), case, lengths, tree)
        pairs = [(rounded.lse, ref.lse)] + [(rounded.row_max, ref.row_max)] * case.max_logits
        floor = floor + torch.stack([(x - y).abs().nan_to_num(nan=0.0) for x, y in pairs]).amax(0)
    return Expected(inputs, lengths, ref, attend(inputs, case, lengths, tree), floor)


def with_latent(inputs: Inputs, qv: Tensor) -> Inputs:
    """The values are keys too, which qv meets."""
    qv = qv if qv.dim() == 3 else qv.flatten(0, 1)
    return inputs._replace(q=torch.cat([inputs.q, qv], -1), k=torch.cat([inputs.k, inputs.v], -1))


def attend(inputs: Inputs, case: CacheCase, lengths: Lengths, tree: Tensor | None) -> Outputs:
    if tree is None:
        return reference.attend_packed(inputs, case.score, lengths, with_row_max=True)
    parts = [reference.attend(one, score, with_row_max=True)
             for _, one, score in each_sequence(inputs, case, lengths, tree)]
    return Outputs(torch.cat([x.out[0] for x in parts]), torch.cat([x.lse[0] for x in parts], 1),
                   torch.cat([x.row_max[0] for x in parts], 1))


def each_sequence(inputs: Inputs, case: CacheCase, lengths: Lengths,
                  tree: Tensor) -> Iterator[tuple[slice, Inputs, Score]]:
    """The rows of a sequence, its tensors with a batch of 1, its score. tree: the bits of all rows;
    column j of a sequence's last keys is bit j % 32 of word j / 32.
    """
    words = tree.reshape(-1, 4).long()
    bits = torch.stack([words[:, j // 32] >> j % 32 & 1 for j in range(128)], 1).bool()
    for rows, keys in lengths.slices():
        mask = dataclasses.replace(case.score.mask, tree=bits[rows, :rows.stop - rows.start])
        one = Inputs(*(x[None, part] for x, part in (
            (inputs.q, rows), (inputs.k, keys), (inputs.v, keys))), inputs.s_aux)
        yield rows, one, dataclasses.replace(case.score, mask=mask)


def dequantised(x: Tensor, scale: Tensor | None, counts: Tensor) -> Tensor:
    """In float64. x: (keys, heads, head_dim) of all sequences; counts: the keys of each."""
    wide = x.double()
    return wide if scale is None else wide * scale.double().repeat_interleave(counts, 0)[..., None]


def scales_of(arguments: dict) -> Scales:
    return Scales(*(arguments.get(f'{name}_descale') for name in 'qkv'))


def _tie_floor(case: CacheCase, ties: Tensor, k: Tensor, lengths: Lengths) -> Tensor:
    """The most that the other neighbour of a query's element moves a score."""
    group = case.heads[0] // case.heads[1]
    floor = torch.zeros(ties.size(1), ties.size(0), dtype=torch.float64, device=ties.device)
    for rows, keys in lengths.slices():
        if keys.start < keys.stop:
            largest = k[keys].double().abs().amax(0).repeat_interleave(group, 0)
            floor[:, rows] = case.score.scale * torch.einsum('qhd,hd->hq', ties[rows], largest)
    return floor


def packed(case: CacheCase, got: Returned) -> Returned:
    """Without a batch."""
    if case.is_packed:
        return got
    rows = (None if x is None else x.transpose(0, 1).flatten(1) for x in got[1:])
    return Returned(got.out.flatten(0, 1), *rows)


def check_shapes(case: CacheCase, arguments: dict, got: Returned) -> None:
    q = arguments['q']
    assert got.out.shape == (*q.shape[:-1], case.columns_v) and got.out.dtype == case.out_dtype
    if case.out:
        assert got.out.data_ptr() == arguments['out'].data_ptr(), 'out: another tensor was returned'
    for rows in got[1:]:
        assert rows is None or rows.shape == (*q.shape[:-3], q.size(-2), q.size(-3))
        assert rows is None or rows.dtype == (torch.float64 if case.dtype == 'fp64'
                                              else torch.float32)


def by_row(own: Returned) -> list[tuple[str, Tensor]]:
    """What the call gives for each row, by the names of Outputs."""
    return [(name, x) for name, x in (('lse', own.lse), ('row_max', own.max_logits))
            if x is not None]


def check_fp8_trees(case: CacheCase, arguments: dict, own: Returned, want: Expected) -> None:
    sequences = each_sequence(want.inputs, case, want.lengths, arguments['tree_mask'])
    for b, (rows, one, score) in enumerate(sequences):
        scales = Scales(*(None if x is None else x[b:b + 1] for x in scales_of(arguments)))
        fp8_data.check_fp8(own.out[None, rows], one, scales, score)
        for name, x in by_row(own):
            fp8_data.check_fp8_lse(x[None, :, rows], one, scales, score, name=name)


def check_result(case: CacheCase, arguments: dict, got: Returned,
                 want: Expected | None = None) -> None:
    """Holds out and LSE to the bar. arguments: with the caches as the call has left them."""
    check_shapes(case, arguments, got)
    want = want or expected(case, arguments)
    own, (ref, pt) = packed(case, got), (want.ref, want.pt)
    if case.wide == E4M3 and case.tree:
        check_fp8_trees(case, arguments, own, want)
        return
    if case.wide == E4M3:
        same = want.inputs, scales_of(arguments), case.score, want.lengths
        fp8_data.check_fp8(own.out, *same)
        for name, x in by_row(own):
            fp8_data.check_fp8_lse(x, *same, name=name)
    else:
        compare.check_close(own.out, ref.out, pt.out, 'out')
        for name, x in by_row(own):
            wanted = getattr(ref, name)
            toward = (wanted - x).clamp(-want.lse_floor, want.lse_floor)
            compare.check_lse(x.double() + toward.nan_to_num(nan=0.0), wanted, name)
    blind = (ref.row_max == -math.inf).T
    assert (own.out[blind] == 0).all(), 'out of rows that see no key'


def run(case: CacheCase, arguments: dict, **changes) -> tuple[Returned, dict]:
    """A call on caches of its own, and its arguments as it has left them."""
    own = copied(arguments)
    if case.out:
        own['out'] = torch.full_like(arguments['out'], math.nan)
    return call(case, own, **changes), own


def check(case: CacheCase, device: str | torch.device) -> tuple[Returned, dict]:
    """Runs it and holds the cache and all results to what they have to be."""
    arguments = case.arguments(device)
    got, after = run(case, arguments)
    check_cache(case, arguments, after)
    check_result(case, after, got)
    return got, arguments


def check_case(case: CacheCase, device: str | torch.device) -> None:
    """Checks a case as check() does; an error says how to repeat it."""
    with compare.naming(case):
        check(case, device)


def check_same(got: Returned, wanted: Returned) -> None:
    """Bit for bit."""
    for name, one, other in zip(Returned._fields, got, wanted):
        assert (one is None) == (other is None), name
        if one is not None:
            compare.check_equal(one, other, name)


def one_of(case: CacheCase, got: Returned, b: int) -> Returned:
    """The results of one sequence."""
    if not case.is_packed:
        return Returned(*(None if x is None else x[b] for x in got))
    first, end = ([0, *itertools.accumulate(case.queries)][i] for i in (b, b + 1))
    rows = (None if x is None else x[:, first:end] for x in got[1:])
    return Returned(got.out[first:end], *rows)
