"""Upstream's names for programs that look for them: `flash_attn_interface` and `flash_attn_3`, the
distribution flash_attn_3, and the ops of `torch.ops.flash_attn_3`.

    flash_attn3.compat.install()        # before the import of what looks for them

Or run `python -m flash_attn3.compat script.py ...`, or for programs that start others set
`PYTHONPATH=$(python -m flash_attn3.compat --path)`. Importing this package does none of that: the
modules lie in flash_attn3/_shim, which is not on the path.
"""
from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from flash_attn3.ops import checks
from flash_attn3.compat.caches import forget_packages
from flash_attn3.compat.ops import register_ops

__all__ = ['install', 'is_installed', 'path', 'register_ops', 'uninstall']

_MODULE = 'flash_attn_interface'    # upstream has a module of this name too
_PACKAGE = Path(__file__).resolve().parents[1]
_SHIM, _LEGACY = str(_PACKAGE / '_shim'), str(_PACKAGE / '_shim_legacy')
# These clients look for upstream only when they are imported.
_LOOK_AT_IMPORT = ('diffusers', 'transformer_engine', 'megatron.core.transformer.attention',
                   'xformers.ops.fmha.flash3')


def path(legacy_tuple: bool = False) -> str:
    """The directory that `install` puts on sys.path; with legacy_tuple two, as PYTHONPATH has them.

    Args:
        legacy_tuple: as in `install`. Default False.
    """
    return os.pathsep.join(_folders(legacy_tuple))


def is_installed() -> bool:
    """Whether `import flash_attn_interface` gives the module of this package, by `install` or by
    PYTHONPATH; False where a real upstream comes first.
    """
    return _found() in (_SHIM, _LEGACY)


def install(force: bool = False, legacy_tuple: bool = False) -> None:
    """Makes upstream's module and distribution names lead here, in this process.

    Appends `path()` to sys.path, so that a really installed upstream comes first; `is_installed`
    tells. It clears what transformers has cached about packages. Calling it again with the same
    arguments does nothing.

    Args:
        force: come before an installed upstream. Default False.
        legacy_tuple: flash_attn_func, flash_attn_varlen_func and flash_attn_qkvpacked_func always
            return (out, lse), as scripts of before August 2025 expect. Default False.

    Raises:
        RuntimeError: the module, or a client that looks for it at its own import, is already
            imported; legacy_tuple while an installed upstream comes first. Nothing changes then.
    """
    importlib.invalidate_caches()
    folders, found = _folders(legacy_tuple), _found()
    if found == folders[0]:
        return
    if found and found not in (_SHIM, _LEGACY) and not force:
        if legacy_tuple:
            raise RuntimeError(checks.error('compat.install', f'no other {_MODULE}',
                                            f'that in {found}', 'call install(force=True)'))
    elif _MODULE in sys.modules:
        raise RuntimeError(checks.error(
            'compat.install', f'no {_MODULE} imported yet', f'that in {found}',
            'call install() first, or uninstall() before it'))
    elif not found or force:
        _check_clients()
    _leave_path()
    sys.path[:] = [*folders, *sys.path] if force else [*sys.path, *folders]
    forget_packages()


def uninstall() -> None:
    """Undoes `install`: the path, the modules, what transformers has cached.

    Code that imported names from the modules keeps them. PyTorch cannot undo `register_ops`.
    """
    _leave_path()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, '__file__', None)).startswith((_SHIM + os.sep, _LEGACY + os.sep)):
            del sys.modules[name]
    forget_packages()


def _folders(legacy_tuple: bool) -> list[str]:
    return [_LEGACY, _SHIM] if legacy_tuple else [_SHIM]


def _found() -> str:
    """The directory from which the module is or would be imported; '' if there is none."""
    if _MODULE in sys.modules:
        file = getattr(sys.modules[_MODULE], '__file__', None)
    else:
        spec = importlib.util.find_spec(_MODULE)
        if spec is None:
            return ''
        file = spec.origin
    return os.path.dirname(os.path.realpath(file)) if file else 'no file'


def _check_clients() -> None:
    """Raises RuntimeError for a client that would not find what is installed now."""
    for name in _LOOK_AT_IMPORT:
        if name in sys.modules:
            raise RuntimeError(checks.error(
                'compat.install', f'{name} not to be imported yet: it looks for upstream on import',
                'an imported module',
                f'call install() before the import of {name.partition(".")[0]}'))


def _leave_path() -> None:
    sys.path[:] = [entry for entry in sys.path if entry not in (_SHIM, _LEGACY)]
    for folder in (_SHIM, _LEGACY):
        sys.path_importer_cache.pop(folder, None)
