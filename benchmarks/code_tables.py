"""Tables that follow from the code, for benchmarks/tables.py: features, kernels, clients."""
from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

from flash_attn3 import _plan, integrations
from tests.support import support_matrix as support
from tests.support.client_evidence import EVIDENCE

E4M3 = 'float8_e4m3fn'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = ['| ' + ' | '.join(map(str, row)) + ' |' for row in (header, *rows)]
    lines.insert(1, '|' + '---|' * len(header))
    return '\n'.join(lines)


# --------------------------------------------------------------------------------------- features
def support_part() -> str:
    """The short table of README.md."""
    largest = max(variant['head_dim'] for variant in _plan.variants())
    fp8 = max(variant['head_dim'] for variant in _plan.variants()
              if variant['dtype'] == 'float8_e4m3fn')
    return table(['', 'Hopper kernels'], [
        ['dtypes', 'bfloat16, float16; FP8 (`float8_e4m3fn`) in the forward, gradients in 16 bits'],
        ['head dims', f'multiples of 8 to {largest}, of V too; dense FP8: multiples of 16 to '
                      f'{fp8}'],
        ['heads', 'MHA, GQA, MQA'],
        ['masks', 'full, causal (aligned bottom-right), sliding windows, chunks'],
        ['scores', 'softmax scale, softcap, attention sinks, LSE, max logits'],
        ['layouts', 'dense, packed (`cu_seqlens`, `seqused`), packed QKV; any strides'],
        ['KV cache', 'dense or paged (any page size), append and rotary in place, splits, '
                     'shared prefixes, absorbed MLA'],
        ['gradients', 'of Q, K, V and sinks; deterministic on request'],
        ['PyTorch', '2.10 and later: `torch.compile`, `torch.export`, CUDA graphs'],
        ['not yet', 'e5m2']])


def features_part() -> str:
    """The features that all columns support, a table of those that differ, and the refused ones."""
    everywhere, refused = [], {}
    notes: list[str] = []
    rows: dict[tuple[str, ...], list[str]] = {}
    for feature in support.FEATURES:
        cells = [_error(feature.cell(column)) for column in support.COLUMNS]
        if not feature.errors:
            everywhere.append(feature.name)
        elif cells[0] and len(set(cells)) == 1:
            refused.setdefault(cells[0], []).append(feature.name)
        else:
            rows.setdefault(tuple(_cell(cell, notes) for cell in cells), []).append(feature.name)
    return '\n'.join([
        'In all four columns: ' + '; '.join(everywhere) + '.', '',
        table(['', *support.COLUMNS],
              [['; '.join(names), *cells] for cells, names in rows.items()]),
        '', *(f'{number}. `{note} ...`' for number, note in enumerate(notes, 1)),
        '', 'Refused in all four:', '',
        *(f'- {"; ".join(names)}: `{error} ...`' for error, names in refused.items())])


def cache_features_part() -> str:
    """The calls of flash_attn_with_kvcache that are supported, and the errors of others."""
    named = {is_fine: [feature for feature in support.CACHE_FEATURES if (not feature.error) is
                       is_fine] for is_fine in (True, False)}
    return '\n'.join([
        'Supported: ' + '; '.join(feature.name for feature in named[True]) + '. Refused:', '',
        *(f'- {feature.name}: `{_error(feature.error)} ...`' for feature in named[False])])


def _error(error: str | None) -> str | None:
    """An error without the function: equal for dense and packed tensors."""
    return error and error.split(': ', 1)[1]


def _cell(error: str | None, notes: list[str]) -> str:
    """A cell of a table: an error is the number of its note, and a new one becomes a note."""
    if not error:
        return 'yes' if error is None else '-'
    if error not in notes:
        notes.append(error)
    return f'({notes.index(error) + 1})'


# --------------------------------------------------------------------------------------- variants
def _names(variants: Sequence[Mapping]) -> str:
    """Head dims with the same kernels together: `D32, D48: Full, Causal; D64: Full, General`."""
    kernels: dict[str, list[str]] = {}
    for variant in variants:
        dim, kernel = re.match(r'\w{3}(?:Bf16|Fp16|E4m3)(D\d+(?:x\d+)?)(\w+)',
                               variant['name']).groups()
        found = kernels.setdefault(dim, [])
        if kernel not in found:
            found.append(kernel)
    groups: dict[tuple[str, ...], list[str]] = {}
    for dim, names in kernels.items():
        groups.setdefault(tuple(names), []).append(dim)
    return '; '.join(f'{", ".join(dims)}: {", ".join(names)}' for names, dims in groups.items())


def _grouped(variants: Iterable[Mapping], keys: Sequence[str]) -> list[list[Mapping]]:
    """Variants that agree in all keys together, in the order of the first of each group."""
    groups: dict[tuple, list[Mapping]] = {}
    for variant in variants:
        groups.setdefault(tuple(variant[key] for key in keys), []).append(variant)
    return list(groups.values())


def _registers(variant: Mapping) -> str:
    consumers = str(variant['consumer_registers']).replace(', ', '+')
    outputs = variant.get('output_registers')
    return f"{variant['producer_registers']}/{consumers}" + (f'/{outputs}' if outputs else '')


def _kib(variants: Sequence[Mapping]) -> str:
    """The least and the most shared memory of the variants."""
    sizes = [variant['shared_bytes'] for variant in variants]
    texts = dict.fromkeys(f'{size / 1024:.0f}' for size in (min(sizes), max(sizes)))
    return '-'.join(texts)


STAGES = 'q_stages', 'stages', 'raw_stages'
FORWARD_KEYS = ('tile_m', 'tile_n', 'producer_registers', 'consumer_registers', 'ping_pong',
                'intra_overlap', 'tile_overlap', 'ctas_per_sm', 'promotes')


def _forward_row(variants: Sequence[Mapping]) -> list[str]:
    first = variants[0]
    is_latent = first['output_registers'] > 0
    overlaps = {'ping-pong': first['ping_pong'], 'warpgroups': is_latent,
                'warpgroup': first['intra_overlap'] and not is_latent,
                'tile': first['tile_overlap']}
    keys = STAGES if first['dtype'] == E4M3 else STAGES[:2]
    stages = dict.fromkeys('/'.join(str(variant[key]) for key in keys) for variant in variants)
    return [_names(variants), f"{first['tile_m']}x{first['tile_n']}", ', '.join(stages),
            _kib(variants), _registers(first),
            '+'.join(name for name, is_on in overlaps.items() if is_on) or 'none']


def _forward_table(is_fp8: bool) -> str:
    """Kernels for a cache that have one tile share a row: their stages are in the order of head
    dims."""
    variants = [variant for variant in _plan.variants() if (variant['dtype'] == E4M3) is is_fp8]
    caches = [variant for variant in variants if 'Cache' in variant['name']]
    others = [variant for variant in variants if variant not in caches]
    groups = _grouped(others, FORWARD_KEYS + STAGES) + _grouped(caches, FORWARD_KEYS)
    stages = 'stages Q/KV/raw V' if is_fp8 else 'stages Q/KV'
    return table(['kernels', 'rows x keys', stages, 'KiB', 'registers', 'overlap'],
                 map(_forward_row, groups))


def forward_part() -> str:
    return _forward_table(is_fp8=False)


def fp8_part() -> str:
    return _forward_table(is_fp8=True)


BACKWARD_KEYS = ('tile_m', 'tile_n', 'cluster_size', 'q_stages', 'dout_stages', 'columns',
                 'columns_v', 'producer_registers', 'consumer_registers')


def _backward_row(variants: Sequence[Mapping]) -> list[str]:
    first = variants[0]
    ctas = first['cluster_size']
    order = 'by keys' if ctas == 1 else f'by products, {ctas} CTAs'
    return [_names(variants), f"{first['tile_m']}x{first['tile_n']}", order,
            f"{first['q_stages']}/{first['dout_stages']}", _kib(variants), _registers(first)]


def backward_part() -> str:
    return table(['kernels', 'queries x keys', 'order', 'stages Q/dO', 'KiB', 'registers'],
                 [_backward_row(group) for group in _grouped(_plan.backward_variants(),
                                                             BACKWARD_KEYS)])


# --------------------------------------------------------------------------------------- clients
def clients_part() -> str:
    """Each client of flash_attn3.integrations: what it is, the calls that turn it on, and what its
    contract test runs against."""
    rows = []
    for name in integrations.CLIENTS:
        text = inspect.getdoc(importlib.import_module(f'flash_attn3.integrations.{name}'))
        what = ' '.join(text.split('\n\n')[0].split()).rstrip('.')
        calls = '\n'.join(line.split('#')[0].strip() for line in text.splitlines()
                          if line.startswith('    ') and 'enable()' not in line)
        calls = calls.replace(',\n', ', ').splitlines()    # a call may span lines
        rows.append([f'`{name}`', what, '<br>'.join(f'`{call}`' for call in calls) or '-',
                     EVIDENCE[name][0]])
    header = ['NAME', 'client', 'turned on by', 'contract test on CPU tensors']
    return ('`import flash_attn3.integrations.NAME; flash_attn3.integrations.NAME.enable()`, then:'
            '\n\n' + table(header, rows))
