"""The attention problems that are timed: their work, their inputs, and the error of a result."""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import NamedTuple

import torch

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
ROTATED_BYTES = 128 << 20      # all sets of inputs together: 2.5 times the L2 of an H100
MAX_SETS = 64
WRONG = 0.02                   # relative error from which a result is not attention at all
WITH_DOUT = 4                  # tensors in a set of inputs of a backward
CHECKED_ROWS = 1024            # rows checked at each end of a head; gradients: rows at a time
CHECKED_SEQUENCES = 8          # at each end of packed tensors, of those of this length or more:
CHECKED_LENGTH = 8

Result = torch.Tensor | tuple[torch.Tensor, ...]   # an output, or dq, dk and dv


@dataclass(frozen=True)
class Shape:
    """One attention problem, as flash_attn_func takes it, or the backward of it.

    With lengths it is flash_attn_varlen_func's: sequences of these lengths, queries and keys alike;
    seqlen_q and seqlen_k are the longest, batch is their number.
    """
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    causal: bool = False
    dtype: str = 'bf16'
    backward: bool = False
    head_dim_v: int = 0       # 0: that of q and k
    window_left: int = -1     # -1: no limit
    window_right: int = -1
    sinks: bool = False
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, 'lengths', tuple(self.lengths))    # JSON has lists

    @property
    def columns_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def has_window(self) -> bool:
        return max(self.window_left, self.window_right) >= 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Rows of q, and of k and v, of all batch entries or sequences."""
        if self.lengths:
            return sum(self.lengths), sum(self.lengths)
        return self.batch * self.seqlen_q, self.batch * self.seqlen_k

    @property
    def pairs(self) -> float:
        """Query-key pairs of a head that count as work, of one batch entry or all sequences. Under
        causal alone the diagonal counts half, which makes it S^2 / 2 for seqlen_q == seqlen_k, as
        the field counts; in a window each pair that is visible counts."""
        if self.lengths:
            return float(sum(self._pairs_of(length, length) for length in self.lengths))
        return float(self._pairs_of(self.seqlen_q, self.seqlen_k))

    def _pairs_of(self, seqlen_q: int, seqlen_k: int) -> float:
        if self.has_window:
            right = 0 if self.causal else self.window_right
            first = seqlen_k - seqlen_q
            own = torch.arange(first, first + seqlen_q)
            end = own + right + 1 if right >= 0 else torch.full_like(own, seqlen_k)
            begin = own - self.window_left if self.window_left >= 0 else torch.zeros_like(own)
            return (end.clamp_max(seqlen_k) - begin.clamp_min(0)).clamp_min(0).sum().item()
        if not self.causal:
            return seqlen_q * seqlen_k
        rows = min(seqlen_q, seqlen_k)
        return rows * (seqlen_k - rows) + rows * rows / 2

    @property
    def flops(self) -> float:
        """FLOP of a call: two GEMMs, each with a multiplication and an addition per element. The
        backward has three GEMMs over the head dim of q and k, and two over that of v."""
        entries = 1 if self.lengths else self.batch
        gemms = (3, 2) if self.backward else (1, 1)
        columns = gemms[0] * self.head_dim + gemms[1] * self.columns_v
        return 2 * entries * self.heads * columns * self.pairs

    @property
    def input_bytes(self) -> int:
        """Bytes that a call reads: q, k and v; a backward also the output and its gradient."""
        outputs = 2 * self.columns_v if self.backward else 0
        queries = self.tokens[0] * self.heads * (self.head_dim + outputs)
        keys = self.tokens[1] * self.heads_k * (self.head_dim + self.columns_v)
        return (queries + keys) * DTYPES[self.dtype].itemsize

    def label(self) -> str:
        grouped, square = self.heads != self.heads_k, self.seqlen_q == self.seqlen_k
        heads = f'{self.heads}/{self.heads_k}' if grouped else f'{self.heads}'
        lengths = f'{self.seqlen_q}' if square else f'{self.seqlen_q}x{self.seqlen_k}'
        if self.lengths:
            lengths = f'{min(self.lengths)}-{max(self.lengths)}'
        dims = f'{self.head_dim}'
        if self.columns_v != self.head_dim:
            dims += f'x{self.columns_v}'
        parts = [self.dtype, f'b{self.batch}', f's{lengths}', f'h{heads}', f'd{dims}',
                 'causal' if self.causal else 'full']
        if self.has_window:
            parts.append(f'window {self.window_left},{self.window_right}')
        return ' '.join(parts + self.features)

    @property
    def features(self) -> list[str]:
        """The features of the problem besides its mask and sizes."""
        return [name for name, is_on in (('sinks', self.sinks), ('packed', bool(self.lengths)),
                                         ('backward', self.backward)) if is_on]

    def as_dict(self) -> dict:
        return asdict(self)


class Rules(NamedTuple):
    """The mask and the sinks of a problem."""
    causal: bool
    window: tuple[int, int] = (-1, -1)
    sinks: torch.Tensor | None = None    # (heads,)

    def hidden(self, rows: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor | None:
        """(rows, seqlen_k): the keys that these rows do not see; None: they see all."""
        left, right = self.window[0], 0 if self.causal else self.window[1]
        if left < 0 and right < 0:
            return None
        distance = (torch.arange(seqlen_k, device=rows.device)
                    - (rows[:, None] + seqlen_k - seqlen_q))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        return hidden


def rules_of(shape: Shape, device: torch.device) -> Rules:
    sinks = torch.linspace(1, 2, shape.heads, device=device) if shape.sinks else None
    return Rules(shape.causal, (shape.window_left, shape.window_right), sinks)


def function_of(package: ModuleType, shape: Shape, device: torch.device) -> Callable:
    """A build's attention on q, k and v of a problem."""
    options: dict = dict(causal=shape.causal)
    if shape.has_window:
        options['window_size'] = (shape.window_left, shape.window_right)
    if shape.sinks:
        options['s_aux'] = rules_of(shape, device).sinks
    if not shape.lengths:
        return functools.partial(package.flash_attn_func, **options)
    starts = torch.tensor([0, *itertools.accumulate(shape.lengths)], dtype=torch.int32,
                          device=device)
    options |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=shape.seqlen_q,
                    max_seqlen_k=shape.seqlen_k)
    return functools.partial(package.flash_attn_varlen_func, **options)


def make_inputs(shape: Shape, device: torch.device,
                seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """Sets of (q, k, v), for a backward of (q, k, v, dout), random normal: constant data would draw
    less power and run faster."""
    count = 1
    if device.type == 'cuda':
        count = min(MAX_SETS, -(-ROTATED_BYTES // max(1, shape.input_bytes)))
    generator = torch.Generator(device).manual_seed(seed)

    def normal(tokens: int, heads: int, columns: int) -> torch.Tensor:
        rows = (tokens,) if shape.lengths else (shape.batch, tokens // max(1, shape.batch))
        return torch.randn((*rows, heads, columns), generator=generator, device=device,
                           dtype=DTYPES[shape.dtype])

    rows_q, rows_k = shape.tokens
    sizes = [(rows_q, shape.heads, shape.head_dim), (rows_k, shape.heads_k, shape.head_dim),
             (rows_k, shape.heads_k, shape.columns_v)]
    if shape.backward:
        sizes.append((rows_q, shape.heads, shape.columns_v))
    return [tuple(normal(*size) for size in sizes) for _ in range(count)]


def error_of(shape: Shape, result: Result, inputs: tuple[torch.Tensor, ...]) -> float:
    """relative_error() of a problem. With packed sequences the largest, over some at each end; of
    very short ones the gradients are differences that cancel."""
    rules = rules_of(shape, inputs[0].device)
    if not shape.lengths:
        return _error(result, inputs, rules)
    ends = list(itertools.accumulate(shape.lengths))
    long = [number for number, length in enumerate(shape.lengths) if length >= CHECKED_LENGTH]
    errors = [0.0]
    for number in {*long[:CHECKED_SEQUENCES], *long[-CHECKED_SEQUENCES:]}:
        rows = slice(ends[number] - shape.lengths[number], ends[number])
        one = ([x[None, rows] for x in result] if isinstance(result, tuple)
               else result[None, rows])
        errors.append(_error(one, tuple(x[None, rows] for x in inputs), rules))
    return max(errors)


def relative_error(result: Result, inputs: tuple[torch.Tensor, ...], causal: bool) -> float:
    """||result - reference|| / ||reference|| in fp32; of three gradients the largest. It finds a
    wrong kernel or a wrong mask; it is no substitute for the tests.

    It reads the first head of batch 0 of an output, at most CHECKED_ROWS rows at each end, and the
    first KV head of batch 0 of gradients, with the query heads that use it.
    """
    return _error(result, inputs, Rules(causal))


def _error(result: Result, inputs: tuple[torch.Tensor, ...], rules: Rules) -> float:
    if len(inputs) == WITH_DOUT:
        return _gradient_error(result, inputs, rules)
    q, k, v = (tensor[0, :, 0].float() for tensor in inputs)
    rows = torch.arange(q.shape[0], device=q.device)
    rows = torch.cat([rows[:CHECKED_ROWS], rows[CHECKED_ROWS:][-CHECKED_ROWS:]])
    reference = _probabilities(q, k, rows, 0, rules) @ v
    return _relative(result[0, rows, 0], reference)


def _probabilities(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, head: int,
                   rules: Rules) -> torch.Tensor:
    """The softmax of these rows of a head over the keys; 0 in rows that see no key."""
    scores = q[rows] @ k.T * q.shape[-1] ** -0.5
    hidden = rules.hidden(rows, q.shape[0], k.shape[0])
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks[head].expand(len(rows), 1)], dim=1)
    return torch.softmax(scores, -1).nan_to_num(0.0)[:, :k.shape[0]]


def _gradient_error(gradients: Sequence[torch.Tensor], inputs: tuple[torch.Tensor, ...],
                    rules: Rules) -> float:
    """The largest relative error of dq, dk and dv. The reference takes CHECKED_ROWS queries at a
    time."""
    q, k, v, dout = inputs
    group = q.shape[2] // k.shape[2]
    q, dout = (x[0, :, :group].transpose(0, 1).float() for x in (q, dout))
    k, v = k[0, :, 0].float(), v[0, :, 0].float()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    every_row = torch.arange(q.shape[1], device=q.device)
    for head, rows in itertools.product(range(group), every_row.split(CHECKED_ROWS)):
        p, own_dout = _probabilities(q[head], k, rows, head, rules), dout[head, rows]
        delta = (own_dout * (p @ v)).sum(-1, keepdim=True)
        ds = (own_dout @ v.T - delta) * p * q.shape[-1] ** -0.5
        dq[head, rows] = ds @ k
        dk += ds.T @ q[head, rows]
        dv += p.T @ own_dout
    found_dq, found_dk, found_dv = gradients
    return max(_relative(found_dq[0, :, :group].transpose(0, 1), dq),
               _relative(found_dk[0, :, 0], dk), _relative(found_dv[0, :, 0], dv))


def _relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (result.float() - reference).norm() / reference.norm().clamp_min(1e-20)
    error = difference.item()
    return error if math.isfinite(error) else math.inf
