"""What would run, and how: explain(), can_use() and built_variants(). No GPU needed.

The decisions are C++ (csrc/checks and csrc/plan, through the module `_plan`): the code that the
CUDA op runs.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flash_attn3 import _plan, arguments
from flash_attn3.ops import checks, fp8, invariance, library, masked, splits
from flash_attn3.tools import planning_cache
from flash_attn3.ops.fp8 import EightBit
from flash_attn3.ops.dense_and_varlen import Execution, general_of
from flash_attn3.cpu.quantize import E4M3

_OPS = 'flash_attn_func', 'flash_attn_varlen_func'
_GENERAL = 'lengths', 'score'
_EXECUTION = 'execution', 'gradients'
# The arguments of attention without a cache that say how, not on what.
_FEATURES = arguments.public_names(*_GENERAL, *_EXECUTION)
_STARTS = [name for name in _FEATURES if name.startswith('cu_')]
_MASKS = {'full': 'full', 'causal': 'causal',
          'general': 'general: packed sequences, windows, chunks, sinks, max logits at run time',
          'softcap': 'general, with a softcap',
          'lists': 'lists of K tiles: an AttentionMask', 'lists, softcap': 'lists, with a softcap',
          'cache': 'cache: any of full, causal, windows, chunks at run time, lengths from the GPU',
          'cache, softcap': 'cache, with a softcap',
          'latent': 'cache whose values are also keys: absorbed MLA'}


def built_variants() -> list[str]:
    """Names of the kernels in this install, forward (Fwd...) and backward (Bwd...); [] without any.

    There is one for each dtype, head dim and mask, or several, of which the planner chooses one by
    the sizes of a call. Kernels that FLASH_ATTN3_VARIANTS excluded from the build are missing.
    """
    if library.KERNELS_MISSING:
        return []
    return [variant['name'] for variant in _plan.variants() + _plan.backward_variants()
            if variant['built']]


def can_use(q: Tensor, k: Tensor | None = None, v: Tensor | None = None,
            softmax_scale: float | None = None, causal: bool = False, *, out: Tensor | None = None,
            return_attn_probs: bool = False, **others) -> tuple[bool, list[str]]:
    """Whether flash_attn_func, flash_attn_varlen_func or flash_attn_with_kvcache would run the
    Hopper kernel on these arguments.

    If grad mode is on and q, k, v or s_aux requires a gradient, that of the gradients too. Tensors
    on the CPU or the meta device are judged as if they were on a Hopper GPU, with their device as
    one of the reasons. Nothing is computed, and the contents of lengths and tables are not read.

    Args:
        all: the arguments of `flash_attn_func`, or with cu_seqlens_q those of
            `flash_attn_varlen_func`, by name from softmax_scale on; or those of
            `flash_attn_with_kvcache` by name, including k_cache and v_cache.

    Returns:
        (True, []), or False and the reasons, each an error text that names the argument.
    """
    others |= dict(softmax_scale=softmax_scale, causal=causal)
    if planning_cache.is_cache_call(others):
        return _can_use_cache(dict(q=q, k=k, v=v, out=out), others)
    features = {name: others.pop(name) for name in _FEATURES if name in others}
    num_splits, features['split_size'] = invariance.in_parts(
        others.pop('num_splits', 1), features.get('split_size', 0))
    op = _OPS[features.get('cu_seqlens_q') is not None]
    needs_grad = checks.needs_grad(q, k, v, out, features.get('s_aux'))
    reasons, eight_bit = _fp8_arguments(op, q, out, others)
    mask = others.pop('mask', None)
    reasons += checks.unsupported(op, **others)
    named = dict(q=q, k=k, v=v, out=out, s_aux=features.get('s_aux'))
    if needs_grad and out is not None:
        reasons.append(checks.gradient_with_out_text(op, **named))
    plans = _plans_of(op, (q, k, v, out), features, eight_bit, num_splits, mask)
    if needs_grad and eight_bit is None and 'reason' not in plans[0]:
        plans.append(plan_backward(q, k, v, **features))
    reasons += [facts['reason'] for facts in plans if 'reason' in facts]
    if needs_grad and eight_bit is not None:
        reasons.append(fp8.gradient_text(op, **named))
    reasons += _device_problems(q, plans)
    return not reasons, reasons


def _plans_of(op: str, tensors: tuple, features: dict, eight_bit: EightBit | None,
              num_splits: int, mask=None) -> list[dict]:
    """How the forward of a call would run; only the key 'reason' if it cannot. tensors: q, k, v and
    out. The sizes of a mask are not compared.
    """
    try:
        general = general_of(tensors[0], **_named(features, *_GENERAL) | _longest(op, features),
                             op=op)
    except RuntimeError as problem:
        return [dict(reason=str(problem))]
    execution = Execution(**_named(features, *_EXECUTION))
    call = splits.Call(op, tensors, general, execution, eight_bit, mask)
    if text := (splits.problem_text(op, num_splits, call) if mask is None
                else masked.problem_text(call, num_splits)):
        return [dict(reason=text)]
    if mask is not None and (packed := masked.packed_call(call, is_planned=True)) is not None:
        call, tensors, general, mask = packed, packed.tensors, packed.general, None
        num_splits = 1    # masked.py does not split them
    named = dict(zip(('q', 'k', 'v', 'out'), tensors))
    facts = [checks.problem_text(named, general, own, eight_bit or EightBit(),
                                 {} if mask is None else masked.sizes_of(call),
                                 rules_of='cuda', check=_plan.plan_forward)
             for own in splits.calls_of(execution)]
    if ('reason' in facts[0] or mask is not None
            or (parts := splits.planned(num_splits, call)) == 1):
        return facts
    return [checks.problem_text(named, splits.attend_arguments(call, parts, False),
                                rules_of='cuda', check=_plan.plan_cache)]


def _device_problems(q: Tensor, plans: Sequence[dict]) -> list[str]:
    """Why the kernels of these plans do not run on the device of q."""
    if not q.is_cuda:
        problem = [library.DRIVER_PROBLEM] if library.DRIVER_PROBLEM else []
        return [checks.error('can_use', 'q on a CUDA device', str(q.device)), *problem]
    if device_text := _device_problem(q.device):
        return [device_text]
    return [checks.error('can_use', f'the kernel {name}', 'a build without it')
            for facts in plans for name in missing_kernels(facts)]


def _can_use_cache(tensors: dict[str, Tensor | None], given: dict) -> tuple[bool, list[str]]:
    """can_use() of `flash_attn_with_kvcache`. tensors: q, k, v and out."""
    if given.get('k_cache') is None and 'v_cache' not in given:    # q and both by position
        given = given | dict(k_cache=tensors['k'], v_cache=tensors['v'])
        tensors = tensors | dict(k=None, v=None)
    reasons, facts = planning_cache.reasons_and_plan(given | tensors)
    reasons += _device_problems(given['v_cache'], [facts] if facts else [])
    return not reasons, reasons


def _fp8_arguments(op: str, q: Tensor, out: Tensor | None,
                   others: dict) -> tuple[list[str], EightBit | None]:
    """What is wrong with the FP8 arguments, which are removed from others, and their values."""
    descales = None, None, None
    if q.dtype == E4M3:
        descales = [None if fp8.is_number(x) else x for x in (
            others.pop(name, None) for name in ('q_descale', 'k_descale', 'v_descale'))]
    own = others.pop('out_dtype', None), others.pop('fp8_accum', 'fast')
    try:
        return [], fp8.eight_bit_of(op, q, descales, out, *own)
    except RuntimeError as problem:
        return [str(problem)], None


def missing_kernels(facts: Mapping) -> list[str]:
    """The kernels of a plan that are not in this install."""
    names = [facts.get(name, '') for name in ('name', 'steps', 'prefix')]
    return [name for name in names if name and name not in built_variants()]


def _device_problem(device: torch.device) -> str:
    """Why our kernels do not serve a CUDA device, or ''."""
    try:
        if library.kernels_serve(device):
            return ''
    except RuntimeError as driver_problem:
        return str(driver_problem)
    return checks.error('can_use', 'a Hopper GPU and its kernels', str(device),
                        library.KERNELS_MISSING)


def plan(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
         v: Tensor | Sequence[int] | None = None, *, dtype: torch.dtype = torch.bfloat16,
         sm_count: int | None = None, l2_bytes: int | None = None, fp8_accum: str = 'fast',
         **features) -> dict:
    """What `explain` prints of the forward, as a dict; only the key 'reason' if no kernel fits.

    The arguments are those of `explain`.
    """
    features['split_size'] = invariance.split_size_of(features.get('split_size', 0))
    execution, *_ = splits.calls_of(Execution(**_named(features, *_EXECUTION)))
    return _ask(_plan.plan_forward, (q, k, v), dtype, features, execution,
                dict(promote=fp8.is_second('explain', 'fp8_accum', fp8_accum, fp8.ACCUMULATIONS)),
                _gpu(q, sm_count, l2_bytes))


def plan_backward(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
                  v: Tensor | Sequence[int] | None = None, *, dtype: torch.dtype = torch.bfloat16,
                  sm_count: int | None = None, l2_bytes: int | None = None, **features) -> dict:
    """What `explain` prints of the gradients, as a dict; the arguments are those of `plan`."""
    gradients = {name: checks.wants_determinism(features.get(name, False))
                 for name in arguments.names('gradients')}
    return _ask(_plan.plan_backward, (q, k, v), dtype, features, gradients,
                _gpu(q, sm_count, l2_bytes))


def _ask(planner: Callable, inputs: tuple, dtype: torch.dtype, features: dict, *groups) -> dict:
    """What a planner of `_plan` returns for a call with tensors of these sizes on a GPU. inputs: q,
    k and v; groups: its other arguments.
    """
    q, k, v = inputs
    if unknown := set(features) - {*_FEATURES}:
        raise TypeError(f'unexpected argument {min(unknown)!r}')
    starts = features.get('cu_seqlens_q')
    lists = planning_cache.list_sizes(0 if starts is None else len(starts) - 1)
    shapes = [_shape(x, starts is not None) for x in (q, k, k if v is None else v)]
    if starts is None:
        features = {name: x for name, x in features.items() if name not in lists}
    else:
        features = dict.fromkeys(_STARTS, starts) | features
    sizes = lists | dict(zip('qkv', shapes), s_aux=shapes[0][-2:-1])
    call = planning_cache.on_meta({**dict(zip('qkv', shapes)), **features}, sizes,
                                  q.dtype if isinstance(q, Tensor) else dtype)
    op = _OPS[starts is not None]
    general = general_of(call['q'], **_named(call, *_GENERAL) | _longest(op, features), op=op)
    return checks.problem_text({name: call[name] for name in 'qkv'}, general, *groups,
                               rules_of='cuda', check=planner)


def _named(features: Mapping, *groups: str) -> dict:
    """The arguments of these groups, by their public names."""
    return {name: features[name] for name in arguments.public_names(*groups) if name in features}


def explain(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
            v: Tensor | Sequence[int] | None = None, *, dtype: torch.dtype = torch.bfloat16,
            sm_count: int | None = None, l2_bytes: int | None = None, fp8_accum: str = 'fast',
            **features) -> None:
    """Prints how a Hopper GPU would compute a call: kernel, tile, memory, grid, waves, work.

    It prints that of the gradients too. With cache=True, or an argument that only
    `flash_attn_with_kvcache` has, k and v are caches: it prints splits, pages, and an estimate of
    the time for full caches.

    Args:
        q, k, v: tensors on any device, or shapes (batch, seqlen, heads, head_dim). Default for v:
            like k. With cu_seqlens_q without batch: (total, heads, head_dim).
        dtype: for shapes; tensors bring their own. Default bfloat16.
        sm_count, l2_bytes: multiprocessors and L2 cache of the GPU. Default: those of q's GPU; for
            shapes and CPU tensors those of an H100, 132 and 50 MiB.
        fp8_accum: as in `flash_attn_func`.
        features: arguments of `flash_attn_func` and `flash_attn_varlen_func` for masks, scores,
            lengths and execution, such as causal. cu_seqlens_q may be a list, as only its length is
            read. For a cache those of `flash_attn_with_kvcache`; page_table may be a shape.

    Raises:
        ValueError: a shape without four numbers, or three with cu_seqlens_q.
        TypeError: an argument that no function has.
    """
    gpu = dict(sm_count=sm_count, l2_bytes=l2_bytes)
    if planning_cache.is_cache_call(features):
        _explain_cache((q, k, k if v is None else v), dtype, features, _gpu(q, **gpu))
        return
    common = dict(dtype=dtype, **gpu, **features)
    forward = plan(q, k, v, fp8_accum=fp8_accum, **common)
    if 'reason' in forward:
        print(f'no kernel: {forward["reason"]}')
        return
    head_dims = _shape(q)[-1], _shape(k if v is None else v)[-1]
    work = _packed_work_rows(forward) if forward['is_packed'] else _work_rows(forward)
    print(_text_of({'variant': _name(forward), **_kernel_rows(forward, head_dims), **work,
                    **_parts_row(features)}), end='\n\n')
    backward = plan_backward(q, k, v, **common)
    if 'reason' in backward:
        print(f'no gradients: {backward["reason"]}')
        return
    print(_text_of({'gradients': _name(backward), **_backward_rows(backward)}))


def _explain_cache(inputs: tuple, dtype: torch.dtype, given: dict, gpu: dict[str, int]) -> None:
    """inputs: q, k_cache and v_cache."""
    q, *_ = inputs
    q_shape = _shape(q, given.get('cu_seqlens_q') is not None)
    shapes = q_shape, *(_shape(x, False) for x in inputs[1:])
    facts = planning_cache.plan(shapes, q.dtype if isinstance(q, Tensor) else dtype, given, gpu)
    if 'reason' in facts:
        print(f'no kernel: {facts["reason"]}')
        return
    head_dims = shapes[0][-1], shapes[2][-1]
    print(_text_of({'variant': _name(facts), **_kernel_rows(facts, head_dims),
                    **planning_cache.rows(facts)}))


def _name(facts: dict) -> str:
    names = [name for name in (facts['name'], facts.get('steps', '')) if name]
    missing = missing_kernels(facts)
    return ' and '.join(name + (' (not in this install)' if name in missing else '')
                        for name in names)


def _parts_row(features: Mapping) -> dict[str, str]:
    size = invariance.split_size_of(features.get('split_size', 0))
    if not size:
        return {}
    ignored = planning_cache.ignored_text()
    others = splits.calls_of(Execution(**_named(features, *_EXECUTION) | {'split_size': size}))[1:]
    return {'splits': f'parts of {size} keys, from the first to the last{ignored}',
            **({'max_logits': 'by another call, without parts'} if others else {})}


def _kernel_rows(facts: dict, head_dims: tuple[int, int]) -> dict[str, str]:
    is_latent = facts['output_registers'] > 0
    overlaps = {'ping-pong of two warpgroups': facts['ping_pong'],
                'softmax with the PV GEMMs of other warpgroups': is_latent,
                'softmax with the GEMMs of its own warpgroup': facts['intra_overlap']
                and not is_latent,
                'the end of a tile with the start of the next': facts['tile_overlap']}
    return {
        'mask': _MASKS[facts['mask']],
        'head dims': _head_dims(facts, head_dims),
        'tile': f'{facts["tile_m"]} query rows x {facts["tile_n"]} keys',
        'pack_gqa': f'{facts["pack"]} query head(s) in the rows of a tile',
        'warpgroups': _warpgroups(facts),
        'overlap': ', '.join(name for name, is_on in overlaps.items() if is_on) or 'none',
        'stages': f'{facts["stages"]} of K, {facts["stages"]} of V, {facts["q_stages"]} of Q'
                  + f', {facts["raw_stages"]} of V as it comes' * (facts['raw_stages'] > 0),
        'registers': _registers(facts),
        'shared memory': _shared_memory(facts),
    }


def _work_rows(facts: dict) -> dict[str, str]:
    not_full = f', the first of {facts["tile_m"] - facts["lead"] * facts["pack"]} rows'
    return {
        'tiles': f'{facts["tiles"]}; {facts["m_tiles"]} along the queries of a head'
                 + not_full * (facts['lead'] > 0),
        'visited': f'{facts["visited_share"]:.1%} of the keys',
        'grid': f'{facts["grid"]} CTAs',
        'waves': f'{facts["waves"]:.2f}',
        'padding': f'{1 - facts["useful_share"]:.1%} of the computed FLOPs are masked or padding',
        'FLOPs': f'{facts["flops"] / 1e9:.4g} GFLOP',
        'bytes': f'{facts["bytes"] / 1e6:.4g} MB: Q, K, V, O and LSE once each',
    }


def _packed_work_rows(facts: dict) -> dict[str, str]:
    """The rows that do not depend on the lengths of the sequences."""
    return {
        'tiles': f'at most {facts["tiles"]}; {facts["m_tiles"]} along the queries of a head of the '
                 'longest sequence',
        'visited': f'{facts["visited_share"]:.1%} of the keys of the longest sequence',
        'grid': f'{facts["grid"]} CTAs, which draw tiles',
        'workspace': f'{facts["workspace_bytes"]} bytes: where the tiles lie',
    }


def _backward_rows(facts: dict) -> dict[str, str]:
    parts = {name: facts[f'{name.lower()}_bytes'] for name in ('LSE', 'delta', 'dQ', 'flags')}
    size = facts['cluster_size']
    owner = 'a CTA' if size == 1 else f'a cluster of {size} CTAs'
    return {
        'head dim': f'{facts["head_dim"]} computed, {facts["columns"]} in shared memory',
        'tile': f'{facts["tile_n"]} keys of {owner}, {facts["tile_m"]} queries a step',
        'warpgroups': _warpgroups(facts),
        'stages': f'{facts["q_stages"]} of Q, {facts["dout_stages"]} of dO',
        'registers': _registers(facts),
        'shared memory': _shared_memory(facts),
        'tiles': f'{facts["n_tiles"]} along the keys, '
                 f'{facts["m_tiles"]} along the queries of a head',
        'grid': f'{facts["grid"]} CTAs',
        'sum of dQ': facts['dq_order'],
        'workspace': f'{sum(parts.values())} bytes: ' + ', '.join(
            f'{name} {size}' for name, size in parts.items()),
    }


def _head_dims(facts: dict, head_dims: tuple[int, int]) -> str:
    """The head dims of the call and, if they differ, those that the kernel computes."""
    def text_of(dim: int, dim_v: int) -> str:
        return f'{dim}' if dim == dim_v else f'{dim} of q and k, {dim_v} of v'

    built = facts['head_dim'], facts['head_dim_v']
    parts = [text_of(*head_dims)]
    if built != head_dims:
        parts.append(f'computed as {text_of(*built)}')
    if facts['launches'] > 1:
        parts.append(f'in {facts["launches"]} launches, each for a part of v')
    parts.append(f'in shared memory {text_of(facts["columns"], facts["columns_v"])}')
    return '; '.join(parts)


def _warpgroups(facts: dict) -> str:
    ctas = facts.get('ctas_per_sm', 1)
    outputs = ', 2 of O' if facts.get('output_registers') else ''
    producers = '2 producers' if facts.get('producers') == 2 else '1 producer'
    return (f'{producers}, {facts["consumer_warpgroups"]} consumers{outputs}; '
            f'{facts["threads"]} threads'
            + f'; {ctas} CTAs a multiprocessor' * (ctas > 1))


def _registers(facts: dict) -> str:
    consumer = str(facts['consumer_registers'])
    by_warpgroup = ', by warpgroup' if ',' in consumer else ''
    outputs = facts.get('output_registers')
    return (f'{facts["producer_registers"]} a producer thread, '
            f'{consumer} a consumer thread{by_warpgroup}'
            + (f', {outputs} where O is computed' if outputs else ''))


def _shared_memory(facts: dict) -> str:
    buffers = ' + '.join(f'{name} {count * size / 1024:.3g}'
                         for name, count, size in facts['shared_memory'])
    return f'{facts["shared_bytes"] / 1024:.0f} KiB of 227: {buffers}'


def _text_of(rows: dict[str, str]) -> str:
    return '\n'.join(f'{name:14} {text}' for name, text in rows.items())


def _longest(op: str, features: dict) -> dict[str, int]:
    """max_seqlen of q and k; 0 if reading it would wait for a GPU."""
    bounds = {}
    for name in ('max_seqlen_q', 'max_seqlen_k'):
        given = features.get(name)
        is_known = given is not None and not (isinstance(given, Tensor) and given.is_cuda)
        bounds[name] = checks.length_bound(name, given, given, op) if is_known else 0
    return bounds


def _gpu(q: Tensor | Sequence[int], sm_count: int | None, l2_bytes: int | None) -> dict[str, int]:
    """Multiprocessors and L2 cache: those given, else those of q's GPU."""
    gpu = checks.gpu_facts(q)
    return {'sm_count': sm_count or gpu['sm_count'], 'l2_bytes': l2_bytes or gpu['l2_bytes']}


def _shape(x: Tensor | Sequence[int], is_packed: bool | None = None) -> tuple[int, ...]:
    """The shape of x, checked to have 3 or 4 entries if is_packed is given."""
    shape = tuple(x.shape) if isinstance(x, Tensor) else tuple(x)
    layout = '(total, heads, head_dim)' if is_packed else '(batch, seqlen, heads, head_dim)'
    if is_packed is not None and len(shape) != (3 if is_packed else 4):
        raise ValueError(checks.error('explain', f'a shape {layout}', str(shape)))
    return shape
