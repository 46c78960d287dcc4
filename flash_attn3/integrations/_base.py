"""What the integrations share: changes that are undone, probes of versions, the shim of compat."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from flash_attn3 import _library, checks, compat

_MISSING = object()
_warned: set[str] = set()
_shim_users: set[str] = set()    # the clients for which the shim was installed here


class Switch:
    """Changes of a client that are made all or not at all, and undone in the opposite order."""

    def __init__(self, client: str):
        self.client = client
        self._undo: ExitStack | None = None

    @property
    def is_on(self) -> bool:
        return self._undo is not None

    def on(self, problem: str, change: Callable[[ExitStack], None]) -> None:
        """Makes the changes; those of an earlier call are undone first.

        Args:
            problem: the error text if the client cannot be served, else ''.
            change: makes them, and tells the stack how each is undone.

        Raises:
            RuntimeError: there is a problem.
        """
        if problem:
            raise RuntimeError(problem)
        self.off()
        with ExitStack() as undo:
            change(undo)
            self._undo = undo.pop_all()

    def off(self) -> None:
        """Undoes everything, also if a part of it fails."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()


def set_attribute(undo: ExitStack, owner: object, name: str, value: Any) -> None:
    """Sets an attribute that exists; undone, it has its old value."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def set_item(undo: ExitStack, mapping: dict, key: Any, value: Any) -> None:
    """Sets an item; undone, it has its old value or is gone."""
    old = mapping.get(key, _MISSING)

    def restore() -> None:
        if old is _MISSING:
            mapping.pop(key, None)
        else:
            mapping[key] = old
    undo.callback(restore)
    mapping[key] = value


def error(client: str, expected: str, got: str, hint: str = '') -> str:
    """The text of an error, in the package's form."""
    return checks.error(f'integrations.{client}', expected, got, hint)


def warn_once(text: str) -> None:
    """Warns, the first time that it is called with this text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


# ---------------------------------------------------------------------------------------- versions
def version_of(*distributions: str) -> str:
    """The version of the first of these distributions that is installed, or ''."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ''


def numbers(version: str) -> tuple[int, ...]:
    """(5, 17, 0) for '5.17.0.dev1'."""
    return tuple(int(x) for x in re.match(r'\d*(?:\.\d+)*', version)[0].split('.') if x)


def client_problem(client: str, distributions: tuple[str, ...], oldest: tuple[int, ...]) -> str:
    """Why an installed client cannot be used, or ''.

    Args:
        distributions: the names under which it may be installed.
        oldest: the oldest version that is served.
    """
    wanted = f'{distributions[0]} {".".join(map(str, oldest))} or later'
    version = version_of(*distributions)
    if not version:
        return error(client, wanted, 'none', f'pip install {distributions[0]}')
    if numbers(version) < oldest:
        return error(client, wanted, version, f'pip install --upgrade {distributions[0]}')
    return ''


def late_problem(client: str, module: str) -> str:
    """Why a client that looks for attention when it is imported does not find it any more, or ''.

    Args:
        module: the client's module that looks.
    """
    if module in sys.modules and not compat.is_installed():
        return error(client, 'to be enabled before the client is imported',
                     f'{module} imported already',
                     'call enable() first, or start with `python -m flash_attn3.compat script.py`')
    return ''


def gpu_problem(client: str) -> str:
    """Why the kernels do not serve a GPU of this machine, or '': also for a machine without."""
    if not torch.cuda.is_available():
        return ''
    for index in range(torch.cuda.device_count()):
        if not _library.kernels_serve(torch.device('cuda', index)):
            return error(client, 'Hopper GPUs and the kernels for them',
                         f'{torch.cuda.get_device_name(index)} as device {index}',
                         _library.KERNELS_MISSING or 'hide other GPUs by CUDA_VISIBLE_DEVICES')
    return ''


# -------------------------------------------------------------------------------- the shim, the ops
def upstream() -> str:
    """The file of a flash_attn_interface that is not ours and would be imported, or ''."""
    spec = importlib.util.find_spec('flash_attn_interface')
    if spec is None or compat.is_installed():
        return ''
    return spec.origin or 'a package without a file'


def shim_problem(client: str) -> str:
    """Why the shim would not be found, or ''."""
    if file := upstream():
        return error(client, 'no other flash_attn_interface', file,
                     'uninstall flash-attn-3, or call enable(force=True)')
    return ''


def ops_problem(client: str) -> str:
    """Why torch.ops.flash_attn_3 cannot be ours, or ''."""
    if hasattr(torch.ops.flash_attn_3, 'fwd') and not compat.ops._kept:
        return error(client, 'no other torch.ops.flash_attn_3', 'those of another library',
                     'one process can use one of them: uninstall flash-attn-3')
    return ''


def install_shim(undo: ExitStack, client: str, force: bool) -> None:
    """compat.install(), undone by the last client if nobody had installed it before."""
    if not compat.is_installed() or _shim_users:
        compat.install(force=force)
        _shim_users.add(client)
        undo.callback(_release_shim, client)


def _release_shim(client: str) -> None:
    _shim_users.discard(client)
    if not _shim_users and compat.is_installed():
        compat.uninstall()
