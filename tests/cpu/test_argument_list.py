"""flash_attn3/arguments.py: an argument stands once, and so does an op. Schemas, tuples, the
readers in C++ and the pages follow from the lists.
"""
from __future__ import annotations

import ctypes
import io
import re
import statistics
import tokenize
from pathlib import Path

import pytest
import torch

from csrc.call import generate_arguments
from flash_attn3 import _plan, arguments
from flash_attn3.ops import library
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import Execution, General
from tests.support.described import describe_sizes

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES, MEDIAN_FILES = 12, 8
GENERIC = {'q', 'k', 'v', 'out', 'causal'}    # words of everything
# Arguments of attention: the others are tensors of ops, under names of everything.
OF_ATTENTION = {argument.name for argument in arguments.ARGUMENTS
                if argument.group in {*generate_arguments.GROUPS, 'quantization'}} - GENERIC
# The names that stand in more than MOST_FILES today, and in how many. It shrinks: a name that does
# better leaves or gets its new count (pytest -vv prints them); none enters, and no count grows.
ABOVE = {
    'sinks': 28, 'softmax_scale': 28, 'page_table': 21, 'softcap': 16, 'qv': 15}
MEDIAN_TODAY = 9    # it shrinks too, to MEDIAN_FILES
DRIVER_LINES = 450
# Those write down the interfaces of others, whose arguments they pass on.
FOREIGN = ROOT / 'flash_attn3/compat', ROOT / 'flash_attn3/integrations'
SOURCES = [path for folder in ('benchmarks', 'build_tools', 'csrc', 'examples', 'flash_attn3',
                               'tools')
           for path in sorted((ROOT / folder).rglob('*'))
           if path.suffix in ('.py', '.h', '.cpp', '.cu')
           and not any(path.is_relative_to(folder) for folder in FOREIGN)]
Q = describe_sizes((1, 8, 2, 64), 'bfloat16')
VALUES = {'Tensor?': describe_sizes((2,), 'float32'), 'SymInt': 3, 'int': 3, 'float': 1.5,
          'float?': 1.5, 'bool': True, 'bool?': False}
READ_IN_CPP = arguments.select(*generate_arguments.GROUPS)


def recipe() -> str:
    text = (ROOT / 'docs/extend.md').read_text()
    return re.search(r'## Add an argument\n(.*?)\n## ', text, re.DOTALL)[1]


CPP_TOKEN = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|[A-Za-z_]\w*')


def identifiers(path: Path) -> set[str]:
    """Outside of comments and strings."""
    text = path.read_text()
    if path.suffix == '.py':
        return {token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.NAME}
    return {token for token in CPP_TOKEN.findall(text) if token[0] not in '/"'}


def test_identifiers(tmp_path: Path):
    python, cpp = tmp_path / 'known.py', tmp_path / 'known.cpp'
    python.write_text('"""a"""\nb = c.d(e=\'f\')    # g\n')
    cpp.write_text('// a\nint b = c->d;  // "e" f\nchar const* g = "h i";\n')
    assert identifiers(python) == {'b', 'c', 'd', 'e'}
    assert identifiers(cpp) == {'int', 'b', 'c', 'd', 'char', 'const', 'g'}


def test_an_argument_stands_in_few_files():
    found = [identifiers(path) for path in SOURCES]
    counts = {name: sum(name in words for words in found) for name in OF_ATTENTION}
    above = {name: count for name, count in counts.items() if count > MOST_FILES}
    assert above == ABOVE
    assert max(MEDIAN_FILES, statistics.median(counts.values())) == MEDIAN_TODAY


def test_the_page_names_the_files_of_an_argument():
    """Its example, in messages and comments too."""
    files = {path.relative_to(ROOT).as_posix() for path in SOURCES
             if 'attention_chunk' in path.read_text()}
    assert len(files) <= 9
    assert files <= set(re.findall(r'`([\w/.]+)`', recipe()))


@pytest.mark.parametrize('op', arguments.OPS)
def test_schemas(op):
    """PyTorch took what the list says."""
    got = getattr(torch.ops.flash_attn3, op).default._schema
    listed = arguments.select(*arguments.OPS[op].takes)
    assert [x.name for x in got.arguments] == [x.name for x in listed]
    assert [x.default_value for x in got.arguments if x.has_default_value()] == [
        x.default for x in listed if x.default is not arguments.REQUIRED]
    assert {x.name for x in got.arguments if x.alias_info} == set(arguments.OPS[op].writes)
    assert len(got.returns) == len(arguments.OPS[op].returns)


def test_there_are_few_ops():
    assert len(arguments.OPS) <= 15


def reads_of(op: str) -> list[str]:
    """The arguments of an op in the order in which C++ reads them off the stack."""
    text = generate_arguments.ops_header()
    body = text[text.index(f'struct {op} {{'):]
    reader = body[:body.index('static void box')]
    reads = re.findall(r'^ +stack\.\w+\((.*)\);$', reader, re.MULTILINE)
    return [re.findall(r'\w+$', read.split(', ')[0])[0] for read in reads]


READ_OPS = [name for name, op in arguments.OPS.items() if not op.is_composed]


@pytest.mark.parametrize('op', READ_OPS)
def test_cpp_reads_in_the_order_of_the_schema(op):
    assert reads_of(op) == [x.name for x in
                            getattr(torch.ops.flash_attn3, op).default._schema.arguments]


@pytest.mark.parametrize('op', [op for op in READ_OPS if len(arguments.OPS[op].takes) > 1])
def test_two_groups_that_change_places_change_them_on_both_sides(op, monkeypatch):
    """And a library that was built before is refused."""
    built = arguments.schemas()
    listed = generate_arguments.arguments
    first, second, *others = reversed(listed.OPS[op].takes)
    swapped = listed.OPS[op]._replace(takes=(*reversed(others), first, second))
    for module in (arguments, listed):
        monkeypatch.setitem(module.OPS, op, swapped)
    names = re.findall(r'(\w+)(?:=[^,)]+)?(?=[,)])', arguments.schema(op).partition(' -> ')[0])
    assert reads_of(op) == names == list(arguments.names(*swapped.takes))
    assert arguments.schemas() != built and arguments.schemas() in generate_arguments.ops_header()


@pytest.mark.skipif(not library._LIBRARY_PATH.exists(), reason='built without kernels')
def test_the_library_refuses_other_schemas():
    accepts = ctypes.CDLL(str(library._LIBRARY_PATH)).flash_attn3_accept_schemas
    accepts.restype, accepts.argtypes = ctypes.c_bool, [ctypes.c_char_p]
    built = arguments.schemas()
    assert not accepts(built.replace('Tensor? seqused_q', 'Tensor? seqused_k', 1).encode())
    assert accepts(built.encode())


@pytest.mark.parametrize('alias', arguments.ALIASES)
def test_an_alias_takes_what_its_op_takes(alias):
    """In another order; test_aliases.py calls them."""
    taken, other = (set(arguments.names(*op.takes)) for op in (
        arguments.op_of(alias), arguments.OPS[arguments.ALIASES[alias]]))
    assert taken <= other


def test_the_drivers_of_the_forward_are_short():
    """Reading, checking, planning, views and launches of every layout, in csrc/ops."""
    files = [path for path in (ROOT / 'csrc/ops').glob('*')
             if path.stem in ('forward', 'forward_run')]
    assert len(files) == 3
    assert sum(len(path.read_text().splitlines()) for path in files) <= DRIVER_LINES


def test_tuples():
    for made, groups in ((General, ('lengths', 'score')), (Execution, ('execution', 'gradients')),
                         (Quantization, ('quantization', 'promote'))):
        assert made._field_defaults == {argument.name: argument.default
                                        for argument in arguments.select(*groups)}
        assert made._fields == arguments.names(*groups)


@pytest.mark.parametrize('argument', READ_IN_CPP, ids=lambda argument: argument.name)
def test_the_reader_of_the_plan_module_takes_each_argument(argument):
    """By its name and type; None is the default of what has no other."""
    def check(value):
        return _plan.check_forward(q=Q, k=Q, v=Q, **{argument.name: value})

    assert check(argument.default) == ''
    assert isinstance(check(VALUES[argument.type]), str)
    if not argument.type.startswith('bool'):
        with pytest.raises(TypeError):
            check('a string')


def test_the_reader_refuses_what_is_not_in_the_list():
    for unknown in ('attention_chunks', 'rotation_seed', 's_aux'):
        with pytest.raises(TypeError, match=f"unexpected argument '{unknown}'"):
            _plan.check_forward(q=Q, k=Q, v=Q, **{unknown: None})
    with pytest.raises(TypeError, match='expected keyword arguments only'):
        _plan.check_forward(Q, Q, Q)


def test_values_reach_the_rules():
    """Each check names its own argument: no two fields of the call are exchanged."""
    for name, value in (('window_left', -2), ('window_right', -2), ('attention_chunk', -1),
                        ('softcap', -1.0), ('softmax_scale', -1.0), ('sm_margin', -1)):
        text = _plan.check_forward(q=Q, k=Q, v=Q, **{name: value})
        assert ('window_size' if name.startswith('window') else name) in text
    for name in arguments.names('lengths')[:4]:
        assert name in _plan.check_forward(q=Q, k=Q, v=Q, **{name: describe_sizes((2,), 'int32')})


def test_the_generated_header_has_every_field():
    header = generate_arguments.header()
    for argument in READ_IN_CPP:
        assert f'visitor("{argument.name}", {argument.name});' in header
        assert re.search(rf' {argument.name}( = [\w.-]+)?;', header)
