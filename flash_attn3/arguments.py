"""The arguments of attention: each stands here once, with its type, its default and its group.

From this list come the schemas (ops/library.py), the tuples of arguments (in ops/), what `explain`
and `can_use` take, and in C++ the structs of an AttentionCall with their readers
(csrc/call/generate_arguments.py). docs/extend.md says how to add an argument.

INVARIANT: imports nothing of the package. The build executes this file by its path.
"""
from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple


class Argument(NamedTuple):
    """type: as schemas write it. group: what an op takes together, in the order of the list."""
    name: str
    type: str
    default: object
    group: str


# No softmax_scale means head_dim ** -0.5, with qv (head_dim + head_dim_v) ** -0.5. max_seqlen is a
# hint for the planner; 0 is unknown.
ARGUMENTS = tuple(Argument(*row) for row in (
    # Both of cu_seqlens, for packed tensors (total, heads, head_dim), or neither, for a batch.
    ('cu_seqlens_q', 'Tensor?', None, 'lengths'),
    ('cu_seqlens_k', 'Tensor?', None, 'lengths'),
    ('seqused_q', 'Tensor?', None, 'lengths'),
    ('seqused_k', 'Tensor?', None, 'lengths'),
    ('max_seqlen_q', 'SymInt', 0, 'lengths'),
    ('max_seqlen_k', 'SymInt', 0, 'lengths'),
    ('sinks', 'Tensor?', None, 'score'),    # float32; float64 for float64
    ('softmax_scale', 'float?', None, 'score'),
    ('causal', 'bool', False, 'score'),
    ('window_left', 'SymInt', -1, 'score'),
    ('window_right', 'SymInt', -1, 'score'),
    ('attention_chunk', 'SymInt', 0, 'score'),
    ('softcap', 'float', 0.0, 'score'),
    # A cache of keys and values. cache_seqlens: keys of each sequence, before `appended` or
    # cu_seqlens_k_new more, which are already written after them.
    ('cache_seqlens', 'Tensor?', None, 'cache'),
    ('page_table', 'Tensor?', None, 'cache'),
    ('appended', 'SymInt', 0, 'cache'),
    ('cache_length', 'SymInt', -1, 'cache'),    # cache_seqlens as a number; -1: the whole cache
    ('cache_batch_idx', 'Tensor?', None, 'cache'),
    ('cache_leftpad', 'Tensor?', None, 'cache'),
    ('cu_seqlens_k_new', 'Tensor?', None, 'cache'),
    ('return_lse', 'bool', False, 'splits'),
    ('num_splits', 'SymInt', 0, 'splits'),
    ('split_size', 'SymInt', 0, 'splits'),
    # The first keys of a cache, which all sequences share: those of the first one.
    ('shared_prefix', 'SymInt', 0, 'prefix'),
    # Appending to a cache. rotary_per_query: each query has a position of its own.
    ('rotary_cos', 'Tensor?', None, 'rotary'),
    ('rotary_sin', 'Tensor?', None, 'rotary'),
    ('rotary_seqlens', 'Tensor?', None, 'rotary'),
    ('rotary_interleaved', 'bool', True, 'rotary'),
    ('rotary_per_query', 'bool', True, 'rotary'),
    ('pack_gqa', 'bool?', None, 'execution'),
    ('sm_margin', 'int', 0, 'execution'),
    ('return_max_logits', 'bool', False, 'execution'),
    ('deterministic', 'bool', False, 'gradients'),
    # Attention on float8_e4m3fn.
    ('q_descale', 'Tensor?', None, 'scales'),
    ('k_descale', 'Tensor?', None, 'scales'),
    ('v_descale', 'Tensor?', None, 'scales'),
    ('float16_out', 'bool', False, 'fp8'),
    ('promote', 'bool', False, 'fp8'),
    # A mask of bits over the last keys of a sequence: api/trees.py.
    ('tree_mask', 'Tensor?', None, 'tree'),
    # k_descale and v_descale of a cache are (pages, heads_k), not (batch, heads_k).
    ('descale_by_page', 'bool', False, 'by_page'),
    # Absorbed MLA: scores are scale * (q k^T + qv v^T).
    ('qv', 'Tensor?', None, 'latent'),
    # The op that quantises first.
    ('rotation_seed', 'int?', 0, 'quantization'),
    ('block_scales', 'bool', True, 'quantization'),
    ('rounded_backward', 'bool', False, 'quantization'),
))

# The names of these in the public functions.
_PUBLIC = {'sinks': 's_aux', 'window_left': 'window_size', 'window_right': 'window_size'}


def select(*wanted: str) -> tuple[Argument, ...]:
    """The arguments of these groups, or with these names, in this order."""
    return tuple(argument for name in wanted for argument in ARGUMENTS
                 if name in (argument.group, argument.name))


def names(*wanted: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in select(*wanted))


def public_names(*wanted: str) -> tuple[str, ...]:
    """The names of these arguments in the public functions, without duplicates."""
    return tuple(dict.fromkeys(_PUBLIC.get(name, name) for name in names(*wanted)))


def schema(*wanted: str) -> str:
    """A part of a schema. PyTorch takes up to 0.4 us to convert an argument of an eager call;
    defaults are free.
    """
    return ', '.join(f'{argument.type} {argument.name}={argument.default}'
                     for argument in select(*wanted))


def tuple_of(name: str, module: str, *wanted: str) -> type:
    """A named tuple of these arguments, with their defaults."""
    return namedtuple(name, names(*wanted), module=module,
                      defaults=[argument.default for argument in select(*wanted)])
