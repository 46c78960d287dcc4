"""`python -m flash_attn3.doctor`: what is installed, which FlashAttention-3 each client would find,
what prevents our kernels from running, and how to fix it.

Exit status: 0 if our kernels would run here, else 1. Nothing is computed. --json prints a report
for an issue, without the names of folders and machines.
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch

import flash_attn3
from flash_attn3 import _plan
from flash_attn3.ops import library
from flash_attn3.tools import planning

OURS, UPSTREAM, NOTHING = 'flash_attn3', 'upstream', 'nothing'

_PACKAGE = Path(__file__).resolve().parents[1]
_VARIABLES = 'FLASH_ATTN3_DISABLE_KERNELS', 'FLASH_ATTN3_LIBRARY', 'CUDA_VISIBLE_DEVICES'
_METADATA, _INTERFACE = 'metadata of flash_attn_3', 'flash_attn_interface'
# Module of flash_attn3.integrations; distributions of the client, the first installed one counts;
# the names of upstream that it looks for. Without names only the integration serves the client.
_CLIENTS = (
    ('sdpa', ('torch',), ()), ('torchtitan', ('torchtitan',), ()), ('vllm', ('vllm',), ()),
    ('sglang', ('sglang', 'sglang-kernel', 'sgl-kernel'), ()),
    ('transformers', ('transformers',), (_INTERFACE, _METADATA)),
    ('diffusers', ('diffusers',), ('flash_attn_3', _INTERFACE, _METADATA)),
    ('xformers', ('xformers',), ('flash_attn_3._C',)),
    ('transformer_engine', ('transformer-engine', 'transformer-engine-torch'),
     (_INTERFACE, _METADATA)),
    ('megatron', ('megatron-core',), ('flash_attn_3.flash_attn_interface',)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser('python -m flash_attn3.doctor', description=(
        'Says whether the kernels of flash_attn3 would run here, and what is missing.'))
    parser.add_argument('--json', action='store_true', help='a report for an issue')
    is_json, report = parser.parse_args(arguments).json, judged(facts())
    print(without_folders(json.dumps(report, indent=2)) if is_json else text_of(report))
    return 0 if report['ok'] else 1


def judged(found: Mapping) -> dict:
    """The facts with two more keys: problems, and whether our kernels would run."""
    has_hopper = any(gpu['compute_capability'] == '9.0' for gpu in found['gpus'])
    is_ok = has_hopper and found['flash_attn3']['kernels'] > 0 and not found['driver']['problem']
    problems = [{'what': what, 'remedy': remedy} for what, remedy in _problems(found)]
    return {**found, 'ok': is_ok, 'problems': problems}


def facts() -> dict:
    """What this machine and this install are, in types of JSON."""
    gpus, gpu_problem = _gpus()
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    devices = variables.get('CUDA_VISIBLE_DEVICES', '')
    if not re.fullmatch(r'[\d,\s-]*', devices):    # unique names of GPUs are private
        variables['CUDA_VISIBLE_DEVICES'] = f'{devices.count(",") + 1} by name'
    return {
        'schema': 2,    # goes up when a key changes its meaning or is removed
        'flash_attn3': {
            'version': flash_attn3.__version__, 'metadata': _version_of('flash_attn3'),
            'loaded': not library.KERNELS_MISSING, 'problem': library.KERNELS_MISSING,
            'kernels': len(planning.built_variants()),
            'kernels_of': len(_plan.variants() + _plan.backward_variants())},
        'python': f'{platform.python_version()}, {platform.system()} {platform.machine()}',
        'torch': {'version': torch.__version__, 'cuda': torch.version.cuda or ''},
        'driver': {'cuda': _cuda_of_driver(), 'problem': library.DRIVER_PROBLEM or gpu_problem},
        'gpus': gpus, 'environment': variables,
        'clients': [client for row in _CLIENTS if (client := _client(*row))['version']]}


def _cuda_of_driver() -> str:
    """The newest CUDA that the NVIDIA driver runs, or ''. Leaves CUDA uninitialised."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(version))
    return f'{version.value // 1000}.{version.value % 1000 // 10}' if version.value else ''


def _gpus() -> tuple[list[dict], str]:
    """A dict for each GPU that PyTorch sees, and the error if it cannot see them."""
    try:
        properties = [torch.cuda.get_device_properties(index) for index in range(
            torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    except (RuntimeError, AssertionError) as error:
        return [], str(error)
    return [{'name': gpu.name, 'compute_capability': f'{gpu.major}.{gpu.minor}'}
            for gpu in properties], ''


def _client(name: str, packages: Sequence[str], looks_for: Sequence[str]) -> dict:
    version = next(filter(None, map(_version_of, packages)), '')
    owners = [_owner(wanted) for wanted in looks_for]
    found = NOTHING if NOTHING in owners else max(owners, default=NOTHING)    # upstream's first
    result = {'name': name, 'version': version, 'finds': found, 'problem': ''}
    try:
        with contextlib.redirect_stdout(sys.stderr):    # clients may print when imported
            integration = importlib.import_module(f'flash_attn3.integrations.{name}')
            result['finds'] = OURS if integration.is_enabled() else found
            result['problem'] = integration.problem() if version else ''
    except Exception as error:    # a broken client is a finding, not the end of the report
        result['problem'] = f'{type(error).__name__}: {error}'
    return result


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution) or ''
    except importlib.metadata.PackageNotFoundError:
        return ''


def _owner(name: str) -> str:
    """Who provides a module of upstream's name; this imports nothing."""
    top, _, rest = name.partition('.')
    try:
        if name == _METADATA:
            places = [importlib.metadata.distribution('flash_attn_3').locate_file('')]
        else:
            spec = find_spec(top)
            if spec is not None and rest:
                spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
            places = [] if spec is None else [spec.origin] if spec.has_location else [
                *(spec.submodule_search_locations or ())]
    except (ImportError, ValueError):    # ValueError: a module that was put into sys.modules
        return NOTHING
    is_ours = any(Path(str(place)).resolve().is_relative_to(_PACKAGE) for place in places)
    return OURS if is_ours else UPSTREAM if places else NOTHING


def _problems(found: Mapping) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do)."""
    own, driver, gpus = found['flash_attn3'], found['driver'], found['gpus']
    if driver['problem']:
        what, _, hint = driver['problem'].partition('; hint: ')
        yield what, hint or 'repair the NVIDIA driver; nvidia-smi must work'
    elif not gpus:
        yield ('PyTorch sees no GPU', 'check nvidia-smi, CUDA_VISIBLE_DEVICES and the devices of '
               'the container' if driver['cuda'] else 'install a Hopper GPU and its driver')
    others = [gpu['name'] for gpu in gpus if gpu['compute_capability'] != '9.0']
    if others:
        yield (f'not of compute capability 9.0: {", ".join(others)}', "PyTorch's attention serves "
               'these; choose Hopper GPUs (H100, H200, GH200) with CUDA_VISIBLE_DEVICES')
    if own['problem']:
        variables = [name for name in _VARIABLES[:2] if name in found['environment']]
        yield (own['problem'], f'unset {variables[0]}' if variables else
               'install a CUDA build of PyTorch, 2.10 or later, then flash_attn3 with nvcc')
    elif own['kernels'] < own['kernels_of']:
        yield (f'{own["kernels"]} of {own["kernels_of"]} kernels are in this build',
               'build without FLASH_ATTN3_VARIANTS')
    if own['metadata'] not in ('', own['version']):
        yield (f'the metadata of flash_attn3 say {own["metadata"]}, its code {own["version"]}',
               'pip uninstall flash_attn3, then install it again')
    for client in found['clients']:
        if client['problem']:
            what, _, hint = client['problem'].partition('; hint: ')
            yield f'{client["name"]}: {what}', hint or 'see docs/integrations.md'
        if client['finds'] == UPSTREAM:
            yield (f'{client["name"]} finds upstream FlashAttention-3',
                   'pip uninstall flash_attn_3, or flash_attn3.compat.install(force=True)')


def text_of(report: Mapping) -> str:
    own, torch_build = report['flash_attn3'], report['torch']
    rows = [('flash_attn3', own['version']),
            ('kernels', f'{own["kernels"]} of {own["kernels_of"]}' if own['loaded'] else 'none'),
            ('PyTorch', f'{torch_build["version"]}, CUDA {torch_build["cuda"] or "none"}'),
            ('CUDA of the driver', report['driver']['cuda'] or 'none'),
            *(('GPU', f'{gpu["name"]} ({gpu["compute_capability"]})') for gpu in report['gpus']),
            ('Python', report['python']), *report['environment'].items(),
            *((f'{client["name"]} {client["version"]}', f'finds {client["finds"]}')
              for client in report['clients'])]
    width = max(len(name) for name, _ in rows)
    return '\n'.join([*(f'{name:{width}}  {text}' for name, text in rows),
                      *(f'\nproblem: {problem["what"]}\nremedy:  {problem["remedy"]}'
                        for problem in report['problems']),
                      f'\nOur kernels {"run" if report["ok"] else "do not run"} here.'])


def without_folders(text: str) -> str:
    """The text with '...' for the folders of absolute paths, which name people and machines."""
    for folder in (str(_PACKAGE), sys.prefix, str(Path.home())):
        text = text.replace(f'{folder}/', '.../')    # these may have spaces in them
    return re.sub(r'(?:\.{3}|(?<![\w./:-]))/(?:[^/\s:;,\'"]+/)+', '.../', text)
