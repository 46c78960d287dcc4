"""Turns variants.py into C++ under build/instances/. The build calls it.

    fwd_variants.h       the structs and the table of facts of every variant (plain C++)
    fwd_built.inc        whether each variant is in this build
    fwd_registry.inc     the launchers, index-parallel with that table; nullptr: not built
    forward_<Tile>.cu    one compile unit per tile: a further variant of a tile costs seconds
    wgmma_shapes.h       shapes of products that CuTe does not offer (generate_wgmma_shapes.py)

FLASH_ATTN3_VARIANTS builds a subset: a comma list of glob patterns on names, such as
`FwdBf16D128*`. A file is rewritten only if its text changed.
"""
import argparse
import fnmatch
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / 'device')]
import generate_wgmma_shapes  # noqa: E402
from variants import FORWARD, ForwardVariant  # noqa: E402

_DTYPES = {'Fp16': 'kFloat16', 'Bf16': 'kBFloat16'}
_MASKS = {'Full': 'kFull', 'Causal': 'kCausal'}
_BANNER = '// Written by csrc/instances/generate.py from variants.py.'
_LAUNCH_ARGUMENTS = '(FwdParams const& params, void* stream)'


def select(variants: Sequence[ForwardVariant], patterns: str) -> list[ForwardVariant]:
    """The variants whose names match the comma list of globs; an empty list means all."""
    globs = [pattern.strip() for pattern in patterns.split(',') if pattern.strip()]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(variant.name, glob) for variant in variants):
            names = ', '.join(variant.name for variant in variants)
            raise ValueError(
                f'flash_attn3.build: expected FLASH_ATTN3_VARIANTS to hold patterns that match a '
                f'variant, got {glob!r}; hint: the variants are {names}')
    return [variant for variant in variants
            if not globs or any(fnmatch.fnmatchcase(variant.name, glob) for glob in globs)]


def variants_header(variants: Sequence[ForwardVariant]) -> str:
    structs = '\n\n'.join(
        f'struct {variant.name} : {variant.tile} {{\n'
        f'  static constexpr char const* kName = "{variant.name}";\n'
        f'  static constexpr Dtype kDtype = Dtype::{_DTYPES[variant.dtype]};\n'
        f'  static constexpr MaskKind kMask = MaskKind::{_MASKS[variant.mask]};\n'
        f'}};' for variant in variants)
    rows = '\n'.join(f'    fwd_facts<{variant.name}>("{variant.name}"),' for variant in variants)
    return (f'{_BANNER} Every variant, built or not.\n'
            f'#pragma once\n\n#include "config/fwd_tiles.h"\n\nnamespace fa3 {{\n\n{structs}\n\n'
            f'inline constexpr FwdVariantFacts kFwdVariants[] = {{\n{rows}\n}};\n\n'
            f'}}  // namespace fa3\n')


def built_flags(variants: Sequence[ForwardVariant], built: Sequence[ForwardVariant]) -> str:
    rows = '\n'.join(f'    {str(variant in built).lower()},  // {variant.name}'
                     for variant in variants)
    return (f'{_BANNER} Index-parallel with kFwdVariants.\nnamespace fa3 {{\n\n'
            f'inline constexpr bool kFwdBuilt[] = {{\n{rows}\n}};\n\n'
            f'}}  // namespace fa3\n')


def registry(variants: Sequence[ForwardVariant], built: Sequence[ForwardVariant]) -> str:
    declarations = '\n'.join(f'void launch_{variant.name}{_LAUNCH_ARGUMENTS};' for variant in built)
    rows = '\n'.join(
        f'    &launch_{variant.name},' if variant in built else f'    nullptr,  // {variant.name}'
        for variant in variants)
    return (f'{_BANNER} Index-parallel with kFwdVariants; nullptr: not built.\n'
            f'#include "core/problem.h"\n\nnamespace fa3 {{\n\n{declarations}\n\n'
            f'using FwdLaunch = void (*){_LAUNCH_ARGUMENTS};\n\n'
            f'inline constexpr FwdLaunch kFwdLaunchers[] = {{\n{rows}\n}};\n\n'
            f'}}  // namespace fa3\n')


def unit(tile: str, built: Sequence[ForwardVariant]) -> str:
    functions = '\n\n'.join(
        f'void launch_{variant.name}{_LAUNCH_ARGUMENTS} {{\n'
        f'  launch_forward<{variant.name}>(params, stream);\n'
        f'}}' for variant in built if variant.tile == tile)
    return (f'{_BANNER}\n#include "forward/launch.h"\n#include "fwd_variants.h"\n\n'
            f'namespace fa3 {{\n\n{functions}\n\n}}  // namespace fa3\n')


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def generate(folder: Path, patterns: str = '') -> list[Path]:
    """Writes the files and gives the compile units; a unit of an earlier selection is removed."""
    built = select(FORWARD, patterns)
    units = {folder / f'forward_{tile}.cu': unit(tile, built)
             for tile in dict.fromkeys(variant.tile for variant in built)}
    folder.mkdir(parents=True, exist_ok=True)
    for stale in set(folder.glob('forward_*.cu')) - set(units):
        stale.unlink()
    _write_if_changed(folder / 'fwd_variants.h', variants_header(FORWARD))
    _write_if_changed(folder / 'wgmma_shapes.h',
                      generate_wgmma_shapes.header())
    _write_if_changed(folder / 'fwd_built.inc', built_flags(FORWARD, built))
    _write_if_changed(folder / 'fwd_registry.inc', registry(FORWARD, built))
    for path, text in units.items():
        _write_if_changed(path, text)
    return list(units)


def main() -> None:
    parser = argparse.ArgumentParser(description='Writes the generated C++, prints the units.')
    parser.add_argument('folder', type=Path)
    for path in generate(parser.parse_args().folder, os.environ.get('FLASH_ATTN3_VARIANTS', '')):
        print(path)


if __name__ == '__main__':
    main()
