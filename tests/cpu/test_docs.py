"""The README files against the code: paths, environment variables, and the numbers of each tile."""
import itertools
import re
import runpy
import sys
from math import prod
from pathlib import Path

import pytest

from csrc.instances.variants import BACKWARD as BACKWARD_VARIANTS
from csrc.instances.variants import FORWARD as FORWARD_VARIANTS
from flash_attn3 import bench
from flash_attn3._plan import backward_variants, plan_backward, plan_forward, variants

from tests.cpu.test_smem_budget import (E4M3, buffers, bytes_of_rings, element_bytes,
                                        output_registers, rings)

ROOT = Path(__file__).resolve().parents[2]
PAGES = ['README.md', 'csrc/README.md', 'csrc/forward/README.md', 'csrc/backward/README.md',
         'benchmarks/results/README.md']
FORWARD = ROOT / 'csrc/forward/README.md'
BACKWARD = ROOT / 'csrc/backward/README.md'
FOLDERS = ('csrc', 'flash_attn3', 'tests', 'benchmarks', 'build_tools', 'third_party', 'examples')


def table_rows(page: Path, first_cell: str) -> dict[str, list[str]]:
    """The rows of the table whose first header is this, by the text of their first cell."""
    lines = iter(page.read_text().splitlines())
    rows = {}
    for line in lines:
        if line.startswith(f'| {first_cell} |'):
            next(lines)
            break
    for line in lines:
        if not line.startswith('|'):
            break
        name, *cells = (cell.strip() for cell in line.strip('|').split('|'))
        rows[name.strip('`')] = cells
    return rows


def section(page: Path, title: str) -> str:
    return page.read_text().split(f'\n## {title}\n')[1].split('\n## ')[0]


@pytest.mark.parametrize('name', PAGES)
def test_paths_exist(name):
    page = ROOT / name
    text = page.read_text()
    inline = re.findall(r'`([\w./]+)`', text)
    from_root = [path for path in inline if path.startswith(tuple(f'{f}/' for f in FOLDERS))]
    links = [link for link in re.findall(r'\]\(([^)#]+)\)', text)]
    missing = [path for path in from_root if not (ROOT / path).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert from_root or links or inline
    assert not missing


def test_source_files_named_in_csrc_exist():
    folders = 'core|config|device|dispatch|forward|backward|host|instances|ops|schedule'
    text = ''.join(page.read_text() for page in (ROOT / 'csrc/README.md', FORWARD, BACKWARD))
    names = re.findall(rf'`(?:csrc/)?((?:{folders})/[\w.]+)`', text)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / 'csrc' / name).exists()] == []
    for page in (FORWARD, BACKWARD):
        local = re.findall(r'`(\w+\.h)`', page.read_text())
        assert [name for name in local if not (page.parent / name).exists()] == []


def test_environment_variables_are_those_that_the_code_reads():
    sources = [ROOT / 'setup.py', *(ROOT / 'build_tools').glob('*.py'),
               *(ROOT / 'flash_attn3').glob('*.py'), *(ROOT / 'third_party').glob('*.py'),
               *(ROOT / 'csrc').rglob('*.py')]
    read = {name for path in sources
            for name in re.findall(r"environ(?:\.get\(|\[)'(\w+)'", path.read_text())}
    rows = table_rows(ROOT / 'README.md', 'variable')
    documented = {name for row in rows for name in re.findall(r'[A-Z][A-Z0-9_]{2,}', row)}
    assert {name for name in read if name.startswith('FLASH_ATTN3_')} <= documented
    assert documented <= read


def test_explain_commands_of_the_readme_run(monkeypatch, capsys):
    commands = re.findall(r'python -m flash_attn3\.explain (--[^#\n]+)',
                          (ROOT / 'README.md').read_text())
    assert len(commands) >= 2
    for command in commands:
        monkeypatch.setattr(sys, 'argv', ['explain', *command.split()])
        runpy.run_module('flash_attn3.explain', run_name='__main__')
        assert capsys.readouterr().out.startswith('variant ')


def test_bench_commands_of_the_readme_parse():
    text = (ROOT / 'README.md').read_text()
    commands = re.findall(r'python -m flash_attn3\.bench (--[^#\n]+)', text)
    shapes = [bench.shape_of(bench.parse(command.split())) for command in commands]
    assert bench.Shape(2, 4096, 4096, 16, 4, 128, causal=True) in shapes


def test_head_dims_of_the_support_table():
    dims = sorted({variant['head_dim'] for variant in variants()})
    text = table_rows(ROOT / 'README.md', 'feature')['head dim'][0]
    most, first, last, step = map(int, re.fullmatch(
        r'multiples of 8 to (\d+) \(computed: (\d+) to (\d+) in steps of (\d+)\)', text).groups())
    assert dims == list(range(first, last + 1, step)) and most == last


def test_head_dims_of_the_values():
    """In the support table: what the checks let through."""
    text = table_rows(ROOT / 'README.md', 'feature')['head dim of v'][0]
    most, longest, head_dim, most_of_gradients = map(int, re.fullmatch(
        r'multiples of 8 to (\d+), to (\d+) with a head dim up to (\d+); gradients: to (\d+)',
        text).groups())
    for dims, is_fine in (((8, most), True), ((head_dim, longest), True),
                          ((head_dim, longest + 8), False), ((head_dim + 8, most + 8), False)):
        facts = plan_forward('bfloat16', 1, 1, 1, 1, 1, *dims, False, 0, 0, 132, 0)
        assert ('reason' not in facts) is is_fine
    for head_dim_v, is_fine in ((most_of_gradients, True), (most_of_gradients + 8, False)):
        facts = plan_backward('bfloat16', 1, 1, 1, 1, 1, head_dim, head_dim_v, False, 132, 0)
        assert ('reason' not in facts) is is_fine


def test_head_dims_with_gradients():
    """In the support table and, where some have none, under Limits."""
    largest = max(variant['head_dim'] for variant in backward_variants())
    has_all = largest == max(variant['head_dim'] for variant in variants())
    text = table_rows(ROOT / 'README.md', 'feature')['gradients'][0]
    assert text == ('yes' if has_all else f'head dims up to {largest}')
    limit = f'Gradients on a Hopper GPU up to head dim {largest};'
    assert (limit in section(ROOT / 'README.md', 'Limits')) is not has_all


def test_shared_memory_of_every_backward_tile():
    """The last number of a cell is its bytes; their sum is what the variants say. Limits of keys
    are those of variants for general masks.
    """
    rows = table_rows(BACKWARD, 'tile')
    tiles = {variant.name: variant.tile for variant in BACKWARD_VARIANTS}
    assert set(rows) == set(tiles.values())
    for variant in backward_variants():
        sizes, *parts, total = rows[tiles[variant['name']]]
        assert sizes == f'{variant["tile_m"]} x {variant["tile_n"]}'
        numbers = [int(re.findall(r'\d+', part)[-1]) for part in parts]
        assert sum(numbers) == int(total)
        has_limits = variant['mask'] in ('general', 'softcap')
        assert variant['shared_bytes'] == int(total) - (0 if has_limits else numbers[-1])


# ---------------------------------------------------------------- shared memory and registers
def forward_tiles() -> dict[str, dict]:
    """The facts of every tile, those of FP8 last; its variants have the same."""
    tiles = {variant.name: variant.tile for variant in FORWARD_VARIANTS}
    order = re.findall(r'^struct (FwdTile\w+) ', ''.join(
        (ROOT / 'csrc/config' / name).read_text() for name in ('fwd_tiles.h', 'fwd_tiles_fp8.h')),
        re.MULTILINE)
    facts = {tiles[variant['name']]: variant for variant in variants()}
    return {tile: facts[tile] for tile in order if tile in facts}


def memory_row(tile: str, facts: dict) -> str:
    """stages (x warpgroups) x bytes of each ring, what is left for the rest, and the sum."""
    cells = [f'`{tile}`', f'{facts["tile_m"]} x {facts["tile_n"]}']
    for ring, size in buffers(facts).items():
        factors = *rings(facts)[ring], size
        cells.append(' x '.join(map(str, factors)) + f' = {prod(factors)}')
    total = facts['shared_bytes']
    return '| ' + ' | '.join([*cells, str(total - bytes_of_rings(facts)), str(total)]) + ' |'


def register_row(tile: str, facts: dict) -> str:
    """S is 64 x keys fp32 over 128 threads, O 64 x head_dim_v, and what is summed beside it; P has
    the bytes of an operand.
    """
    consumer = facts['consumer_registers']
    own = (facts['tile_n'] // 2, facts['tile_n'] * element_bytes(facts) // 8,
           output_registers(facts))
    cells = [f'`{tile}`', facts['producer_registers'], consumer, *own, consumer - sum(own)]
    return '| ' + ' | '.join(map(str, cells)) + ' |'


def _is_fp8(facts: dict) -> bool:
    return facts['dtype'] == E4M3


# Header, rule of a row, and which tiles have one.
TILE_TABLES = {
    'memory': ('| tile | rows x keys | Q ring | K ring | V ring | barriers | total |',
               memory_row, lambda facts: not _is_fp8(facts)),
    'FP8 memory': ('| tile | rows x keys | Q ring | K ring | V ring | raw V ring | '
                   'staged O | O in fp32 | barriers and scales | total |', memory_row, _is_fp8),
    'registers': ('| tile | producer | consumer | S | P | O | left for the rest |',
                  register_row, lambda facts: True)}


def tile_table(name: str) -> list[str]:
    """The lines of a table of csrc/forward/README.md, to paste there:

        python -c "from tests.cpu.test_docs import tile_table; print(*tile_table('FP8 memory'),
                   sep=chr(10))"
    """
    header, row, is_wanted = TILE_TABLES[name]
    rows = [row(tile, facts) for tile, facts in forward_tiles().items() if is_wanted(facts)]
    return [header, '|---' * header.count(' | ') + '|---|', *rows]


def test_every_tile_has_a_row_of_facts():
    """Variants of a tile differ in what the tables do not show."""
    tiles = {variant.name: variant.tile for variant in FORWARD_VARIANTS}
    facts = forward_tiles()
    assert set(facts) == set(tiles.values())
    for variant in variants():
        tile = tiles[variant['name']]
        for row in (memory_row, register_row):
            assert row(tile, variant) == row(tile, facts[tile])


@pytest.mark.parametrize('name', TILE_TABLES)
def test_shared_memory_and_registers_of_every_tile(name):
    """In any order. hint: `tile_table` makes the lines."""
    header, rule, *rows = tile_table(name)
    lines = FORWARD.read_text().splitlines()
    assert header in lines, f'{FORWARD.name} has no table of {name}'
    begin = lines.index(header)
    assert lines[begin + 1] == rule
    found = itertools.takewhile(lambda line: line.startswith('|'), lines[begin + 2:])
    assert sorted(found) == sorted(rows)


def test_barrier_tables_name_every_barrier():
    words = (ROOT / 'csrc/device/barriers.h').read_text()
    named = set(re.findall(r'^  (k\w+) = \d', words, re.MULTILINE))
    in_tables = set()
    for page in (FORWARD, BACKWARD):
        code = (page.parent / 'storage.h').read_text()
        mbarriers = set(re.findall(r'Mbarrier (\w+)[\[;]', code))
        cells = re.findall(r'^\| (`[^|]*)\|', section(page, 'Barriers'), re.MULTILINE)
        table = set(re.findall(r'`(\w+)', ' '.join(cells)))
        assert table - named == mbarriers
        in_tables |= table & named
    assert in_tables == named
