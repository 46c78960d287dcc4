"""Ops of clients that ship a copy of upstream's kernels in a namespace of their own: the kernel of
the dispatcher is replaced by one that sorts the arguments, by their names, to our functions.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from flash_attn3 import (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache,
                         get_scheduler_metadata, invariant)
from flash_attn3.integrations import _base

# The arguments of `fwd` and our names for them.
_SCALES = ('q_descale', 'k_descale', 'v_descale')
_SHARED = {
    **{name: name for name in _SCALES}, 'softmax_scale': 'softmax_scale', 'is_causal': 'causal',
    'attention_chunk': 'attention_chunk', 'softcap': 'softcap', 'pack_gqa': 'pack_gqa',
    'sm_margin': 'sm_margin', 'out': 'out', 's_aux': 's_aux', 'sinks': 's_aux'}
_OF_CACHE = {
    'k_new': 'k', 'v_new': 'v', 'rotary_cos': 'rotary_cos', 'rotary_sin': 'rotary_sin',
    'seqused_k': 'cache_seqlens', 'kv_batch_idx': 'cache_batch_idx', 'leftpad_k': 'cache_leftpad',
    'page_table': 'page_table', 'cu_seqlens_q': 'cu_seqlens_q', 'max_seqlen_q': 'max_seqlen_q',
    'cu_seqlens_k_new': 'cu_seqlens_k_new', 'seqlens_rotary': 'rotary_seqlens',
    'is_rotary_interleaved': 'rotary_interleaved', 'scheduler_metadata': 'scheduler_metadata',
    'q_v': 'qv'}
_READ = {'q', 'k', 'v', 'cu_seqlens_k', 'seqused_q', 'max_seqlen_k', 'window_size_left',
         'window_size_right', 'num_splits', 'only_qv', 'cp_world_size', 'cp_rank',
         'cp_tot_seqused_k', *_SHARED, *_OF_CACHE}
# The only values supported for these arguments, and for others where a rank holds a part of the
# keys.
_REFUSED = {'o_scale': (None,), 'sparse_mask_fine': (None,)}
_OF_RANKS = {'window_size_left': (-1,), 'window_size_right': (-1, 0), 'attention_chunk': (0,),
             'k_new': (None,), 'leftpad_k': (None,), 'cu_seqlens_k': (None,)}
HINT = "disable() restores the client's kernels"
_TRUE = '1', 'true', 'yes', 'y'    # values that turn on an environment variable


class Replacement(NamedTuple):
    """function: takes the client's name and the arguments of the op by name. known: those that it
    reads or refuses; None: any.
    """
    function: Callable[[str, dict], Any]
    known: Collection[str] | None = None


class PrivateOps:
    """A client of whose ops some are replaced, if they are there."""

    def __init__(self, client: str, namespace: str, module: str, distribution: str,
                 variable: str = '', replaced: Mapping[str, Replacement] | None = None):
        """
        Args:
            module: the client's module whose import loads the ops.
            variable: of the environment, in which the client's workers find that results must not
                depend on the batch.
            replaced: by the names of the ops, of which the first must be there. Default: FA3's.
        """
        self._client, self._namespace, self._module = client, namespace, module
        self._distribution, self._variable = distribution, variable
        self._replaced = FA3 if replaced is None else replaced
        self._first = next(iter(self._replaced))
        self._switch = _base.Switch(client)

    def enable(self) -> None:
        """Replaces the client's kernels in this process; its workers need it too. Until disable(),
        also `flash_attn3.invariant()`, if the client was told to be deterministic.

        Raises:
            RuntimeError: what `problem()` says.
        """
        self._switch.on(self.problem(), self._replace)

    def disable(self) -> None:
        """Restores the client's own kernels."""
        self._switch.off()

    def is_enabled(self) -> bool:
        """Whether enable() was called, and disable() was not."""
        return self._switch.is_on

    def problem(self) -> str:
        """Why the client cannot be served here and what to do, or ''. Imports the module of it that
        has the ops, if it is installed.
        """
        if text := self._load() or _base.gpu_problem(self._client):
            return text
        for name, op, known in self._found():
            names = [] if known is None else [x.name for x in op._schema.arguments]
            unknown = [x for x in names if x not in known]
            if unknown or names[:1] not in ([], ['q']):
                return _base.error(
                    self._client, f"the arguments of {self._namespace}::{name} to be upstream's "
                    'and those of its versions that are known', ', '.join(unknown or names[:1]),
                    'use another version of the client')
        return ''

    def _found(self) -> list[tuple[str, OpOverload, Collection[str] | None]]:
        """(name, op, known arguments) of the ops that are there."""
        ops = ((name, self._op(name), known) for name, (_, known) in self._replaced.items())
        return [x for x in ops if x[1] is not None]

    def _op(self, name: str) -> OpOverload | None:
        packet = getattr(getattr(torch.ops, self._namespace), name, None)
        return None if packet is None else packet.default

    def _load(self) -> str:
        """Loads the ops; why that was not possible, or ''."""
        if self._op(self._first) is not None:
            return ''
        if importlib.util.find_spec(self._module.partition('.')[0]) is None:
            return _base.error(self._client, self._distribution, 'none',
                               f'pip install {self._distribution}')
        got = 'none'
        try:
            importlib.import_module(self._module)
        except Exception as error:    # the client's import may raise anything
            got = repr(error)
        if self._op(self._first) is not None:
            return ''
        return _base.error(self._client, f'the op {self._namespace}::{self._first} after the '
                           f'import of {self._module}', got,
                           'install a build of it with these kernels for Hopper')

    def _replace(self, undo: ExitStack) -> None:
        library = torch.library.Library(self._namespace, 'IMPL')
        undo.callback(library._destroy)
        if os.environ.get(self._variable, '').lower() in _TRUE:
            undo.enter_context(invariant())
        for (name, op, _), key in itertools.product(self._found(), ('CUDA', 'CPU')):
            function = self._replaced[name].function
            with _base.quiet_override():
                library.impl(name, by_name(op, functools.partial(function, self._client)), key,
                             allow_override=True)


def by_name(op: OpOverload, function):
    """A kernel of op that gives function the arguments by their names, defaults filled in."""
    arguments = op._schema.arguments
    names = [x.name for x in arguments]
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}

    @torch.no_grad()
    def kernel(*given: Any, **named: Any):
        return function({**defaults, **dict(zip(names, given)), **named})
    return kernel


def forward(client: str, call: dict[str, Any]) -> list[Tensor]:
    """Attention as upstream's `fwd` has it: on packed keys, on a cache, or on a batch.

    Scales of tensors that are not e4m3 have no effect, as in upstream: vLLM always gives some, of
    1.

    Returns:
        out, which is the one given if there is one; lse; two empty tensors.
    """
    is_packed = call['cu_seqlens_k'] is not None
    refuse(client, call, _REFUSED | {'q_v' if is_packed else 'seqused_q': (None,)})
    if call.get('cp_world_size', 1) > 1 and call['is_causal']:
        return _on_a_rank(client, call)
    shared = {ours: call[name] for name, ours in _SHARED.items() if name in call}
    shared |= dict(window_size=(call['window_size_left'], call['window_size_right']),
                   num_splits=max(0, call['num_splits']))
    q, k, v = call['q'], call['k'], call['v']
    for name, x in zip(_SCALES, (q, k, v)):
        if x.dtype != torch.float8_e4m3fn:
            shared[name] = None
    cache = {ours: call[name] for name, ours in _OF_CACHE.items() if name in call}
    if is_packed:
        out, lse = flash_attn_varlen_func(
            q, k, v, call['cu_seqlens_q'], call['cu_seqlens_k'], call['max_seqlen_q'] or 0,
            call['max_seqlen_k'] or 0, call['seqused_q'], call['seqused_k'],
            return_attn_probs=True, **shared)
    elif any(call.get(name) is not None for name in (
            'k_new', 'seqused_k', 'page_table', 'kv_batch_idx', 'leftpad_k', 'cu_seqlens_q',
            'q_v')):
        if cache.get('qv') is not None and shared['softmax_scale'] is None:
            shared['softmax_scale'] = q.size(-1) ** -0.5    # as the op has it
        if call.get('only_qv'):
            q = k = None    # what the client passes for them holds anything
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **cache, **shared)
    else:
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **shared)
    return [out, lse, lse.new_empty(0), lse.new_empty(0)]


def metadata(_: str, call: dict[str, Any]) -> Tensor:
    """What `flash_attn3.get_scheduler_metadata` returns."""
    sizes = [call[name] for name in ('batch_size', 'max_seqlen_q', 'max_seqlen_k', 'num_heads',
                                     'num_heads_k', 'headdim')]
    return get_scheduler_metadata(*sizes, call['seqused_k'])


def refuse(client: str, call: dict[str, Any], refused: Mapping[str, tuple]) -> None:
    """Raises NotImplementedError for an argument that asks for something this version lacks.

    refused: the only values supported for these arguments.
    """
    for name, allowed in refused.items():
        value = call.get(name, allowed[0])
        if isinstance(value, Tensor) or value not in allowed:
            raise NotImplementedError(_base.error(
                client, f'{name} to be {" or ".join(map(str, allowed))}',
                'a tensor' if isinstance(value, Tensor) else repr(value),
                f'no other value is supported; {HINT}'))


def _on_a_rank(client: str, call: dict[str, Any]) -> list[Tensor]:
    """Causal attention to the keys that one rank of decode context parallelism holds: those at the
    positions p with p % cp_world_size == cp_rank, of cp_tot_seqused_k in all.

    A query sees the first of them, up to its own position. WHY each query becomes a sequence: their
    number grows by one every cp_world_size queries, which no mask of a sequence says.
    """
    refuse(client, call, _OF_RANKS)
    world, rank = call['cp_world_size'], call['cp_rank']
    needed = {name: call[name] for name in ('cp_tot_seqused_k', 'cu_seqlens_q', 'seqused_k')}
    wrong = [(f'{name} with cp_world_size above 1', 'None') for name, x in needed.items()
             if x is None]
    if not 0 <= rank < world:
        wrong.append((f'cp_rank to be from 0 to {world - 1}', str(rank)))
    if wrong:
        raise RuntimeError(_base.error(client, *wrong[0]))
    (total, starts, used), q = needed.values(), call['q']
    own = call | dict(is_causal=False, window_size_right=-1)
    if call['max_seqlen_q'] == 1:    # the last position: all keys of the rank
        return forward(client, own)
    tokens = torch.arange(q.size(0), dtype=torch.int32, device=q.device)
    sequence = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=used.numel() - 1)
    position = tokens + (total - starts[1:])[sequence]
    seen = ((position - rank).div(world, rounding_mode='floor') + 1).clamp_(min=0)
    rows = 'page_table' if call['page_table'] is not None else 'kv_batch_idx'
    for name in (*_SCALES, rows):
        if own[name] is not None:
            own[name] = own[name][sequence]
    if own[rows] is None:
        own[rows] = sequence.to(torch.int32)
    for name in ('q', 'q_v', 'out'):
        own[name] = None if own[name] is None else own[name][:, None]
    own |= dict(cu_seqlens_q=None, seqused_k=torch.minimum(seen, used[sequence]), max_seqlen_q=None)
    out, lse, *rest = forward(client, own)
    return [out[:, 0] if call['out'] is None else call['out'], lse[..., 0].t().contiguous(), *rest]


FA3 = {'fwd': Replacement(forward, {*_READ, *_REFUSED}),
       'get_scheduler_metadata': Replacement(metadata)}
