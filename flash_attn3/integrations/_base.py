"""What the integrations share: changes that are undone, probes of versions, the shim of compat."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from flash_attn3 import compat
from flash_attn3.ops import checks, library

_MISSING = object()
_warned: set[str] = set()
_shim_users: set[str] = set()    # the clients for which the shim was installed here


class Switch:
    """Changes of a client, made all or not at all and undone in reverse order."""

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


@contextmanager
def quiet_override() -> Iterator[None]:
    """Silences PyTorch's warning that a kernel is replaced, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '(?s).*Overriding a previously registered kernel')
        yield


# ---------------------------------------------------------------------------------------- versions
def version_of(distribution: str) -> str:
    """The version that is installed, or ''."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ''


def numbers(version: str) -> tuple[int, ...]:
    """(5, 17, 0) for '5.17.0.dev1'."""
    return tuple(int(x) for x in re.match(r'\d*(?:\.\d+)*', version)[0].split('.') if x)


def client_problem(client: str, distribution: str, oldest: tuple[int, ...], package: str) -> str:
    """Why an installed client cannot be used, or ''.

    Args:
        distribution: the name under which it is installed.
        oldest: the oldest version that is served.
        package: the name of its import; a checkout on sys.path is believed to be new enough.
    """
    wanted = f'{distribution} {".".join(map(str, oldest))} or later'
    version = version_of(distribution)
    if not version and importlib.util.find_spec(package) is not None:
        return ''
    if not version:
        return error(client, wanted, 'none', f'pip install {distribution}')
    if numbers(version) < oldest:
        return error(client, wanted, version, f'pip install --upgrade {distribution}')
    return ''


def gpu_problem(client: str) -> str:
    """Why the kernels do not serve a GPU of this machine, or '': also for a machine without."""
    if not torch.cuda.is_available():
        return ''
    for index in range(torch.cuda.device_count()):
        if not library.kernels_serve(torch.device('cuda', index)):
            return error(client, 'Hopper GPUs and the kernels for them',
                         f'{torch.cuda.get_device_name(index)} as device {index}',
                         library.KERNELS_MISSING or 'hide other GPUs with CUDA_VISIBLE_DEVICES')
    return ''


# -------------------------------------------------------------------------------- the shim, the ops
def upstream() -> str:
    """The file of a flash_attn_interface that is not ours and would be imported, or ''."""
    if compat.is_installed():
        return ''
    if (module := sys.modules.get('flash_attn_interface')) is not None:
        return getattr(module, '__file__', None) or 'a module without a file'
    spec = importlib.util.find_spec('flash_attn_interface')
    return '' if spec is None else spec.origin or 'a package without a file'


def shim_problem(client: str) -> str:
    """Why the shim would not be found, or ''."""
    if file := upstream():
        return error(client, 'no other flash_attn_interface', file,
                     'uninstall flash-attn-3, or call enable(force=True)')
    return ''


def ops_problem(client: str) -> str:
    """Why torch.ops.flash_attn_3 cannot be ours, or ''."""
    if hasattr(torch.ops.flash_attn_3, 'fwd') and not compat.ops.are_registered():
        return error(client, 'no other torch.ops.flash_attn_3', 'those of another library',
                     'a process can use only one of them; uninstall flash-attn-3')
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


class ShimClient:
    """A client that finds upstream's names when it is imported: the shim is all it needs."""

    def __init__(self, client: str, distribution: str, oldest: tuple[int, ...], module: str,
                 flag: str):
        """
        Args:
            distribution, oldest: of `client_problem`.
            module: the client's module that looks for upstream at its import.
            flag: its attribute, also of attributes, that is true when it has found it.
        """
        self._name = client
        self._installed = distribution, oldest, module.partition('.')[0]
        self._module, self._flag = module, flag
        self._switch = Switch(client)

    def enable(self, force: bool = False) -> None:
        """`flash_attn3.compat.install()`, before the client is imported.

        Args:
            force: the shim takes the place of an installed flash-attn-3. Default False.

        Raises:
            RuntimeError: what `problem()` says.
        """
        text = self._problem(not force)
        self._switch.on(text, lambda undo: install_shim(undo, self._name, force))

    def disable(self) -> None:
        """Takes the shim back, if no other client uses it. What the client has imported stays: only
        a new process is without it.
        """
        self._switch.off()

    def is_enabled(self) -> bool:
        """Whether enable() was called, and disable() was not."""
        return self._switch.is_on

    def problem(self) -> str:
        """Why the client cannot be served here and what to do, or ''."""
        return self._problem(not self._switch.is_on)

    def _problem(self, may_be_upstream: bool) -> str:
        text = client_problem(self._name, *self._installed)
        if not text and may_be_upstream:
            text = shim_problem(self._name)
        return text or ops_problem(self._name) or self._late_problem()

    def _late_problem(self) -> str:
        found = sys.modules.get(self._module)
        for name in self._flag.split('.') if found is not None else ():
            found = getattr(found, name, True)    # another version may have renamed it
        if self._module not in sys.modules or found:
            return ''
        return error(self._name, f'enable() before the import of {self._module}',
                     "it is already imported, without upstream's names",
                     'start a new process and call enable() first, or use '
                     'python -m flash_attn3.compat')
