"""The ops of vLLM 0.33, sglang-kernel 0.4.10 and sgl-flash-mla 1.0.0, by the schemas in their
libraries, with kernels that say that they are the client's own; and packages with files of these
clients around them.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flash_attn3.integrations import _flashmla, _private_ops

from tests.support.called_ops import CalledOps
from tests.support.client_files import files_of

_TENSORS = ('Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, '
            'Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, '
            'Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, '
            'Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, '
            'Tensor? v_descale, ')
_MASK = 'bool is_causal, int window_size_left, int window_size_right, '
_LAST = ('float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, '
         'bool? pack_gqa, int sm_margin, ')
_NEW = 'Tensor? k_new, Tensor? v_new, Tensor? q_v, '
_SIZES = ('int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, '
          'int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, '
          'Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, '
          'Tensor? seqused_q, Tensor? leftpad_k, int? page_size, ')
_PREFILL = 'Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v'
_DECODE = ('Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, '
           'Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, '
           'Tensor? extra_indices, Tensor? extra_topk_length, int d_v, float sm_scale')
SCHEMAS = {
    '_vllm_fa3_C': (
        f'fwd(Tensor! q, Tensor k, Tensor v, {_NEW}Tensor!? out, {_TENSORS}float softmax_scale, '
        f'{_MASK}{_LAST}Tensor? s_aux, int cp_world_size, int cp_rank, '
        'Tensor? cp_tot_seqused_k) -> Tensor[]',
        f'get_scheduler_metadata({_SIZES}int max_seqlen_k_new, {_MASK}bool has_softcap, '
        'int num_splits, bool? pack_gqa, int sm_margin) -> Tensor'),
    'sgl_kernel': (
        f'fwd(Tensor q, Tensor k, Tensor v, {_NEW}Tensor(a!)? out, {_TENSORS}'
        f'float? softmax_scale, {_MASK}int attention_chunk, {_LAST}Tensor? sinks, '
        'Tensor? sparse_mask_fine, bool only_qv) -> (Tensor(a!), Tensor, Tensor, Tensor)',
        f'get_scheduler_metadata({_SIZES}int max_seqlen_k_new=0, bool is_causal=False, '
        'int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, '
        'bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) '
        '-> Tensor'),
    '_flashmla_C': (
        f'sparse_prefill_fwd({_PREFILL}, Tensor? attn_sink, Tensor? topk_length, '
        'Tensor(a!)? out_) -> Tensor[]',
        f'sparse_decode_fwd({_DECODE}, Tensor(c!)? out_=None, bool enable_batch_invariant=False) '
        '-> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)'),
    'flash_mla_legacy': (
        f'sparse_prefill_fwd({_PREFILL}, Tensor? attn_sink=None, Tensor? topk_length=None, '
        'bool return_log2_stats=False, bool return_stats=True) -> Tensor?[]',
        f'sparse_decode_fwd({_DECODE.replace(")?", "!)?")}, str? kv_format=None) -> (Tensor, '
        'Tensor, Tensor(a)?, Tensor(b)?)'),
}
_libraries: list[torch.library.Library] = []


def define(namespace: str) -> None:
    """Defines the ops, until `undefine()`."""
    library = torch.library.Library(namespace, 'DEF')
    _libraries.append(library)
    for schema in SCHEMAS[namespace]:
        library.define(schema)
        for key in ('CPU', 'CUDA'):
            library.impl(schema.partition('(')[0], _own, key)


def undefine() -> None:
    while _libraries:
        _libraries.pop()._destroy()


def _own(*_, **__):
    raise ZeroDivisionError("the client's own kernel")


@pytest.fixture
def called(monkeypatch) -> CalledOps:
    """Which of our ops the replaced kernels call."""
    ops = CalledOps()
    functions = 'flash_attn_with_kvcache', 'flash_attn_varlen_func', 'flash_attn_func'
    for module, name in ((_flashmla, functions[0]), *((_private_ops, x) for x in functions)):
        def watched(*arguments, function=getattr(module, name), **named):
            with ops:
                return function(*arguments, **named)
        monkeypatch.setattr(module, name, watched)
    return ops


@contextmanager
def packages(folder: Path, stubs: dict[str, str], distributions: list[str]) -> Iterator[None]:
    """Makes the clients' own files importable, and what else they import.

    Args:
        stubs: {path: content} of the rest.
        distributions: of `client_files.WHEELS`.
    """
    contents = {name: text.encode() for name, text in stubs.items()}
    for distribution in distributions:
        contents |= files_of(distribution)
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    tops = {name.partition('/')[0] for name in contents}
    before = {name: sys.modules.pop(name) for name in list(sys.modules)
              if name.partition('.')[0] in tops}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in list(sys.modules):
            if name.partition('.')[0] in tops:
                del sys.modules[name]
        sys.modules.update(before)
        undefine()
