"""Turns flash_attn3/arguments.py into C++. generate.py calls it.

    attention_arguments.h   a struct for each group of arguments, with their defaults, and the base
                            of AttentionCall that holds all groups
    attention_ops.h         for each op its name, the reader of its arguments in the order of the
                            schema, and the writer of its results; the text of all schemas
"""
import importlib.util
from pathlib import Path
from types import ModuleType

_LIST = Path(__file__).resolve().parents[2] / 'flash_attn3' / 'arguments.py'
# The groups that an AttentionCall holds, each as a member of the group's name.
GROUPS = {'lengths': 'LengthArguments', 'score': 'ScoreArguments', 'scales': 'ScaleArguments',
          'fp8': 'Fp8Arguments', 'execution': 'ExecutionArguments',
          'gradients': 'GradientArguments', 'cache': 'CacheArguments', 'splits': 'SplitArguments',
          'rotary': 'RotaryArguments', 'prefix': 'PrefixArgument', 'tree': 'TreeArguments',
          'by_page': 'ByPageArgument', 'latent': 'LatentArgument',
          'choice': 'ChoiceArgument', 'largest': 'LargestArgument', 'mask': 'MaskArguments'}
# The groups of tensors that the ops use as tensors: OpTensors owns them. The call describes them,
# apart from those in _UNDESCRIBED.
_TENSORS = ('inputs', 'given', 'upstream', 'outputs', 'given_gradients', 'new', 'set_scales',
            'latent', 'largest')
_UNDESCRIBED = ('set_scales',)
_TYPES = {'Tensor?': 'std::optional<TensorMeta>', 'SymInt': 'int64_t', 'int': 'int64_t',
          'float': 'double', 'float?': 'std::optional<double>', 'bool': 'bool',
          'bool?': 'std::optional<bool>', 'int?': 'std::optional<int64_t>'}
_BANNER = '// Written by csrc/call/generate_arguments.py from flash_attn3/arguments.py.\n'


def _load_list() -> ModuleType:
    """Without the package, which needs what is being built."""
    spec = importlib.util.spec_from_file_location('flash_attn3_arguments', _LIST)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arguments = _load_list()


# --------------------------------------------------------------------------- attention_arguments.h
def _field(argument, types: dict[str, str] = _TYPES) -> str:
    default = argument.default
    value = '' if default in (None, arguments.REQUIRED) else f' = {str(default).lower()}'
    return f'  {types[argument.type]} {argument.name}{value};'


def _struct(group: str) -> str:
    chosen = arguments.select(group)
    fields = '\n'.join(map(_field, chosen))
    visits = '\n'.join(f'    visitor("{argument.name}", {argument.name});' for argument in chosen)
    return (f'struct {GROUPS[group]} {{\n{fields}\n\n'
            f'  template <class Visitor>\n  void visit(Visitor&& visitor) {{\n{visits}\n  }}\n}};')


def header() -> str:
    structs = '\n\n'.join(map(_struct, GROUPS))
    members = '\n'.join(f'  {struct} {group};' for group, struct in GROUPS.items())
    visits = '\n'.join(f'    {group}.visit(visitor);' for group in GROUPS)
    tensors = sum(argument.type == 'Tensor?' for argument in arguments.select(*GROUPS))
    return (f'{_BANNER}'
            '#pragma once\n\n#include <cstdint>\n#include <optional>\n\n'
            '#include "core/problem.h"\n\n'
            f'namespace fa3 {{\n\n{structs}\n\n'
            f'struct CallArguments {{\n{members}\n\n'
            '  // See AttentionCall().\n  CallArguments() {}\n\n'
            '  // visitor(name, field) for each argument.\n'
            '  template <class Visitor>\n'
            f'  void visit(Visitor&& visitor) {{\n{visits}\n  }}\n}};\n\n'
            f'// Tensors among all of them.\nconstexpr int kTensorArguments = {tensors};\n\n'
            '}  // namespace fa3\n')


# --------------------------------------------------------------------------------- attention_ops.h
def _is_of_a_call(op: str) -> bool:
    """Whether an AttentionCall holds all that the op takes."""
    return all(argument.group in (*GROUPS, *_TENSORS)
               for argument in arguments.select(*arguments.OPS[op].takes))


def _read_into_call(argument) -> str:
    name, group = argument.name, argument.group
    if group not in _TENSORS:
        return f'stack.read(call.{group}.{name});'
    described = f'call.{group}.{name}' if group in GROUPS else f'call.{name}'
    target = '' if group in _UNDESCRIBED else f', {described}'
    return f'stack.{_take(argument)}(tensors.{name}{target});'


def _take(argument) -> str:
    return 'take_optional' if argument.type == 'Tensor?' else 'take'


def _call_reader(op: str) -> str:
    lines = '\n'.join(f'    {_read_into_call(argument)}'
                      for argument in arguments.select(*arguments.OPS[op].takes))
    return ('  template <class Stack>\n'
            '  static void read(Stack& stack, OpTensors& tensors, AttentionCall& call) {\n'
            f'{lines}\n  }}')


def _own_reader(op: str) -> str:
    """Fields and reader of an op that is no call."""
    chosen = arguments.select(*arguments.OPS[op].takes)
    types = _TYPES | dict.fromkeys(('Tensor', 'Tensor?'), 'OwnedTensor')
    fields = '\n'.join(_field(argument, types) for argument in chosen)
    lines = '\n'.join(
        f'    stack.{_take(argument) if argument.type.startswith("Tensor") else "read"}'
        f'({argument.name});' for argument in chosen)
    return f'{fields}\n\n  template <class Stack>\n  void read(Stack& stack) {{\n{lines}\n  }}'


def _op(op: str) -> str:
    returns = arguments.OPS[op].returns
    boxes = '\n'.join(f'    *stack++ = boxed(std::move(results.{name}));' for name in returns)
    listed = ', '.join(f'"{name}"' for name in returns)
    return (f'struct {op} {{\n'
            f'  static constexpr char const* kName = "{op}";\n'
            f'  static constexpr std::string_view kReturns[] = {{{listed}}};\n\n'
            f'{_call_reader(op) if _is_of_a_call(op) else _own_reader(op)}\n\n'
            '  template <class Results>\n'
            f'  static void box(StableIValue* stack, Results&& results) {{\n{boxes}\n  }}\n}};')


def ops_header() -> str:
    ops = '\n\n'.join(_op(name) for name, op in arguments.OPS.items() if not op.is_composed)
    names = dict.fromkeys(arguments.names(*_TENSORS))
    tensors = '\n'.join(f'  OwnedTensor {name};' for name in names)
    return (f'{_BANNER}'
            '#pragma once\n\n#include <string_view>\n#include <utility>\n\n'
            '#include "call/attention_call.h"\n#include "ops/tensor_handle.h"\n\n'
            'namespace fa3 {\n\n'
            f'// The tensors of a call; null: not given.\nstruct OpTensors {{\n{tensors}\n}};\n\n'
            f'constexpr char const* kSchemas = R"({arguments.schemas()})";\n\n'
            f'namespace ops {{\n\n{ops}\n\n}}  // namespace ops\n}}  // namespace fa3\n')
