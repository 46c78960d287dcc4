"""flash_attn3/arguments.py: an argument stands once. Schemas, tuples, the readers in C++ and the
pages follow from the list.
"""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from csrc.call import generate_arguments
from flash_attn3 import _plan, arguments
from flash_attn3.ops.checks import describe_sizes
from flash_attn3.ops.fp8 import Quantization
from flash_attn3.ops.dense_and_varlen import Execution, General

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 8
# Those write down the interfaces of others, whose arguments they pass on.
FOREIGN = ROOT / 'flash_attn3/compat', ROOT / 'flash_attn3/integrations'
SOURCES = [path for folder in ('benchmarks', 'build_tools', 'csrc', 'examples', 'flash_attn3')
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


@pytest.mark.parametrize('name', ['attention_chunk'])
def test_an_argument_stands_in_few_files(name):
    """The page names all of them."""
    files = {path.relative_to(ROOT).as_posix() for path in SOURCES if name in path.read_text()}
    assert len(files) <= MOST_FILES
    assert files <= set(re.findall(r'`([\w/.]+)`', recipe()))


@pytest.mark.parametrize('op, before, groups', [
    ('fwd', 3, ('softmax_scale', 'causal', 'pack_gqa', 'sm_margin', 'gradients')),
    ('_fwd_general', 3, ('lengths', 'score', 'execution')),
    ('fwd_general', 3, ('lengths', 'score', 'execution', 'gradients')),
    ('bwd_general', 7, ('lengths', 'score', 'gradients')),
    ('bwd_general_out', 10, ('lengths', 'score', 'gradients')),
    ('fwd_fp8', 3, ('scales', 'fp8', 'lengths', 'score', 'execution')),
    ('fwd_quantized', 3,
     ('lengths', 'score', 'execution', 'gradients', 'quantization', 'promote'))])
def test_schemas(op, before, groups):
    schema = getattr(torch.ops.flash_attn3, op).default._schema
    expected = [(argument.name, argument.default) for argument in arguments.select(*groups)]
    assert [(got.name, got.default_value) for got in schema.arguments[before:]] == expected


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
