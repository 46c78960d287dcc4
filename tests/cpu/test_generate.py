"""csrc/plan/generate.py: the selection of variants, the tables and units that it writes."""
from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from csrc.plan import generate
from csrc.plan.variants import BACKWARD, FORWARD

CSRC = Path(generate.__file__).parent.parent
NAMES = [variant.name for variant in FORWARD]
BACKWARD_NAMES = [variant.name for variant in BACKWARD]


def names(patterns: str) -> list[str]:
    return [variant.name for variant in generate.select(FORWARD, patterns)]


def table(text: str, name: str) -> list[str]:
    """The rows of a C++ table."""
    body = re.search(name + r'\[\] = \{\n(.*?)\n\};', text, re.DOTALL)
    assert body, f'no table {name}'
    return [row.strip() for row in body[1].splitlines()]


def test_variants_are_distinct_and_their_tiles_exist():
    assert len(set(NAMES)) == len(NAMES)
    tiles = re.findall(r'constexpr FwdConfig k(FwdTile\w+)', ''.join(
        (CSRC / 'config' / name).read_text() for name in ('fwd_tiles.h', 'fwd_tiles_fp8.h')))
    assert {variant.tile for variant in FORWARD} == set(tiles)
    assert len(set(BACKWARD_NAMES)) == len(BACKWARD_NAMES)
    tiles = re.findall(r'constexpr BwdConfig k(\w+)', (CSRC / 'config/bwd_tiles.h').read_text())
    assert {variant.tile for variant in BACKWARD} == set(tiles)


@pytest.mark.parametrize(('patterns', 'expected'), [
    ('', NAMES),
    ('*', NAMES),
    ('FwdBf16D128Causal', ['FwdBf16D128Causal']),
    ('FwdBf16D128*', [name for name in NAMES if name.startswith('FwdBf16D128')]),
    (' FwdFp16D64Full , *D256Causal,', [name for name in NAMES
                                       if name == 'FwdFp16D64Full' or name.endswith('D256Causal')]),
])
def test_selection(patterns: str, expected: list[str]):
    assert names(patterns) == expected


def test_a_pattern_without_a_variant_is_an_error_that_lists_those_near_it():
    text = r"got 'FwdBf16D64Fulll'; hint: .* FwdBf16D64Full,"
    with pytest.raises(ValueError, match=text) as error:
        names('FwdBf16D64Full,FwdBf16D64Fulll')
    assert len(str(error.value)) < 400
    with pytest.raises(ValueError, match=r"got '\?'; hint: near it are (Fwd\w+, ){4}Fwd\w+;"):
        names('?')


@pytest.mark.parametrize(('short', 'names'), [('fwd', NAMES), ('bwd', BACKWARD_NAMES)])
def test_tables_are_index_parallel(tmp_path: Path, short: str, names: list[str]):
    generate.generate(tmp_path, '*D128*')
    prefix = short.capitalize()
    values = table((tmp_path / f'{short}_variants.h').read_text(), f'k{prefix}Variants')
    assert values == [f'{name}::k,' for name in names]
    built = table((tmp_path / f'{short}_built.inc').read_text(), f'k{prefix}Built')
    assert built == [f'{str("D128" in name).lower()},  // {name}' for name in names]
    launchers = table((tmp_path / f'{short}_registry.inc').read_text(), f'k{prefix}Launchers')
    assert launchers == [f'&launch_{name},' if 'D128' in name else f'nullptr,  // {name}'
                         for name in names]


@pytest.mark.parametrize('patterns', ['', 'FwdBf16D128*', 'Bwd*Causal'])
def test_every_selected_variant_is_launched_by_one_unit(tmp_path: Path, patterns: str):
    units = generate.generate(tmp_path, patterns)
    launched = [(kernel, name) for path in units
                for kernel, name in re.findall(r'launch_(\w+)<(\w+)>', path.read_text())]
    assert sorted(launched) == sorted((variant.folder, variant.name)
                                      for variant in generate.select(FORWARD + BACKWARD, patterns))


def test_units_hold_whole_shapes():
    for family in generate.FAMILIES:
        units = generate.units_of(family, family.variants)
        shapes = [{variant.shape for variant in variants} for variants in units.values()]
        assert sum(map(len, shapes)) == len(set().union(*shapes))
        assert all(len(variants) <= 12 for variants in units.values())
        assert all(name.split('_')[1] == variants[0].shape for name, variants in units.items())


def test_only_what_changed_is_written_and_stale_units_go(tmp_path: Path):
    generate.generate(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    units = generate.generate(tmp_path, 'FwdBf16D64Full')
    assert [path.name for path in units] == ['forward_FwdTileD64.cu']
    assert list(tmp_path.glob('*.cu')) == units
    rewritten = {path.name for path in tmp_path.iterdir() if path.stat().st_mtime > 1}
    assert rewritten == {'fwd_built.inc', 'fwd_registry.inc', 'forward_FwdTileD64.cu',
                         'bwd_built.inc', 'bwd_registry.inc'}


def test_the_tables_compile_without_cuda(tmp_path: Path):
    generate.generate(tmp_path, 'FwdBf16D128Causal,BwdFp16D64Full')
    source = tmp_path / 'tables.cpp'
    source.write_text('#include "fwd_variants.h"\n#include "fwd_built.inc"\n'
                      '#include "fwd_registry.inc"\n#include <iterator>\n'
                      f'static_assert(std::size(fa3::kFwdVariants) == {len(NAMES)});\n'
                      f'static_assert(std::size(fa3::kFwdLaunchers) == {len(NAMES)});\n'
                      f'static_assert(fa3::kFwdBuilt[{NAMES.index("FwdBf16D128Causal")}]);\n'
                      '#include "bwd_variants.h"\n#include "bwd_built.inc"\n'
                      '#include "bwd_registry.inc"\n'
                      f'static_assert(std::size(fa3::kBwdLaunchers) == {len(BACKWARD)});\n'
                      f'static_assert(fa3::kBwdBuilt[{BACKWARD_NAMES.index("BwdFp16D64Full")}]);\n')
    subprocess.run(['g++', '-std=c++20', '-fsyntax-only', f'-I{CSRC}', f'-I{tmp_path}', source],
                   check=True)
