"""What would run on a KV cache, and how, for planning.py: a call of `flash_attn_with_kvcache` is
bound to the function's own signature, and `_plan` is asked about the op that it would run.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flash_attn3 import _plan
from flash_attn3.api import interface, kvcache
from flash_attn3.ops import checks, fp8, prefix_rules
from flash_attn3.ops.attend_cache import Attend, Rotary, append_of

_OP = 'flash_attn_with_kvcache'
_SIGNATURE = inspect.signature(kvcache.flash_attn_with_kvcache)
# Arguments that no other function takes.
_OWN = {'cache', *_SIGNATURE.parameters}.difference(*(
    inspect.signature(function).parameters
    for function in (interface.flash_attn_func, interface.flash_attn_varlen_func)))

# An estimate of the time of a call on an H200: its bytes at this rate, and the time of a short one.
_BYTES_PER_US = 4.0e6
_SHORT_CALL_US = 6.0


def is_cache_call(given: Mapping) -> bool:
    """Whether these are arguments of `flash_attn_with_kvcache`, not of `flash_attn_func`."""
    return any(given.get(name) is not None and given[name] is not False for name in _OWN)


def _bound(given: Mapping) -> dict:
    """All arguments of the function, with its defaults."""
    given = {name: x for name, x in given.items() if name != 'cache'}
    if unknown := set(given) - {*_SIGNATURE.parameters}:
        raise TypeError(f'unexpected argument {min(unknown)!r}')
    bound = _SIGNATURE.bind(**given)
    bound.apply_defaults()
    return bound.arguments


def _attend_of(call: Mapping) -> Attend:
    """The arguments of the op, as the function makes them.

    Raises:
        RuntimeError: as the function does.
    """
    q, k, k_cache, starts = (call[name] for name in ('q', 'k', 'k_cache', 'cu_seqlens_q'))
    names = 'q_descale', 'k_descale', 'v_descale'
    descales = kvcache.descales_of(tuple(map(call.get, names)), (q, k_cache, call['v_cache']),
                                   starts, call['descale_by_page'], call['qv'])
    length, lengths = kvcache.lengths_of(call['cache_seqlens'])
    table, rows = call['page_table'], call['cache_batch_idx']
    if table is not None and rows is not None:
        table, rows = kvcache.rows_of_table(table, rows, fp8.of_heads(q, k_cache, starts)[0],
                                            reads=False)
    left, right = checks.window_sides(call['window_size'])
    new_starts = None if k is None else call['cu_seqlens_k_new']
    same = {name: call[name] for name in Attend._fields if name in call}
    return Attend(**same | dict(zip(names, descales)) | dict(
        cache_seqlens=lengths, cache_length=length, page_table=table, cache_batch_idx=rows,
        cu_seqlens_k_new=new_starts, window_left=left, window_right=right,
        appended=k.size(1) if k is not None and new_starts is None and k.dim() > 1 else 0,
        sinks=checks.sinks_of(call['s_aux'], q), return_lse=call['return_softmax_lse'],
        max_seqlen_q=kvcache.longest(call['max_seqlen_q'], q, starts),
        float16_out=call['out_dtype'] == torch.float16 and q.dtype == fp8.E4M3))


def _plan_of(call: Mapping, own: Attend, **gpu: int) -> dict:
    """How the op would run; only the key 'reason' if no kernel fits."""
    tensors = {'q': call['q'], 'k': call['k_cache'], 'v': call['v_cache'], 'out': call['out']}
    return checks.problem_text(tensors, own._replace(shared_prefix=0), rules_of='cuda',
                               check=lambda **described: _plan.plan_cache(**described | gpu))


# ------------------------------------------------------------------------------------ real tensors
def reasons_and_plan(given: Mapping) -> tuple[list[str], dict]:
    """Why the kernels would not serve a call, but for its device, and how it would run.

    given: the arguments of the function.
    """
    call = _bound(given)
    reasons = []
    try:
        kvcache.reject(_OP, call['softmax_scale'], call['softcap'], call['out_dtype'], {
            name: x if isinstance(x := call[name], Tensor) else None for name in kvcache.TENSORS})
    except (RuntimeError, NotImplementedError) as problem:
        reasons.append(str(problem))
    try:
        own = _attend_of(call)
    except RuntimeError as problem:
        return [*reasons, str(problem)], {}
    if own.shared_prefix != 0 and (text := prefix_rules.problem_text(
            tuple(call[name] for name in ('q', 'k_cache', 'v_cache', 'out')), own)):
        reasons.append(text)
    if any(call[name] is not None for name in ('k', 'v', 'rotary_cos', 'rotary_sin')) and (
            text := _append_problem(call, own)):
        reasons.append(text)
    facts = _plan_of(call, own)
    return reasons + ([facts['reason']] if 'reason' in facts else []), facts


def _append_problem(call: Mapping, own: Attend) -> str:
    per_query = own.causal or (own.window_left, own.window_right) != (-1, -1)
    positions = None if call['rotary_cos'] is None else call['rotary_seqlens']
    rotary = Rotary(call['rotary_cos'], call['rotary_sin'], positions, call['rotary_interleaved'],
                    per_query)
    named = {'q': call['q'], 'k': call['k_cache'], 'v': call['v_cache'], 'k_new': call['k'],
             'v_new': call['v']}
    return checks.problem_text(named, append_of(own, rotary), check=_plan.check_append,
                               rules_of='cuda')


# ------------------------------------------------------------------------------------------- sizes
def plan(shapes: Sequence[Sequence[int]], dtype: torch.dtype, given: Mapping,
         gpu: Mapping[str, int]) -> dict:
    """What `explain` prints of a call on a cache; only the key 'reason' if no kernel fits.

    shapes: of q, k_cache and v_cache. page_table: a tensor or its shape; of lists their presence
    counts, of cu_seqlens_q its length.
    """
    call = _bound({'q': ..., 'k_cache': ..., 'v_cache': ..., **given})    # replaced below
    q, k_cache, v_cache = shapes
    starts, table = call['cu_seqlens_q'], call['page_table']
    batch = q[0] if starts is None else len(starts) - 1
    sizes = dict(zip(('q', 'k_cache', 'v_cache'), shapes), s_aux=(q[-2],),
                 qv=(*q[:-1], v_cache[-1]), page_table=getattr(table, 'shape', table),
                 cu_seqlens_q=(batch + 1,), **dict.fromkeys(
                     ('cache_seqlens', 'cache_batch_idx', 'cache_leftpad'), (batch,)))
    dtypes = dict.fromkeys(('q', 'k_cache', 'v_cache', 'qv'), dtype) | {'s_aux': torch.float32}
    for name, shape in sizes.items():
        if call[name] is not None and type(call[name]) is not int:    # a length may be a number
            call[name] = torch.empty(tuple(shape), dtype=dtypes.get(name, torch.int32),
                                     device='meta')
    call = {name: x.to('meta') if isinstance(x, Tensor) else x for name, x in call.items()}
    own = _attend_of(call)
    facts = _plan_of(call, own, **gpu)
    return facts if 'reason' in facts else facts | _estimate(facts, shapes, own)


def _estimate(facts: Mapping, shapes: Sequence[Sequence[int]], own: Attend) -> dict:
    """Bytes of K and V of full caches, and the time that reading them takes."""
    _, k_cache, v_cache = shapes
    keys = facts['batch'] * (facts['capacity'] if own.cache_length < 0 else own.cache_length)
    size = 1 if facts['dtype'] == 'float8_e4m3fn' else 2
    read = keys * k_cache[-2] * (k_cache[-1] + v_cache[-1]) * size
    return {'is_paged': own.page_table is not None, 'bytes': read,
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
