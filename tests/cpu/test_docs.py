"""The README files against the code: paths, environment variables, and the numbers of each tile."""
import re
import runpy
import sys
from pathlib import Path

import pytest

from csrc.instances.variants import BACKWARD as BACKWARD_VARIANTS
from csrc.instances.variants import FORWARD as FORWARD_VARIANTS
from flash_attn3 import bench
from flash_attn3._plan import backward_variants, plan_backward, plan_forward, variants

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


def test_shared_memory_and_registers_of_every_tile():
    text = FORWARD.read_text()
    tile, ring, number = r'^\| `(FwdTile\w+)` ', r'\| .*= (\d+) ', r'\| (\d+) '
    memory_row = tile + r'\| (\d+) x (\d+) ' + 3 * ring + 2 * number + r'\|$'
    memory = {row[0]: row[1:] for row in re.findall(memory_row, text, re.MULTILINE)}
    registers = {row[0]: row[1:]
                 for row in re.findall(tile + 6 * number + r'\|$', text, re.MULTILINE)}
    tiles = {variant.name: variant.tile for variant in FORWARD_VARIANTS}
    assert set(tiles.values()) == set(memory) == set(registers)
    for variant in variants():
        tile = tiles[variant['name']]
        rows, keys, q, k, v, barriers, total = map(int, memory[tile])
        assert (rows, keys) == (variant['tile_m'], variant['tile_n'])
        columns = max(variant['columns'], variant['columns_v'])
        assert q == variant['q_stages'] * rows * columns * 2
        assert k == variant['stages'] * keys * variant['columns'] * 2
        assert v == variant['stages'] * keys * variant['columns_v'] * 2
        assert q + k + v + barriers == total == variant['shared_bytes']
        producer, consumer, s, p, o, rest = map(int, registers[tile])
        assert producer == variant['producer_registers']
        assert consumer == variant['consumer_registers']
        assert (s, p, o) == (keys // 2, keys // 4, variant['head_dim_v'] // 2)
        assert s + p + o + rest == consumer


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
