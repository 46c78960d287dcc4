"""For doctor.py: which client packages are installed, and whose FlashAttention-3 each would find.

Clients find attention by upstream's names: the module `flash_attn_interface`, the package
`flash_attn_3`, the metadata of a distribution `flash_attn_3`. What each looks for is in `_CLIENTS`;
nothing of a client or of upstream is imported to find it out.
"""
from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
OURS, UPSTREAM, NOTHING = 'flash_attn3', 'upstream', 'nothing'
DISTRIBUTION = 'flash_attn_3'

_INTERFACE = ('flash_attn_interface',)


class _Client(NamedTuple):
    """A client: its distributions, the first installed one counts; the module of integrations that
    serves it; the modules that it looks for, and whether for the distribution too. Without modules
    only the integration gets our kernels into it.
    """
    name: str
    packages: tuple[str, ...]
    integration: str
    modules: tuple[str, ...] = ()
    needs_distribution: bool = False


_CLIENTS = (
    _Client('torch SDPA, varlen_attn', ('torch',), 'sdpa', _INTERFACE),
    _Client('transformers', ('transformers',), 'transformers', _INTERFACE, True),
    _Client('diffusers', ('diffusers',), 'diffusers', ('flash_attn_3', *_INTERFACE), True),
    _Client('xformers', ('xformers',), 'xformers', ('flash_attn_3', 'flash_attn_3._C')),
    _Client('transformer_engine', ('transformer-engine', 'transformer-engine-torch'),
            'transformer_engine', _INTERFACE, True),
    _Client('megatron', ('megatron-core',), 'megatron', ('flash_attn_3.flash_attn_interface',)),
    _Client('torchtitan', ('torchtitan',), 'torchtitan', _INTERFACE),
    _Client('vllm', ('vllm',), 'vllm'),
    _Client('sglang', ('sglang', 'sglang-kernel', 'sgl-kernel'), 'sglang'),
    _Client('timm', ('timm',), 'sdpa', _INTERFACE),
    _Client('lightning', ('lightning', 'pytorch-lightning'), 'sdpa', _INTERFACE),
)
# Those that go through PyTorch's attention, whose hook somebody has to activate.
_THROUGH_HOOK = 'sdpa'


def clients() -> list[dict]:
    """A dict for each client, installed or not, with these keys.

    name; package, version: of its distribution, '' if it is not installed; finds: OURS, UPSTREAM or
    NOTHING, in a process with the path of this one; turn_on: what makes it find us, '' where it
    does; problem: what stands in the way, by its integration.
    """
    return [_facts(client) for client in _CLIENTS]


def compat() -> dict:
    """The state of `flash_attn3.compat`: whether this version has it, whether its directory is on
    the path, and who owns upstream's names in this process.
    """
    module = _import('flash_attn3.compat')
    version = version_of(DISTRIBUTION)
    return {'available': module is not None,
            'installed': module is not None and bool(module.is_installed()),
            'interface': owner_of(_INTERFACE[0]), 'package': owner_of('flash_attn_3'),
            'distribution': distribution_owner() if version else NOTHING,
            'distribution_version': version}


def _facts(client: _Client) -> dict:
    package = next((name for name in client.packages if version_of(name)), client.packages[0])
    version = version_of(package)
    facts = {'name': client.name, 'package': package, 'version': version, 'finds': NOTHING,
             'turn_on': '', 'problem': ''}
    if not version:
        return facts
    try:
        # What is printed here, or by a client that is imported here, is no part of the report.
        with contextlib.redirect_stdout(sys.stderr):
            return facts | _state(client)
    except Exception as error:    # a broken client is a finding, not the end of the report
        return facts | {'problem': f'{type(error).__name__}: {error}'}


def _state(client: _Client) -> dict:
    integration = _import(f'flash_attn3.integrations.{client.integration}')
    found = _found(client, integration)
    return {'finds': found,
            'turn_on': '' if found == OURS else _turn_on(client, integration, found),
            'problem': '' if integration is None else integration.problem()}


def _found(client: _Client, integration: ModuleType | None) -> str:
    if integration is not None and integration.is_enabled():
        return OURS
    if not client.modules or (client.integration == _THROUGH_HOOK and not _has_active_hook()):
        return NOTHING
    owners = {owner_of(name) for name in client.modules}
    if client.needs_distribution:
        owners.add(distribution_owner())
    return next((owner for owner in (NOTHING, UPSTREAM) if owner in owners), OURS)


def _has_active_hook() -> bool:
    """Whether PyTorch's attention is another one than its own."""
    try:
        from torch.nn.attention import current_flash_attention_impl
    except ImportError:    # a torch without the hook
        return False
    return current_flash_attention_impl() is not None


def _turn_on(client: _Client, integration: ModuleType | None, found: str) -> str:
    forced = 'force=True' if found == UPSTREAM else ''
    ways = []
    if client.modules and client.integration != _THROUGH_HOOK and _import('flash_attn3.compat'):
        ways.append(f'flash_attn3.compat.install({forced}) before its import')
    if integration is not None:
        ways.append(f'flash_attn3.integrations.{client.integration}.enable()')
    return ', or '.join(ways) or 'this version of flash_attn3 has no way to it'


def _import(name: str) -> ModuleType | None:
    """A module of ours, None where this version does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if not (error.name or '').startswith('flash_attn3'):
            raise
        return None


def version_of(distribution: str) -> str:
    """The version of an installed distribution, or ''."""
    try:
        return importlib.metadata.version(distribution) or ''
    except importlib.metadata.PackageNotFoundError:
        return ''


def owner_of(module: str) -> str:
    """OURS, UPSTREAM or NOTHING: whose a module is that an import would find."""
    spec = _spec(module)
    if spec is None:
        return NOTHING
    places = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return OURS if any(_is_ours(place) for place in places) else UPSTREAM


def _spec(module: str) -> ModuleSpec | None:
    """That of a module which is not imported for it, nor the package that it is in."""
    top, _, rest = module.partition('.')
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):    # ValueError: a module that was put in by hand
        return None
    if spec is None or not rest:
        return spec
    return PathFinder.find_spec(module, spec.submodule_search_locations or [])


def distribution_owner() -> str:
    """The same of the distribution flash_attn_3."""
    try:
        found = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return NOTHING
    return OURS if _is_ours(found.locate_file('')) else UPSTREAM


def _is_ours(place: object) -> bool:
    return Path(str(place)).resolve().is_relative_to(PACKAGE)
