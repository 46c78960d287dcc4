"""What would run on a KV cache, and how, for planning.py: the arguments of
`flash_attn_with_kvcache` as the module `_plan` reads them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flash_attn3 import _plan, arguments
from flash_attn3.api import kvcache
from flash_attn3.ops import checks, fp8, prefix_rules
from flash_attn3.ops.attend_cache import Attend, Rotary, append_of

# What only a call on a cache has.
_OF_CACHE = ('k_cache', 'v_cache', 'cache', 'rotary_cos', 'rotary_sin', 'cache_seqlens',
             'cache_batch_idx', 'cache_leftpad', 'page_table', 'cu_seqlens_k_new',
             'rotary_seqlens', 'scheduler_metadata', 'split_size', 'return_softmax_lse',
             'shared_prefix', 'tree_mask', 'descale_by_page')
# What the op and the public function have under the same names, with their types.
_SHARED = {argument.name: argument.type for argument in arguments.select(
    'score', 'num_splits', 'split_size', 'cu_seqlens_q', 'cache_batch_idx', 'cache_leftpad',
    'page_table', 'cu_seqlens_k_new', 'pack_gqa', 'sm_margin', 'scales', 'tree', 'by_page',
    'latent')
    if argument.name in arguments.public_names(argument.name)}
_LISTS = ('cache_seqlens', 'cache_batch_idx', 'cache_leftpad')
_OTHERS = ('window_size', 's_aux', 'max_seqlen_q', 'out_dtype', 'rotary_interleaved')

# An estimate of the time of a call on an H200: its bytes at this rate, and the time of a short one.
_BYTES_PER_US = 4.0e6
_SHORT_CALL_US = 6.0


def is_cache_call(given: Mapping) -> bool:
    """Whether these are arguments of `flash_attn_with_kvcache`, not of `flash_attn_func`."""
    return any(given.get(name) is not None and given[name] is not False for name in _OF_CACHE)


def _reject_unknown(given: Mapping) -> None:
    if unknown := set(given) - {*_OF_CACHE, *_SHARED, *_OTHERS}:
        raise TypeError(f'unexpected argument {min(unknown)!r}')


def _length_of(given: Mapping) -> int:
    """cache_seqlens as a number; -1 where it is a tensor or None."""
    length = given.get('cache_seqlens')
    return length if isinstance(length, int) else -1


# ------------------------------------------------------------------------------------ real tensors
def reasons_and_plan(tensors: Mapping[str, Tensor | None],
                     given: Mapping) -> tuple[list[str], dict]:
    """Why the kernels would not serve a call, but for its device, and how it would run.

    tensors: q, k_cache, v_cache, k, v and out. given: the other arguments.
    """
    _reject_unknown(given)
    op = 'flash_attn_with_kvcache'
    try:
        given = _as_the_op(tensors, given)
    except RuntimeError as problem:
        return [str(problem)], {}
    named = {**tensors, **{name: given.get(name) for name in (
        'qv', 's_aux', 'rotary_cos', 'rotary_sin', 'q_descale', 'k_descale', 'v_descale')}}
    reasons = []
    if checks.needs_grad(*named.values()):
        reasons.append(checks.error(op, 'no gradient of attention on a cache',
                                    checks.requires_grad_text(**named),
                                    'call it under torch.no_grad()'))
    k, v = tensors['k'], tensors['v']
    try:
        own = _attend_of(tensors, given)
    except RuntimeError as problem:
        return [*reasons, str(problem)], {}
    count = given.get('shared_prefix', 0)
    if count != 0 and (text := prefix_rules.problem_text(
            tuple(tensors[name] for name in ('q', 'k_cache', 'v_cache', 'out')),
            own._replace(shared_prefix=count))):
        reasons.append(text)
    appended = k, v, given.get('rotary_cos'), given.get('rotary_sin')
    if any(x is not None for x in appended) and (text := _append_problem(tensors, own, given)):
        reasons.append(text)
    described = {'q': tensors['q'], 'k': tensors['k_cache'], 'v': tensors['v_cache'],
                 'out': tensors['out']}
    facts = checks.problem_text(described, own, check=_plan.plan_cache, rules_of='cuda')
    return reasons + ([facts['reason']] if 'reason' in facts else []), facts


def _attend_of(tensors: Mapping[str, Tensor | None], given: Mapping) -> Attend:
    q, k = tensors['q'], tensors['k']
    left, right = checks.window_sides(given.get('window_size', (-1, -1)))
    longest = given.get('max_seqlen_q')
    out_dtype = given.get('out_dtype')
    if out_dtype is not None and (out_dtype != q.dtype or q.dtype == fp8.E4M3):
        fp8.fp8_of('flash_attn_with_kvcache', q, (None, None, None), tensors['out'], out_dtype,
                   'fast')
    length = given.get('cache_seqlens')
    is_dense = k is not None and k.dim() > 1 and given.get('cu_seqlens_k_new') is None
    own = dict(
        cache_seqlens=length if isinstance(length, Tensor) else None,
        cache_length=_length_of(given), appended=k.size(1) if is_dense else 0,
        sinks=checks.sinks_of(given.get('s_aux'), q), window_left=left, window_right=right,
        return_lse=bool(given.get('return_softmax_lse', False)),
        max_seqlen_q=0 if longest is None else checks.length_bound('max_seqlen_q', longest, q),
        float16_out=out_dtype == torch.float16 and q.dtype == fp8.E4M3)
    return Attend(**own, **{name: given[name] for name in _SHARED if name in given})


def _as_the_op(tensors: Mapping[str, Tensor | None], given: Mapping) -> dict:
    """The arguments after what `flash_attn_with_kvcache` does to them.

    Raises:
        RuntimeError: as it does.
    """
    given = dict(given)
    q, k_cache, starts = tensors['q'], tensors['k_cache'], given.get('cu_seqlens_q')
    names = 'q_descale', 'k_descale', 'v_descale'
    given |= zip(names, kvcache.descales_of(
        tuple(map(given.get, names)), (q, k_cache, tensors['v_cache']), starts,
        bool(given.get('descale_by_page')), given.get('qv')))
    table, rows = given.get('page_table'), given.get('cache_batch_idx')
    if isinstance(table, Tensor) and isinstance(rows, Tensor):
        given['page_table'], given['cache_batch_idx'] = kvcache.rows_of_table(
            table, rows, fp8.of_heads(q, k_cache, starts)[0], reads=False)
    if tensors['k'] is None:
        given['cu_seqlens_k_new'] = None
    if given.get('rotary_cos') is None:
        given['rotary_seqlens'] = None
    length = given.get('cache_seqlens')
    if length is not None and not isinstance(length, Tensor):
        kvcache.lengths_of(length)
    return given


def _append_problem(tensors: Mapping[str, Tensor | None], own: Attend, given: Mapping) -> str:
    rotary = {name: given[name] for name in arguments.names('rotary') if name in given}
    per_query = own.causal or (own.window_left, own.window_right) != (-1, -1)
    appended = append_of(own, Rotary(**rotary | dict(rotary_per_query=per_query)))
    named = {'q': tensors['q'], 'k': tensors['k_cache'], 'v': tensors['v_cache'],
             'k_new': tensors['k'], 'v_new': tensors['v']}
    return checks.problem_text(named, appended, check=_plan.check_append, rules_of='cuda')


# ------------------------------------------------------------------------------------------- sizes
def plan(shapes: Sequence[Sequence[int]], dtype: str, given: Mapping,
         gpu: Mapping[str, int]) -> dict:
    """What `explain` prints of a call on a cache; only the key 'reason' if no kernel fits.

    shapes: of q, k_cache and v_cache. page_table: a tensor or its shape; of lists their presence
    counts, of cu_seqlens_q its length.
    """
    _reject_unknown(given)
    q, k_cache, v_cache = shapes
    starts = given.get('cu_seqlens_q')
    batch = q[0] if starts is None else len(starts) - 1
    left, right = checks.window_sides(given.get('window_size', (-1, -1)))
    call = {name: checks.describe_sizes(shape, dtype)
            for name, shape in (('q', q), ('k', k_cache), ('v', v_cache))}
    call |= {name: given[name] for name, kind in _SHARED.items()
             if kind != 'Tensor?' and given.get(name) is not None}
    call |= dict(window_left=left, window_right=right, cache_length=_length_of(given),
                 max_seqlen_q=given.get('max_seqlen_q') or 0)
    lists = {name: (batch,) for name in _LISTS if given.get(name) is not None}
    if call['cache_length'] >= 0:
        lists.pop('cache_seqlens')
    if starts is not None:
        lists['cu_seqlens_q'] = (batch + 1,)
    if (table := given.get('page_table')) is not None and lists.pop('cache_batch_idx', None):
        lists['page_table'] = (batch, tuple(
            table.shape if isinstance(table, Tensor) else table)[1])
    elif table is not None:
        lists['page_table'] = tuple(table.shape if isinstance(table, Tensor) else table)
    call |= {name: checks.describe_sizes(shape, 'int32') for name, shape in lists.items()}
    if given.get('qv') is not None:
        call['qv'] = checks.describe_sizes((*q[:-1], v_cache[-1]), dtype)
    if given.get('s_aux') is not None:
        call['sinks'] = checks.describe_sizes((q[-2],), 'float32')
    facts = _plan.plan_cache(**call, **gpu)
    return facts if 'reason' in facts else facts | _estimate(facts, k_cache, v_cache, given)


def _estimate(facts: Mapping, k_cache: Sequence[int], v_cache: Sequence[int],
              given: Mapping) -> dict:
    """Bytes of K and V of full caches, and the time that reading them takes."""
    length = _length_of(given)
    keys = facts['batch'] * (facts['capacity'] if length < 0 else length)
    size = 1 if facts['dtype'] == 'float8_e4m3fn' else 2
    read = keys * k_cache[-2] * (k_cache[-1] + v_cache[-1]) * size
    return {'is_paged': given.get('page_table') is not None, 'bytes': read,
            'expected_us': read / _BYTES_PER_US + _SHORT_CALL_US}


def rows(facts: Mapping) -> dict[str, str]:
    """What `explain` prints of splits, pages and time."""
    parts = {'even': 'even: the K tiles of all sequences and KV heads, in equal shares for the '
                     'CTAs, by the lengths on the GPU',
             'parts': f'at most {facts["split_count"]} part(s) of equal numbers of K tiles',
             'size': f'parts of {facts["split_count"] * facts["tile_n"]} keys'}
    keys = (f'{facts["capacity"]} slots a sequence' if not facts['is_paged'] else
            f'pages of {facts["page_size"]}, {facts["capacity"] // facts["page_size"]} a sequence')
    return {
        'keys': f'{facts["batch"]} sequence(s), {keys}',
        'splits': parts[facts['splits']],
        'grid': f'{facts["grid"]} CTAs, which read {facts["lanes"]} head(s) at a time',
        'workspace': f'{facts["parts_bytes"]} bytes: at most {facts["slots"]} parts of results',
        'bytes': f'{facts["bytes"] / 1e6:.4g} MB: K and V of full caches',
        'expected': f'{facts["expected_us"]:.3g} us, an estimate: these bytes at '
                    f'{_BYTES_PER_US / 1e6:.1f} TB/s (H200), and {_SHORT_CALL_US:.0f} us',
    }
