"""Clients that look for upstream when they are imported: each in a process of its own, where it is
installed; and what enable() refuses. torchtitan and Transformer Engine are emulated.
"""
import importlib
import subprocess
import sys
import types

import pytest
import torch

from flash_attn3 import compat, integrations
from flash_attn3.integrations import _base, sdpa, torchtitan

from tests.cpu import client_contracts
from tests.support.checkout import ROOT
from tests.support.client_evidence import EMULATED, EVIDENCE, ITS_FILE


@pytest.fixture(autouse=True)
def _path_is_restored():
    before = list(sys.path)
    yield
    assert not compat.is_installed() and sys.path == before


@pytest.mark.slow
@pytest.mark.parametrize('name', ['diffusers', 'xformers', 'megatron', 'transformer_engine'])
def test_client(name):
    """Values of the client's own code on our functions: tests.cpu.client_contracts."""
    problem = importlib.import_module(f'flash_attn3.integrations.{name}').problem()
    if problem and name != 'transformer_engine':
        pytest.skip(problem)
    done = subprocess.run([sys.executable, '-m', 'tests.cpu.client_contracts', name],
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith('served\n'), done.stderr


def client(monkeypatch, version='3.1.4', module='pretended.attention'):
    monkeypatch.setattr(_base, 'version_of', lambda _: version)
    return _base.ShimClient('pretended', 'pretended', (3, 1), module, 'found.it')


def test_a_client_in_time_is_served_until_disable(monkeypatch):
    served = client(monkeypatch)
    served.enable()
    assert served.is_enabled() and served.problem() == '' and compat.is_installed()
    served.enable()
    served.disable()
    assert not served.is_enabled() and not compat.is_installed()


def test_the_shim_stays_for_others(monkeypatch):
    """Until the last client is disabled; and for the user, who had installed it before."""
    first, second = client(monkeypatch), client(monkeypatch)
    second._name = 'second'
    first.enable()
    second.enable()
    first.disable()
    assert compat.is_installed()
    second.disable()
    assert not compat.is_installed()
    compat.install()
    first.enable()
    first.disable()
    assert compat.is_installed()
    compat.uninstall()


@pytest.mark.parametrize('found', [True, False])
def test_a_client_that_was_imported_before_is_refused(monkeypatch, found):
    """Unless it has found upstream's names all the same, or calls its attribute something else."""
    module = types.ModuleType('pretended.attention')
    module.found = types.SimpleNamespace(it=found)
    monkeypatch.setitem(sys.modules, 'pretended.attention', module)
    served = client(monkeypatch)
    assert (served.problem() == '') == found
    if not found:
        with pytest.raises(RuntimeError, match=r'^flash_attn3.integrations.pretended: expected '
                                               r'enable\(\) before the import of pretended.att'):
            served.enable()
        del module.found
        assert served.problem() == ''


@pytest.mark.parametrize('version,got', [('', 'none'), ('3.0.9', '3.0.9'), ('2', '2')])
def test_missing_and_old_clients_are_refused(monkeypatch, version, got):
    served = client(monkeypatch, version)
    with pytest.raises(RuntimeError, match=f'expected pretended 3.1 or later, got {got}; hint: '
                                           'pip install'):
        served.enable()
    assert not served.is_enabled()


def test_an_installed_upstream_wins_unless_forced(monkeypatch, tmp_path):
    (tmp_path / 'flash_attn_interface.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path)
    served = client(monkeypatch)
    with pytest.raises(RuntimeError, match='expected no other flash_attn_interface, got '
                                           f'{tmp_path}'):
        served.enable()
    served.enable(force=True)
    assert compat.is_installed()
    served.disable()


@pytest.mark.parametrize('client', [sdpa, torchtitan])
def test_a_torch_without_the_hook_is_refused(monkeypatch, client):
    """PyTorch 2.10 itself, or one whose hook is hidden."""
    monkeypatch.setitem(sys.modules, 'torch.nn.attention._fa3', None)
    monkeypatch.setattr(_base, 'version_of', lambda _: '0.3.0')    # torchtitan's
    with pytest.raises(RuntimeError, match=r'^flash_attn3.integrations.sdpa: expected a PyTorch '
                                           r'with .*, got 2\..*; hint: pip install --upgrade '
                                           r'torch: it came with 2\.11$'):
        client.enable()
    assert not client.is_enabled() and not sdpa.is_enabled()


@pytest.mark.parametrize('name', integrations.CLIENTS)
def test_each_client_has_a_contract_test(name):
    """Which is there, and of the kind that the client's module says."""
    kind, path, test = EVIDENCE[name]
    assert f'\ndef {test}(' in (ROOT / path).read_text()
    text = ' '.join(importlib.import_module(f'flash_attn3.integrations.{name}').__doc__.split())
    assert ('Only emulated' in text) == (kind == EMULATED)
    assert ('interface file' in text) == (kind == ITS_FILE)
    if test == 'test_client':
        assert hasattr(client_contracts, name)


def test_torchtitan(monkeypatch):
    """Emulated: on Hopper it activates 'FA3' unless that is active."""
    pytest.importorskip('torch.nn.attention._fa3', reason='PyTorch has the hook from 2.11 on')
    monkeypatch.setattr(_base, 'version_of', lambda _: '0.3.0')
    torchtitan.enable()
    torchtitan.enable()
    assert torchtitan.is_enabled() and sdpa.is_enabled()
    assert torch.nn.attention.current_flash_attention_impl() == 'FA3'
    torch.nn.attention.activate_flash_attention_impl('FA3')
    assert torchtitan.is_enabled()
    torchtitan.disable()
    assert not sdpa.is_enabled() and torch.nn.attention.current_flash_attention_impl() is None
    sdpa.enable()
    torchtitan.enable()
    torchtitan.disable()
    assert sdpa.is_enabled()
    sdpa.disable()
