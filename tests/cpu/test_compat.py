"""`flash_attn3.compat`: upstream's names are found when they are installed, and not otherwise; its
signatures and schemas; the command line.
"""
from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flash_attn3
from flash_attn3 import compat
from flash_attn3.api import interface
from flash_attn3.compat import functions, ops

from tests.support.checkout import ROOT
from tests.support.upstream_calls import SCHEMAS, SIGNATURES

MODULES = ('flash_attn_interface', 'flash_attn_config', 'flash_attn_3', 'flash_attn_3._C',
           'flash_attn_3.flash_attn_interface', 'flash_attn_3.flash_attn_config')
PUBLIC = [name for name in SIGNATURES if not name.startswith('_')]
FIRST = ('flash_attn_func', 'flash_attn_varlen_func', 'flash_attn_qkvpacked_func')
FOREIGN = 'upstream = "the real one"\n'


@pytest.fixture(autouse=True)
def state():
    """Every test leaves sys.path and sys.modules as they were."""
    assert visible() == []
    before = list(sys.path)
    yield
    compat.uninstall()
    assert sys.path == before and visible() == []


def visible() -> list[str]:
    """What a client would find."""
    importlib.invalidate_caches()
    found = [name for name in ('flash_attn_interface', 'flash_attn_3', 'flash_attn_config')
             if importlib.util.find_spec(name)]
    try:
        return [*found, importlib.metadata.version('flash-attn-3')]
    except importlib.metadata.PackageNotFoundError:
        return found


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A directory with what a real installation of upstream has."""
    (tmp_path / 'flash_attn_interface.py').write_text(FOREIGN)
    information = tmp_path / 'flash_attn_3-3.0.0b1.dist-info'
    information.mkdir()
    (information / 'METADATA').write_text('Metadata-Version: 2.1\nName: flash_attn_3\n'
                                          'Version: 3.0.0b1\n')
    (information / 'top_level.txt').write_text('flash_attn_interface\n')
    return tmp_path


# ------------------------------------------------------------------------- signatures and schemas
@pytest.mark.parametrize('name', SIGNATURES)
def test_signature(name):
    """Upstream's names, order and defaults; what is more is keyword-only."""
    wanted = inspect.signature(eval(f'lambda {SIGNATURES[name]}: None', {'bf16': torch.bfloat16}))
    parameters = inspect.signature(getattr(functions, name)).parameters.values()
    got = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in got] == [
        (p.name, p.default) for p in wanted.parameters.values()]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in got)


def test_what_transformers_reads_of_a_signature():
    """What is not a name of the packed function, transformers never passes; dropout_p it would."""
    for name in FIRST[:2]:
        given = inspect.signature(getattr(functions, name)).parameters
        assert {'s_aux', 'softcap', 'window_size', 'deterministic'} <= set(given)
        assert 'dropout_p' not in given
    assert 'page_table' in inspect.signature(functions.flash_attn_with_kvcache).parameters


def test_public_functions_cost_nothing():
    """They are the functions of the package themselves; the two others are plain functions."""
    for name in PUBLIC:
        assert getattr(functions, name) is getattr(flash_attn3, name)
    assert inspect.isfunction(functions._flash_attn_forward)    # Megatron asks
    assert inspect.isfunction(functions._flash_attn_backward)


def python_calls(function: Callable, *arguments, **named) -> Counter[str]:
    """How often a call enters a function of Python, and one of C."""
    events = Counter()
    function(*arguments, **named)    # what is done once is done
    sys.setprofile(lambda frame, event, _: events.update([event]))
    try:
        function(*arguments, **named)
    finally:
        sys.setprofile(None)
    return events


def test_a_dense_forward_takes_the_short_way(monkeypatch):
    """Two functions of Python and some questions to tensors beside those of `flash_attn_func`: each
    costs the host some 0.1 us in every step. The default of the op, num_splits by plan, is one of
    them. What calls the kernel does not count.
    """
    q, k, v = (torch.randn(1, 4, 2, 64) for _ in range(3))
    results = torch.empty_like(q), torch.empty(1, 2, 4)
    monkeypatch.setattr(interface, '_fwd', lambda *_: results)
    plain = python_calls(flash_attn3.flash_attn_func, q, k, v, 0.1, True, return_attn_probs=True)
    for forward, most in ((functions._flash_attn_forward, dict(call=5, c_call=3)),
                          (ops._fwd, dict(call=8, c_call=10))):
        more = python_calls(forward, q, k, v, *[None] * 20, 0.1, True, -1, 0) - plain
        assert all(more[event] <= n for event, n in most.items()), f'{forward.__name__}: {more}'


@pytest.mark.parametrize('text', SCHEMAS, ids=lambda text: text.partition('(')[0])
def test_schema(text):
    """Word for word, and by the rule that xFormers asks."""
    compat.register_ops()
    name = text.partition('(')[0].removeprefix('flash_attn_3::')
    got, wanted = getattr(torch.ops.flash_attn_3, name).default._schema, torch._C.parse_schema(text)
    assert str(got) == str(wanted) and got.is_backward_compatible_with(wanted)
    keys = ('CompositeImplicitAutograd',) if name in ops._COMPOSITES else ('CPU', 'CUDA', 'Meta')
    for key in keys:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f'flash_attn_3::{name}', key)


FOREIGN_OPS = '''
import torch
from flash_attn3.compat import ops
foreign = torch.library.Library('flash_attn_3', 'DEF')
foreign.define('bwd(Tensor x) -> Tensor')
try:
    ops.register_ops()
except RuntimeError as error:
    print(error)
assert not hasattr(torch.ops.flash_attn_3, 'fwd')
'''


@pytest.mark.slow
def test_ops_of_another_library():
    """Refused, and nothing is registered. In a process of its own: PyTorch keeps a namespace."""
    done = subprocess.run([sys.executable, '-c', FOREIGN_OPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'compat.register_ops: expected no op flash_attn_3::bwd yet' in done.stdout


# -------------------------------------------------------------------------------------- installed
def test_names_are_found():
    """By all ways of clients."""
    assert not compat.is_installed()
    compat.install()
    assert compat.is_installed()
    assert all(importlib.util.find_spec(name) for name in MODULES)
    version = importlib.metadata.version('flash-attn-3')
    assert version == importlib.metadata.version('flash_attn_3') == '3.0.0+flash.attn3'
    owners = importlib.metadata.packages_distributions()
    assert all(owners[name] == ['flash_attn_3'] for name in MODULES[:3])
    interface = importlib.import_module('flash_attn_interface')
    other = importlib.import_module('flash_attn_3.flash_attn_interface')
    for name in SIGNATURES:
        assert getattr(interface, name) is getattr(other, name) is getattr(functions, name)
    importlib.import_module('flash_attn_3._C')
    assert interface.flash_attn_3_gpu is torch.ops.flash_attn_3
    assert importlib.import_module('flash_attn_3').__version__ == version


def test_configuration(capsys):
    compat.install()
    configuration = importlib.import_module('flash_attn_3.flash_attn_config')
    flags = configuration.CONFIG['build_flags']
    assert flags['FLASHATTENTION_DISABLE_BACKWARD'] is False
    configuration.show()
    assert 'FLASHATTENTION_DISABLE_HDIM256' in capsys.readouterr().out


def test_install_appends_once():
    before = list(sys.path)
    for _ in range(2):
        compat.install()
        assert sys.path == [*before, compat.path()]
    compat.uninstall()
    compat.uninstall()
    assert sys.path == before


def test_legacy_tuples():
    """(out, lse) of the first group, with the signatures of now."""
    compat.install(legacy_tuple=True)
    interface = importlib.import_module('flash_attn_interface')
    other = importlib.import_module('flash_attn_3.flash_attn_interface')
    for name in SIGNATURES:
        own = getattr(functions, name)
        assert getattr(other, name) is getattr(interface, name)
        assert inspect.signature(getattr(interface, name)) == inspect.signature(own)
        assert (getattr(interface, name) is own) == (name not in FIRST)
    q, k, v = (torch.randn(1, 3, 2, 8) for _ in range(3))
    out, lse = interface.flash_attn_func(q, k, v)
    wanted = flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


def test_the_other_tuples_before_the_import():
    """install() may be called again with another legacy_tuple, but not when it is too late."""
    for legacy in (True, False, True):
        compat.install(legacy_tuple=legacy)
        assert os.pathsep.join(sys.path).endswith(compat.path(legacy))
        assert sys.path.count(compat.path()) == 1
    importlib.import_module('flash_attn_interface')
    before = list(sys.path)
    with pytest.raises(RuntimeError, match='expected no flash_attn_interface imported yet'):
        compat.install()
    assert sys.path == before and compat.is_installed()


# ---------------------------------------------------------------------------------- other installs
def test_a_real_upstream_comes_first(upstream, monkeypatch):
    monkeypatch.setattr(sys, 'path', [*sys.path, str(upstream)])
    compat.install()
    assert not compat.is_installed() and compat.path() in sys.path
    assert importlib.metadata.version('flash-attn-3') == '3.0.0b1'
    assert importlib.import_module('flash_attn_interface').upstream == 'the real one'
    compat.uninstall()
    assert 'flash_attn_interface' in sys.modules    # it is not ours
    del sys.modules['flash_attn_interface']


def test_force(upstream, monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(upstream), *sys.path])
    with pytest.raises(RuntimeError, match='install: expected no other flash_attn_interface, got '):
        compat.install(legacy_tuple=True)
    assert compat.path() not in sys.path
    compat.install(force=True)
    assert compat.is_installed() and sys.path[0] == compat.path()
    assert importlib.metadata.version('flash-attn-3') == '3.0.0+flash.attn3'
    compat.uninstall()
    importlib.import_module('flash_attn_interface')
    with pytest.raises(RuntimeError, match='expected no flash_attn_interface imported yet'):
        compat.install(force=True)
    assert compat.path() not in sys.path
    del sys.modules['flash_attn_interface']


@pytest.mark.parametrize('client', ['diffusers', 'transformer_engine', 'xformers.ops.fmha.flash3',
                                    'megatron.core.transformer.attention'])
def test_a_client_that_has_looked_already(client, monkeypatch):
    """An error that says what to do, and no trace of the call."""
    monkeypatch.setitem(sys.modules, client, types.ModuleType(client))
    before = list(sys.path)
    with pytest.raises(RuntimeError, match=f'install: expected {client} not to be .* hint: '):
        compat.install()
    assert sys.path == before and visible() == []


def test_a_client_that_found_it_by_the_path(monkeypatch):
    """With PYTHONPATH it has found the names before: nothing is to be done."""
    monkeypatch.setattr(sys, 'path', [compat.path(), *sys.path])
    monkeypatch.setitem(sys.modules, 'diffusers', types.ModuleType('diffusers'))
    compat.install()
    assert compat.is_installed()


@pytest.fixture
def transformers(monkeypatch) -> types.ModuleType:
    """What transformers 5.17 remembers of packages, and how."""
    utils = types.ModuleType('transformers.utils.import_utils')
    utils.PACKAGE_DISTRIBUTION_MAPPING = importlib.metadata.packages_distributions()

    @functools.lru_cache
    def is_flash_attn_3_available() -> bool:
        return 'flash_attn_3' in utils.PACKAGE_DISTRIBUTION_MAPPING.get('flash_attn_interface', [])

    utils.is_flash_attn_3_available = is_flash_attn_3_available
    attention = types.ModuleType('transformers.modeling_flash_attention_utils')
    attention._loaded_implementation = 'flash_attention_3'
    for module in (utils, attention):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return utils


def test_transformers_forgets(transformers):
    """Imported before install() and before uninstall()."""
    attention = sys.modules['transformers.modeling_flash_attention_utils']
    assert not transformers.is_flash_attn_3_available()
    compat.install()
    assert transformers.is_flash_attn_3_available() and attention._loaded_implementation is None
    attention._loaded_implementation = 'sdpa'
    compat.uninstall()
    assert not transformers.is_flash_attn_3_available()
    assert attention._loaded_implementation == 'sdpa'


# --------------------------------------------------------------------------------- the command line
SCRIPT = '''
import importlib.metadata, sys
import flash_attn_interface, torch
q = torch.randn(1, 3, 2, 8)
out = flash_attn_interface.flash_attn_func(q, q, q)
print(type(out).__name__, importlib.metadata.version('flash_attn_3'), __name__, sys.argv[1:],
      hasattr(torch.ops.flash_attn_3, 'bwd'))
'''


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {'PYTHONPATH': str(ROOT)} | environment
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=os.environ | environment,
                          capture_output=True, text=True)


@pytest.mark.slow
def test_a_script(tmp_path):
    """As `python script.py` runs it: its directory on the path, its own arguments."""
    (tmp_path / 'own_module.py').write_text('')
    (tmp_path / 'script.py').write_text('import own_module' + SCRIPT)
    done = python('-m', 'flash_attn3.compat', '--legacy-tuple', str(tmp_path / 'script.py'),
                  '--path', 'b', cwd=ROOT)
    assert done.stdout == "tuple 3.0.0+flash.attn3 __main__ ['--path', 'b'] True\n", done.stderr


@pytest.mark.slow
def test_a_module(tmp_path):
    (tmp_path / 'own_module.py').write_text(SCRIPT)
    done = python('-m', 'flash_attn3.compat', '-m', 'own_module', '-x', cwd=tmp_path)
    assert done.stdout == "Tensor 3.0.0+flash.attn3 __main__ ['-x'] True\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('legacy, result', [(False, 'Tensor'), (True, 'tuple')])
def test_python_path(legacy, result, tmp_path):
    """For programs that start others."""
    path = os.pathsep.join([compat.path(legacy), str(ROOT)])
    done = python('-c', SCRIPT, 'a', cwd=tmp_path, PYTHONPATH=path)
    assert done.stdout == f"{result} 3.0.0+flash.attn3 __main__ ['a'] True\n", done.stderr


@pytest.mark.parametrize('arguments', [[], ['-m'], ['--path', 'script.py'], ['--nothing']], ids=str)
def test_a_wrong_command(arguments, capsys):
    from flash_attn3.compat.__main__ import main
    with pytest.raises(SystemExit):
        main(arguments)
    assert 'usage: python -m flash_attn3.compat' in capsys.readouterr().err


def test_path_of_the_command(capsys):
    from flash_attn3.compat.__main__ import main
    for options, legacy in (([], False), (['--legacy-tuple'], True)):
        main(['--path', *options])
        assert capsys.readouterr().out.strip() == compat.path(legacy)
