"""Turns flash_attn3/arguments.py into attention_arguments.h: a struct for each group of arguments,
with their defaults, and a visit() through which one reader serves them all. generate.py calls it.
"""
import importlib.util
from pathlib import Path
from types import ModuleType

_LIST = Path(__file__).resolve().parents[2] / 'flash_attn3' / 'arguments.py'
GROUPS = {'lengths': 'LengthArguments', 'score': 'ScoreArguments', 'scales': 'ScaleArguments',
          'fp8': 'Fp8Arguments', 'execution': 'ExecutionArguments',
          'gradients': 'GradientArguments', 'cache': 'CacheArguments', 'splits': 'SplitArguments',
          'rotary': 'RotaryArguments', 'prefix': 'PrefixArgument', 'tree': 'TreeArguments',
          'by_page': 'ByPageArgument', 'latent': 'LatentArgument'}
_TYPES = {'Tensor?': 'std::optional<TensorMeta>', 'SymInt': 'int64_t', 'int': 'int64_t',
          'float': 'double', 'float?': 'std::optional<double>', 'bool': 'bool',
          'bool?': 'std::optional<bool>'}


def _load_list() -> ModuleType:
    """Without the package, which needs what is being built."""
    spec = importlib.util.spec_from_file_location('flash_attn3_arguments', _LIST)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arguments = _load_list()


def _field(argument) -> str:
    default = '' if argument.default is None else f' = {str(argument.default).lower()}'
    return f'  {_TYPES[argument.type]} {argument.name}{default};'


def _struct(group: str) -> str:
    chosen = arguments.select(group)
    fields = '\n'.join(map(_field, chosen))
    visits = '\n'.join(f'    visitor("{argument.name}", {argument.name});' for argument in chosen)
    return (f'struct {GROUPS[group]} {{\n'
            f'  static constexpr int kCount = {len(chosen)};\n\n{fields}\n\n'
            f'  template <class Visitor>\n  void visit(Visitor&& visitor) {{\n{visits}\n  }}\n}};')


def header() -> str:
    structs = '\n\n'.join(map(_struct, GROUPS))
    tensors = sum(argument.type == 'Tensor?' for argument in arguments.select(*GROUPS))
    return ('// Written by csrc/call/generate_arguments.py from flash_attn3/arguments.py.\n'
            '#pragma once\n\n#include <cstdint>\n#include <optional>\n\n'
            '#include "core/problem.h"\n\n'
            f'namespace fa3 {{\n\n{structs}\n\n'
            f'// Tensors among all of them.\nconstexpr int kTensorArguments = {tensors};\n\n'
            '}  // namespace fa3\n')
