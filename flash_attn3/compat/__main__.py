"""Runs a program that looks for upstream's FlashAttention-3, with `flash_attn3.compat.install()`.

    python -m flash_attn3.compat [options] script.py ARGUMENTS...
    python -m flash_attn3.compat [options] -m module ARGUMENTS...
    PYTHONPATH=$(python -m flash_attn3.compat --path) torchrun script.py ...
"""
from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from flash_attn3 import compat


def main(arguments: list[str]) -> None:
    end = next((i for i, text in enumerate(arguments)
                if text == '-m' or not text.startswith('-')), len(arguments))
    parser = argparse.ArgumentParser(
        prog='python -m flash_attn3.compat', usage='%(prog)s [options] (script.py | -m module) ...')
    parser.add_argument('--path', action='store_true',
                        help='print what to put into PYTHONPATH, where it comes before an '
                             'installed upstream')
    parser.add_argument('--legacy-tuple', action='store_true',
                        help='functions that return (out, lse), as before August 2025')
    parser.add_argument('--force', action='store_true', help='before an installed upstream')
    options, command = parser.parse_args(arguments[:end]), arguments[end:]
    if options.path:
        if command:
            parser.error('--path goes without a script')
        print(compat.path(options.legacy_tuple))
        return
    if not command or command == ['-m']:
        parser.error('expected a script or -m module')
    _run(command, options)


def _run(command: list[str], options: argparse.Namespace) -> None:
    """As `python script.py` and `python -m module` would."""
    is_module = command[0] == '-m'
    if not is_module and not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = str(Path(command[0]).resolve().parent)
    compat.install(options.force, options.legacy_tuple)
    sys.argv = command[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name='__main__')


if __name__ == '__main__':
    main(sys.argv[1:])
