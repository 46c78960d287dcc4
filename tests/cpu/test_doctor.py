"""python -m flash_attn3.doctor: problems and their remedies, exit status, the report in JSON."""
from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flash_attn3.tools import doctor

from tests.support.checkout import ROOT

H100 = {'name': 'NVIDIA H100 80GB HBM3', 'compute_capability': '9.0'}
L4 = {'name': 'NVIDIA L4', 'compute_capability': '8.9'}
INSTALL = {'version': '0.1.0', 'metadata': '0.1.0', 'loaded': True, 'problem': '', 'kernels': 9,
           'kernels_of': 9}
HEALTHY = {
    'schema': 2, 'flash_attn3': INSTALL, 'python': '3.11.7, Linux x86_64',
    'torch': {'version': '2.11.0', 'cuda': '13.0'}, 'driver': {'cuda': '13.0', 'problem': ''},
    'gpus': [H100], 'environment': {},
    'clients': [{'name': 'vllm', 'version': '0.33', 'finds': 'nothing', 'problem': ''}]}


def without_kernels(problem: str) -> dict:
    return {'flash_attn3': INSTALL | {'loaded': False, 'kernels': 0, 'problem': problem}}


def client(**facts) -> dict:
    return {'clients': [HEALTHY['clients'][0] | facts]}


# What differs from HEALTHY, whether the kernels run, a problem, a part of its remedy.
PROBLEMS = {
    'disabled': (without_kernels('FLASH_ATTN3_DISABLE_KERNELS=1 is set')
                 | {'environment': {'FLASH_ATTN3_DISABLE_KERNELS': '1'}}, False,
                 'FLASH_ATTN3_DISABLE_KERNELS=1', '^unset FLASH_ATTN3_DISABLE_KERNELS$'),
    'another library': (without_kernels('x.so does not exist')
                        | {'environment': {'FLASH_ATTN3_LIBRARY': 'x.so'}}, False,
                        'x.so does not exist', '^unset FLASH_ATTN3_LIBRARY$'),
    'no library': (without_kernels('lib does not exist'), False, 'lib does not exist', 'with nvcc'),
    'old driver': ({'driver': {'cuda': '12.4', 'problem': 'expected a driver; hint: update it'}},
                   False, '^expected a driver$', '^update it$'),
    'broken driver': ({'gpus': [], 'driver': {'cuda': '', 'problem': 'CUDA unknown error'}}, False,
                      'CUDA unknown error', 'nvidia-smi'),
    'no driver': ({'gpus': [], 'driver': {'cuda': '', 'problem': ''}}, False, 'no GPU',
                  'Hopper GPU and its driver'),
    'no GPU': ({'gpus': []}, False, 'no GPU', 'CUDA_VISIBLE_DEVICES'),
    'no Hopper GPU': ({'gpus': [L4]}, False, 'not of compute capability 9.0: NVIDIA L4', 'H200'),
    'two kinds of GPUs': ({'gpus': [H100, L4]}, True, '9.0: NVIDIA L4$', 'CUDA_VISIBLE_DEVICES'),
    'some kernels': ({'flash_attn3': INSTALL | {'kernels': 2}}, True, '2 of 9 kernels',
                     'without FLASH_ATTN3_VARIANTS'),
    'stale metadata': ({'flash_attn3': INSTALL | {'metadata': '0.0.1'}}, True, 'say 0.0.1',
                       'pip uninstall flash_attn3'),
    'client': (client(problem='expected 5.17, got 4.0; hint: newer'), True,
               '^vllm: expected 5.17, got 4.0$', '^newer$'),
    'upstream': (client(finds='upstream'), True, '^vllm finds upstream', 'force=True')}


def test_a_healthy_machine():
    report = doctor.judged(HEALTHY)
    assert report == HEALTHY | {'ok': True, 'problems': []}
    text = doctor.text_of(report)
    assert text.endswith('Our kernels run here.')
    for words in ('9 of 9', H100['name'], '2.11.0, CUDA 13.0', 'finds nothing'):
        assert words in text


@pytest.mark.parametrize('changes, runs, what, remedy', PROBLEMS.values(), ids=PROBLEMS)
def test_what_stands_in_the_way(changes, runs, what, remedy):
    report = doctor.judged(HEALTHY | changes)
    problem, = report['problems']
    assert report['ok'] == runs
    assert re.search(what, problem['what']) and re.search(remedy, problem['remedy'])
    text = doctor.text_of(report)
    assert f'problem: {problem["what"]}\nremedy:  {problem["remedy"]}' in text
    assert text.endswith(f'Our kernels {"run" if runs else "do not run"} here.')


def run(*command: str, **environment: str) -> tuple[dict, int, str]:
    """(report, exit status, what was printed) of a process of its own."""
    done = subprocess.run([sys.executable, '-m', *command, '--json'], cwd=ROOT, text=True,
                          env=os.environ | environment, capture_output=True)
    return json.loads(done.stdout), done.returncode, done.stdout


def test_the_report_of_this_machine():
    """The keys are those of HEALTHY; no folder or name of this machine is in it."""
    report, status, printed = run('flash_attn3.doctor', CUDA_VISIBLE_DEVICES='GPU-1234,GPU-5678',
                                  FLASH_ATTN3_LIBRARY=str(ROOT / 'tests' / 'nowhere.so'))
    for key, value in HEALTHY.items():
        assert type(report[key]) is type(value), key
        if isinstance(value, dict) and value:
            assert {*report[key]} == {*value}, key
    assert {*report['clients'][0]} == {*HEALTHY['clients'][0]}
    assert status == 1 and not report['ok']
    assert report['environment'] == {'CUDA_VISIBLE_DEVICES': '2 by name',
                                     'FLASH_ATTN3_LIBRARY': '.../nowhere.so'}
    assert any('.../nowhere.so does not exist' in problem['what'] for problem in report['problems'])
    for private in (str(ROOT), str(Path.home()) + '/', sys.prefix, socket.gethostname()):
        assert private not in printed


@pytest.mark.parametrize('text, expected', [
    ('/a/b c/d.so: no', '.../b c/d.so: no'), ("'/a/b/c.so'", "'.../c.so'"),
    ('https://a.b/c/d', 'https://a.b/c/d'), ('a/b and 1/2', 'a/b and 1/2'),
    (f'{ROOT}/flash_attn3/x.so (no)', '.../x.so (no)')])
def test_folders_are_hidden(text, expected):
    assert doctor.without_folders(text) == expected


# ----------------------------------------------------------------------------------------- clients
def install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f'{name.replace("-", "_")}-{version}.dist-info/METADATA'
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')


@pytest.fixture
def clients(tmp_path) -> Path:
    """A folder in which some clients are installed."""
    for name in ('xformers', 'megatron-core', 'vllm'):
        install(tmp_path, name, '9.9.9')
    return tmp_path


def owners(*command: str, folder: Path) -> dict[str, str]:
    report, _, _ = run(*command, PYTHONPATH=str(folder))
    return {client['name']: client['finds'] for client in report['clients']
            if client['version'] == '9.9.9'}


def test_clients_that_find_nothing(clients):
    assert owners('flash_attn3.doctor', folder=clients) == dict.fromkeys(
        ('xformers', 'megatron', 'vllm'), 'nothing')


def test_clients_that_find_upstream(clients):
    """By upstream's names, in files that nobody may import; vLLM has its own names."""
    install(clients, 'flash_attn_3', '3.0.0')
    (clients / 'flash_attn_3').mkdir()
    for name in ('__init__', '_C', 'flash_attn_interface'):
        (clients / f'flash_attn_3/{name}.py').write_text('raise AssertionError("imported")\n')
    assert owners('flash_attn3.doctor', folder=clients) == {
        'xformers': 'upstream', 'megatron': 'upstream', 'vllm': 'nothing'}


def test_clients_that_find_us(clients):
    assert owners('flash_attn3.compat', '-m', 'flash_attn3.doctor', folder=clients) == {
        'xformers': 'flash_attn3', 'megatron': 'flash_attn3', 'vllm': 'nothing'}
