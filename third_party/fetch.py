"""Fetches what the build needs from the package index: the CUTLASS headers and, where there is no
nvcc, the CUDA compiler. pip downloads the wheels pinned in cutlass.txt and cuda.txt and checks
their sha256; they are unpacked into git-ignored folders and never installed into an environment.

    python third_party/fetch.py cutlass | cuda      unpacks and prints the folder
"""
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PINS = Path(__file__).resolve().parent


class FetchError(RuntimeError):
    """The package index cannot be reached or does not have a pinned wheel."""


def _download(pins: Path, folder: Path) -> None:
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--require-hashes',
               '--only-binary=:all:', '--requirement', str(pins), '--dest', str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith('ERROR')]
        raise FetchError('\n'.join(errors) or done.stderr or f'{command[0]} -m pip failed')


def _unpack(wheel: Path, prefix: str, target: Path) -> None:
    """Puts the members below `prefix` into `target`, with the modes that the wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.filename.startswith(prefix) or member.is_dir():
                continue
            path = target / member.filename[len(prefix):]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(member))
            path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)


def fetch(pins: Path, prefix: str, target: Path) -> Path:
    """Makes `target` hold what the pinned wheels have below `prefix`; nothing to do if it does."""
    stamp = target / 'pins.txt'
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return target
    print(f'flash_attn3.build: fetching {pins.stem} from the package index', flush=True)
    (ROOT / 'build').mkdir(exist_ok=True)
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / 'build') as scratch:
        wheels, tree = Path(scratch, 'wheels'), Path(scratch, 'tree')
        _download(pins, wheels)
        for wheel in sorted(wheels.glob('*.whl')):
            _unpack(wheel, prefix, tree)
        shutil.copyfile(pins, tree / stamp.name)
        shutil.rmtree(target, ignore_errors=True)
        tree.rename(target)
    return target


def cutlass_include() -> Path:
    """The folder for -I: that of CUTLASS_DIR (a CUTLASS checkout), else the pinned headers."""
    override = os.environ.get('CUTLASS_DIR')
    if not override:
        return fetch(_PINS / 'cutlass.txt', 'cutlass_library/source/include/',
                     _PINS / 'cutlass' / 'include')
    include = Path(override).resolve() / 'include'
    if not (include / 'cutlass' / 'cutlass.h').exists():
        raise FetchError(f'flash_attn3.build: expected CUTLASS_DIR to be a CUTLASS checkout with '
                         f'include/cutlass/cutlass.h, got {override}')
    return include


def cuda_toolkit() -> Path:
    """A folder like CUDA_HOME with the pinned compiler: bin/, include/, lib/, nvvm/."""
    return fetch(_PINS / 'cuda.txt', 'nvidia/cu13/', ROOT / 'build' / 'cuda')


if __name__ == '__main__':
    what = {'cutlass': cutlass_include, 'cuda': cuda_toolkit}.get(' '.join(sys.argv[1:]))
    if what is None:
        sys.exit(__doc__)
    print(what())
