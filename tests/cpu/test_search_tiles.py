"""benchmarks/search_tiles.py without a GPU: the candidates' file, their source, and a library."""
import subprocess
from pathlib import Path

import pytest

from benchmarks import search_tiles
from csrc.instances import variants

TILES = Path(search_tiles.__file__).with_name('tiles.txt')


def test_candidates_of_a_file():
    text = '# only a comment\n\na kHeadDim=64 kTileN=96 kPingPong=false  # why\n'
    candidate, = search_tiles.read_candidates(text)
    assert (candidate.name, candidate.head_dim) == ('a', 64)
    source = candidate.source('fp16')
    for line in ('struct a : FwdDefaults {', '  static constexpr auto kTileN = 96;',
                 '  static constexpr auto kPingPong = false;',
                 '  static constexpr auto kHeadDimV = 64;',
                 '  static constexpr Dtype kDtype = Dtype::kFloat16;'):
        assert f'{line}\n' in source
    assert '@' not in source


@pytest.mark.parametrize('line', ['a', 'a kHeadDim=64', 'a kTileN=64', 'a kHeadDim',
                                  'a-b kHeadDim=1 kTileN=64'])
def test_a_bad_line_is_named(line):
    with pytest.raises(SystemExit, match=f"got line 2: '{line}'"):
        search_tiles.read_candidates(f'\n{line}\n')


def test_candidates_have_the_head_dims_of_kernels():
    candidates = search_tiles.read_candidates(TILES.read_text())
    assert {c.head_dim for c in candidates} <= {v.head_dim for v in variants.FORWARD}
    assert len({c.name for c in candidates}) == len(candidates)


def test_a_candidate_becomes_a_library():
    candidate, = search_tiles.read_candidates('test_tile kHeadDim=64 kTileN=64 kQStages=2')
    library = search_tiles.build([candidate], 'bf16')['test_tile']
    symbols = subprocess.run(['nm', '-D', '--defined-only', library], capture_output=True,
                             text=True, check=True).stdout
    assert ' T candidate_forward\n' in symbols
