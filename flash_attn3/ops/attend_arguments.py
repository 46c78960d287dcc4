"""The arguments of `attend_cache` without defaults: as one tuple, or by name.

Each argument of an eager call costs host time, and defaults are free. A decode step takes
microseconds, and building a named tuple of 33 fields takes 0.8 us (CPython 3.11). So a function
that builds the shortest tuple is generated from the list in arguments.py.
"""
from __future__ import annotations

from collections.abc import Callable

from flash_attn3.arguments import Argument, names, select
from flash_attn3.ops.attend_cache import Attend

# The shortest tuple holds the first step. Each further step is appended whole or not at all.
_STEPS = ('cache', *names('score', 'splits', 'split_size'), 'prefix', 'lengths', 'pack_gqa',
          'sm_margin', 'scales', 'tree', 'by_page', 'latent', 'float16_out', 'choice')
# What keeps its default: arguments of packed keys, and the last one, which few calls give.
_APART = ('cu_seqlens_k', 'seqused_q', 'seqused_k', 'max_seqlen_k', 'max_logits_out')


def _is_given(argument: Argument) -> str:
    if argument.default is None:
        return f'{argument.name} is not None'
    return argument.name if argument.default is False else f'{argument.name} != {argument.default}'


def _generate() -> Callable[..., tuple]:
    """A function of the fields of Attend by position, without those of _APART.

    TRAP: CPython passes more than 30 arguments through a list, which takes 0.2 us longer.
    """
    taken = [name for name in Attend._fields if name not in _APART]
    values, lines = [], []
    for number, step in enumerate(map(select, _STEPS)):
        values += [argument.name if argument.name in taken else repr(argument.default)
                   for argument in step]
        tests = [_is_given(argument) for argument in step if argument.name in taken]
        condition = f'if {" or ".join(tests)}: ' if number > 0 else ''
        lines.append(f'    {condition}return {", ".join(values)}')
    lines.append(f'def build({", ".join(taken)}):')
    lines.reverse()    # the longest tuple is tried first
    scope = {}
    exec(compile('\n'.join(lines), '<attend_arguments>', 'exec'), scope)
    return scope['build']


build = _generate()


def shortest(own: Attend) -> tuple:
    """The tuple that build() returns, from named arguments."""
    return build(*(value for name, value in zip(own._fields, own) if name not in _APART))


_DEFAULTS = Attend()


def given(own: Attend) -> dict:
    """The arguments that are not defaults, by name. A call with one of the last arguments takes 7
    us less with these than with all by position (CPython 3.11, PyTorch 2.11).
    """
    return {name: x for name, x, default in zip(own._fields, own, _DEFAULTS) if x is not default}
