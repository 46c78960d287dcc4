"""What would run, and how: explain(), can_use() and built_variants(). No GPU needed.

The decisions are C++ (csrc/dispatch, through the module `_plan`): the code that the CUDA op runs.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn3 import _library, _plan, checks


def built_variants() -> list[str]:
    """Names of the kernels in this install, forward (Fwd...) and backward (Bwd...); [] without any.

    One for each dtype, head dim and mask, or several among which the planner chooses by the sizes
    of a call. A kernel that FLASH_ATTN3_VARIANTS left out when the package was built is missing.
    """
    if _library.KERNELS_MISSING:
        return []
    return [variant['name'] for variant in _plan.variants() + _plan.backward_variants()
            if variant['built']]


def can_use(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None,
            causal: bool = False, *, pack_gqa: bool | None = None, sm_margin: int = 0,
            out: Tensor | None = None, deterministic: bool = False,
            return_attn_probs: bool = False, **upstreams) -> tuple[bool, list[str]]:
    """Whether flash_attn_func would run the Hopper kernel on these arguments.

    And that of the gradients too, if q, k or v requires them and grad mode is on. Tensors on the
    CPU or the meta device are judged as if they were on a Hopper GPU, with their device as one of
    the reasons. Nothing is computed.

    Args:
        all: the arguments of `flash_attn_func`.

    Returns:
        (True, []), or False and the reasons, each an error text that names the argument.
    """
    reasons = checks.unsupported(**upstreams)
    if softmax_scale is None:
        softmax_scale = checks.default_softmax_scale(q)
    needs_grad = checks.needs_grad(q, k, v, out)
    if needs_grad and out is not None:
        reasons.append(checks.gradient_with_out_text(q, k, v, out))
    plans = []
    if text := checks.problem_text(q, k, v, out, softmax_scale, sm_margin, rules_of='cuda'):
        reasons.append(text)
    else:
        plans.append(plan(q, k, v, causal=causal, pack_gqa=pack_gqa, sm_margin=sm_margin))
        if needs_grad:
            plans.append(plan_backward(q, k, v, causal=causal, deterministic=deterministic))
    reasons += [facts['reason'] for facts in plans if 'reason' in facts]
    if not q.is_cuda:
        reasons.append(checks.error('can_use', 'q on a CUDA device', str(q.device)))
        if _library.DRIVER_PROBLEM:
            reasons.append(_library.DRIVER_PROBLEM)
    elif device_text := _device_problem(q.device):
        reasons.append(device_text)
    else:
        reasons += [checks.error('can_use', f'the kernel {facts["name"]}', 'a build without it')
                    for facts in plans if not _is_built(facts)]
    return not reasons, reasons


def _is_built(facts: dict) -> bool:
    return 'reason' in facts or facts['name'] in built_variants()


def _device_problem(device: torch.device) -> str:
    """Why our kernels do not serve a CUDA device, or ''."""
    try:
        if _library.kernels_serve(device):
            return ''
    except RuntimeError as driver_problem:
        return str(driver_problem)
    return checks.error('can_use', 'a Hopper GPU and its kernels', str(device),
                        _library.KERNELS_MISSING)


def plan(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
         v: Tensor | Sequence[int] | None = None, *, causal: bool = False,
         dtype: torch.dtype = torch.bfloat16, pack_gqa: bool | None = None, sm_margin: int = 0,
         sm_count: int | None = None, l2_bytes: int | None = None) -> dict:
    """What `explain` prints of the forward, as a dict; only the key 'reason' if no kernel fits.

    The same arguments.
    """
    return _plan.plan_forward(*_problem(q, k, v, dtype), causal, checks.PACK_GQA[pack_gqa],
                              sm_margin, *_gpu(q, sm_count, l2_bytes))


def plan_backward(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
                  v: Tensor | Sequence[int] | None = None, *, causal: bool = False,
                  dtype: torch.dtype = torch.bfloat16, deterministic: bool = False,
                  sm_count: int | None = None, l2_bytes: int | None = None) -> dict:
    """`plan` of the gradients."""
    return _plan.plan_backward(*_problem(q, k, v, dtype), causal, *_gpu(q, sm_count, l2_bytes),
                               checks.wants_determinism(deterministic))


def explain(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
            v: Tensor | Sequence[int] | None = None, *, causal: bool = False,
            dtype: torch.dtype = torch.bfloat16, pack_gqa: bool | None = None,
            deterministic: bool = False, sm_margin: int = 0, sm_count: int | None = None,
            l2_bytes: int | None = None) -> None:
    """Prints how a Hopper GPU would compute a call: kernel, tile, memory, grid, waves, work.

    And its gradients: kernel, tile, memory, grid, workspace.

    Args:
        q, k, v: tensors on any device, or shapes (batch, seqlen, heads, head_dim). Default for v:
            like k.
        causal, pack_gqa, deterministic, sm_margin: as in `flash_attn_func`.
        dtype: for shapes; tensors bring their own. Default bfloat16.
        sm_count, l2_bytes: multiprocessors and L2 cache of the GPU. Default: those of q's GPU; for
            shapes and CPU tensors those of an H100, 132 and 50 MiB.

    Raises:
        ValueError: a shape that is not four numbers.
    """
    common = dict(causal=causal, dtype=dtype, sm_count=sm_count, l2_bytes=l2_bytes)
    forward = plan(q, k, v, pack_gqa=pack_gqa, sm_margin=sm_margin, **common)
    if 'reason' in forward:
        print(f'no kernel: {forward["reason"]}')
        return
    print(_text_of({'variant': _name(forward), **_forward_rows(forward)}), end='\n\n')
    backward = plan_backward(q, k, v, deterministic=deterministic, **common)
    if 'reason' in backward:
        print(f'no gradients: {backward["reason"]}')
        return
    print(_text_of({'gradients': _name(backward), **_backward_rows(backward)}))


def _name(facts: dict) -> str:
    return facts['name'] + ('' if _is_built(facts) else ' (not in this install)')


def _forward_rows(facts: dict) -> dict[str, str]:
    overlaps = {'ping-pong of two warpgroups': facts['ping_pong'],
                'softmax beside the products of its warpgroup': facts['intra_overlap'],
                'the end of a tile beside the start of the next': facts['tile_overlap']}
    return {
        'head dim': _head_dim(facts),
        'tile': f'{facts["tile_m"]} query rows x {facts["tile_n"]} keys',
        'pack_gqa': f'{facts["pack"]} query head(s) in the rows of a tile',
        'warpgroups': _warpgroups(facts),
        'overlap': ', '.join(name for name, is_on in overlaps.items() if is_on) or 'none',
        'stages': f'{facts["stages"]} of K, {facts["stages"]} of V, {facts["q_stages"]} of Q',
        'registers': _registers(facts),
        'shared memory': _shared_memory(facts),
        'tiles': f'{facts["tiles"]}; {facts["m_tiles"]} along the queries of a head',
        'grid': f'{facts["grid"]} CTAs',
        'waves': f'{facts["waves"]:.2f}',
        'padding': f'{1 - facts["useful_share"]:.1%} of the computed FLOPs are masked or padding',
        'FLOPs': f'{facts["flops"] / 1e9:.4g} GFLOP',
        'bytes': f'{facts["bytes"] / 1e6:.4g} MB: Q, K, V, O and LSE once each',
    }


def _backward_rows(facts: dict) -> dict[str, str]:
    is_ordered = facts['flags_bytes'] > 0
    parts = {name: facts[f'{name.lower()}_bytes']
             for name in ('LSE', 'delta', 'dQ') + ('flags',) * is_ordered}
    size = facts['cluster_size']
    owner = 'a CTA' if size == 1 else f'a cluster of {size} CTAs'
    return {
        'head dim': _head_dim(facts),
        'tile': f'{facts["tile_n"]} keys of {owner}, {facts["tile_m"]} queries a step',
        'warpgroups': _warpgroups(facts),
        'stages': f'{facts["q_stages"]} of Q, {facts["dout_stages"]} of dO',
        'registers': _registers(facts),
        'shared memory': _shared_memory(facts),
        'tiles': f'{facts["n_tiles"]} along the keys, '
                 f'{facts["m_tiles"]} along the queries of a head',
        'grid': f'{facts["grid"]} CTAs',
        'sum of dQ': 'in a fixed order' if is_ordered else 'in any order',
        'workspace': f'{sum(parts.values())} bytes: ' + ', '.join(
            f'{name} {size}' for name, size in parts.items()),
    }


def _head_dim(facts: dict) -> str:
    return f'{facts["head_dim"]} computed, {facts["columns"]} in shared memory'


def _warpgroups(facts: dict) -> str:
    return (f'1 producer, {facts["consumer_warpgroups"]} consumers; '
            f'{facts["threads"]} threads')


def _registers(facts: dict) -> str:
    consumer = str(facts['consumer_registers'])
    by_warpgroup = ', by warpgroup' if ',' in consumer else ''
    return (f'{facts["producer_registers"]} a producer thread, '
            f'{consumer} a consumer thread{by_warpgroup}')


def _shared_memory(facts: dict) -> str:
    return f'{facts["shared_bytes"] / 1024:.0f} KiB of 227'


def _text_of(rows: dict[str, str]) -> str:
    return '\n'.join(f'{name:14} {text}' for name, text in rows.items())


def _problem(q: Tensor | Sequence[int], k: Tensor | Sequence[int],
             v: Tensor | Sequence[int] | None, dtype: torch.dtype) -> tuple:
    """dtype and sizes, as `_plan` reads them."""
    batch, seqlen_q, heads_q, head_dim = _shape(q)
    _, seqlen_k, heads_k, _ = _shape(k)
    name = checks.dtype_name(q.dtype if isinstance(q, Tensor) else dtype)
    head_dim_v = head_dim if v is None else _shape(v)[3]
    return name, batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v


def _gpu(q: Tensor | Sequence[int], sm_count: int | None, l2_bytes: int | None) -> tuple[int, int]:
    """Multiprocessors and L2: what was given, else those of q's GPU."""
    gpu = checks.gpu_facts(q)
    return sm_count or gpu['sm_count'], l2_bytes or gpu['l2_bytes']


def _shape(x: Tensor | Sequence[int]) -> tuple[int, ...]:
    shape = tuple(x.shape) if isinstance(x, Tensor) else tuple(x)
    if len(shape) != 4:
        raise ValueError(checks.error('explain', 'a shape (batch, seqlen, heads, head_dim)',
                                      str(shape)))
    return shape
