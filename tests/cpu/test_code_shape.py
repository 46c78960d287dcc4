"""The code stays readable: sizes, header comments, nothing commented out, no traces of a machine.

lizard measures the functions of C++, ruff reads Python (unused names, commented-out code; what it
looks for is in pyproject.toml).
"""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import lizard
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ('benchmarks', 'build_tools', 'csrc', 'examples', 'flash_attn3', 'tests', 'third_party',
           'tools')
FILE_LINES, DEVICE_LINES, COLUMNS, FUNCTION_LINES, NESTING, PARAMETERS = 600, 350, 100, 80, 3, 7
# Branches on constants in csrc/forward, where a feature is a type in a slot: `if constexpr`, and an
# `if` whose condition begins with a constant. The latter's limit is what stands there today.
CONSTEXPR_BRANCHES, PLAIN_BRANCHES = 12, 37
CHECK_LINES = 1_000    # csrc/checks in all; it shrinks
PLAIN_BRANCH = re.compile(r'\bif \(!?(?:\w+::)*k[A-Z]\w*')
CPP = ('.h', '.cpp', '.cu', '.inc')

SOURCES = [ROOT / 'setup.py'] + [
    path for folder in FOLDERS for path in sorted((ROOT / folder).rglob('*'))
    if path.suffix in ('.py', *CPP) and ROOT / 'third_party/cutlass' not in path.parents]
TEXTS = SOURCES + [ROOT / name for name in (
    '.ci/run', 'Makefile', 'NOTICE', 'README.md', 'constraints.txt', 'pyproject.toml')] + [
    path for path in sorted(ROOT.rglob('*.md')) if path.relative_to(ROOT).parts[0] in FOLDERS]
LABS = sorted((ROOT / 'tools/labs').glob('*.cu'))   # prototypes, which nothing builds
CPP_SOURCES = [path for path in SOURCES if path.suffix in CPP]
# Folders in csrc that include device/, or are included by those.
DEVICE_FOLDERS = {'device', 'launch'} | {
    path.relative_to(ROOT / 'csrc').parts[0] for path in CPP_SOURCES
    if ROOT / 'csrc' in path.parents and '#include "device/' in path.read_text()}


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def at(path: Path, lines: list[int]) -> str:
    return ', '.join(f'{ids(path)}:{line}' for line in lines)


@pytest.mark.parametrize('path', SOURCES, ids=ids)
def test_lines_and_columns(path: Path):
    lines = path.read_text().splitlines()
    top, folder = path.relative_to(ROOT).parts[:2] if path.parent != ROOT else ('', '')
    is_device = top == 'csrc' and folder in DEVICE_FOLDERS
    assert len(lines) <= (DEVICE_LINES if is_device else FILE_LINES)
    wide = [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
    assert not wide, f'wider than {COLUMNS} columns: {at(path, wide)}'


@pytest.mark.parametrize('path', SOURCES, ids=ids)
def test_header_comment(path: Path):
    """What the file does stands at its top; that of a .cpp may stand in its header."""
    text = path.read_text()
    if path.suffix == '.py':
        assert not text or ast.get_docstring(ast.parse(text))
    else:
        assert text.startswith('// ') or path.with_suffix('.h').exists()


def test_features_of_the_forward_are_types():
    text = ''.join(path.read_text() for path in (ROOT / 'csrc/forward').rglob('*.h'))
    assert text.count('if constexpr') <= CONSTEXPR_BRANCHES
    assert len(PLAIN_BRANCH.findall(text)) <= PLAIN_BRANCHES


def test_few_choices_of_a_forward_kernel_must_be_known():
    """RawRing, Measured and PtxasTuning are groups that a reader may skip."""
    text = (ROOT / 'csrc/config/fwd_config.h').read_text()
    members = text[text.index('struct FwdConfig {'):].split('  constexpr ')[0]
    known = [line for line in members.splitlines() if re.match(r'  \w.* = .*;', line)
             and not re.match(r'  (RawRing|Measured|PtxasTuning) ', line)]
    assert 10 <= len(known) <= 14


def test_checks_stay_small():
    paths = (ROOT / 'csrc/checks').iterdir()
    assert sum(len(path.read_text().splitlines()) for path in paths) <= CHECK_LINES


def test_folders_of_device_code():
    assert {'backward', 'combine', 'decode', 'device', 'forward', 'launch',
            'mla'} <= DEVICE_FOLDERS
    assert not DEVICE_FOLDERS & {'core', 'config', 'ops', 'python'}


def python_functions(path: Path) -> list[tuple[str, int, int]]:
    """(name, lines, nesting) of every function; an elif is no further level."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try)

    def depth(node: ast.AST) -> int:
        inner = [depth(child) - (isinstance(node, ast.If) and node.orelse == [child]
                                 and isinstance(child, ast.If))
                 for child in ast.iter_child_nodes(node)]
        return max(inner, default=0) + isinstance(node, blocks)

    return [(node.name, node.end_lineno - node.lineno + 1, depth(node))
            for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def cpp_functions(path: Path) -> list[tuple[str, int, int, int]]:
    """(name, lines, nesting, parameters) of every function."""
    analyse = lizard.FileAnalyzer(lizard.get_extensions(['ns']))
    return [(function.name, function.length, function.max_nested_structures,
             len(function.full_parameters))
            for function in analyse(str(path)).function_list]


@pytest.mark.parametrize('path', [path for path in SOURCES if path not in LABS], ids=ids)
def test_functions(path: Path):
    functions = python_functions(path) if path.suffix == '.py' else cpp_functions(path)
    most = dict(lines=FUNCTION_LINES, levels=NESTING)
    if path.relative_to(ROOT).parts[0] in ('csrc', 'tests'):   # others follow foreign interfaces
        most['parameters'] = PARAMETERS
    too_much = [f'{name}: {count} {what}' for name, *counts in functions
                for (what, limit), count in zip(most.items(), counts) if count > limit]
    assert not too_much, f'{ids(path)}: {too_much}'


def test_functions_are_measured(tmp_path: Path):
    """The two measures themselves, on a function of known length and depth."""
    python, cpp = tmp_path / 'known.py', tmp_path / 'known.cpp'
    python.write_text('def f(x):\n  for a in x:\n    if a:\n      return 1\n'
                      '    elif x:\n      pass\n')
    cpp.write_text('template <class T>\nint f(T x) {\n  for (auto a : x) {\n    if (a) {\n'
                   '      return 1;\n    }\n  }\n  return 0;\n}\n')
    assert python_functions(python) == [('f', 6, 2)]
    assert cpp_functions(cpp) == [('f', 8, 2, 1)]


@pytest.mark.parametrize('path', CPP_SOURCES, ids=ids)
def test_nothing_is_commented_out(path: Path):
    """A comment line that ends like a statement and assigns or calls, or a directive, is code."""
    code = re.compile(r'^\s*//\s*(.*(=|\w\(|::|->).*[;{}]|[{}]|#\s*(include|if|endif|define)\b.*)$')
    found = [number for number, line in enumerate(path.read_text().splitlines(), 1)
             if code.match(line)]
    assert not found, f'commented-out code: {at(path, found)}'


@pytest.mark.parametrize('path', TEXTS, ids=ids)
def test_no_traces_of_a_machine_and_no_promises(path: Path):
    # The words are put together here, so that this file does not contain them.
    folders = '|'.join(['work', 'root', 'farm', 'home', 'opt', 'tmp', 'mnt'])
    machine = re.compile(rf'(?<![\w./-])/({folders})/')
    words = '|'.join(['TO' + 'DO', 'FIX' + 'ME', 'X' * 3, 'HA' + 'CK'])
    promise = re.compile(rf'\b({words})\b')
    found = [number for number, line in enumerate(path.read_text().splitlines(), 1)
             if machine.search(line) or promise.search(line)]
    assert not found, at(path, found)


def test_ruff():
    done = subprocess.run([sys.executable, '-m', 'ruff', 'check', '--output-format=concise',
                           'setup.py', *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
