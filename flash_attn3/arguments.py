"""The arguments of attention and the ops that take them. Each argument stands here once, with its
type, its default and its group; each op once, with the groups it takes, in order.

Everything that depends on an order follows from these lists: the schemas (ops/library.py), the
tuples of arguments (in ops/), what `explain` and `can_use` take, and in C++ the structs of an
AttentionCall and the readers of each op (csrc/call/generate_arguments.py). docs/extend.md says how
to add an argument or an op.

INVARIANT: imports nothing of the package. The build executes this file by its path.
"""
from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple


class Argument(NamedTuple):
    """type: as in a schema. default: REQUIRED if there is none. group: arguments that an op takes
    together, in the order of the list.
    """
    name: str
    type: str
    default: object
    group: str


class Op(NamedTuple):
    """takes: groups and single arguments, in the order of the schema; an argument named twice keeps
    its first place. returns: the names of the results. writes: the tensors that the op writes.
    is_composed: Python composes it of other ops on every device; C++ has no reader.
    """
    takes: tuple[str, ...]
    returns: tuple[str, ...]
    writes: tuple[str, ...] = ()
    is_composed: bool = False


REQUIRED = ...

# No softmax_scale means head_dim ** -0.5, with qv (head_dim + head_dim_v) ** -0.5. max_seqlen is a
# hint for the planner; 0 is unknown.
ARGUMENTS = tuple(Argument(*row) for row in (
    ('q', 'Tensor', REQUIRED, 'inputs'),
    ('k', 'Tensor', REQUIRED, 'inputs'),
    ('v', 'Tensor', REQUIRED, 'inputs'),
    # If given, a forward writes into it and returns an empty tensor in its place.
    ('out', 'Tensor?', None, 'given'),
    # What a backward takes besides q, k and v; without dlse, the gradient of the LSE is zero.
    ('dout', 'Tensor', REQUIRED, 'upstream'),
    ('dlse', 'Tensor?', REQUIRED, 'upstream'),
    ('out', 'Tensor', REQUIRED, 'outputs'),
    ('lse', 'Tensor', REQUIRED, 'outputs'),
    ('dq', 'Tensor', REQUIRED, 'given_gradients'),
    ('dk', 'Tensor', REQUIRED, 'given_gradients'),
    ('dv', 'Tensor', REQUIRED, 'given_gradients'),
    # Both of cu_seqlens (batch + 1), for packed tensors (total, heads, head_dim), or neither, for a
    # batch. seqused: (batch). All int32.
    ('cu_seqlens_q', 'Tensor?', None, 'lengths'),
    ('cu_seqlens_k', 'Tensor?', None, 'lengths'),
    ('seqused_q', 'Tensor?', None, 'lengths'),
    ('seqused_k', 'Tensor?', None, 'lengths'),
    ('max_seqlen_q', 'SymInt', 0, 'lengths'),
    ('max_seqlen_k', 'SymInt', 0, 'lengths'),
    ('sinks', 'Tensor?', None, 'score'),    # (heads_q) float32; float64 for float64
    ('softmax_scale', 'float?', None, 'score'),
    ('causal', 'bool', False, 'score'),
    ('window_left', 'SymInt', -1, 'score'),
    ('window_right', 'SymInt', -1, 'score'),
    ('attention_chunk', 'SymInt', 0, 'score'),
    ('softcap', 'float', 0.0, 'score'),
    # A cache of keys and values. cache_seqlens: keys of each sequence before the append;
    # `appended` or cu_seqlens_k_new counts the new ones, already written after them.
    ('cache_seqlens', 'Tensor?', None, 'cache'),
    ('page_table', 'Tensor?', None, 'cache'),
    ('appended', 'SymInt', 0, 'cache'),
    ('cache_length', 'SymInt', -1, 'cache'),    # cache_seqlens as a number; -1: the whole cache
    ('cache_batch_idx', 'Tensor?', None, 'cache'),
    ('cache_leftpad', 'Tensor?', None, 'cache'),
    ('cu_seqlens_k_new', 'Tensor?', None, 'cache'),
    ('return_lse', 'bool', False, 'splits'),
    ('num_splits', 'SymInt', 0, 'splits'),
    # Leading keys that all sequences share, read from the first sequence.
    ('shared_prefix', 'SymInt', 0, 'prefix'),
    # New keys and values of an append, and the descales that it sets: those of pages that begin
    # with new rows, or of latents (v_scales alone).
    ('k_new', 'Tensor?', None, 'new'),
    ('v_new', 'Tensor?', None, 'new'),
    ('k_scales', 'Tensor?', None, 'set_scales'),
    ('v_scales', 'Tensor?', None, 'set_scales'),
    # Appending to a cache. rotary_per_query: each query has a position of its own.
    ('rotary_cos', 'Tensor?', None, 'rotary'),
    ('rotary_sin', 'Tensor?', None, 'rotary'),
    ('rotary_seqlens', 'Tensor?', None, 'rotary'),
    ('rotary_interleaved', 'bool', True, 'rotary'),
    ('rotary_per_query', 'bool', True, 'rotary'),
    ('pack_gqa', 'bool?', None, 'execution'),
    ('sm_margin', 'int', 0, 'execution'),
    ('return_max_logits', 'bool', False, 'execution'),
    ('split_size', 'SymInt', 0, 'execution'),    # keys of a part, from key 0 on; 0: no such parts
    ('deterministic', 'bool', False, 'gradients'),
    # Attention on float8_e4m3fn: (batch, heads_k), or by blocks, or k and v by page.
    ('q_descale', 'Tensor?', None, 'scales'),
    ('k_descale', 'Tensor?', None, 'scales'),
    ('v_descale', 'Tensor?', None, 'scales'),
    ('float16_out', 'bool', False, 'fp8'),
    ('promote', 'bool', False, 'fp8'),
    # A mask of bits over the last keys of a sequence: api/trees.py.
    ('tree_mask', 'Tensor?', None, 'tree'),
    # k_descale and v_descale of a cache are (pages, heads_k), not (batch, heads_k).
    ('descale_by_page', 'bool', False, 'by_page'),
    # An AttentionMask (api/masks.py). mask_rows: (batch or 1, seqlen_q, 4) or (total_q, 4) int32,
    # two intervals [begin, end) of keys of each query. mask_blocks: (batch or 1, heads_q or 1, q
    # blocks, k blocks) bool, the visible blocks of 64 x 64. key_lists, query_lists: both of them as
    # lists of K tiles, and for gradients of tiles of queries (ops/mask_lists.py), for kernels.
    ('mask_rows', 'Tensor?', None, 'mask'),
    ('mask_blocks', 'Tensor?', None, 'mask'),
    ('key_lists', 'Tensor?', None, 'mask'),
    ('query_lists', 'Tensor?', None, 'mask'),
    # What makes the last two and mask_rows: an AttentionMask, cu_seqlens of packed sequences, and
    # a call with so many heads of q, queries (packed: total_q) and keys (packed: a bound of the
    # longest; all_keys: total_k). tile_rows: queries that share a list of keys; tile_queries: of
    # kernels of gradients; 0: no query_lists.
    ('intervals', 'Tensor?', REQUIRED, 'shown'),
    ('block_mask', 'Tensor?', REQUIRED, 'shown'),
    ('starts_q', 'Tensor?', REQUIRED, 'shown'),
    ('starts_k', 'Tensor?', REQUIRED, 'shown'),
    ('heads', 'int', REQUIRED, 'sizes'),
    ('queries', 'SymInt', REQUIRED, 'sizes'),
    ('keys', 'SymInt', REQUIRED, 'sizes'),
    ('all_keys', 'SymInt', REQUIRED, 'sizes'),
    ('tile_keys', 'int', REQUIRED, 'sizes'),
    ('tile_rows', 'int', REQUIRED, 'sizes'),
    ('tile_queries', 'int', REQUIRED, 'sizes'),
    # Absorbed MLA: scores are scale * (q k^T + qv v^T). As q, with the head_dim of v.
    ('qv', 'Tensor?', None, 'latent'),
    # Queries choose their keys: page ids outside the cache hold no key. With an append only that is
    # done: out stays as it is, and the next call attends.
    ('keys_chosen', 'bool', False, 'choice'),
    # The ops on a cache write the largest score of each row here. It has the shape and dtype of the
    # LSE: float32, or float64 for float64.
    ('max_logits_out', 'Tensor?', None, 'largest'),
    # The choice itself, for gradients. indices: (total_q, 1 or heads_k, n) int32, blocks of rows of
    # k. index_counts: (total_q,), how many indices of each list are used. index_block: rows per
    # block. q_latent: qv, or None. scale: the softmax scale.
    ('q_latent', 'Tensor?', REQUIRED, 'chosen'),
    ('indices', 'Tensor', REQUIRED, 'chosen'),
    ('index_counts', 'Tensor?', REQUIRED, 'chosen'),
    ('index_block', 'int', REQUIRED, 'chosen'),
    ('scale', 'float', REQUIRED, 'chosen'),
    # The op that quantises first.
    ('rotation_seed', 'int?', 0, 'quantization'),
    ('block_scales', 'bool', True, 'quantization'),
    ('rounded_backward', 'bool', False, 'quantization'),
    # Quantising. block: rows that share a scale, or quantize.PER_HEAD or PER_TENSOR.
    ('x', 'Tensor', REQUIRED, 'rows'),
    ('cu_seqlens', 'Tensor?', None, 'rows'),
    ('seqused', 'Tensor?', None, 'rows'),
    ('block', 'int', 0, 'rows'),
    ('group', 'int', 1, 'rows'),
    ('rotation_seed', 'int?', None, 'rotation'),
    ('q_block', 'int', 64, 'blocks'),
    ('kv_block', 'int', 384, 'blocks'),
    # Two to four results and their LSEs. Without out_1, out_0 and lse_0 are stacks of results.
    ('out', 'Tensor', REQUIRED, 'merged'),
    ('out_0', 'Tensor', REQUIRED, 'merged'),
    ('lse_0', 'Tensor', REQUIRED, 'merged'),
    ('out_1', 'Tensor?', None, 'merged'),
    ('lse_1', 'Tensor?', None, 'merged'),
    ('out_2', 'Tensor?', None, 'merged'),
    ('lse_2', 'Tensor?', None, 'merged'),
    ('out_3', 'Tensor?', None, 'merged'),
    ('lse_3', 'Tensor?', None, 'merged'),
))

# Each argument costs host time, so the dense ops, which are called most, take the fewest. In the
# others, arguments that are rarely given come last.
_DENSE = 'softmax_scale', 'causal', 'pack_gqa', 'sm_margin'
_BACKWARD = 'softmax_scale', 'causal', 'gradients', 'lengths', 'score', 'mask'
_CACHE = ('cache', 'score', 'splits', 'split_size', 'prefix', 'lengths', 'pack_gqa', 'sm_margin',
          'scales', 'tree', 'by_page', 'latent', 'float16_out', 'choice', 'largest')
_GRADIENTS = 'dq', 'dk', 'dv'

# ops/library.py says what each op is for.
OPS = {
    'fwd': Op(('inputs', *_DENSE, 'gradients'), ('out', 'lse')),
    '_fwd': Op(('inputs', *_DENSE), ('out', 'lse')),
    '_fwd_no_lse': Op(('inputs', *_DENSE, 'given'), ('out',), writes=('out',)),
    'fwd_general': Op(('inputs', 'lengths', 'score', 'execution', 'gradients', 'mask'),
                      ('out', 'lse', 'max_logits')),
    'attend': Op(('inputs', 'given', 'lengths', 'score', 'execution', 'scales', 'fp8', 'mask'),
                 ('out', 'lse', 'max_logits'), writes=('out',)),
    'bwd': Op(('upstream', 'inputs', 'outputs', *_BACKWARD), (*_GRADIENTS, 'dsinks')),
    'bwd_out': Op(('upstream', 'inputs', 'outputs', 'given_gradients', *_BACKWARD), ('dsinks',),
                  writes=_GRADIENTS),
    'attend_cache': Op(('inputs', 'given', *_CACHE), ('out', 'lse'),
                       writes=('out', 'max_logits_out')),
    'append_and_attend': Op(('inputs', 'new', 'given', 'set_scales', 'rotary', *_CACHE),
                            ('out', 'lse', 'rotated'),
                            writes=('k', 'v', 'out', 'k_scales', 'v_scales', 'max_logits_out')),
    'fwd_quantized': Op(('inputs', 'lengths', 'score', 'execution', 'gradients', 'quantization',
                         'promote', 'mask'), ('out', 'lse', 'max_logits'), is_composed=True),
    'quantize_fp8': Op(('rows', 'rotation'), ('values', 'scales')),
    # q and k are rotated alike, v is not.
    'quantize_qkv_fp8': Op(('inputs', 'cu_seqlens_q', 'seqused_q', 'cu_seqlens_k', 'seqused_k',
                            'blocks', 'rotation'),
                           ('q', 'q_scales', 'k', 'k_scales', 'v', 'v_scales')),
    'combine': Op(('merged',), ('lse',), writes=('out',)),
    'bwd_chosen': Op(('upstream', 'inputs', 'outputs', 'chosen'),
                     (*_GRADIENTS, 'dq_latent', 'delta')),
    'mask_lists': Op(('shown', 'sizes'), ('mask_rows', 'key_lists', 'query_lists')),
}

# The names of these in the public functions.
_PUBLIC = {'sinks': 's_aux', 'window_left': 'window_size', 'window_right': 'window_size'}

# Names of 0.1.0, which go with the next release, and the ops that serve them: the same arguments in
# another order.
ALIASES = {
    '_fwd_general': 'attend',
    'fwd_fp8': 'attend',
    'bwd_general': 'bwd',
    'bwd_general_out': 'bwd_out',
}
_OF_ALIASES = {
    '_fwd_general': ('inputs', 'lengths', 'score', 'execution'),
    'fwd_fp8': ('inputs', 'scales', 'fp8', 'lengths', 'score', 'execution'),
    'bwd_general': ('upstream', 'inputs', 'outputs', 'lengths', 'score', 'gradients'),
    'bwd_general_out': ('upstream', 'inputs', 'outputs', 'given_gradients', 'lengths', 'score',
                        'gradients'),
}


def op_of(name: str) -> Op:
    """The op of this name, or what an alias takes."""
    if name in OPS:
        return OPS[name]
    op = OPS[ALIASES[name]]
    is_written = set(op.writes) & set(names(*_OF_ALIASES[name]))
    return op._replace(takes=_OF_ALIASES[name], writes=op.writes if is_written else ())


def select(*wanted: str) -> tuple[Argument, ...]:
    """The arguments of these groups, or with these names, in this order, each once."""
    return tuple(dict.fromkeys(argument for name in wanted for argument in ARGUMENTS
                               if name in (argument.group, argument.name)))


def names(*wanted: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in select(*wanted))


def public_names(*wanted: str) -> tuple[str, ...]:
    """The names of these arguments in the public functions, each once."""
    return tuple(dict.fromkeys(_PUBLIC.get(name, name) for name in names(*wanted)))


def schema(op: str, letters: str = 'abcdefgh') -> str:
    """The schema of an op. Its defaults save host time: PyTorch takes up to 0.4 us to convert an
    argument of an eager call, and none to fill in a default.
    """
    takes, returns, writes, _ = op_of(op)
    written = dict(zip(writes, letters))
    texts = []
    for name, kind, default, _ in select(*takes):
        if name in written:
            kind = kind.replace('Tensor', f'Tensor({written[name]}!)')
        texts.append(f'{kind} {name}' + ('' if default is REQUIRED else f'={default}'))
    results = 'Tensor' if len(returns) == 1 else f'({", ".join("Tensor" for _ in returns)})'
    return f'{op}({", ".join(texts)}) -> {results}'


def schemas() -> str:
    """The schemas of all ops. A library of kernels is built for one such text."""
    return '\n'.join(map(schema, OPS))


def tuple_of(name: str, module: str, *wanted: str) -> type:
    """A named tuple of these arguments, with their defaults."""
    return namedtuple(name, names(*wanted), module=module,
                      defaults=[argument.default for argument in select(*wanted)])
