"""How a call on a KV cache would run, for planning.py: its arguments are bound to the signature of
`flash_attn_with_kvcache`, and `_plan` plans the op that the function would call.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flash_attn3 import _plan, arguments
from flash_attn3.api import interface, kvcache
from flash_attn3.ops import checks, invariance, prefix_rules, rope_free
from flash_attn3.ops.attend_cache import Attend, append_of
from flash_attn3.ops.chosen_keys import Choice

_OP = 'flash_attn_with_kvcache'
_SIGNATURE = inspect.signature(kvcache.flash_attn_with_kvcache)
_INPUTS = 'q', 'k', 'v', 'k_cache', 'v_cache', 'qv'
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
    call = bound.arguments
    call['num_splits'], call['split_size'] = invariance.in_parts(call['num_splits'],
                                                                 call['split_size'])
    return call


def list_sizes(batch: int) -> dict[str, tuple[int]]:
    """The sizes of all lists of lengths, by name."""
    return {argument.name: (batch + argument.name.startswith('cu_'),)
            for argument in arguments.select('lengths', 'cache') if argument.type == 'Tensor?'}


def on_meta(given: Mapping, sizes: Mapping, dtype: torch.dtype | str) -> dict:
    """The arguments on the meta device: tensors, and those with a size, if they are given.

    dtype: of the inputs; s_aux is float32, lists and tables are int32.
    """
    dtypes = dict.fromkeys(_INPUTS, getattr(torch, checks.dtype_name(dtype)))
    dtypes |= {'s_aux': torch.float32}
    placed = {name: x.to('meta') if isinstance(x, Tensor) else x for name, x in given.items()}
    for name, size in sizes.items():
        if placed.get(name) is not None and type(placed[name]) is not int:    # lengths stay
            placed[name] = torch.empty(tuple(size), dtype=dtypes.get(name, torch.int32),
                                       device='meta')
    return placed


def _plan_of(call: Mapping, own: Attend, gpu: Mapping[str, int]) -> dict:
    """How the op would run; only the key 'reason' if no kernel fits."""
    tensors = tuple(call[name] for name in ('q', 'k_cache', 'v_cache', 'out'))
    if own.keys_chosen:
        choice = Choice(*(call[name] for name in ('indices', 'index_block', 'index_counts')))
        try:
            appends = call['k'] is not None or call['rotary_cos'] is not None
            layout = kvcache.check_chosen(tensors, own, choice, appends)
            tensors, arguments = kvcache.lower(tensors, own, choice, layout)
            own = Attend(**arguments)
        except RuntimeError as problem:
            return {'reason': str(problem)}
    named = dict(zip(('q', 'k', 'v', 'out'), tensors))
    return checks.problem_text(named, own, gpu, rules_of='cuda', check=_plan.plan_cache)


def ignored_text() -> str:
    return '; num_splits is ignored under flash_attn3.invariant()' if invariance.OPEN else ''


# ------------------------------------------------------------------------------------ real tensors
def reasons_and_plan(given: Mapping) -> tuple[list[str], dict]:
    """Why the kernels would not serve a call, apart from its device, and how it would run.

    given: the arguments of the function.
    """
    call = _bound(given)
    reasons = []
    if call['q'] is None or call['k_cache'] is None:
        try:
            call |= dict(zip(('q', 'k_cache', 'softmax_scale'), rope_free.of_cache(
                *(call[name] for name in rope_free.OF_CACHE))))
        except RuntimeError as problem:
            return [str(problem)], {}
    try:
        kvcache.reject(_OP, call['softmax_scale'], call['softcap'], call['out_dtype'], {
            name: x if isinstance(x := call[name], Tensor) else None for name in kvcache.TENSORS})
    except (RuntimeError, NotImplementedError) as problem:
        reasons.append(str(problem))
    try:
        own, rotary = kvcache.arguments_of(call)
    except RuntimeError as problem:
        return [*reasons, str(problem)], {}
    if text := prefix_rules.problem_text(
            tuple(call[name] for name in ('q', 'k_cache', 'v_cache', 'out')), own):
        reasons.append(text)
    if any(call[name] is not None for name in ('k', 'v', 'rotary_cos', 'rotary_sin')):
        named = {'q': call['q'], 'k': call['k_cache'], 'v': call['v_cache'], 'k_new': call['k'],
                 'v_new': call['v']}
        text = checks.problem_text(named, append_of(own, rotary), check=_plan.check_append,
                                   rules_of='cuda')
        reasons += [text] if text else []
    facts = _plan_of(call, own, {})
    return reasons + ([facts['reason']] if 'reason' in facts else []), facts


# ------------------------------------------------------------------------------------------- sizes
def plan(shapes: Sequence[Sequence[int]], dtype: torch.dtype, given: Mapping,
         gpu: Mapping[str, int]) -> dict:
    """What `explain` prints of a call on a cache; only the key 'reason' if no kernel fits.

    shapes: those of q, k_cache and v_cache. page_table: a tensor or its shape. Only the presence of
    lists counts, and the length of cu_seqlens_q.
    """
    call = _bound({'q': ..., 'k_cache': ..., 'v_cache': ..., **given})    # replaced below
    q, _, v_cache = shapes
    starts, table = call['cu_seqlens_q'], call['page_table']
    sizes = list_sizes(q[0] if starts is None else len(starts) - 1) | {
        'q': q, 'k_cache': shapes[1], 'v_cache': v_cache, 's_aux': q[-2:-1],
        'qv': (*q[:-1], v_cache[-1]), 'page_table': getattr(table, 'shape', table),
        'index_counts': q[:-2]}
    sizes['indices'] = getattr(call['indices'], 'shape', call['indices'])
    call = on_meta(call, sizes, dtype)
    facts = _plan_of(call, kvcache.arguments_of(call)[0], gpu)
    if 'reason' in facts:
        return facts
    length, _ = kvcache.lengths_of(call['cache_seqlens'])
    is_paged = table is not None or call['indices'] is not None
    shared = call['shared_prefix'] if facts['prefix'] else 0
    return facts | dict(is_paged=is_paged, shared=shared) | _estimate(facts, shapes, length, shared)


def _estimate(facts: Mapping, shapes: Sequence[Sequence[int]], length: int, shared: int) -> dict:
    """Bytes of K and V in full caches, or at this length, and the time to read them."""
    _, k_cache, v_cache = shapes
    held = facts['capacity'] if length < 0 else length
    keys = facts['batch'] * (held - shared) + shared
    size = 1 if facts['dtype'] == 'float8_e4m3fn' else 2
    read = keys * k_cache[-2] * (k_cache[-1] + v_cache[-1]) * size
    return {'bytes': read, 'expected_us': read / _BYTES_PER_US + _SHORT_CALL_US}


def rows(facts: Mapping) -> dict[str, str]:
    """What `explain` prints of splits, pages, shared keys and time."""
    parts = {'even': 'even: the K tiles of all sequences and KV heads, in equal shares for the '
                     'CTAs, by the lengths on the GPU',
             'parts': f'at most {facts["split_count"]} part(s) of equal numbers of K tiles',
             'size': f'parts of {facts["split_count"] * facts["tile_n"]} keys{ignored_text()}'}
    groups = facts['head_groups']
    turns = f', {groups} groups of heads one after the other' if groups > 1 else ''
    keys = (f'{facts["capacity"]} slots a sequence' if not facts['is_paged'] else
            f'pages of {facts["page_size"]}, {facts["capacity"] // facts["page_size"]} a sequence')
    shared = {'shared keys': f'{facts["shared"]}, read once for all queries in '
                             f'{facts["prefix_parts"]} part(s) by {facts["prefix"]}'}
    return {
        'keys': f'{facts["batch"]} sequence(s), {keys}',
        **(shared if facts['shared'] else {}),
        'splits': parts[facts['splits']],
        'grid': f'{facts["grid"]} CTAs, which read {facts["lanes"]} head(s) at a time',
        'workspace': f'{facts["parts_bytes"]} bytes: at most {facts["slots"]} parts of results'
                     f'{turns}',
        'bytes': f'{facts["bytes"] / 1e6:.4g} MB: K and V of full caches',
        'expected': f'{facts["expected_us"]:.3g} us, an estimate: these bytes at '
                    f'{_BYTES_PER_US / 1e6:.1f} TB/s (H200), and {_SHORT_CALL_US:.0f} us',
    }
