"""The only list of what is built: one row a variant (generate.py turns it into C++).

A variant is a tile of csrc/config (fwd_tiles.h, fwd_tiles_fp8.h, bwd_tiles.h) for head dims, a
dtype and a kind (core/kernel_kind.h). Full and causal variants serve dense batches; general ones
everything else (packed sequences, windows, chunks, sinks, row maxima), softcap ones the same with a
softcap. All other properties of a problem are run-time values. Variants of one shape share a
compile unit.
"""
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    tile: str     # constant of csrc/config/fwd_tiles.h, fwd_tiles_fp8.h (E4m3) or bwd_tiles.h
    dtype: str    # 'Fp16', 'Bf16' or 'E4m3'
    kind: str     # 'Full', 'Causal', 'General' or 'Softcap'
    head_dim: int | str   # '192x128': 192 of q and k, 128 of v
    suffix: str = ''  # tells tiles apart where several serve a problem and the planner chooses

    @property
    def name(self) -> str:
        """The C++ struct: FwdBf16D128Causal. Tests, error messages and profilers show this name."""
        return f'{self.tile[:3]}{self.dtype}D{self.head_dim}{self.kind}{self.suffix}'

    @property
    def folder(self) -> str:
        """The folder of csrc that has the kernel."""
        if self.tile.startswith('Bwd'):
            return 'backward'
        if 'Decode' in self.suffix:
            return 'decode'
        return 'mla' if self.kind == 'Latent' else 'forward'

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dim of q and k, and that of v."""
        dims = [int(dim) for dim in str(self.head_dim).split('x')]
        return dims[0], dims[-1]

    @property
    def shape(self) -> str:
        """The tile, and the head dims where they are not those of its name."""
        tile, dims = self.tile, f'D{self.head_dim}'
        return tile if re.search(dims + r'(?!\d|x)', tile) else f'{tile}{dims}'


def _forward_variants() -> list[Variant]:
    both = 'Full Causal'
    # (tile, head dim, kinds, suffix); the fastest of those that serve a problem comes first
    tiles = [(f'FwdTileD{tile}', head_dim, both, '') for tile, head_dims in (
        (64, (32, 48, 64)), (96, (80, 96, 112)), (192, (144, 160, 176, 192)),
        (256, (208, 224, 240, 256))) for head_dim in head_dims]
    tiles += [('FwdTileD128', 128, 'Full', ''), ('FwdTileD128Short', 128, 'Causal', ''),
              ('FwdTileD64Short', 64, 'Causal', 'Short'),
              ('FwdTileD128Short', 128, 'Full', 'Short')]
    tiles += [(f'FwdTileD{tile}Short', head_dim, both, 'Short')
              for tile, head_dim in ((96, 80), (96, 96), (112, 112), (256, 256))]
    tiles += [('FwdTileD64Small', 64, both, 'Small'),
              ('FwdTileD128Small', 128, 'Full', 'Small'),
              ('FwdTileD128ShortSmall', 128, 'Full', 'ShortSmall'),
              ('FwdTileD128ShortSmall', 128, 'Causal', 'Small'),
              ('FwdTileD256Small', 256, both, 'Small'),
              ('FwdTileD256ShortSmall', 256, both, 'ShortSmall')]
    tiles += [(f'FwdTileD{head_dim}', head_dim, 'General', '') for head_dim in (64, 128, 192, 256)]
    tiles += [(f'FwdTileD{head_dim}Short', head_dim, 'General', 'Short' * (head_dim != 96))
              for head_dim in (64, 96, 128)]
    tiles += [(f'FwdTileD{head_dim}Tiny', head_dim, 'General', 'Tiny') for head_dim in (64, 128)]
    tiles += [('FwdTileD64Short', 64, 'Softcap', ''), ('FwdTileD128Short', 128, 'Softcap', ''),
              ('FwdTileD256', 256, 'Softcap', '')]
    tiles += [(f'FwdTileD{tile}', head_dims, 'Causal General', '') for tile, head_dims in (
        (128, '64x128'), ('64x256', '64x256'), (64, '96x64'), (64, '128x64'),
        ('192x128', '192x128'))]
    tiles += [('FwdTileD64Short', 64, 'Lists', ''), ('FwdTileD128Short', 128, 'Lists', ''),
              ('FwdTileD256', 256, 'Lists ListsSoftcap', '')]
    tiles += [(f'FwdTileD{head_dim}Block', head_dim, 'Lists', 'Block') for head_dim in (64, 128)]
    tiles += [('FwdTileD256', 512, f'{both} General Softcap Lists', '')]
    tiles += [(f'FwdTileD{head_dim}Cache', head_dim, 'Cache CacheSoftcap', '')
              for head_dim in (64, 128, '192x128', 256, 512)]
    tiles += [(f'FwdTileD{head_dim}CacheKv8', head_dim, 'Cache CacheSoftcap', 'Kv8')
              for head_dim in (64, 128, '192x128', 256, 512)]
    tiles += [(f'FwdTileD{head_dim}CacheLong', head_dim, 'Cache', 'Long')
              for head_dim in (64, 128, '192x128')]
    tiles += [(f'FwdTileD{head_dim}Folded', head_dim, f'{both} General Softcap', 'Folded')
              for head_dim in (64, 128, '192x128', 256)]
    decoded = (64, 96, 128, '192x128', 256)
    tiles += [(f'FwdTileD{head_dim}Decode', head_dim, 'Cache', 'Decode') for head_dim in decoded]
    tiles += [('FwdTileLatentDecode', '64x512', 'Latent', 'Decode'),
              ('FwdTileLatentDecodeKv8', '64x512', 'Latent', 'DecodeKv8'),
              ('FwdTileLatent', '64x512', 'Latent', ''),
              ('FwdTileLatentKv8', '64x512', 'Latent', 'Kv8')]
    half_precision = [Variant(tile, dtype, kind, head_dim, suffix)
                  for tile, head_dim, kinds, suffix in tiles
                  for kind in kinds.split() for dtype in ('Bf16', 'Fp16')]
    tiles = [('FwdTileFp8D64', 64, f'{both} General Softcap', ''),
             ('FwdTileFp8D256', 256, f'{both} General Softcap Lists', ''),
             ('FwdTileFp8D128', 128, f'{both} General', ''),
             ('FwdTileFp8D128Short', 128, f'{both} General', 'Short'),
             ('FwdTileFp8D128Short', 128, 'Softcap Lists', ''),
             ('FwdTileFp8D192x128', '192x128', 'Causal General', '')]
    tiles += [(f'FwdTileFp8D{head_dim}Promote', head_dim, 'General Softcap', 'Promote')
              for head_dim in (64, 128, 256)]
    tiles += [('FwdTileFp8D192x128Promote', '192x128', 'General', 'Promote')]
    tiles += [(f'FwdTileFp8D{head_dim}Cache', head_dim, 'Cache CacheSoftcap', '')
              for head_dim in (64, 128, '192x128', 256)]
    # These take q of either dtype, and compute in fp16.
    half_precision += [Variant(f'FwdTileD{head_dim}DecodeKv8', 'Fp16', 'Cache', head_dim,
                                  'DecodeKv8') for head_dim in decoded]
    return half_precision + [Variant(tile, 'E4m3', kind, head_dim, suffix)
                         for tile, head_dim, kinds, suffix in tiles
                         for kind in kinds.split()]


FORWARD = _forward_variants()


def _backward_variants() -> list[Variant]:
    all_kinds = 'Full Causal General Softcap'
    listed = ' Lists ListsSoftcap'
    tiles = [(f'BwdTileD{head_dim}', head_dim, f'{all_kinds}{lists}') for head_dim, lists in (
        (64, listed), (96, ''), (128, listed), (192, ' Lists'), (256, listed))]
    tiles += [(f'BwdTileD{tile}', head_dims, 'Causal General') for tile, head_dims in (
        ('128Narrow', '64x128'), ('64x256', '64x256'), ('128Narrow', '96x64'),
        ('128Narrow', '128x64'), ('192x128', '192x128'))]
    tiles += [('BwdTileD256', 512, 'Causal General Softcap Lists ListsSoftcap')]
    return [Variant(tile, dtype, kind, head_dim)
            for tile, head_dim, kinds in tiles for kind in kinds.split()
            for dtype in ('Bf16', 'Fp16')]


BACKWARD = _backward_variants()
