"""The only list of what is built: one row a variant (generate.py turns it into C++).

A variant is a tile of csrc/config/fwd_tiles.h for one dtype and one mask. Everything else (lengths,
strides, heads, GQA packing, scale) is a run-time value. Variants of one tile share a compile unit.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardVariant:
    tile: str     # struct in csrc/config/fwd_tiles.h
    dtype: str    # 'Fp16' or 'Bf16'
    mask: str     # 'Full' or 'Causal'
    head_dim: int
    suffix: str = ''  # tells tiles apart where several serve a problem and the planner chooses

    @property
    def name(self) -> str:
        """The C++ struct: FwdBf16D128Causal. Tests, error messages and profilers show this name."""
        return f'Fwd{self.dtype}D{self.head_dim}{self.mask}{self.suffix}'


def _forward_variants() -> list[ForwardVariant]:
    tiles = [
        ('FwdTileD64', 64, ('Full', 'Causal'), ''),
        ('FwdTileD64Short', 64, ('Causal',), 'Short'),
        ('FwdTileD128', 128, ('Full', 'Causal'), ''),
        ('FwdTileD256', 256, ('Full', 'Causal'), ''),
    ]
    return [ForwardVariant(tile, dtype, mask, head_dim, suffix)
            for tile, head_dim, masks, suffix in tiles
            for mask in masks for dtype in ('Bf16', 'Fp16')]


FORWARD = _forward_variants()
