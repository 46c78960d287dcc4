"""AttentionMask: which keys each query sees, as intervals of keys, as blocks, or as both.

`flash_attn_func` and `flash_attn_varlen_func` take one as `mask=` (ops/masked.py). The lists of K
tiles for the kernels are made in the first call (ops/mask_lists.py) and kept in the mask.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn3.ops import checks, mask_lists
from flash_attn3.ops.dense_and_varlen import MaskTensors
from flash_attn3.ops.mask_lists import BLOCK, Layout, Tiles
from flash_attn3.ops.mask_shapes import (OP, Documents, Lengths, check_ints, check_starts,
                                         completion_intervals, described, exactly, in_blocks,
                                         saveable)

_mask_lists = torch.ops.flash_attn3.mask_lists.default
_BLOCKS = 64, 128
_MOST_INTERVALS = 2
_MOST_KEPT = 8    # how many kinds of call (lengths, head dims, heads) a mask keeps lists for


class _Kept(NamedTuple):
    """Tensors that later calls of the same kind use. layout keeps the cu_seqlens alive, because the
    key holds their id().
    """
    tensors: tuple[Tensor | None, ...]
    layout: Layout
    made: torch.cuda.Event | None    # None: on a CPU

    def wait(self) -> None:
        """Makes the tensors safe to read on the current stream."""
        tensors = [x for x in self.tensors if x is not None]
        stream = torch.cuda.current_stream(tensors[0].device)
        stream.wait_event(self.made)
        for x in tensors:
            x.record_stream(stream)


class AttentionMask:
    """Which keys each query sees: `mask=` of `flash_attn_func` and `flash_attn_varlen_func`.

    Made by the methods below, and by `a & b`, which shows what both show. A mask holds for the
    lengths that it was made for, for any number of layers and steps: its tensors must not change.
    docs/masks.md has a picture of each. torch.compile traces calls and the methods, from_block_mask
    excepted. A mask is plain on every rank of a mesh: calls on DTensors take their part of it.

    Keys are counted within the sequence of the query. Other values than described are errors on the
    CPU and with FLASH_ATTN3_CHECKS=1; else begin and end are clamped to the sequence.
    """

    def __init__(self, intervals: Tensor | None, blocks: Tensor | None, seqlen_q: Lengths,
                 seqlen_k: Lengths, cu_seqlens: Tensor | None = None):
        """For the methods below. intervals: (batch or 1, seqlen_q, n, 2), packed (total_q, n, 2).
        blocks: (batch or 1, heads or 1, q blocks, k blocks) bool, of 64 x 64.
        """
        self._intervals, self._blocks = map(saveable, (intervals, blocks))
        self._seqlen_q, self._seqlen_k = seqlen_q, seqlen_k
        self._cu_seqlens = cu_seqlens
        self._is_fine = False    # made from blocks of 64
        self._documents: Documents | None = None
        self._kept: dict[tuple, _Kept] = {}
        self._captured: dict[tuple, _Kept] = {}    # what CUDA graphs read, never dropped
        self._parts: dict[tuple, AttentionMask] = {}    # what part() made

    def __repr__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in (
            ('intervals', self._intervals), ('blocks of 64', self._blocks)) if x is not None}
        return f'AttentionMask({", ".join(f"{name} {shape}" for name, shape in shapes.items())})'

    # -------------------------------------------------------------------------------- constructors
    @staticmethod
    def from_intervals(intervals: Tensor, cu_seqlens: Tensor | None = None) -> AttentionMask:
        """A query sees the keys of its intervals [begin, end), each key once.

        Args:
            intervals: int32 (seqlen_q, n, 2) for all sequences, or (batch, seqlen_q, n, 2); packed
                (total_q, n, 2). n is 1 or 2. 0 <= begin <= end <= seqlen_k.
            cu_seqlens: (batch + 1,) int32, where packed sequences of queries begin.
        """
        is_packed = cu_seqlens is not None
        shape = '(total_q, n, 2)' if is_packed else '(seqlen_q, n, 2) or (batch, seqlen_q, n, 2)'
        if (intervals.dtype != torch.int32 or intervals.dim() not in ((3,) if is_packed else (3, 4))
                or intervals.size(-1) != 2 or intervals.size(-2) not in (1, _MOST_INTERVALS)):
            raise RuntimeError(checks.error(
                f'{OP}.from_intervals', f'intervals of int32 {shape}, n from 1 to 2',
                described(intervals)))
        if is_packed:
            check_starts('from_intervals', 'cu_seqlens', cu_seqlens, intervals.device)
            return AttentionMask(intervals, None, Lengths(), Lengths(), cu_seqlens)
        intervals = intervals if intervals.dim() == 4 else intervals[None]
        return AttentionMask(intervals, None, exactly(intervals.size(1)), Lengths())

    @staticmethod
    def from_blocks(block_mask: Tensor, block_q: int = 128, block_k: int = 128) -> AttentionMask:
        """A query sees the keys of the blocks that are True.

        Args:
            block_mask: bool (heads, q blocks, k blocks) for all sequences, or (batch or 1, heads, q
                blocks, k blocks); heads are those of q, of k, or 1. Packed: q and k blocks of the
                longest sequence, those of others begin with the first.
            block_q, block_k: queries and keys of a block, 64 or 128.
        """
        name = f'{OP}.from_blocks'
        for argument, size in (('block_q', block_q), ('block_k', block_k)):
            if type(size) is not int or size not in _BLOCKS:
                raise RuntimeError(checks.error(name, f'{argument} to be 64 or 128', repr(size)))
        if block_mask.dtype != torch.bool or block_mask.dim() not in (3, 4):
            raise RuntimeError(checks.error(
                name, 'block_mask of bool ([batch or 1,] heads, q blocks, k blocks)',
                described(block_mask)))
        blocks = block_mask if block_mask.dim() == 4 else block_mask[None]
        lengths = [in_blocks(count, size) for count, size in zip(blocks.shape[2:],
                                                                  (block_q, block_k))]
        for dim, size in ((2, block_q), (3, block_k)):
            if size != BLOCK:
                blocks = blocks.repeat_interleave(size // BLOCK, dim)
        mask = AttentionMask(None, blocks, *lengths)
        mask._is_fine = BLOCK in (block_q, block_k)
        return mask

    @staticmethod
    def from_block_mask(block_mask, intervals: AttentionMask | None = None) -> AttentionMask:
        """The mask of a `torch.nn.attention.flex_attention.BlockMask`.

        Args:
            block_mask: of blocks of 64 or 128. Its mask_mod is not called: without intervals, all
                blocks must be full ones, which is read from the device.
            intervals: made by from_intervals or a method after it: the same mask within blocks.
        """
        name = f'{OP}.from_block_mask'
        sizes = block_mask.BLOCK_SIZE
        if any(size not in _BLOCKS for size in sizes):
            raise RuntimeError(checks.error(name, 'a BLOCK_SIZE of 64 or 128', str(sizes)))
        full = block_mask.full_kv_num_blocks
        if intervals is None and (block_mask.kv_num_blocks > 0).any():
            raise RuntimeError(checks.error(
                name, 'full blocks, or intervals of what partial blocks show',
                'partial blocks' + ' alone' * (full is None),
                'pass intervals, an AttentionMask of the same mask as its mask_mod'))
        mask = AttentionMask.from_blocks(block_mask.to_dense().bool(), *sizes)
        exact = [exactly(length) for length in block_mask.seq_lengths]
        mask._seqlen_q, mask._seqlen_k = mask._seqlen_q & exact[0], mask._seqlen_k & exact[1]
        return mask if intervals is None else mask & intervals

    @staticmethod
    def documents(cu_documents: Tensor, seqlen: int, *, causal: bool = True) -> AttentionMask:
        """Documents one after another in a sequence: a query sees its own document up to itself.

        Args:
            cu_documents: (documents + 1,) for all sequences or (batch, documents + 1) int32: where
                documents begin, and the end of the last. Queries outside of them see nothing.
            seqlen: queries and keys of a sequence.
            causal: False: a query sees its whole document.
        """
        check_ints('documents', 'cu_documents', cu_documents, (1, 2))
        row = torch.arange(seqlen, dtype=torch.int32, device=cu_documents.device)
        row = row.expand(*cu_documents.shape[:-1], seqlen).contiguous()
        last = cu_documents.size(-1) - 1
        after = torch.searchsorted(cu_documents.contiguous(), row, right=True)    # 1: the first
        is_inside = (after > 0) & (after <= last)
        begin, end = (cu_documents.gather(-1, x.clamp(0, last)) for x in (
            (after - 1).clamp(min=0), after))
        ends = row + 1 if causal else end
        intervals = torch.stack([begin, ends], -1).masked_fill(~is_inside[..., None], 0)
        mask = _square(intervals.unsqueeze(-2), seqlen)
        mask._documents = Documents.of(torch.atleast_2d(cu_documents), seqlen, causal)
        return mask

    @staticmethod
    def prefix_lm(prefix: Tensor, seqlen: int, cu_seqlens: Tensor | None = None) -> AttentionMask:
        """All queries see the prefix of their sequence; those after the prefix are causal.

        Args:
            prefix: (batch,) int32, tokens of each prefix.
            seqlen: queries and keys of a sequence; packed: total_q.
            cu_seqlens: (batch + 1,) int32, where packed sequences of queries begin.
        """
        check_ints('prefix_lm', 'prefix', prefix, (1,), least=0)
        row = torch.arange(seqlen, dtype=torch.int32, device=prefix.device)
        if cu_seqlens is None:
            ends = torch.maximum(prefix[:, None], row + 1)
        else:
            check_starts('prefix_lm', 'cu_seqlens', cu_seqlens, prefix.device, prefix.size(0) + 1)
            layout = Layout(seqlen, seqlen, cu_seqlens)
            if layout.batch == 0:
                ends = torch.zeros_like(row)
            else:
                sequence = layout.sequence_of(row)
                ends = torch.maximum(prefix[sequence], row + 1 - cu_seqlens[sequence])
        intervals = torch.stack([torch.zeros_like(ends), ends], -1).unsqueeze(-2)
        if cu_seqlens is None:
            return _square(intervals, seqlen)
        return AttentionMask.from_intervals(intervals, cu_seqlens)

    @staticmethod
    def completions(cu_seqlens: Tensor, cu_trees: Tensor, seqlen: int) -> AttentionMask:
        """Prompts that completions share: a query sees its own segment up to itself, and one of a
        completion also the whole prompt. The numbers may be on a GPU, and nothing waits for them.

        A tree is a prompt and any number of completions of it, each a segment: the prompt of tree
        0, its completions one after the other, the prompt of tree 1, and so on.

        Args:
            cu_seqlens: (segments + 1,) int32: where segments begin, and the end of the last; from 0
                on, never falling, up to at most seqlen. Queries after the last see nothing.
            cu_trees: (trees + 1,) int32: which segments are prompts, and the number of segments;
                from 0 on, never falling.
            seqlen: queries and keys of a sequence.
        """
        return _square(completion_intervals(cu_seqlens, cu_trees, seqlen), seqlen)

    @staticmethod
    def tree(lengths: Sequence[int], parents: Sequence[int], *, causal: bool = True,
             device: torch.device | str | None = None) -> AttentionMask:
        """Segments that continue one another, such as prompts and their completions: a query sees
        its own segment up to itself, and the segments that this one continues.

        Args:
            lengths: tokens of each segment, in the order in which the segments lie in a sequence.
            parents: the segment that each continues, an earlier one, or -1. What a query sees must
                be two intervals at most: let a segment be followed by one that continues it.
            causal: False: a query sees its whole segment.
            device: where the mask is made.
        """
        name = f'{OP}.tree'
        if len(lengths) != len(parents):
            raise RuntimeError(checks.error(name, f'{len(lengths)} parents, one for each segment',
                                            str(len(parents))))
        seen: list[list[tuple[int, int]]] = []    # intervals that the whole of a segment sees
        start, rows = 0, []
        for number, (length, parent) in enumerate(zip(lengths, parents)):
            if length < 0 or not -1 <= parent < number:
                raise RuntimeError(checks.error(
                    name, f'lengths[{number}] of 0 or more and parents[{number}] from -1 to '
                    f'{number - 1}', f'{length} and {parent}'))
            ranges = list(seen[parent]) if parent >= 0 else []
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((begin, start + length))
            if len(ranges) > _MOST_INTERVALS and length > 0:
                raise RuntimeError(checks.error(
                    name, f'at most two intervals of keys in segment {number}',
                    str(ranges), 'let a segment be followed by one that continues it'))
            seen.append(ranges)
            rows.append([*(0, 0) * (_MOST_INTERVALS - len(ranges)), *sum(ranges, ())][-4:])
            start += length
        segments = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
        intervals = segments.repeat_interleave(torch.tensor(lengths, dtype=torch.int64), 0,
                                               output_size=start)
        if causal:
            intervals[:, 3] = torch.arange(1, start + 1, dtype=torch.int32)
        return _square(intervals.view(-1, 2, 2).to(device), start)

    def __and__(self, other: AttentionMask) -> AttentionMask:
        """What both masks show."""
        if not isinstance(other, AttentionMask):
            return NotImplemented
        intervals = _joined('intervals', self._intervals, other._intervals, _both_intervals)
        blocks = _joined('blocks', self._blocks, other._blocks, _both_blocks)
        starts = self._cu_seqlens if self._cu_seqlens is not None else other._cu_seqlens
        others = other._cu_seqlens
        if others is not None and others is not starts and (
                starts.shape != others.shape
                or (checks.reads_contents(starts) and not checks.has_no_data(starts)
                    and not torch.equal(starts, others))):
            raise RuntimeError(checks.error(f'{OP}.__and__', 'masks with the same cu_seqlens',
                                            'others'))
        both = AttentionMask(intervals, blocks, self._seqlen_q & other._seqlen_q,
                             self._seqlen_k & other._seqlen_k, starts)
        both._is_fine = self._is_fine or other._is_fine
        return both

    # ------------------------------------------------------------------------------------ a part
    def part(self, key: tuple, cut: Callable[[Tensor, int | None, int | None],
                                             Tensor]) -> AttentionMask:
        """The mask of some of the sequences and heads, kept under this key.

        cut: from a tensor, and which of its dimensions has the sequences and which the heads, None
        for one that all share, makes the part of it.
        """
        if not is_compiling() and (kept := self._parts.get(key)) is not None:
            return kept

        def of(x: Tensor | None, *dims: int | None) -> Tensor | None:
            if x is None:
                return None
            divided = [dim if dim is not None and x.size(dim) > 1 else None for dim in dims]
            return x if divided == [None, None] else cut(x, *divided)

        sequences = None if self._cu_seqlens is not None else 0
        part = AttentionMask(of(self._intervals, sequences, None), of(self._blocks, sequences, 1),
                             self._seqlen_q, self._seqlen_k, self._cu_seqlens)
        part._is_fine = self._is_fine
        if (documents := self._documents) is not None:
            part._documents = Documents.of(of(documents.cu_documents, 0, None), documents.seqlen,
                                            documents.causal)
        if not is_compiling():
            self._parts[key] = part
        return part

    @property
    def has_blocks(self) -> bool:
        return self._blocks is not None

    @property
    def rows(self) -> int | None:
        """Queries that its intervals are for: of a sequence, or of all packed ones."""
        return None if self._intervals is None else self._intervals.size(-3)

    def of_heads(self, op: str, heads: tuple[int, int], rank: int, ranks: int) -> AttentionMask:
        """The mask for one of `ranks` equal shares of query heads, of a call with so many heads of
        q and k.
        """
        if problem := self._heads_problem(heads):
            raise RuntimeError(checks.error(op, *problem))
        share = heads[0] // ranks

        def cut(x: Tensor, _, dim: int | None) -> Tensor:
            if dim is None:
                return x
            own = torch.arange(rank * share, (rank + 1) * share, device=x.device)
            return x.index_select(dim, own * x.size(dim) // heads[0])
        return self.part(('heads', heads, rank, ranks), cut)

    def seen_by_query(self) -> Tensor:
        """(rows,) int64: how many keys each query sees, over all sequences, of a mask without
        blocks whose sequences have as many keys as queries.
        """
        starts = self._cu_seqlens
        ends = mask_lists.clean_rows(self._intervals, Layout(self.rows, self.rows, starts, starts))
        seen = (ends[..., 1::2] - ends[..., ::2]).sum(-1)
        return seen if seen.dim() == 1 else seen.sum(0)

    def of_stream(self, op: str, q: Tensor, seqlen: int | None,
                  cu_seqlens: Tensor | None) -> Tensor:
        """Intervals of keys of a whole stream, (batch or 1, seqlen, n, 2), of a mask that has no
        blocks, for a call with these arguments. q: (batch or 1, rows, heads, head_dim).
        """
        intervals, starts = self._intervals, self._cu_seqlens
        seqlen = self.rows if seqlen is None else seqlen
        lists = () if cu_seqlens is None else (cu_seqlens.to(q.device),) * 2
        layout, heads = Layout(seqlen, seqlen, *lists), (q.size(2), q.size(2))
        if problem := self._problem(q, layout, layout.batch if lists else q.size(0), heads):
            raise RuntimeError(checks.error(op, *problem))
        if starts is None:
            return intervals

        def make() -> tuple[Tensor]:
            layout = Layout(seqlen, seqlen, starts, starts)
            rows = layout.rows(q.device)
            most = layout.keys_of(rows)[:, None, None]
            first = starts[layout.sequence_of(rows)] if layout.batch else torch.zeros_like(rows)
            return ((intervals.clamp(min=0).minimum(most) + first[:, None, None])[None],)
        return self._kept_tensors(('stream',), q, make)[0]

    # ------------------------------------------------------------------------------------- a call
    def as_packed(self, op: str, q: Tensor, k: Tensor,
                  check: Callable[[], None] | None) -> tuple[Tensor, Tensor, bool] | None:
        """cu_seqlens, seqused_k and causal of a packed call on the rows of q and k, if the mask is
        nothing but documents. op, check: as of tensors_of(), which raises the same errors; None:
        nothing is checked.
        """
        documents = self._documents
        if documents is None:
            return None
        if check is not None:
            check()
            self.check_fits(op, q, k, ())
        batch = q.size(0)
        if batch == documents.rows:
            return documents.cu_seqlens, documents.seqused_k, documents.causal
        if check is None:
            return *documents.lists_of(batch), documents.causal
        lists = self._kept_tensors(('documents', batch), q, lambda: documents.lists_of(batch))
        return *lists, documents.causal

    def tensors_of(self, op: str, tensors: tuple[Tensor, Tensor], lengths: tuple,
                   tiles: Tiles | None, check: Callable[[], None],
                   is_fp8: bool = False) -> MaskTensors:
        """What the ops `attend` and `bwd` take for a call on q and k.

        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of packed sequences, or
        (). tiles: of the kernels that read lists (mask_lists.tiles_of); None: the plain path.
        check: refuses a wrong call; called before the mask is compared with it. is_fp8: of the
        forward's kernels, which have no tiles for blocks of 64.

        Raises:
            RuntimeError: the mask was made for other sizes, or has wrong values, where those are
                read.
        """
        q, k = tensors
        layout, batch, heads = _sizes_of(q, k, lengths)
        is_dense = not layout.is_packed and layout.queries > BLOCK
        if self._is_fine and tiles is not None and is_dense and not is_fp8:
            tiles = tiles.of_blocks()
        key = (tiles, batch, heads, layout.queries, layout.keys, layout.all_keys,
               *map(_identity, layout[2:4]))
        def make() -> MaskTensors:
            check()
            self.check_fits(op, q, k, lengths)
            return self._made(layout, heads[0], tiles)

        return self._kept_tensors(key, q, make, layout)

    def _kept_tensors(self, key: tuple, x: Tensor, make: Callable[[], tuple],
                      layout: Layout = Layout(0, 0)) -> tuple:
        """What make() returned in the first call with this key. x: on the device of the tensors.

        A graph of torch.compile has what eager calls have kept, or makes it. WHY it keeps nothing:
        its tensors may be memory of a CUDA graph. Nor do calls of fake tensors keep any.
        """
        if checks.has_no_data(x) and not is_compiling():
            return make()
        if is_compiling():
            # Looking up makes a graph of its own for each size, which an empty dict does not need.
            kept = self._kept.get(key) if self._kept and not layout.is_packed else None
            return make() if kept is None else kept.tensors
        is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if (kept := self._kept.get(key)) is not None:
            if is_captured:
                self._captured[key] = kept
            elif x.is_cuda:
                kept.wait()
            return kept.tensors
        with torch.inference_mode(False):    # later calls may need gradients
            made = make()
        # What a captured graph makes exists only in its replays. PyTorch counts no changes of
        # inference tensors.
        if not is_captured and not any(x is not None and x.is_inference() for x in layout[2:4]):
            if len(self._kept) >= _MOST_KEPT:
                self._kept.pop(list(self._kept)[0], None)    # another thread may have dropped it
            event = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
            self._kept[key] = _Kept(made, layout, event)
        return made

    def _made(self, layout: Layout, heads: int, tiles: Tiles | None) -> MaskTensors:
        rows, blocks = self._intervals, self._blocks
        if tiles is not None:
            made = [_mask_lists(rows, blocks, *layout[2:4], heads, layout.queries, layout.keys,
                                layout.all_keys, *sizes) for sizes in tiles.of_calls()]
            return MaskTensors(None if rows is None else made[0][0], None, made[0][1],
                               made[-1][2] if tiles.queries else None)
        return MaskTensors(
            None if rows is None else mask_lists.clean_rows(rows, layout),
            None if blocks is None else mask_lists.expanded_blocks(blocks, layout, heads))

    # ------------------------------------------------------------------------------------- checks
    def check_fits(self, op: str, q: Tensor, k: Tensor, lengths: tuple) -> None:
        """Raises an error if the mask does not fit a call, with the arguments of tensors_of()."""
        if problem := self._problem(q, *_sizes_of(q, k, lengths)):
            raise RuntimeError(checks.error(op, *problem))

    def _problem(self, q: Tensor, layout: Layout, batch: int,
                 heads: tuple[int, int]) -> tuple[str, str] | None:
        """(what was expected, what was got) if the mask does not fit the call, else None."""
        given = [x for x in (self._intervals, self._blocks, self._cu_seqlens) if x is not None]
        if any(x.device != q.device for x in given):
            return f'mask on the device of q, {q.device}', str(given[0].device)
        is_packed = layout.is_packed
        if self._intervals is not None and is_packed != (self._cu_seqlens is not None):
            return (f'mask of {"packed" if is_packed else "dense"} sequences, made '
                    f'{"with" if is_packed else "without"} cu_seqlens', repr(self))
        if problem := (self._packed_problem(layout) if is_packed else self._dense_problem(layout)):
            return problem
        sizes = [x.size(0) for x in given[:2] if x.dim() == 4]
        if any(size != 1 and size != batch for size in sizes):    # symbols are in no tuple
            return f'mask for {batch} sequences, the batch of q, or for all', f'{max(sizes)}'
        if problem := self._heads_problem(heads):
            return problem
        is_read = (not is_compiling() and checks.reads_contents(q)
                   and not checks.has_no_data(q))
        return self._value_problem(layout) if is_read else None

    def _heads_problem(self, heads: tuple[int, int]) -> tuple[str, str] | None:
        if self._blocks is None or any(self._blocks.size(1) == x for x in (1, *heads)):
            return None
        return (f'mask for {heads[0]} heads of q, {heads[1]} heads of k, or all',
                str(self._blocks.size(1)))

    def _dense_problem(self, layout: Layout) -> tuple[str, str] | None:
        for name, made_for, length in (('seqlen_q', self._seqlen_q, layout.queries),
                                       ('seqlen_k', self._seqlen_k, layout.keys)):
            if not made_for.takes(length):
                return f'mask for a {name} of {length}', f'one for {made_for}'
        return None

    def _packed_problem(self, layout: Layout) -> tuple[str, str] | None:
        if self._intervals is not None and self._intervals.size(0) != layout.queries:
            return (f'mask for total_q of {layout.queries}, the rows of q',
                    f'one for {self._intervals.size(0)}')
        if self._cu_seqlens is not None and self._cu_seqlens.shape != layout.starts_q.shape:
            return (f'mask for {layout.batch} sequences, those of cu_seqlens_q',
                    f'one for {self._cu_seqlens.size(0) - 1}')
        return None

    def _value_problem(self, layout: Layout) -> tuple[str, str] | None:
        """Like _problem(), for the values in the mask's tensors. Waits for the GPU."""
        most: int | Tensor = layout.keys
        if layout.is_packed:
            if self._cu_seqlens is not None and not torch.equal(self._cu_seqlens, layout.starts_q):
                return 'mask with the cu_seqlens of the call, cu_seqlens_q', 'other values'
            longest = [int(x.diff().max()) if layout.batch else 0 for x in layout[2:4]]
            if longest[1] > layout.keys:
                return (f'max_seqlen_k of {longest[1]} or more with mask, the longest sequence',
                        str(layout.keys))
            for name, made_for, length in zip('qk', (self._seqlen_q, self._seqlen_k), longest):
                if made_for.high is not None and length > made_for.high:
                    return (f'mask for a longest seqlen_{name} of {length}',
                            f'one for {made_for.high}')
            most = layout.keys_of(layout.rows(layout.starts_q.device))[:, None]
        return None if self._intervals is None else _interval_problem(self._intervals, most, layout)


def _sizes_of(q: Tensor, k: Tensor, lengths: tuple) -> tuple[Layout, int, tuple[int, int]]:
    """Layout, sequences and heads of a call; lengths: as in tensors_of()."""
    heads = q.size(-2), k.size(-2)
    if not lengths:
        return Layout(q.size(1), k.size(1)), q.size(0), heads
    *starts, _, longest = lengths    # max_seqlen_q is a hint, and lists name all queries
    layout = Layout(q.size(0), longest or k.size(0), *starts, k.size(0))
    return layout, layout.batch, heads


def _interval_problem(intervals: Tensor, most: int | Tensor,
                      layout: Layout) -> tuple[str, str] | None:
    """As _problem(). most: the number of keys; packed: (total_q, 1), for each query."""
    begin, end = intervals.unbind(-1)
    is_wrong = (begin < 0) | (end < begin) | (end > most)
    if layout.is_packed:
        is_wrong[layout.starts_q[-1]:] = False    # queries after the last sequence
    if not is_wrong.any():
        return None
    place = tuple(is_wrong.nonzero()[0].tolist())
    limit = most if isinstance(most, int) else int(most[place[0]])
    return (f'mask with intervals{list(place)} from begin to end, in 0 to {limit}, the keys',
            f'{begin[place]} to {end[place]}')


def _square(intervals: Tensor, seqlen: int) -> AttentionMask:
    """A mask of intervals for a call with seqlen_k = seqlen_q = seqlen."""
    mask = AttentionMask.from_intervals(intervals)
    mask._seqlen_k = exactly(seqlen)
    return mask


def _identity(x: Tensor | None) -> tuple[int, int] | None:
    """What differs for another tensor and for other contents. Graphs keep no lists of these."""
    return None if x is None or is_compiling() or x.is_inference() else (id(x), x._version)


def _joined(name: str, one: Tensor | None, other: Tensor | None, join) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    try:
        return join(one, other)
    except RuntimeError as problem:
        if 'flash_attn3' in str(problem):
            raise
        raise RuntimeError(checks.error(f'{OP}.__and__', f'{name} of the same sizes',
                                        f'{tuple(one.shape)} and {tuple(other.shape)}')) from None


def _both_blocks(one: Tensor, other: Tensor) -> Tensor:
    """What both show, cut to the smaller size, which covers every length that both masks take."""
    rows, columns = map(min, one.shape[2:], other.shape[2:])
    return one[:, :, :rows, :columns] & other[:, :, :rows, :columns]


def _both_intervals(one: Tensor, other: Tensor) -> Tensor:
    counts = one.size(-2), other.size(-2)
    if min(counts) > 1 or one.dim() != other.dim():
        raise RuntimeError(checks.error(
            f'{OP}.__and__', 'masks of as many sequences, one of them of one interval a query',
            f'{tuple(one.shape)} and {tuple(other.shape)}'))
    begin = torch.maximum(one[..., 0], other[..., 0])
    return torch.stack([begin, torch.maximum(begin, torch.minimum(one[..., 1], other[..., 1]))], -1)
