"""Turns variants.py into C++ under build/instances/. The build calls it.

    fwd_variants.h       the structs of all variants, and the table of their values (plain C++)
    fwd_built.inc        whether each variant is in this build
    fwd_registry.inc     the launchers, index-parallel with that table; nullptr: not built
    forward_<shape>.cu   compile units, named after the first of their shapes
    bwd_variants.h ...   these files for the backward
    wgmma_shapes.h       shapes of MMAs that CuTe does not offer (generate_wgmma_shapes.py)
    attention_arguments.h   the arguments of a call (generate_arguments.py)
    attention_ops.h         how each op reads them (generate_arguments.py)

FLASH_ATTN3_VARIANTS builds a subset: a comma list of glob patterns on names, such as
`FwdBf16D128*`. A file is rewritten only if its text changed.
"""
import argparse
import difflib
import fnmatch
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / 'device'), str(_HERE.parent / 'call')]
import generate_arguments  # noqa: E402
import generate_wgmma_shapes  # noqa: E402
from variants import BACKWARD, FORWARD, Variant  # noqa: E402

_DTYPES = {'Fp16': 'kFloat16', 'Bf16': 'kBFloat16', 'E4m3': 'kFloat8E4M3'}
# The headers take 13 s of processor time in each unit (nvcc 13.0, 2026-11-22); all 225 variants in
# 23 units took 25 minutes.
_VARIANTS_OF_A_UNIT = 12
_BANNER = '// Written by csrc/plan/generate.py from variants.py.'


@dataclass(frozen=True)
class Family:
    """The variants of one kernel, and how C++ names what belongs to it."""
    variants: Sequence[Variant]
    short: str     # in file names: fwd
    long: str      # in names of units and of the launch function: forward
    tiles: Sequence[str]  # headers of csrc/config

    @property
    def prefix(self) -> str:
        return self.short.capitalize()

    @property
    def launch_arguments(self) -> str:
        return f'({self.prefix}Params const& params, void* stream)'


FAMILIES = (Family(FORWARD, 'fwd', 'forward', ('fwd_tiles.h', 'fwd_tiles_fp8.h')),
            Family(BACKWARD, 'bwd', 'backward', ('bwd_tiles.h',)))


def select(variants: Sequence[Variant], patterns: str) -> list[Variant]:
    """The variants whose names match the comma list of globs; an empty list means all."""
    globs = [pattern.strip() for pattern in patterns.split(',') if pattern.strip()]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(variant.name, glob) for variant in variants):
            near = ', '.join(difflib.get_close_matches(
                glob, [variant.name for variant in variants], n=5, cutoff=0))
            raise ValueError(
                f'flash_attn3.build: expected FLASH_ATTN3_VARIANTS to hold patterns that match a '
                f'variant, got {glob!r}; hint: near it are {near}; csrc/plan/variants.py '
                'lists all')
    return [variant for variant in variants
            if not globs or any(fnmatch.fnmatchcase(variant.name, glob) for glob in globs)]


def variants_header(family: Family) -> str:
    structs = '\n\n'.join(
        f'struct {variant.name} {{\n'
        f'  static constexpr {family.prefix}Config k = {family.short}_variant(\n'
        f'      "{variant.name}", k{variant.tile}, {{{variant.head_dims[0]}, '
        f'{variant.head_dims[1]}}}, Dtype::{_DTYPES[variant.dtype]},\n'
        f'      k{variant.kind}Kernel);\n'
        f'}};' for variant in family.variants)
    rows = '\n'.join(f'    {variant.name}::k,' for variant in family.variants)
    includes = '\n'.join(f'#include "config/{header}"' for header in family.tiles)
    return (f'{_BANNER} Every variant, built or not.\n'
            f'#pragma once\n\n{includes}\n\n'
            f'namespace fa3 {{\n\n{structs}\n\n'
            f'inline constexpr {family.prefix}Config k{family.prefix}Variants[] = '
            f'{{\n{rows}\n}};\n\n'
            f'}}  // namespace fa3\n')


def built_flags(family: Family, built: Sequence[Variant]) -> str:
    rows = '\n'.join(f'    {str(variant in built).lower()},  // {variant.name}'
                     for variant in family.variants)
    return (f'{_BANNER} Index-parallel with k{family.prefix}Variants.\nnamespace fa3 {{\n\n'
            f'inline constexpr bool k{family.prefix}Built[] = {{\n{rows}\n}};\n\n'
            f'}}  // namespace fa3\n')


def registry(family: Family, built: Sequence[Variant]) -> str:
    declarations = '\n'.join(f'void launch_{variant.name}{family.launch_arguments};'
                             for variant in family.variants if variant in built)
    rows = '\n'.join(
        f'    &launch_{variant.name},' if variant in built else f'    nullptr,  // {variant.name}'
        for variant in family.variants)
    prefix = family.prefix
    return (f'{_BANNER} Index-parallel with k{prefix}Variants; nullptr: not built.\n'
            f'#include "core/problem.h"\n\nnamespace fa3 {{\n\n{declarations}\n\n'
            f'using {prefix}Launch = void (*){family.launch_arguments};\n\n'
            f'inline constexpr {prefix}Launch k{prefix}Launchers[] = {{\n{rows}\n}};\n\n'
            f'}}  // namespace fa3\n')


def units_of(family: Family, built: Sequence[Variant]) -> dict[str, list[Variant]]:
    """What each compile unit launches, by the unit's name: the shapes that are its first's, and
    more while there is room. The variants of a shape stay together, in their order.
    """
    by_shape: dict[str, list[Variant]] = {}
    for variant in family.variants:
        if variant in built:
            by_shape.setdefault(variant.shape, []).append(variant)
    units: dict[str, list[Variant]] = {}
    last: list[Variant] = []
    for shape, variants in by_shape.items():
        is_other = bool(last) and last[0].folder != variants[0].folder
        if not last or is_other or len(last) + len(variants) > _VARIANTS_OF_A_UNIT:
            last = units[f'{family.long}_{shape}'] = []
        last += variants
    return units


def unit(family: Family, variants: Sequence[Variant]) -> str:
    folder = variants[0].folder
    functions = '\n\n'.join(
        f'void launch_{variant.name}{family.launch_arguments} {{\n'
        f'  launch_{folder}<{variant.name}>(params, stream);\n'
        f'}}' for variant in variants)
    return (f'{_BANNER}\n#include "{folder}/launch.h"\n'
            f'#include "{family.short}_variants.h"\n\n'
            f'namespace fa3 {{\n\n{functions}\n\n}}  // namespace fa3\n')


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _generate_family(folder: Path, family: Family, built: Sequence[Variant]) -> list[Path]:
    units = {folder / f'{name}.cu': unit(family, variants)
             for name, variants in units_of(family, built).items()}
    for stale in set(folder.glob(f'{family.long}_*.cu')) - set(units):
        stale.unlink()
    _write_if_changed(folder / f'{family.short}_variants.h', variants_header(family))
    _write_if_changed(folder / f'{family.short}_built.inc', built_flags(family, built))
    _write_if_changed(folder / f'{family.short}_registry.inc', registry(family, built))
    for path, text in units.items():
        _write_if_changed(path, text)
    return list(units)


def generate(folder: Path, patterns: str = '') -> list[Path]:
    """Writes the files and gives the compile units; a unit of an earlier selection is removed."""
    built = select([variant for family in FAMILIES for variant in family.variants], patterns)
    folder.mkdir(parents=True, exist_ok=True)
    _write_if_changed(folder / 'wgmma_shapes.h', generate_wgmma_shapes.header())
    _write_if_changed(folder / 'attention_arguments.h', generate_arguments.header())
    _write_if_changed(folder / 'attention_ops.h', generate_arguments.ops_header())
    return [path for family in FAMILIES for path in _generate_family(folder, family, built)]


def main() -> None:
    parser = argparse.ArgumentParser(description='Writes the generated C++, prints the units.')
    parser.add_argument('folder', type=Path)
    for path in generate(parser.parse_args().folder, os.environ.get('FLASH_ATTN3_VARIANTS', '')):
        print(path)


if __name__ == '__main__':
    main()
