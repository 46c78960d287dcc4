"""For doctor.py: what this machine and this install are, what an example call would run, and what
stands in the way of our kernels.
"""
from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

import flash_attn3
from flash_attn3 import _plan, env
from flash_attn3.ops import checks, library
from flash_attn3.tools import doctor_clients, planning, planning_cache
from flash_attn3.tools.doctor_clients import NOTHING, PACKAGE, UPSTREAM

SCHEMA = 1    # goes up when a key of the report changes its meaning or goes away

_HOPPER = '9.0'
_VARIABLES = ('FLASH_ATTN3_DISABLE_KERNELS', 'FLASH_ATTN3_LIBRARY', 'FLASH_ATTN3_CHECKS',
              'CUDA_VISIBLE_DEVICES')
_DRIVER = Path('/proc/driver/nvidia/version')
_TRAINING = (2, 4096, 16, 128)
_DECODE = (8, 1, 32, 128), (8, 8192, 8, 128)


class Problem(NamedTuple):
    """A finding and its remedy, a sentence each without a full stop."""
    what: str
    remedy: str


def report() -> dict:
    """Everything that doctor.py prints, in types of JSON. Its paths have no folders."""
    gpus, gpu_problem = _gpus()
    facts = {
        'schema': SCHEMA,
        'flash_attn3': _install(),
        'python': {'version': platform.python_version(), 'system': platform.system(),
                   'machine': platform.machine()},
        'torch': {'version': torch.__version__, 'cuda': torch.version.cuda or ''},
        'driver': {**_driver(), 'problem': library.DRIVER_PROBLEM or gpu_problem},
        'gpus': gpus,
        'environment': _environment(),
        'compat': doctor_clients.compat(),
        'clients': doctor_clients.clients(),
    }
    problems = [*_machine_problems(facts), *_install_problems(facts), *_client_problems(facts)]
    facts['calls'] = _calls(facts)
    facts['problems'] = [problem._asdict() for problem in problems]
    facts['ok'] = any(call['runs'] for call in facts['calls'])
    return _without_folders(facts)


# -------------------------------------------------------------------------------------- the facts
def _install() -> dict:
    return {'version': flash_attn3.__version__, 'library': library._LIBRARY_PATH.name,
            'loaded': not library.KERNELS_MISSING, 'problem': library.KERNELS_MISSING,
            'kernels': len(planning.built_variants()),
            'kernels_of': len(_plan.variants() + _plan.backward_variants())}


def _driver() -> dict:
    """The version of the NVIDIA driver and the newest CUDA that it runs; empty without one."""
    try:
        text = _DRIVER.read_text()
    except OSError:    # a container may have the driver's library without this file
        text = ''
    found = re.search(r'Kernel Module\D*([\d.]+)', text)
    return {'version': found[1] if found else '', 'cuda': _cuda_of_driver()}


def _cuda_of_driver() -> str:
    """Asks the library of the driver, which leaves CUDA uninitialised."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ''
    return f'{version.value // 1000}.{version.value % 1000 // 10}' if version.value else ''


def _environment() -> dict[str, str]:
    """The variables that count. GPUs may be listed by unique names, which are nobody's business."""
    found = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    devices = found.get('CUDA_VISIBLE_DEVICES', '')
    if not re.fullmatch(r'[\d,\s-]*', devices):
        found['CUDA_VISIBLE_DEVICES'] = f'{devices.count(",") + 1} by name'
    return found


def _gpus() -> tuple[list[dict], str]:
    """A dict for each GPU that PyTorch sees, and why it sees none if that is an error."""
    try:
        if not torch.cuda.is_available():
            return [], ''
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return [], str(error)
    return [{'index': index, 'name': gpu.name, 'compute_capability': f'{gpu.major}.{gpu.minor}',
             'multiprocessors': gpu.multi_processor_count,
             'memory_gib': round(gpu.total_memory / 2**30, 1)}
            for index, gpu in enumerate(properties)], ''


# ------------------------------------------------------------------------------- the example calls
def _calls(facts: Mapping) -> list[dict]:
    """A training step and a step of decode, which nobody runs: by their plans."""
    hopper = [gpu for gpu in facts['gpus'] if gpu['compute_capability'] == _HOPPER]
    sm_count = hopper[0]['multiprocessors'] if hopper else checks.HOPPER_SM_COUNT
    gpu = dict(sm_count=sm_count, l2_bytes=checks.HOPPER_L2_BYTES)
    training = dict(causal=True, **gpu)
    q, cache = _DECODE
    plans = {
        'training': ('flash_attn_func', f'q, k, v {_TRAINING}, causal, with gradients',
                     [planning.plan(_TRAINING, _TRAINING, **training),
                      planning.plan_backward(_TRAINING, _TRAINING, **training)]),
        'decode': ('flash_attn_with_kvcache', f'q {q}, caches {cache}',
                   [planning_cache.plan((q, cache, cache), 'bfloat16', {'causal': True}, gpu)])}
    common = _why_none_runs(facts, bool(hopper))
    return [_call(name, *call, common) for name, call in plans.items()]


def _call(name: str, function: str, sizes: str, plans: list[dict], common: str) -> dict:
    reasons = [common] if common else [
        text for plan in plans for text in
        [plan['reason'] if 'reason' in plan else '',
         *(f'the kernel {name} is not in this install' for name in planning.missing_kernels(plan))]
        if text]
    return {'name': name, 'function': function, 'sizes': f'bfloat16 {sizes}',
            'kernels': [plan.get('name', '') for plan in plans], 'runs': not reasons,
            'reasons': reasons}


def _why_none_runs(facts: Mapping, has_hopper: bool) -> str:
    if library.KERNELS_MISSING:
        return library.KERNELS_MISSING
    if not facts['gpus']:
        return facts['driver']['problem'] or 'no GPU'
    if not has_hopper:
        return f'no GPU of compute capability {_HOPPER}'
    return library.DRIVER_PROBLEM


# ------------------------------------------------------------------------- problems with a remedy
def _machine_problems(facts: Mapping) -> Iterator[Problem]:
    if torch.version.cuda is None:
        yield Problem(f'PyTorch {torch.__version__} is a CPU build',
                      'install a CUDA build of PyTorch, then install flash_attn3 again')
    if library.DRIVER_PROBLEM:
        yield _of_error_text(library.DRIVER_PROBLEM)
    gpus = facts['gpus']
    if not gpus:
        yield _no_gpu(facts)
        return
    serving = [gpu['compute_capability'] == _HOPPER for gpu in gpus]
    names = ', '.join(f'{gpu["name"]} ({gpu["compute_capability"]})' for gpu in gpus)
    if not any(serving):
        yield Problem(f'no GPU of compute capability {_HOPPER}: {names}',
                      "the kernels need Hopper (H100, H200, GH200); PyTorch's attention runs here")
    elif not all(serving):
        yield Problem(f'some GPUs are not of compute capability {_HOPPER}: {names}',
                      'choose the others with CUDA_VISIBLE_DEVICES')


def _no_gpu(facts: Mapping) -> Problem:
    if facts['driver']['problem']:
        return Problem(facts['driver']['problem'], 'mend the NVIDIA driver; nvidia-smi has to work')
    driver = facts['driver']['version'] or facts['driver']['cuda']
    if not driver:
        return Problem('no GPU: this machine has no NVIDIA driver',
                       'CPU tensors are served by plain PyTorch; the kernels need a Hopper GPU')
    hint = ('set CUDA_VISIBLE_DEVICES to a GPU' if 'CUDA_VISIBLE_DEVICES' in facts['environment']
            else 'compare nvidia-smi, and give the container its GPUs')
    return Problem(f'PyTorch sees no GPU, though there is a driver ({driver})', hint)


def _install_problems(facts: Mapping) -> Iterator[Problem]:
    yield from _library_problem()
    install = facts['flash_attn3']
    if install['loaded'] and install['kernels'] < install['kernels_of']:
        yield Problem(f'{install["kernels"]} of {install["kernels_of"]} kernels are in this build',
                      'build without FLASH_ATTN3_VARIANTS')
    metadata = doctor_clients.version_of('flash_attn3')
    if metadata and metadata != install['version']:
        yield Problem(f'the metadata of flash_attn3 say {metadata}, its code {install["version"]}',
                      'pip uninstall flash_attn3, then install it again')


def _library_problem() -> Iterator[Problem]:
    """Why the library of kernels is not loaded; library.py goes through the same cases."""
    text = library.KERNELS_MISSING
    if not text:
        return
    if env.DISABLE_KERNELS:
        yield Problem(text, 'unset FLASH_ATTN3_DISABLE_KERNELS')
    elif torch.version.cuda is None:
        return    # said of the machine
    elif env.LIBRARY_PATH:
        yield Problem(text, 'unset FLASH_ATTN3_LIBRARY, or set it to a library of this version')
    elif not library._LIBRARY_PATH.exists():
        yield Problem(text, 'install again with nvcc and a CUDA build of PyTorch at hand, '
                            'and without FLASH_ATTN3_CPU_ONLY')
    else:
        yield Problem(text, 'install again for this PyTorch, which has to be 2.10 or later')


def _client_problems(facts: Mapping) -> Iterator[Problem]:
    compat = facts['compat']
    found = {compat[name] for name in ('interface', 'package', 'distribution')}
    if UPSTREAM in found:
        version = compat['distribution_version']
        yield Problem(f'upstream FlashAttention-3 {version or "(without metadata)"} is installed: '
                      'clients find it instead of flash_attn3',
                      'pip uninstall flash_attn_3, or flash_attn3.compat.install(force=True)')
    if compat['distribution'] != NOTHING and compat['interface'] == NOTHING:
        yield Problem('there are metadata of flash_attn_3, but no module flash_attn_interface',
                      'pip uninstall flash_attn_3')
    for client in facts['clients']:
        if client['problem']:
            problem = _of_error_text(client['problem'])
            yield Problem(f'{client["name"]}: {problem.what}', problem.remedy)


def _of_error_text(text: str) -> Problem:
    what, _, hint = text.partition('; hint: ')
    return Problem(what, hint or 'see docs/integrations.md')


# ------------------------------------------------------------------------------------ what is left
def _without_folders(facts):
    """The same without the folders of absolute paths, which name people and machines."""
    if isinstance(facts, Mapping):
        return {key: _without_folders(value) for key, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [_without_folders(value) for value in facts]
    return hide_folders(facts) if isinstance(facts, str) else facts


def hide_folders(text: str) -> str:
    """'.../_C.abi3.so' for any absolute path of it."""
    for known in sorted({str(PACKAGE.parent), str(Path.home()), sys.prefix}, key=len, reverse=True):
        if len(known) > 1:    # the known ones may have spaces in them
            text = text.replace(known + '/', '.../')
    return re.sub(r'(?:\.{3}|(?<![\w./:-]))/(?:[^/\s:;,\'"]+/)+', '.../', text)
