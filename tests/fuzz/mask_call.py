"""A call with an AttentionMask as drawn, checked by tests/support/mask_cases.py; gradients too."""
from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.fp8_accuracy import BLOCKS
from flash_attn3 import AttentionMask
from flash_attn3.integrations import flex

from tests.support import compare, mask_cases, mask_cases_fp8
from tests.support.cases import DTYPES
from tests.support.lists import ints, starts
from tests.support.mask_cases import INTERVALS, Blocks, Given, MaskCase

HEADS = ((4, 4), (4, 2), (6, 2), (5, 1), (3, 3))
HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (40, 40), (72, 72), (32, 32), (128, 64), (64, 128),
             (256, 256), (192, 128), (192, 192), (256, 64))
WIDE_HEAD_DIMS = ((512, 512), (304, 304), (512, 256))    # without softcap
RESULTS = 'out', 'lse', 'max_logits'


# ----------------------------------------------------------------------------------------- masks
def points(count: int, most: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, most + 1, (count,), generator=generator,
                         device=generator.device).sort()[0].tolist()


def below(size: int, is_causal: bool, device: torch.device) -> Tensor:
    ones = torch.ones(size, size, dtype=torch.bool, device=device)
    return ones.tril() if is_causal else ones


def documents(case: MaskCase, generator: torch.Generator) -> tuple[AttentionMask, list[Tensor]]:
    length, device = case.lengths[0][0], generator.device
    count = int(torch.randint(1, 6, (), generator=generator, device=device))
    cuts = [points(count, length, generator) for _ in case.lengths]
    cuts = cuts if case.by_batch else cuts[:1] * len(cuts)
    is_causal, shown = length % 3 > 0, []
    for own in cuts:
        shown.append(below(length, False, device).logical_not())
        for begin, end in itertools.pairwise(own):
            shown[-1][begin:end, begin:end] = below(end - begin, is_causal, device)
    lists = ints(itertools.chain(*cuts), device).view(len(cuts), count)
    return AttentionMask.documents(lists if case.by_batch else lists[0], length,
                                   causal=is_causal), shown


def prefix_lm(case: MaskCase, generator: torch.Generator) -> tuple[AttentionMask, list[Tensor]]:
    lengths, device = [one[0] for one in case.lengths], generator.device
    prefixes = [points(1, length, generator)[0] for length in lengths]
    shown = [below(length, True, device) for length in lengths]
    for one, prefix in zip(shown, prefixes):
        one[:, :prefix] = True
    packed = (sum(lengths) + case.behind, starts(lengths, device))
    return AttentionMask.prefix_lm(ints(prefixes, device),
                                   *(packed if case.is_packed else lengths[:1])), shown


def tree(case: MaskCase, generator: torch.Generator) -> tuple[AttentionMask, list[Tensor]]:
    """A parent that adds a third interval is taken for another, by chance."""
    length, device = case.lengths[0][0], generator.device
    cuts = [0, *points(4, length, generator), length]
    lengths, is_causal = [b - a for a, b in itertools.pairwise(cuts)], length % 3 > 0
    pick = random.Random(cuts[1])
    for _ in range(1000):
        parents = [pick.choice((number - 1, pick.randint(-1, number - 1)))
                   for number in range(len(lengths))]
        try:
            mask = AttentionMask.tree(lengths, parents, causal=is_causal, device=device)
        except RuntimeError as error:
            assert 'at most two intervals' in str(error)
            continue
        break
    shown = below(length, False, device).logical_not()
    for number in range(len(lengths)):
        own, seen = slice(*cuts[number:number + 2]), parents[number]
        shown[own, own] = below(lengths[number], is_causal, device)
        while seen >= 0:
            shown[own, slice(*cuts[seen:seen + 2])] = True
            seen = parents[seen]
    return mask, [shown] * len(case.lengths)


def completions(case: MaskCase, generator: torch.Generator) -> tuple[AttentionMask, list[Tensor]]:
    """Trees of any number of segments, also none; rows after the last segment see nothing."""
    length, device = case.lengths[0][0], generator.device
    cuts = [0, *points(6, length, generator)]
    trees = [0, *points(2, len(cuts) - 1, generator), len(cuts) - 1]
    shown = below(length, False, device).logical_not()
    for first, end in itertools.pairwise(trees):
        for segment in range(first, end):
            own = slice(*cuts[segment:segment + 2])
            shown[own, slice(*cuts[first:first + 2])] = True
            shown[own, own] = below(own.stop - own.start, True, device)
    return AttentionMask.completions(ints(cuts, device), ints(trees, device),
                                     length), [shown] * len(case.lengths)


def block_mask(case: MaskCase, generator: torch.Generator) -> tuple[AttentionMask, list[Tensor]]:
    """One of FlexAttention, read by flash_attn3.integrations.flex."""
    (rows, keys), device = case.lengths[0], generator.device
    size = 64 if rows % 2 else 128
    ends = torch.randint(0, keys + 1, (rows, 4), generator=generator, device=device).sort()[0]
    key = torch.arange(keys, device=device)
    inside = (ends[:, ::2, None] <= key) & (key < ends[:, 1::2, None])
    table = inside.any(1)
    if rows % 3 == 0:    # and of blocks: a part of the first of a row, and whole ones
        hidden = torch.rand(-(-rows // size), -(-keys // size), generator=generator, device=device)
        row, column = torch.arange(rows, device=device) // size, key // size
        table = (inside[:, 0] | (column > 0)) & (hidden < 0.6)[row][:, column]
    found = create_block_mask(lambda b, h, q, k: table[q, k], None, None, rows, keys, device,
                              BLOCK_SIZE=size)
    return flex.mask_of(found, rows, keys), [table] * len(case.lengths)


MAKERS = {maker.__name__: maker for maker in (documents, prefix_lm, tree, completions,
                                             block_mask)}


# ----------------------------------------------------------------------------------------- a call
def wrong_calls(case: MaskCase, device: torch.device) -> dict[str, dict]:
    """Changes of a call that no call with a mask takes."""
    rows = sum(one[0] for one in case.lengths) if case.is_packed else case.lengths[0][0]
    own = AttentionMask.from_intervals(
        torch.zeros(rows + case.behind + 1, 1, 2, dtype=torch.int32, device=device),
        starts((one[0] for one in case.lengths), device) if case.is_packed else None)
    meta = torch.ones(1, 1, 1, dtype=torch.bool, device='meta')
    return {'causal': dict(causal=True), 'window': dict(window_size=(3, 0)),
            'chunk': dict(attention_chunk=4), 'splits': dict(num_splits=2),
            'parts': dict(split_size=64), 'softcap of -1': dict(softcap=-1.0),
            'a tensor': dict(mask=meta), 'a mask of another device': dict(
                mask=AttentionMask.from_blocks(meta)), 'a mask of more queries': dict(mask=own),
            'no scale': dict(softmax_scale=0.0)}


@dataclass(frozen=True)
class MaskCall:
    """maker: a name in MAKERS; '': the case has intervals, blocks or both."""
    case: MaskCase
    maker: str
    gradients: bool
    dlse: bool
    deterministic: bool
    seed: int
    fp8: str = ''    # how the call is quantised, as in fp8_data.py; '': it has 16 bits

    function = 'attention_mask'

    def check(self, device: str | torch.device) -> None:
        """All results; twice, with the same bits. Before, a call is refused for one thing."""
        case, maker = self.case, MAKERS.get(self.maker)
        if self.fp8:
            mask_cases_fp8.check_case(case, device, self.fp8, maker)
            return
        given = mask_cases.made(case, device, maker)
        what, change = random.Random(self.seed).choice(list(wrong_calls(
            case, given.q.device).items()))
        with pytest.raises((RuntimeError, NotImplementedError)) as raised:
            mask_cases.call(case, given, **change)
        assert re.search(r'flash_attn3\.\w+: expected ', str(raised.value)), what
        results = mask_cases.call(case, given)
        mask_cases.check(case, given, results)
        for name, one, other in zip(RESULTS, results, mask_cases.call(case, given)):
            assert one is None or torch.equal(one, other), f'{name} of a second call'
        if self.gradients:
            self._check_gradients(given)

    def _check_gradients(self, given: Given) -> None:
        """Keys that no query sees have numbers: their tile may be multiplied by zeros."""
        case, generator = self.case, torch.Generator(given.q.device).manual_seed(self.seed)
        given = given._replace(**{name: getattr(given, name).nan_to_num() for name in 'qkv'})
        shape = (len(given.q), case.heads[0], case.columns_v)
        dout = torch.randn(shape, generator=generator, device=given.q.device).to(given.q.dtype)
        dlse = torch.randn(shape[1::-1], generator=generator, device=given.q.device)
        dlse = dlse if self.dlse else None
        names = ['q', 'k', 'v'] + ['s_aux'] * case.s_aux

        def gradients(dtype: torch.dtype | None, results_of: Callable) -> list[Tensor]:
            leaves = {name: getattr(given, name).detach() for name in names}
            leaves = {name: (x if dtype is None else x.to(dtype)).clone().requires_grad_()
                      for name, x in leaves.items()}
            out, lse, *_ = results_of(given._replace(**leaves))
            results = [(out, dout.to(out.dtype))]
            if dlse is not None:
                sees = lse.detach().isfinite()    # others have no gradient
                results.append((lse[sees], dlse[sees].to(lse.dtype)))
            outputs, gradients_of = zip(*results)
            return list(torch.autograd.grad(outputs, list(leaves.values()), gradients_of))

        ref, pt = (gradients(dtype, lambda own, dtype=dtype: mask_cases.expected(case, own, dtype))
                   for dtype in (torch.float64, DTYPES[case.dtype]))
        got, again = (gradients(None, lambda own: mask_cases.call(
            case, own, deterministic=self.deterministic)) for _ in range(2))
        exact = mask_cases.expected(case, given, torch.float64)
        floors = compare.cancellation_floors([x[None] for x in given[:3]], dout[None],
                                             case.head_dim ** -0.5)
        floors = {name[1:]: floor for name, floor in floors.items()}
        if case.s_aux:
            floors['s_aux'] = compare.sink_floor(exact[0], exact[1], dout, given.s_aux, dout.dtype)
        for name, *tensors in zip(names, got, ref, pt):
            compare.check_close(*tensors, f'd{name}', floors[name])
        for name, one, other in zip(names, got, again):
            assert not self.deterministic or torch.equal(one, other), f'd{name} of a second call'


def blocks_of(pick: random.Random) -> Blocks:
    return Blocks(pick.choice((64, 128)), pick.choice((64, 128)), pick.choice((0.1, 0.5, 0.9)),
                  pick.choice(('one', 'k', 'q')), pick.random() < 0.4)


def drawn(pick: random.Random, lengths: Callable[..., tuple]) -> MaskCall:
    """lengths: draws those of a batch, or of packed sequences."""
    maker = pick.choice(('', '', '', *MAKERS))
    is_packed = pick.random() < 0.5 and maker in ('', 'prefix_lm')
    found = lengths(pick, is_packed)
    if maker:    # no dimension is 0
        found = tuple((max(one), max(one)) if maker != 'block_mask' else
                      tuple(max(x, 1) for x in one) for one in found)
    intervals = '' if maker else pick.choice(('', 'one', 'two', *INTERVALS))
    has_blocks = pick.random() < (0.3 if maker or intervals else 1)
    kind = pick.choice(('gradients', 'gradients', 'gradients', 'forward', 'wide', 'head', 'block'))
    gradients = kind == 'gradients'
    wide = WIDE_HEAD_DIMS if gradients else ()
    dims = pick.choice(WIDE_HEAD_DIMS if kind == 'wide' else HEAD_DIMS + wide)
    if kind in BLOCKS:
        dims = tuple(dim // 16 * 16 for dim in dims)
    case = MaskCase(
        lengths=found, intervals=intervals, blocks=blocks_of(pick) if has_blocks else None,
        by_batch=pick.random() < 0.5, is_packed=is_packed, head_dim=dims[0], head_dim_v=dims[1],
        heads=pick.choice(HEADS), dtype=pick.choice(('bf16', 'fp16')),
        behind=pick.choice((0, 0, pick.randint(1, 70))) if is_packed else 0,
        softcap=(pick.choice((0.0, 3.0, 3.0)) if kind in ('forward', 'gradients')
                 and dims not in WIDE_HEAD_DIMS else 0.0),
        s_aux=pick.random() < 0.3,
        max_logits=pick.random() < 0.2, lse=gradients or pick.random() < 0.8,
        pack_gqa=pick.choice((None, True, False)), sm_margin=pick.choice((0, 0, 0, 20)),
        out=not gradients and pick.random() < 0.2)
    return MaskCall(case, maker, gradients, pick.random() < 0.5, pick.random() < 0.4,
                    pick.randint(0, 999), kind if kind in BLOCKS else '')
