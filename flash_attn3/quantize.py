"""FP8 quantisation in plain PyTorch, bit for bit what the kernels give: rotate, scale, cast.

Called by fp8.py for tensors that are not on a Hopper GPU, and by the tests of the kernels
(csrc/quantize/quantize.cu). Each step is one correctly rounded operation of
float32 in the order that is written here, never contracted to a fused multiply-add:

1. x as float32, exact for float16 and bfloat16.
2. Rotation, of head_dim columns at once: x H D of the signs and the Hadamard matrices below.
   a. Column c of KV head h changes its sign if bit c % 32 of the word
      mix(mix(mix(seed) + h) + c // 32) is set; `mix` is below, sums are modulo 2^32.
   b. head_dim is cut into its powers of two, largest first (96 = 64 + 32), and each piece goes
      through butterflies of the distances 1, 2, 4, ... in this order: columns i and i + distance
      of a pair become their sum and their difference.
   c. Its norm is the float32 next to width ** -0.5; without rotation it is 1.
3. The largest absolute value times norm of a block, among those that are finite: 0 if none is.
4. scale = max(largest, 2^-64) / 448, a division. The floor is for blocks of zeros: with it, 1 /
   scale is finite, they never count as large beside other blocks, and sums that are taken relative
   to a scale (reference_fp8.py) stay below 2^128.
5. factor = norm times (1 / scale), and each value times factor, then to [-448, 448] (a product may
   be some ulps above).
6. To e4m3: nearest, ties to even, with subnormals. Infinities have no place in e4m3 and become NaN
   as NaN does, of bits 0x7f.

WHY scales are no powers of two: largest / 448 makes the largest value of a block exact, and the
error of an outlier is the largest of all. On N(0, 1) + 10 N(0, 1) in one value of 1000 (2048 keys,
head dim 128, blocks of 32 rows of k and v) attention is off by 1.31e-2 without rotation and 8.1e-3
with it; with powers of two by 1.78e-2 and 8.3e-3, whatever the blocks: e4m3 has an exponent of its
own.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_AMAX = 2.0 ** -64
Q_BLOCK, KV_BLOCK = 64, 384    # rows of a block of q, and of k and v, as attention takes them
BLOCK_STEP = 32    # blocks have a multiple of so many rows
PER_HEAD, PER_TENSOR = 0, -1    # in place of rows: a scale per (sequence, KV head), or only one

_WORD = 0xFFFFFFFF


class Rotation(NamedTuple):
    """seed: of the signs, 0 to 2^32 - 1. group: heads of x that use the signs of one KV head."""
    seed: int
    group: int


class Sequences(NamedTuple):
    """Of packed tensors: (batch + 1,) and (batch,) integers; seqused None for all rows."""
    cu_seqlens: Tensor
    seqused: Tensor | None

    def slices(self) -> list[slice]:
        starts = self.cu_seqlens.tolist()
        ends = starts[1:] if self.seqused is None else [
            start + used for start, used in zip(starts, self.seqused.tolist())]
        return [slice(*pair) for pair in zip(starts, ends)]


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
    """float32 x (..., head_dim) times the Hadamard matrix of each piece, of 1 and -1."""
    return torch.cat([_butterflies(piece) for piece in x.split(pieces(x.size(-1)), dim=-1)], dim=-1)


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


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """float32 x (..., heads, head_dim), rotated, but for the norms."""
    heads, head_dim = x.shape[-2:]
    own = signs(rotation.seed, heads // rotation.group, head_dim, x.device)
    return hadamard(x * own.repeat_interleave(rotation.group, dim=0))


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


def cast(x: Tensor, scale: Tensor, norm: Tensor | float = 1.0) -> Tensor:
    """float32 x, scales and norms that broadcast with it, to e4m3."""
    scaled = (x * (norm * (1.0 / scale))).clamp(-LARGEST, LARGEST)
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return values.copy_(scaled.where(x.isfinite(), torch.nan))


def _magnitudes(x: Tensor, norm: Tensor | float) -> Tensor:
    return x.abs().where(x.isfinite(), 0.0) * norm


def _row_scales(x: Tensor, norm: Tensor | float, block: int,
                group: int) -> tuple[Tensor, Tensor]:
    """Scales of x (batch, rows, heads, head_dim) by block or head, and by row.

    Returns:
        (batch, heads, blocks) or (batch, heads / group); (batch, rows, heads).
    """
    batch, rows, heads, _ = x.shape
    largest = _magnitudes(x, norm).amax(-1) if x.size(-1) else x.new_zeros(batch, rows, heads)
    if block == PER_HEAD:
        by_head = largest.unflatten(2, (-1, group))
        amax = by_head.amax((1, 3)) if rows else by_head.new_zeros(batch, heads // group)
        scale = scale_of(amax)                                          # (b, h_k)
        return scale, scale.repeat_interleave(group, 1)[:, None].expand(batch, rows, heads)
    count = blocks_of(rows, block)
    padded = torch.nn.functional.pad(largest, (0, 0, 0, count * block - rows))
    scale = scale_of(padded.unflatten(1, (count, block)).amax(2))       # (b, blocks, h)
    # Unlike contiguous(), a clone has the usual strides where a size is 1, as the fakes do.
    by_head = scale.mT.clone(memory_format=torch.contiguous_format)
    return by_head, scale.repeat_interleave(block, 1)[:, :rows]


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
    norm = 1.0
    if rotation is not None:
        x, norm = rotate(x, rotation), norms(x.size(-1), x.device)
    if block == PER_TENSOR:
        amax = _magnitudes(x, norm).amax() if x.numel() else x.new_zeros(())
        scale = scale_of(amax)
        return cast(x, scale, norm), scale.reshape(1, 1)
    scale, by_row = _row_scales(x, norm, block, group)
    return cast(x, by_row.unsqueeze(-1), norm), scale


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
    # Rows behind the last sequence read anything: nobody uses them.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    sequence = sequence.clamp_max(cu_seqlens.numel() - 2)
    if scale.dim() == 2:
        by_row = scale[sequence]                                        # (rows, h_k)
    else:
        place = (first_blocks(cu_seqlens, block)[sequence]
                 + (row - cu_seqlens[sequence]) // block)
        by_row = scale[0][:, place.clamp_max(scale.size(2) - 1)].mT     # (rows, h)
    return by_row.repeat_interleave(heads // by_row.size(1), 1)
