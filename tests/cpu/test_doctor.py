"""python -m flash_attn3.doctor: problems and their remedies, exit status, the report in JSON."""
from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from csrc.plan.variants import BACKWARD, FORWARD
from flash_attn3 import env
from flash_attn3.ops import library
from flash_attn3.tools import doctor, doctor_clients, doctor_facts, planning
from flash_attn3.integrations import sdpa

from tests.support.checkout import ROOT

NAMES = [variant.name for variant in FORWARD + BACKWARD]
H100 = {'index': 0, 'name': 'NVIDIA H100 80GB HBM3', 'compute_capability': '9.0',
        'multiprocessors': 132, 'memory_gib': 79.1}
L4 = {**H100, 'index': 1, 'name': 'NVIDIA L4', 'compute_capability': '8.9', 'multiprocessors': 58}
DRIVER = {'version': '580.95.05', 'cuda': '13.0'}
# An entry of a list stands for all of them.
KEYS = {
    'schema': int, 'ok': bool,
    'flash_attn3': {'version': str, 'library': str, 'loaded': bool, 'problem': str, 'kernels': int,
                    'kernels_of': int},
    'python': {'version': str, 'system': str, 'machine': str},
    'torch': {'version': str, 'cuda': str},
    'driver': {'version': str, 'cuda': str, 'problem': str},
    'gpus': [{'index': int, 'name': str, 'compute_capability': str, 'multiprocessors': int,
              'memory_gib': float}],
    'environment': {},
    'compat': {'available': bool, 'installed': bool, 'interface': str, 'package': str,
               'distribution': str, 'distribution_version': str},
    'clients': [{'name': str, 'package': str, 'version': str, 'finds': str, 'turn_on': str,
                 'problem': str}],
    'calls': [{'name': str, 'function': str, 'sizes': str, 'kernels': [str], 'runs': bool,
               'reasons': [str]}],
    'problems': [{'what': str, 'remedy': str}]}


class Machine:
    """A machine and an install: what the doctor asks about them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.patch = monkeypatch

    def set(self, *, missing='', path=library._LIBRARY_PATH, own_library='', disabled=False,
            driver=DRIVER, driver_problem='', gpus=(H100,), gpu_problem='', built=NAMES) -> None:
        patch = self.patch.setattr
        patch(library, 'KERNELS_MISSING', missing)
        patch(library, 'DRIVER_PROBLEM', driver_problem)
        patch(library, '_LIBRARY_PATH', Path(path))
        patch(env, 'LIBRARY_PATH', own_library)
        patch(env, 'DISABLE_KERNELS', disabled)
        patch(planning, 'built_variants', lambda: [] if missing else list(built))
        patch(doctor_facts, '_driver', lambda: dict(driver))
        patch(doctor_facts, '_gpus', lambda: (list(gpus), gpu_problem))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A healthy one with an H100, and a PyTorch that has the hook."""
    for name in doctor_facts._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    result = Machine(monkeypatch)
    result.set()
    if importlib.util.find_spec('torch.nn.attention._fa3') is None:    # 2.10
        monkeypatch.setattr(sdpa, 'problem', lambda: '')
    return result


def found(capsys: pytest.CaptureFixture) -> tuple[dict, int]:
    """The report and the exit status."""
    status = doctor.main(['--json'])
    return json.loads(capsys.readouterr().out), status


def remedy_of(report: dict, what: str) -> str:
    """The remedy of the one problem that has this in its words."""
    remedy, = (problem['remedy'] for problem in report['problems']
               if re.search(what, problem['what']))
    return remedy


# ------------------------------------------------------------------------- machines and installs
def test_a_healthy_machine(machine, capsys):
    report, status = found(capsys)
    assert status == 0 and report['ok'] and report['problems'] == []
    kernels = {call['name']: call['kernels'] for call in report['calls']}
    assert kernels['training'] == ['FwdBf16D128Causal', 'BwdBf16D128Causal']
    assert re.fullmatch('FwdBf16D128Cache.*', *kernels['decode'])
    assert all(call['runs'] and call['reasons'] == [] for call in report['calls'])


NO_LIBRARY = 'lib does not exist'
PROBLEMS = {    # what the machine is, a problem of it, a part of its remedy
    'disabled': (dict(missing='FLASH_ATTN3_DISABLE_KERNELS=1 is set', disabled=True),
                 'FLASH_ATTN3_DISABLE_KERNELS=1', 'unset FLASH_ATTN3_DISABLE_KERNELS'),
    'no library': (dict(missing=NO_LIBRARY, path='nowhere.so'), NO_LIBRARY, 'with nvcc'),
    'another library': (dict(missing=NO_LIBRARY, own_library='nowhere.so'), NO_LIBRARY,
                        'unset FLASH_ATTN3_LIBRARY'),
    'broken library': (dict(missing='undefined symbol', path=__file__), 'undefined symbol',
                       '2.10 or later'),
    'old driver': (dict(driver_problem='expected a driver for CUDA 13.0, got 12.4; hint: update'),
                   'expected a driver for CUDA 13.0, got 12.4$', '^update$'),
    'no driver': (dict(driver={'version': '', 'cuda': ''}, gpus=()), 'no NVIDIA driver',
                  'need a Hopper GPU'),
    'no GPU': (dict(gpus=()), r'no GPU, though there is a driver \(580', 'container'),
    'broken driver': (dict(gpus=(), gpu_problem='CUDA unknown error'), 'CUDA unknown error',
                      'mend the NVIDIA driver'),
    'no Hopper GPU': (dict(gpus=[L4]), r'NVIDIA L4 \(8.9\)', 'need Hopper')}


@pytest.mark.parametrize('state, what, remedy', PROBLEMS.values(), ids=PROBLEMS)
def test_what_stands_in_the_way(state, what, remedy, machine, capsys):
    """Each is named with its remedy, no call runs, and the exit status says so."""
    machine.set(**state)
    report, status = found(capsys)
    assert status == 1 and not report['ok']
    assert re.search(remedy, remedy_of(report, what))
    assert all(call['reasons'] and not call['runs'] for call in report['calls'])


def test_a_cpu_build_of_torch(machine, capsys, monkeypatch):
    machine.set(missing='PyTorch 2.11.0 is a CPU build', gpus=())
    monkeypatch.setattr(torch.version, 'cuda', None)
    report, status = found(capsys)
    assert status == 1 and report['torch']['cuda'] == ''
    assert 'install a CUDA build' in remedy_of(report, 'is a CPU build')


def test_gpus_of_two_kinds(machine, capsys):
    machine.set(gpus=[H100, L4])
    report, status = found(capsys)
    assert status == 0 and 'CUDA_VISIBLE_DEVICES' in remedy_of(report, r'some GPUs .* L4 \(8.9\)')


def test_hidden_gpus(machine, capsys, monkeypatch):
    """Unique names of GPUs do not get into the report."""
    machine.set(gpus=())
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', 'GPU-1234,GPU-5678')
    report, _ = found(capsys)
    assert 'set CUDA_VISIBLE_DEVICES' in remedy_of(report, 'no GPU')
    assert report['environment'] == {'CUDA_VISIBLE_DEVICES': '2 by name'}


def test_a_build_of_some_kernels(machine, capsys):
    """One of the two example calls runs."""
    machine.set(built=[name for name in NAMES if 'D128Causal' in name])
    report, status = found(capsys)
    assert status == 0 and 'without FLASH_ATTN3_VARIANTS' in remedy_of(report, 'kernels are in')
    training, decode = report['calls']
    assert training['runs'] and not decode['runs']
    assert decode['reasons'] == [f'the kernel {decode["kernels"][0]} is not in this install']


def test_stale_metadata(machine, capsys, monkeypatch):
    monkeypatch.setattr(doctor_clients, 'version_of',
                        lambda name: '0.0.1' if name == 'flash_attn3' else '')
    assert 'pip uninstall flash_attn3' in remedy_of(found(capsys)[0], 'say 0.0.1')


# --------------------------------------------------------------------------------------- clients
def install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f'{name.replace("-", "_")}-{version}.dist-info/METADATA'
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')


def flash_attention_3(folder: Path) -> None:
    """Upstream's names, in files that nobody may import."""
    install(folder, 'flash_attn_3', '3.0.0')
    (folder / 'flash_attn_3').mkdir()
    for name in ('flash_attn_interface', 'flash_attn_3/__init__', 'flash_attn_3/_C',
                 'flash_attn_3/flash_attn_interface'):
        (folder / f'{name}.py').write_text('raise AssertionError("imported")\n')


@pytest.fixture
def clients(tmp_path, monkeypatch) -> Path:
    """A folder on the path in which some clients are installed."""
    for name in ('transformers', 'diffusers', 'xformers', 'megatron-core', 'vllm'):
        install(tmp_path, name, '5.17.0')
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def owners(report: dict) -> dict[str, str]:
    return {client['name']: client['finds'] for client in report['clients']
            if client['version'] == '5.17.0'}


def test_clients_that_find_nothing(machine, clients, capsys):
    report, _ = found(capsys)
    assert owners(report) == dict.fromkeys(
        ('transformers', 'diffusers', 'xformers', 'megatron', 'vllm'), 'nothing')
    assert all(client['turn_on'] for client in report['clients'] if client['version'])
    assert report['compat']['interface'] == report['compat']['distribution'] == 'nothing'


@pytest.mark.parametrize('owner', ['upstream', 'flash_attn3'])
def test_whose_attention_clients_find(owner, machine, clients, capsys, monkeypatch):
    """By upstream's names, in a folder of upstream or of this package; vLLM has its own names."""
    folder = clients / 'names'
    flash_attention_3(folder)
    monkeypatch.syspath_prepend(folder)
    if owner == 'flash_attn3':
        monkeypatch.setattr(doctor_clients, 'PACKAGE', clients)
    report, _ = found(capsys)
    assert owners(report) == {**dict.fromkeys(
        ('transformers', 'diffusers', 'xformers', 'megatron'), owner), 'vllm': 'nothing'}
    assert report['compat']['distribution_version'] == '3.0.0'
    texts = [problem['what'] for problem in report['problems']]
    assert any('upstream FlashAttention-3 3.0.0' in text for text in texts) == (owner == 'upstream')


def test_metadata_without_a_module(machine, clients, capsys):
    install(clients, 'flash_attn_3', '3.0.0')
    report, _ = found(capsys)
    assert remedy_of(report, 'but no module') == 'pip uninstall flash_attn_3'
    assert owners(report)['transformers'] == 'nothing'


def integration(monkeypatch, client: str, **functions) -> None:
    module = SimpleNamespace(**{'is_enabled': lambda: False, 'problem': lambda: '', **functions})
    monkeypatch.setitem(sys.modules, f'flash_attn3.integrations.{client}', module)


def test_what_integrations_say(machine, clients, capsys, monkeypatch):
    """Their problems are ours; a client that prints or breaks does not spoil the report."""
    def broken() -> str:
        print('noise')
        raise ValueError('no such symbol')

    integration(monkeypatch, 'transformers', problem=lambda: 'expected 5.17, got 4.0; hint: newer')
    integration(monkeypatch, 'diffusers', problem=broken)
    integration(monkeypatch, 'vllm', is_enabled=lambda: True)
    report, status = found(capsys)
    assert status == 0 and owners(report)['vllm'] == 'flash_attn3'
    assert remedy_of(report, '^transformers: expected 5.17, got 4.0$') == 'newer'
    assert remedy_of(report, '^diffusers: ValueError: no such symbol$')


# --------------------------------------------------------------------------------- what is printed
def check_keys(value, keys, where: str = '') -> None:
    if isinstance(keys, dict):
        assert set(value) == set(keys) or keys == {}, where
        for key in keys:
            check_keys(value[key], keys[key], f'{where}.{key}')
    elif isinstance(keys, list):
        for item in value:
            check_keys(item, keys[0], f'{where}[]')
    else:
        assert type(value) is keys, where


def test_the_report_of_this_machine():
    """In a process of its own: stable keys, and no folder or name of this machine in it."""
    nowhere = ROOT / 'tests' / 'nowhere.so'
    done = subprocess.run([sys.executable, '-m', 'flash_attn3.doctor', '--json'], cwd=ROOT,
                          env=os.environ | {'FLASH_ATTN3_LIBRARY': str(nowhere)}, text=True,
                          capture_output=True)
    report = json.loads(done.stdout)
    check_keys(report, KEYS)
    assert done.returncode == 1 and not report['ok'], done.stderr
    assert remedy_of(report, 'nowhere.so does not exist').startswith('unset FLASH_ATTN3_LIBRARY')
    assert report['environment']['FLASH_ATTN3_LIBRARY'] == '.../nowhere.so'
    for private in (str(ROOT), str(Path.home()) + '/', sys.prefix, socket.gethostname()):
        assert private not in done.stdout


def test_keys_with_a_gpu(machine, capsys):
    check_keys(found(capsys)[0], KEYS)


@pytest.mark.parametrize('text, expected', [
    ('/a/b c/d.so: no', '.../b c/d.so: no'), ("'/a/b/c.so'", "'.../c.so'"),
    ('https://a.b/c/d', 'https://a.b/c/d'), ('a/b and 1/2', 'a/b and 1/2'),
    (f'{doctor_clients.PACKAGE}/x.so (no)', '.../x.so (no)')])
def test_folders_are_hidden(text, expected):
    assert doctor_facts.hide_folders(text) == expected


@pytest.mark.parametrize('has_rich', [True, False])
def test_tables(has_rich, machine, capsys, monkeypatch):
    """With rich and without: the same words, brackets included; the status is that of --json."""
    machine.set(missing='broken [here]', path=__file__)
    monkeypatch.setenv('COLUMNS', '300')
    if not has_rich:
        monkeypatch.setitem(sys.modules, 'rich', None)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert ('│' in text) == has_rich
    for words in ('Installed', 'NVIDIA H100 80GB HBM3', torch.__version__, '580.95.05',
                  'would take FwdBf16D128Causal, BwdBf16D128Causal, but: broken [here]',
                  'remedy: install again'):
        assert words in text
    machine.set()
    assert doctor.main([]) == 0
    assert 'nothing stands in the way' in capsys.readouterr().out
