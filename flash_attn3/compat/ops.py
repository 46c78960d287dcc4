"""The ops `torch.ops.flash_attn_3`: upstream's schemas, on the functions of functions.py.

Registered on demand alone, as the namespace is upstream's. For clients that call the dispatcher:
PyTorch's own FA3 hook, xFormers. Positions are part of the contract, names and defaults too.

`fwd` and `fwd_combine` are composite, as PyTorch functionalizes no custom op that returns a given
out: torch.compile and export see the ops of this package, whose schemas name what they write.
TRAP: upstream's schema of `fwd` marks k_new and v_new as written, where it is k and v; clients
compare it word for word.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from flash_attn3.ops import checks
from flash_attn3.compat import functions

NAMESPACE = 'flash_attn_3'
SCHEMAS = {
    'fwd': '(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, '
           'Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, '
           'Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, '
           'Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, '
           'Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, '
           'Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, '
           'Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, '
           'float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, '
           'int window_size_right=-1, int attention_chunk=0, float softcap=0.0, '
           'bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, '
           'bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)',
    'bwd': '(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, '
           'Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, '
           'Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, '
           'Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, '
           'float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, '
           'int window_size_right=-1, float softcap=0.0, bool deterministic=False, '
           'int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    'fwd_combine': '(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, '
                   'ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)',
    'get_scheduler_metadata':
        '(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, '
        'int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, '
        'Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, '
        'Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, '
        'int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, '
        'int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, '
        'int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor',
}
_BACKWARD_LISTS = 6    # cu_seqlens, seqused, max_seqlen; `_flash_attn_backward` has them first
_BACKWARD_RESULTS = 5

_kept = []    # keeps the registrations alive


@functools.cache
def register_ops() -> None:
    """Registers `torch.ops.flash_attn_3`, with upstream's schemas, on CPU, CUDA and fake tensors.

    Once in a process. Importing `flash_attn_interface` or `flash_attn_3._C` of an installed shim
    does it. They have no gradients, as upstream's. torch.compile takes them, caches that are
    written and given outputs included.

    Raises:
        RuntimeError: another library has registered one of them. Nothing is changed then.
    """
    for name in SCHEMAS:
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            raise RuntimeError(checks.error(
                'compat.register_ops', f'no op {NAMESPACE}::{name} yet',
                'one of another library, such as an installed upstream',
                'a process can use only one of them'))
    library = torch.library.Library(NAMESPACE, 'FRAGMENT')
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, kernel in _COMPOSITES.items():
        library.impl(name, kernel, 'CompositeImplicitAutograd')
    for name, (kernel, fake) in _KERNELS.items():
        for key in ('CPU', 'CUDA'):
            library.impl(name, kernel, key)
        torch.library.register_fake(f'{NAMESPACE}::{name}', fake, lib=library)
    _kept.append(library)


def are_registered() -> bool:
    """Whether `torch.ops.flash_attn_3` has the ops of this package."""
    return bool(_kept)


# ----------------------------------------------------------------------------------------- kernels
# PyTorch does not pass on trailing arguments that equal the defaults of a schema.
def _fwd(*arguments) -> tuple[Tensor, Tensor, None, None]:
    q = arguments[0]
    if (type(q) is not Tensor or q.is_meta) and checks.has_no_data(q):
        return _fwd_traced(*arguments)
    has_gradients = torch.is_grad_enabled()
    if has_gradients:
        torch.set_grad_enabled(False)    # `with torch.no_grad()` takes twice the time
    try:
        out, lse = functions.forward(*arguments)
    finally:
        if has_gradients:
            torch.set_grad_enabled(True)
    return out, lse, None, None


@torch.no_grad()
def _fwd_traced(*arguments) -> tuple[Tensor, Tensor, None, None]:
    with _traced():
        return *functions.forward(*arguments), None, None


@torch.no_grad()
def _bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
         dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
         *others) -> tuple[Tensor, ...]:
    lists = (*others, *(None for _ in range(_BACKWARD_LISTS)))[:_BACKWARD_LISTS]
    functions._flash_attn_backward(dout, q, k, v, out, softmax_lse, *lists, dq, dk, dv,
                                   *others[_BACKWARD_LISTS:])
    return _bwd_fake(dout)


@torch.no_grad()
def _combine(*arguments) -> tuple[Tensor, Tensor]:
    with _traced() if checks.has_no_data(arguments[0]) else contextlib.nullcontext():
        return functions.flash_attn_combine(*arguments)


_tracing = threading.Lock()
_traces = 0    # threads that trace


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """Lets `torch.compiler.is_compiling` hold, as under Dynamo: no contents are read. The flag is
    the process's: it goes with the last thread that traces.
    """
    global _traces
    with _tracing:
        _traces += 1
        torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        with _tracing:
            _traces -= 1
            torch.compiler._is_compiling_flag = _traces > 0


def _metadata(*arguments) -> Tensor:
    *sizes, _, qkv_dtype, seqused_k = arguments[:9]
    return functions.get_scheduler_metadata(*sizes, seqused_k, qkv_dtype)


# ------------------------------------------------------------------------------------------- fakes
# Fakes check nothing; real tensors are checked when they arrive.
def _bwd_fake(dout: Tensor, *_) -> tuple[Tensor, ...]:
    return tuple(dout.new_empty(0, dtype=torch.float32) for _ in range(_BACKWARD_RESULTS))


_COMPOSITES = {'fwd': _fwd, 'fwd_combine': _combine}
_KERNELS = {'bwd': (_bwd, _bwd_fake), 'get_scheduler_metadata': (_metadata, _metadata)}
