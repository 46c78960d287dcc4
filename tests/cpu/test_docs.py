"""The documents against the code: generated parts, paths, links, commands, examples, sizes."""
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from flash_attn3.bench import Shape, __main__ as bench

ROOT = Path(__file__).resolve().parents[2]
PAGES = tables.pages()
FOLDERS = ('csrc', 'flash_attn3', 'tests', 'benchmarks', 'build_tools', 'third_party', 'examples',
           'docs', 'tools')
MOST_WORDS, MOST_RESULTS = 21_750, 40
BARRIERS = ROOT / 'csrc/device/barriers.h'
KERNELS = [path.parent for path in sorted((ROOT / 'csrc').glob('*/storage.h'))]    # with mbarriers
each_page = pytest.mark.parametrize('page', PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def section(page: Path, title: str) -> str:
    return page.read_text().split(f'\n## {title}\n')[1].split('\n## ')[0]


def examples() -> list[tuple[str, str]]:
    """The Python blocks of README.md and docs/ that import something: (page, code)."""
    pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
    return [(page.name, code) for page in pages
            for code in re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL)
            if 'import' in code]


def commands(module: str) -> list[list[str]]:
    """The options of each call of a module in the documents."""
    texts = re.findall(rf'python -m {re.escape(module)} (--[^#\n`]+)',
                       ''.join(page.read_text() for page in PAGES))
    return [shlex.split(text) for text in texts]


def test_generated_parts_are_up_to_date(capsys):
    """hint: python -m benchmarks.tables"""
    assert tables.main(['--check']) == 0, capsys.readouterr().out


def test_a_stale_part_is_found_and_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / 'page.md'
    begin, end = '<!-- generated: number -->\n', '<!-- end -->\n'
    page.write_text(f'a\n{begin}old\n{end}b\n')
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    monkeypatch.setattr(tables, 'pages', lambda: [page])
    monkeypatch.setattr(tables, 'PARTS', {'number': lambda: '12'})
    assert tables.main(['--check']) == 1 and 'page.md' in capsys.readouterr().out
    assert tables.main([]) == 0 and page.read_text() == f'a\n{begin}12\n{end}b\n'
    assert tables.main(['--check']) == 0
    monkeypatch.setattr(tables, 'PARTS', {'number': lambda: '12', 'other': lambda: ''})
    assert tables.main(['--check']) == 1 and 'other' in capsys.readouterr().err


@each_page
def test_paths_and_links_exist(page):
    text = page.read_text()
    paths = [path for path in re.findall(r'`([\w./-]+)`', text)
             if path.startswith(tuple(f'{folder}/' for folder in FOLDERS))]
    links = [link for link in re.findall(r'\]\(([^)#]+)\)', text) if '://' not in link]
    built = {path for path in paths if path.endswith('.so')}
    assert [path for path in paths if path not in built and not (ROOT / path).exists()] == []
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_source_files_named_in_csrc_exist():
    folders = '|'.join(path.name for path in (ROOT / 'csrc').iterdir() if path.is_dir())
    text = ''.join(page.read_text() for page in sorted((ROOT / 'csrc').rglob('*.md')))
    names = re.findall(rf'`(?:csrc/)?((?:{folders})/[\w./]+)`', text)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / 'csrc' / name).exists()] == []
    for folder in KERNELS:
        local = re.findall(r'`(\w+\.h|(?:cache|fp8)/\w+\.h)`', (folder / 'README.md').read_text())
        assert [name for name in local if not (folder / name).exists()] == []


def test_barrier_tables_name_every_barrier():
    assert {'backward', 'decode', 'forward', 'mla'} <= {folder.name for folder in KERNELS}
    named = set(re.findall(r'^  (k\w+) = \d', BARRIERS.read_text(), re.MULTILINE))
    in_tables = set()
    for folder in KERNELS:
        mbarriers = set(re.findall(r'Mbarrier (\w+)[\[;]', (folder / 'storage.h').read_text()))
        rows = re.findall(r'^\| (`[^|]*)\|', section(folder / 'README.md', 'Barriers'),
                          re.MULTILINE)
        table = set(re.findall(r'`(\w+)', ' '.join(rows)))
        assert table - named == mbarriers
        in_tables |= table & named
    assert in_tables == named


def test_environment_variables_are_those_that_the_code_reads():
    sources = [ROOT / 'setup.py', *(path for folder in ('build_tools', 'flash_attn3',
                                                        'third_party', 'csrc')
                                    for path in (ROOT / folder).rglob('*.py'))]
    read = {name for path in sources
            for name in re.findall(r"(?:environ(?:\.get\(|\[)|_is_on\()'(\w+)'", path.read_text())}
    rows = re.findall(r'^\| (`[A-Z].*?) \|', section(ROOT / 'docs/api.md', 'Environment variables'),
                      re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r'[A-Z][A-Z0-9_]{2,}', row)}
    assert {name for name in read if name.startswith('FLASH_ATTN3_')} <= documented
    assert documented <= read


@pytest.mark.parametrize('page, code', examples())
def test_examples_run_on_the_cpu(page, code):
    code = code.replace('torch.cuda.is_available()', 'False')
    found = {}
    exec(compile(code, page, 'exec'), found)
    assert found['out'].isfinite().all()


def test_commands_run(monkeypatch, capsys):
    listed = commands('flash_attn3.explain')
    assert len(listed) >= 3
    for options in listed:
        monkeypatch.setattr(sys, 'argv', ['explain', *options])
        runpy.run_module('flash_attn3.explain', run_name='__main__')
        assert capsys.readouterr().out.startswith(('variant ', '| '))
    shapes = [bench.shape_of(bench.parse(options)) for options in commands('flash_attn3.bench')]
    assert Shape(2, 4096, 4096, 16, 4, 128, causal=True) in shapes


def test_modules_named_in_commands_exist():
    text = ''.join(page.read_text() for page in PAGES)
    modules = set(re.findall(r'python -m ((?:benchmarks|flash_attn3|tests)\.[\w.]+\w)', text))
    assert len(modules) > 10
    missing = [name for name in sorted(modules)
               if not (ROOT / name.replace('.', '/')).with_suffix('.py').exists()
               and not (ROOT / name.replace('.', '/') / '__main__.py').exists()]
    assert missing == []


def test_sizes():
    readme = ROOT / 'README.md'
    assert len(readme.read_text().splitlines()) <= 120 and readme.stat().st_size <= 8192
    for page in (ROOT / 'csrc').rglob('*.md'):
        assert len(page.read_text().splitlines()) <= 150, page
    # Without the bars and rules of tables.
    words = {page: len(re.findall(r'\S*\w\S*', page.read_text())) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words


def test_results_are_one_record_a_subject():
    files = [path for path in (ROOT / 'benchmarks/results').iterdir() if path.name != 'README.md']
    assert len(files) < MOST_RESULTS
    for path in files:
        assert re.fullmatch(r'[a-z][a-z0-9_]*\.(json|png)', path.name), path.name
        assert 'cpu' not in path.stem.split('_'), path.name
    for path in files:
        if path.suffix == '.json':
            record = tables.read_record(path.stem)
            assert record['subject'] == path.stem
            assert record['time'] and record['commit'] and record['command']
            assert record['environment']['device'].startswith('NVIDIA')
