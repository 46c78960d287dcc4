"""FP8 quantisation in plain PyTorch, bitwise equal to the kernels: rotate, scale, cast.

fp8.py calls it for tensors that are not on a Hopper GPU, and the tests of the kernels
(csrc/quantize/quantize.cu) do. Each step is one correctly rounded operation, in the order written
here and never contracted to a fused multiply-add. It is in float32 unless stated otherwise:

1. Convert x to float32, which is exact for float16 and bfloat16.
2. Rotate the head_dim columns of a row together: x H D, with the signs and Hadamard matrices below.
   a. Column c of KV head h changes its sign if bit c % 32 of the word
      mix(mix(mix(seed) + h) + c // 32) is set; `mix` is below, sums are modulo 2^32.
   b. head_dim is split into powers of two, largest first (96 = 64 + 32). Each piece of a row has a
      unit, a power of two: the largest absolute value of the piece is 2 to 4 units. It is at least
      2^-126, and the largest power if the piece has infinities or NaN, which make all of it NaN.
      The piece times 1 / unit is rounded to float16, exactly except for values far below the
      largest.
   c. Each piece passes through butterflies with distances 1, 2, 4, ... in this order, in float16:
      columns i and i + distance of a pair become their sum and their difference.
   d. Its norm is width ** -0.5 rounded to float32. Without rotation norm and unit are 1.
3. Find the largest finite absolute value of a block, times norm times unit: 0 if none is finite,
   and at most the largest float32.
4. scale = max(largest, 2^-64) / 448, a division. The floor is for blocks of zeros: it keeps 1 /
   scale finite, keeps such blocks small next to others, and keeps sums relative to a scale
   (reference_fp8.py) below 2^128.
5. factor = norm times (1 / scale), times unit. Multiply each value by factor and clamp it to
   [-448, 448], as a result may be some ulps above. For rotated values both are float16.
6. Round to e4m3: nearest, ties to even, with subnormals. e4m3 has no infinities; they become NaN,
   bits 0x7f, as NaN does.

WHY float16 is enough for the rotation: it rounds to 2^-11 of a value, e4m3 to 2^-4. On N(0, 1) +
10 N(0, 1) in one value of 1000, with blocks of 64 rows, the error of the values is 1.0002, 1.0003
and 1.0004 times that with float32 at head dim 64, 128 and 256.

WHY scales are not powers of two: largest / 448 makes the largest value of a block exact, and
outliers have the largest errors. On N(0, 1) + 10 N(0, 1) in one value of 1000 (2048 keys, head dim
128, blocks of 32 rows of k and v) the error of attention is 1.31e-2 without rotation and 8.1e-3
with it. With powers of two it is 1.78e-2 and 8.3e-3 for any block size, because e4m3 has its own
exponent.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.cpu.reference import Sequences, without_autocast

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_AMAX = 2.0 ** -64
Q_BLOCK, KV_BLOCK = 64, 384    # rows of a block of q, and of k and v, as attention takes them
PER_HEAD, PER_TENSOR = 0, -1    # in place of rows: a scale per (sequence, KV head), or only one

_WORD = 0xFFFFFFFF
_ONE_EXPONENT = 1 << 23    # what the bits of a power of two and of its double differ by
_LARGEST_FLOAT = torch.finfo(torch.float32).max


class Rotation(NamedTuple):
    """seed: of the signs, 0 to 2^32 - 1. group: heads of x that use the signs of one KV head."""
    seed: int
    group: int


# --------------------------------------------------------------------------------------- rotation
def mix(x: Tensor) -> Tensor:
    """A hash of 32 bits on int64 tensors: shifts, exclusive ors and two odd factors."""
    x = (x + 0x9E3779B9) & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def signs(seed: int, heads: int, head_dim: int, device: torch.device | str = 'cpu') -> Tensor:
    """(heads, head_dim) of 1 and -1, float32."""
    head = torch.arange(heads, device=device)[:, None]
    column = torch.arange(head_dim, device=device)
    word = mix(mix(mix(torch.full_like(head, seed)) + head) + column // 32)
    return 1.0 - 2.0 * ((word >> (column % 32)) & 1).float()


def pieces(head_dim: int) -> list[int]:
    """The powers of two that head_dim is the sum of, largest first."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


def hadamard(x: Tensor) -> Tensor:
    """x (..., head_dim) times the Hadamard matrix of each piece, of 1 and -1, in the dtype of x."""
    return torch.cat([_butterflies(piece) for piece in x.split(pieces(x.size(-1)), dim=-1)], dim=-1)


def units(x: Tensor) -> Tensor:
    """float32 of the shape of x: the power of two that a piece of a row is divided by."""
    return torch.cat([_unit_of(piece) for piece in x.split(pieces(x.size(-1)), dim=-1)], dim=-1)


def _unit_of(piece: Tensor) -> Tensor:
    largest = (piece.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    power = (largest & 0x7F800000).clamp_min(2 * _ONE_EXPONENT)
    return (power - _ONE_EXPONENT).view(torch.float32).expand(piece.shape)


def norms(head_dim: int, device: torch.device | str = 'cpu') -> Tensor:
    """(head_dim,) What makes `hadamard` orthonormal, by column."""
    widths = [width for width in pieces(head_dim) for _ in range(width)]
    return torch.tensor([width ** -0.5 for width in widths], dtype=torch.float32, device=device)


def _butterflies(x: Tensor) -> Tensor:
    width, distance = x.size(-1), 1
    while distance < width:
        first, second = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        distance *= 2
    return x


class Columns(NamedTuple):
    """values * unit * norm is what is cast. Values: float32, or float16 if they are rotated."""
    values: Tensor
    unit: Tensor | float = 1.0
    norm: Tensor | float = 1.0

    def magnitudes(self) -> Tensor:
        """float32; 0 where a value is not finite."""
        finite = self.values.abs().float().where(self.values.isfinite(), 0.0)
        return (finite * self.norm * self.unit).clamp_max(_LARGEST_FLOAT)

    def cast(self, scale: Tensor) -> Tensor:
        """To e4m3; scale: broadcasts with the values."""
        x = self.values
        factor = (self.norm * (1.0 / scale) * self.unit).to(x.dtype)
        scaled = (x * factor).clamp(-LARGEST, LARGEST).where(x.isfinite(), torch.nan)
        return torch.empty(x.shape, dtype=E4M3, device=x.device).copy_(scaled)


def rotate(x: Tensor, rotation: Rotation) -> Columns:
    """float32 x (..., heads, head_dim), rotated."""
    heads, head_dim = x.shape[-2:]
    own = signs(rotation.seed, heads // rotation.group, head_dim, x.device)
    unit = units(x)
    scaled = (x * own.repeat_interleave(rotation.group, dim=0) / unit).half()
    return Columns(hadamard(scaled), unit, norms(head_dim, x.device))


# ----------------------------------------------------------------------------------------- scales
def blocks_of(rows: int, block: int) -> int:
    return -(-rows // block)


def first_blocks(cu_seqlens: Tensor, block: int) -> Tensor:
    """(batch + 1,) Where each sequence's blocks begin among those of a packed tensor.

    A kernel finds the scale of (sequence, row) without the lengths of the others, and the host the
    number of scales without reading cu_seqlens: total // block + batch. Ranges never overlap; what
    is between them holds 1, and attention never reads it.
    """
    numbers = torch.arange(cu_seqlens.numel(), device=cu_seqlens.device)
    return cu_seqlens // block + numbers


def scale_of(amax: Tensor) -> Tensor:
    # Divided by a tensor: by a number, PyTorch would multiply by its inverse on a GPU.
    return amax.clamp_min(SMALLEST_AMAX) / amax.new_tensor(LARGEST)


def _row_scales(x: Columns, block: int, group: int) -> tuple[Tensor, Tensor]:
    """Scales of x (batch, rows, heads, head_dim) by block or head, and by row.

    Returns:
        (batch, heads, blocks) or (batch, heads / group); (batch, rows, heads).
    """
    batch, rows, heads, head_dim = x.values.shape
    found = x.magnitudes()
    largest = found.amax(-1) if head_dim else found.new_zeros(batch, rows, heads)
    if block == PER_HEAD:
        by_head = largest.unflatten(2, (-1, group))
        amax = by_head.amax((1, 3)) if rows else by_head.new_zeros(batch, heads // group)
        scale = scale_of(amax)                                          # (b, h_k)
        return scale, scale.repeat_interleave(group, 1)[:, None].expand(batch, rows, heads)
    block = min(block, max(rows, 1))    # no memory for rows that are not there
    count = blocks_of(rows, block)
    padded = torch.nn.functional.pad(largest, (0, 0, 0, count * block - rows))
    scale = scale_of(padded.unflatten(1, (count, block)).amax(2))       # (b, blocks, h)
    # Unlike contiguous(), a clone has the usual strides where a size is 1, as the fakes do.
    by_head = scale.mT.clone(memory_format=torch.contiguous_format)
    return by_head, scale.repeat_interleave(block, 1)[:, :rows]


@without_autocast
def quantize(x: Tensor, rotation: Rotation | None, block: int, group: int,
             sequences: Sequences | None) -> tuple[Tensor, Tensor]:
    """e4m3 of the shape of x, and its scales.

    Args:
        x: (batch, rows, heads, head_dim), or packed (total, heads, head_dim) with sequences.
        rotation: None for none.
        block: rows, PER_HEAD or PER_TENSOR.
        group: heads of x that share a scale per head.
        sequences: of packed tensors. Rows outside of them are not read, and 0.

    Returns:
        Both contiguous. The scales by blocks: (batch, heads, blocks), packed
        (1, heads, total // block + batch), in the places that `first_blocks` says. Per head:
        (batch, heads / group). Per tensor: (1, 1).
    """
    if sequences is None:
        return _quantize_dense(x.float(), rotation, block, group)
    slices, (total, heads, _) = sequences.slices(), x.shape
    batch = len(slices)
    result = torch.zeros(x.shape, dtype=E4M3, device=x.device)
    if block == PER_TENSOR:
        used = torch.zeros(total, dtype=torch.bool, device=x.device)
        for rows in slices:
            used[rows] = True
        one, scales = _quantize_dense(x[None, used].float(), rotation, block, group)
        result[used] = one[0]
        return result, scales
    places = first_blocks(sequences.cu_seqlens, block).tolist() if block > 0 else range(batch)
    shape = (1, heads, total // block + batch) if block > 0 else (batch, heads // group)
    scales = torch.ones(shape, device=x.device)
    for place, rows in zip(places, slices):
        one, scale = _quantize_dense(x[None, rows].float(), rotation, block, group)
        result[rows] = one[0]
        if block > 0:
            scales[0, :, place:place + scale.size(2)] = scale[0]
        else:
            scales[place] = scale[0]
    return result, scales


def _quantize_dense(x: Tensor, rotation: Rotation | None, block: int,
                    group: int) -> tuple[Tensor, Tensor]:
    columns = Columns(x) if rotation is None or x.size(-1) == 0 else rotate(x, rotation)
    if block == PER_TENSOR:
        scale = scale_of(columns.magnitudes().amax() if x.numel() else x.new_zeros(()))
        return columns.cast(scale), scale.reshape(1, 1)
    scale, by_row = _row_scales(columns, block, group)
    return columns.cast(by_row.unsqueeze(-1)), scale


def row_scales(scale: Tensor | None, x: Tensor, block: int,
               cu_seqlens: Tensor | None) -> Tensor | None:
    """The scale of each row and head of x, whose shape without head_dim it has; None for 1.

    Args:
        scale: as `quantize` returns it, for x or for the KV heads that the heads of x use.
        block: rows of a block, if the scale has three dimensions.
        cu_seqlens: (batch + 1,) int64, of packed tensors.
    """
    if scale is None:
        return None
    heads, rows = x.size(-2), x.size(-3)
    row = torch.arange(rows, device=x.device)
    if cu_seqlens is not None and cu_seqlens.numel() == 1:    # no sequence at all
        return x.new_ones(rows, heads, dtype=scale.dtype)
    if cu_seqlens is None:
        by_row = (scale[:, :, row // block] if scale.dim() == 3
                  else scale[:, :, None].expand(-1, -1, rows))          # (b, h or h_k, rows)
        return by_row.repeat_interleave(heads // scale.size(1), 1).mT
    # Rows after the last sequence take any scale: they are never used.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    sequence = sequence.clamp_max(cu_seqlens.numel() - 2)
    if scale.dim() == 2:
        by_row = scale[sequence]                                        # (rows, h_k)
    else:
        place = (first_blocks(cu_seqlens, block)[sequence]
                 + (row - cu_seqlens[sequence]) // block)
        by_row = scale[0][:, place.clamp_max(scale.size(2) - 1)].mT     # (rows, h)
    return by_row.repeat_interleave(heads // by_row.size(1), 1)
