"""A copy of the source tree, as a fresh clone has it, and environments to install it into."""
from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ('csrc', 'flash_attn3', 'build_tools', 'third_party', 'setup.py', 'pyproject.toml',
          'MANIFEST.in', 'README.md', 'LICENSE', 'NOTICE', 'constraints.txt', 'Makefile')


def copy_checkout(target: Path) -> Path:
    """The sources without anything that was built."""
    target.mkdir()
    for name in _PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name,
                            ignore=shutil.ignore_patterns('*.so', '__pycache__', 'cutlass'))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def run(command: list[str | Path], cwd: Path, **environment: str) -> str:
    """Runs it and gives its output; fails the test with the output when it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f'{command}\n{done.stdout}'
    return done.stdout


def new_environment(folder: Path) -> Path:
    """A virtual environment with pip alone; gives its Python."""
    run([sys.executable, '-m', 'venv', '--without-pip', folder], folder.parent)
    python = folder / 'bin' / 'python'
    link_package('pip', site_packages(python))
    return python


def site_packages(python: Path) -> Path:
    return next((python.parent.parent / 'lib').glob('python*/site-packages'))


def link_package(name: str, target: Path) -> None:
    """Lets another environment see an installed package and all that it needs, by links."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # needed on another platform, or by an extra
    tops = {path.parts[0] for path in distribution.files or ()} - {'..', '__pycache__'}
    if all((target / top).exists() for top in tops):
        return
    for top in tops:
        if not (target / top).exists():
            (target / top).symlink_to(distribution.locate_file(top))
    for needed in distribution.requires or ():
        link_package(re.match(r'[\w.-]+', needed)[0], target)
