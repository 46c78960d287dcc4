"""What the Hopper kernels support: one list, from which docs/support.md is generated
(benchmarks/code_tables.py). The tests walk it cell by cell (support_cells.py).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# Backward: the gradients, with the forward that they need. Packed: flash_attn_varlen_func.
COLUMNS = ('forward dense', 'forward packed', 'backward dense', 'backward packed')

_FUNCTIONS = ('flash_attn_func', 'flash_attn_varlen_func')


class KernelRule(str):
    """The error of a rule that only the kernels have: the CPU takes such a call."""


def _of_functions(text: str, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """An error that names the function, which columns take in turns."""
    return {column: f'flash_attn3.{_FUNCTIONS[COLUMNS.index(column) % 2]}: expected {text}'
            for column in columns}


def _of_kernels(text: str, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    return {column: KernelRule(error) for column, error in _of_functions(text, columns).items()}


_HEAD_DIMS = _of_kernels('the head_dim of q to be a multiple of 8 from 8 to 512')

_NO_FP8_GRADIENTS = _of_functions('requires_grad=False with float8_e4m3fn', COLUMNS[2:])


@dataclass(frozen=True)
class Feature:
    """A row: a small call that has the feature.

    Attributes:
        name: first cell of the table.
        dtype, head_dims, heads: of q, k and v; head_dims are those of q and k, and of v; heads are
            query and KV heads.
        options: arguments of the function.
        tensors: arguments that are tensors (of a right shape): s_aux, out, seqused_q, ...
        lengths_q, lengths_k: of the sequences. Dense tensors have the longest.
        errors: for each column that is not supported, how the error begins; '' where the function
            has no such argument.
    """
    name: str
    dtype: str = 'bfloat16'
    head_dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 2)
    options: Mapping[str, object] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    lengths_q: tuple[int, ...] = (70, 3, 41)
    lengths_k: tuple[int, ...] = (133, 20, 41)
    errors: Mapping[str, str] = field(default_factory=dict)

    def cell(self, column: str) -> str | None:
        """How the error begins; '' for no such argument; None: supported."""
        return self.errors.get(column)


_EVERYTHING = {'causal': True, 'window_size': (30, 0), 'softcap': 20.0, 'deterministic': True,
               'return_attn_probs': True, 'return_max_logits': True, 'pack_gqa': True}

FEATURES = (
    Feature('bfloat16'),
    Feature('float16', dtype='float16'),
    Feature('float32', dtype='float32',
            errors=_of_kernels('q.dtype to be float16 or bfloat16')),
    Feature('FP8', dtype='float8_e4m3fn', errors=_NO_FP8_GRADIENTS),
    Feature('FP8 with `q_descale`, `k_descale`, `v_descale`, `out_dtype`', dtype='float8_e4m3fn',
            tensors=('q_descale', 'k_descale', 'v_descale'), options={'out_dtype': torch.float16},
            errors=_NO_FP8_GRADIENTS),
    Feature('FP8, head dim 80, GQA, causal, window, softcap, sinks, LSE', dtype='float8_e4m3fn',
            head_dims=(80, 80), heads=(6, 2), tensors=('s_aux',), errors=_NO_FP8_GRADIENTS,
            options={'causal': True, 'window_size': (30, 0), 'softcap': 20.0,
                     'return_attn_probs': True}),
    Feature('FP8, head dim of v: 192, 128', dtype='float8_e4m3fn', head_dims=(192, 128),
            errors=_NO_FP8_GRADIENTS),
    Feature('FP8, head dim 72', dtype='float8_e4m3fn', head_dims=(72, 72), errors=_of_kernels(
        'the head_dim of q to be a multiple of 16 from 16 to 256')),
    Feature('FP8 with `return_max_logits`', dtype='float8_e4m3fn',
            options={'return_max_logits': True}, errors=_NO_FP8_GRADIENTS),
    Feature("FP8 with `fp8_accum='promote'`", dtype='float8_e4m3fn',
            options={'fp8_accum': 'promote'}, errors=_NO_FP8_GRADIENTS),
    Feature('`causal`', options={'causal': True}),
    Feature('seqlen_q > seqlen_k', options={'causal': True}, lengths_q=(90, 7, 65),
            lengths_k=(66, 2, 64)),
    Feature('sequences of length 0', lengths_q=(0, 5, 65, 0), lengths_k=(9, 0, 65, 0)),
    Feature('head dim 8', head_dims=(8, 8)),
    Feature('head dim 120', head_dims=(120, 120)),
    Feature('head dim 256', head_dims=(256, 256)),
    Feature('head dim 100', head_dims=(100, 100), errors=_HEAD_DIMS),
    Feature('head dim 520', head_dims=(520, 520), errors=_HEAD_DIMS),
    Feature('head dim of v: 192, 128', head_dims=(192, 128), options={'causal': True}),
    Feature('head dim of v: 64, 256', head_dims=(64, 256)),
    Feature('head dim of v: 72, 24', head_dims=(72, 24)),
    Feature('head dim of v: 64, 512', head_dims=(64, 512)),
    Feature('head dims 264, 512', head_dims=(264, 512), options={'window_size': (20, 0)},
            tensors=('s_aux',)),
    Feature('GQA', heads=(6, 2)),
    Feature('MQA, `pack_gqa`', heads=(4, 1), options={'pack_gqa': True}),
    Feature('`window_size`, left', options={'window_size': (20, 0)}),
    Feature('`window_size`, both sides', options={'window_size': (9, 17)}),
    Feature('`attention_chunk`', options={'attention_chunk': 32}),
    Feature('`softcap`', options={'softcap': 2.5}),
    Feature('sinks (`s_aux`)', tensors=('s_aux',)),
    Feature('LSE', options={'return_attn_probs': True}),
    Feature('`return_max_logits`', options={'return_max_logits': True}),
    Feature('`deterministic`', options={'deterministic': True}),
    Feature('`sm_margin`', options={'sm_margin': 4}),
    Feature('`seqused_q`, `seqused_k`', tensors=('seqused_q', 'seqused_k'),
            errors={'forward dense': '', 'backward dense': ''}),
    Feature('`out=`', tensors=('out',),
            errors=_of_functions('requires_grad=False together with out=', COLUMNS[2:])),
    Feature('GQA, causal, window, softcap, sinks, LSE, max logits, deterministic', heads=(6, 2),
            options=_EVERYTHING, tensors=('s_aux',)),
    Feature('192, 128 with window, softcap, sinks', head_dims=(192, 128), tensors=('s_aux',),
            options={'window_size': (40, 8), 'softcap': 5.0}),
    Feature('`num_splits` > 1', options={'num_splits': 2}),
    Feature('`num_splits` > 1, FP8', dtype='float8_e4m3fn', options={'num_splits': 2},
            errors=_NO_FP8_GRADIENTS),
    Feature('`num_splits` > 1, `return_max_logits`',
            options={'num_splits': 2, 'return_max_logits': True}),
    Feature('`split_size`, `return_max_logits`',
            options={'split_size': 64, 'return_max_logits': True}),
    Feature('`qv`', tensors=('qv',), errors=_of_functions('qv to be None')),
    Feature('`q_descale`', tensors=('q_descale',),
            errors=_of_functions('q_descale to be None')),
)


@dataclass(frozen=True)
class CacheFeature:
    """A small call of flash_attn_with_kvcache that has the feature.

    Attributes:
        name: in the list.
        case: what differs from tests.support.cache_cases.small, in bf16 with 64 columns.
        error: how the error begins that refuses it; '': supported.
    """
    name: str
    case: Mapping[str, object] = field(default_factory=dict)
    error: str = ''


_NEW = {'new': (1, 1, 1)}
_E4M3 = {'dtype': 'e4m3'}
_LATENT = {'latent': True, 'head_dim_v': 512, 'heads': (4, 1)}
_KV8 = {'kv8': True, 'descales': False}

CACHE_FEATURES = (
    CacheFeature('bfloat16'),
    CacheFeature('float16', {'dtype': 'fp16'}),
    CacheFeature('FP8 with scales', _E4M3),
    CacheFeature('head dim 8', {'head_dim': 8}),
    CacheFeature('head dims 192, 128', {'head_dim': 192, 'head_dim_v': 128}),
    CacheFeature('head dims 256, 512', {'head_dim': 256, 'head_dim_v': 512}),
    CacheFeature('MQA', {'heads': (4, 1)}),
    CacheFeature('several queries, `causal`', {'queries': 3, 'causal': True}),
    CacheFeature('`window_size`', {'queries': 3, 'window': (4, 0)}),
    CacheFeature('`attention_chunk`', {'chunk': 8}),
    CacheFeature('`softcap`', {'softcap': 2.5}),
    CacheFeature('sinks', {'sinks': 'fp32'}),
    CacheFeature('packed queries', {'queries': (3, 0, 2), 'is_packed': True}),
    CacheFeature('pages of 1', {'page_size': 1}),
    CacheFeature('pages of 12', {'page_size': 12}),
    CacheFeature('`cache_batch_idx`', {'batch_idx': True}),
    CacheFeature('`cache_leftpad`', {'leftpad': (2, 0, 5)}),
    CacheFeature('a number as length', {'lengths': (5, 5, 5), 'length_as': 'int'}),
    CacheFeature('append', _NEW),
    CacheFeature('append to FP8 pages', {**_NEW, **_E4M3, 'page_size': 4}),
    CacheFeature('FP8 cache under 16-bit queries', _KV8),
    CacheFeature('append of 16-bit keys to FP8 pages', {**_NEW, **_KV8, 'page_size': 4}),
    CacheFeature('FP8 cache with scales by page', {'kv8': True, 'by_page': True, 'page_size': 4}),
    CacheFeature('append with rotary', {**_NEW, 'rotary': 0.25, 'page_size': 4}),
    CacheFeature('packed append', {'new': (3, 0, 1), 'queries': (3, 0, 1), 'is_packed': True,
                                   'new_packed': True}),
    CacheFeature('`num_splits`', {'num_splits': 3}),
    CacheFeature('`split_size`', {'split_size': 128}),
    CacheFeature('`shared_prefix`', {'lengths': (9, 9, 20), 'page_size': 4, 'shared': 8}),
    CacheFeature('`qv`', {**_LATENT, 'page_size': 4}),
    CacheFeature('`qv` without q and `k_cache`', {**_LATENT, 'page_size': 4, 'rope_free': True}),
    CacheFeature('`qv`, latents of e4m3', {**_LATENT, **_KV8, 'page_size': 4}),
    CacheFeature('float32', {'dtype': 'fp32'},
                 error='flash_attn3.flash_attn_with_kvcache: expected q.dtype to be float16 or '
                       'bfloat16'),
    CacheFeature('FP8, rotary', {**_NEW, 'dtype': 'e4m3', 'rotary': 0.5, 'descales': False}),
    CacheFeature('`split_size` with `num_splits` > 1', {'split_size': 128, 'num_splits': 2},
                 error='flash_attn3.flash_attn_with_kvcache: expected no num_splits above 1 with '
                       'split_size'),
    CacheFeature('`shared_prefix` with windows, chunks or `cache_leftpad`',
                 {'lengths': (9, 9, 20), 'page_size': 4, 'shared': 8, 'window': (4, 0)},
                 error='flash_attn3.flash_attn_with_kvcache: expected no window_size with '
                       'shared_prefix'),
    CacheFeature('`qv`, head dims 64, 256', _LATENT | {'head_dim_v': 256},
                 error='flash_attn3.flash_attn_with_kvcache: expected the head_dim of v_cache to '
                       'be 512 with qv'),
)
