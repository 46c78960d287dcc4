"""Ops of clients that ship a copy of upstream's kernels in a namespace of their own: the kernel of
the dispatcher is replaced by one that sorts the arguments, by their names, to our functions.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
from contextlib import ExitStack
from typing import Any

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
         'window_size_right', 'num_splits', *_SHARED, *_OF_CACHE}
# The only values supported for these arguments.
_REFUSED = {'o_scale': (None,), 'cp_world_size': (0, 1), 'cp_rank': (0,),
            'cp_tot_seqused_k': (None,), 'sparse_mask_fine': (None,), 'only_qv': (False,)}
_TRUE = '1', 'true', 'yes', 'y'    # values that turn on an environment variable


class PrivateOps:
    """A client whose op `fwd`, and `get_scheduler_metadata` if there is one, are replaced."""

    def __init__(self, client: str, namespace: str, module: str, distribution: str,
                 variable: str = ''):
        """
        Args:
            module: the client's module whose import loads the ops.
            variable: of the environment, in which the client's workers find that results must not
                depend on the batch.
        """
        self._client, self._namespace, self._module = client, namespace, module
        self._distribution, self._variable = distribution, variable
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
        names = [x.name for x in self._op('fwd')._schema.arguments]
        unknown = [x for x in names if x not in _READ and x not in _REFUSED]
        if unknown or names[:3] != ['q', 'k', 'v']:
            return _base.error(
                self._client, f"the arguments of {self._namespace}::fwd to be upstream's and those "
                'of its versions that are known', ', '.join(unknown or names[:3]),
                'use another version of the client')
        return ''

    def _op(self, name: str) -> OpOverload | None:
        packet = getattr(getattr(torch.ops, self._namespace), name, None)
        return None if packet is None else packet.default

    def _load(self) -> str:
        """Loads the ops; why that was not possible, or ''."""
        if self._op('fwd') is not None:
            return ''
        if importlib.util.find_spec(self._module.partition('.')[0]) is None:
            return _base.error(self._client, self._distribution, 'none',
                               f'pip install {self._distribution}')
        got = 'none'
        try:
            importlib.import_module(self._module)
        except Exception as error:    # the client's import may raise anything
            got = repr(error)
        if self._op('fwd') is not None:
            return ''
        return _base.error(self._client, f'the op {self._namespace}::fwd after the import of '
                           f'{self._module}', got,
                           'install a build of it with FlashAttention-3 for Hopper')

    def _replace(self, undo: ExitStack) -> None:
        library = torch.library.Library(self._namespace, 'IMPL')
        undo.callback(library._destroy)
        if os.environ.get(self._variable, '').lower() in _TRUE:
            undo.enter_context(invariant())
        ops = {name: function for name, function in (
            ('fwd', forward), ('get_scheduler_metadata', metadata)) if self._op(name)}
        for name, key in itertools.product(ops, ('CUDA', 'CPU')):
            kernel = by_name(self._op(name), functools.partial(ops[name], self._client))
            with _base.quiet_override():
                library.impl(name, kernel, key, allow_override=True)


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
    refuse(client, call)
    shared = {ours: call[name] for name, ours in _SHARED.items() if name in call}
    shared |= dict(window_size=(call['window_size_left'], call['window_size_right']),
                   num_splits=max(0, call['num_splits']))
    q, k, v = call['q'], call['k'], call['v']
    for name, x in zip(_SCALES, (q, k, v)):
        if x.dtype != torch.float8_e4m3fn:
            shared[name] = None
    cache = {ours: call[name] for name, ours in _OF_CACHE.items() if name in call}
    if call['cu_seqlens_k'] is not None:
        out, lse = flash_attn_varlen_func(
            q, k, v, call['cu_seqlens_q'], call['cu_seqlens_k'], call['max_seqlen_q'] or 0,
            call['max_seqlen_k'] or 0, call['seqused_q'], call['seqused_k'],
            return_attn_probs=True, **shared)
    elif any(call.get(name) is not None for name in (
            'k_new', 'seqused_k', 'page_table', 'kv_batch_idx', 'leftpad_k', 'cu_seqlens_q',
            'q_v')):
        if cache.get('qv') is not None and shared['softmax_scale'] is None:
            shared['softmax_scale'] = q.size(-1) ** -0.5    # as the op has it
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **cache, **shared)
    else:
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **shared)
    return [out, lse, lse.new_empty(0), lse.new_empty(0)]


def metadata(_: str, call: dict[str, Any]) -> Tensor:
    """What `flash_attn3.get_scheduler_metadata` returns."""
    sizes = [call[name] for name in ('batch_size', 'max_seqlen_q', 'max_seqlen_k', 'num_heads',
                                     'num_heads_k', 'headdim')]
    return get_scheduler_metadata(*sizes, call['seqused_k'])


def refuse(client: str, call: dict[str, Any]) -> None:
    """Raises NotImplementedError for an argument that asks for something this version lacks."""
    refused = dict(_REFUSED)
    refused['seqused_q' if call['cu_seqlens_k'] is None else 'q_v'] = (None,)
    for name, allowed in refused.items():
        value = call.get(name, allowed[0])
        if isinstance(value, Tensor) or value not in allowed:
            raise NotImplementedError(_base.error(
                client, f'{name} to be {" or ".join(map(str, allowed))}',
                'a tensor' if isinstance(value, Tensor) else repr(value),
                "no other value is supported; disable() restores the client's kernels"))
