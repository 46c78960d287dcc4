"""Compiles C++ and CUDA units with ninja and keeps every object in a cache by content.

An object's key is the text of its source and of all files of ours that it includes, the flags, and
the versions of the compiler and of the foreign headers: a fresh clone with a warm cache compiles
nothing. ninja gets only the units that the cache lacks; it runs them side by side and shows how far
it is. Beside each object lies the compiler's log, which has what ptxas says about each kernel.
"""
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ninja.ninja_syntax import Writer, escape

from build_tools.toolchain import BuildError

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / 'build'
LOGS = BUILD / 'logs'
_UNIT_BYTES = 2.5 * 2**30  # what the largest unit may take
_CACHE_DAYS = 30
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
# A line that is a comment, and a comment after code without quotes, which may hold // too.
_COMMENT = re.compile(rb'^\s*//[^\n]*\n|^([^"\'\n]*?)[ \t]*//[^\n]*', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    source: Path                       # below the repository
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    own_includes: tuple[Path, ...]     # folders of ours: what lies there is part of the key
    foreign_includes: tuple[Path, ...]
    versions: tuple[str, ...]          # the compiler, and what foreign_includes holds

    @property
    def name(self) -> str:
        return f'{self.source.parent.name}_{self.source.stem}'


def included_files(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The source and all files of ours that it includes, directly or not, sorted."""
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for name in _INCLUDE.findall(path.read_text()):
            found = next((folder / name for folder in (path.parent, *folders)
                          if (folder / name).exists()), None)
            if found is not None and found not in seen:
                waiting.append(found)
    return sorted(seen)


def key(unit: Unit) -> str:
    """Names what the compiler sees: an edit of a comment compiles nothing again."""
    digest = hashlib.sha256()
    for part in (*unit.flags, *unit.versions):
        digest.update(part.encode() + b'\0')
    for path in included_files(unit.source, unit.own_includes):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b'\0'
                      + _COMMENT.sub(rb'\1', path.read_bytes()))
    return digest.hexdigest()[:24]


def cache_folder() -> Path:
    """FLASH_ATTN3_CACHE_DIR, else the user's cache folder, else (no home to write to) build/."""
    named = os.environ.get('FLASH_ATTN3_CACHE_DIR')
    base = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    folder = Path(named) if named else Path(base) / 'flash_attn3'
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = BUILD / 'cache'
        folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _prune(folder: Path) -> None:
    oldest = time.time() - _CACHE_DAYS * 86400
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def _available_bytes() -> int:
    """The memory that may be used now: what the machine has free, and what the container allows."""
    meminfo = re.search(r'MemAvailable:\s+(\d+) kB', Path('/proc/meminfo').read_text())
    available = int(meminfo[1]) * 1024 if meminfo else sys.maxsize
    limit = Path('/sys/fs/cgroup/memory.max')
    text = limit.read_text().strip() if limit.exists() else 'max'
    return available if text == 'max' else min(available, int(text))


def max_jobs() -> int:
    """MAX_JOBS, else one job a core as far as memory goes."""
    text = os.environ.get('MAX_JOBS', '')
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise BuildError(f'flash_attn3.build: expected MAX_JOBS >= 1, got {text!r}')
        return int(text)
    return max(1, min(len(os.sched_getaffinity(0)), int(_available_bytes() / _UNIT_BYTES)))


def _shown(path: Path) -> str:
    """Relative to the repository where it can be: the same command in every clone."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _command(unit: Unit, keep: bool) -> str:
    parts = [*unit.compiler, *unit.flags]
    parts += [f'-I{_shown(folder)}' for folder in unit.own_includes]
    for folder in unit.foreign_includes:
        parts += ['-isystem', _shown(folder)]
    if keep and unit.source.suffix == '.cu':
        folder = BUILD / 'keep' / unit.name
        folder.mkdir(parents=True, exist_ok=True)
        parts += ['--keep', '--keep-dir', _shown(folder)]
    return shlex.join(parts)


def _run_ninja(missing: dict[Path, Unit], keep: bool) -> None:
    """One edge a unit. The object moves to its place whole, so that builds can share the cache."""
    BUILD.mkdir(exist_ok=True)
    ninja_file = BUILD / 'units.ninja'
    with ninja_file.open('w') as stream:
        writer = Writer(stream, width=1000)
        writer.variable('builddir', 'build')
        writer.rule('compile', description='$source', command=(
            '$compile -c $source -o $part > $part.log 2>&1 || { cat $part.log; exit 1; }; '
            'grep -i warning $part.log; mv $part.log $log && mv $part $out'))
        for target, unit in missing.items():
            variables = {'compile': _command(unit, keep), 'source': _shown(unit.source),
                         'part': shlex.quote(f'{target}.{os.getpid()}'),
                         'log': shlex.quote(str(target.with_suffix('.log')))}
            writer.build(str(target), 'compile', variables={
                name: escape(value) for name, value in variables.items()})
    environment = os.environ | {'NINJA_STATUS': '[%f/%t, %es] '}
    command = [sys.executable, '-m', 'ninja', '-f', str(ninja_file), '-j', str(max_jobs())]
    if subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode != 0:
        raise BuildError('flash_attn3.build: a unit did not compile; its messages are above')


def compile_units(units: Sequence[Unit]) -> dict[Unit, Path]:
    """The objects of the units, from the cache or compiled now. Logs are left in build/logs/."""
    cache = cache_folder()
    keep = os.environ.get('FLASH_ATTN3_KEEP', '') not in ('', '0')
    targets = {unit: cache / f'{unit.name}-{key(unit)}.o' for unit in units}
    objects = {path: unit for unit, path in targets.items()}
    missing = {path: unit for path, unit in objects.items()
               if not (path.exists() and path.with_suffix('.log').exists())
               or (keep and unit.source.suffix == '.cu')}
    print(f'flash_attn3.build: {len(objects)} units, {len(objects) - len(missing)} from the cache '
          f'({cache}), {max_jobs()} at a time', flush=True)
    for path in missing:
        path.unlink(missing_ok=True)
    if missing:
        _run_ninja(missing, keep)
    LOGS.mkdir(parents=True, exist_ok=True)
    for path, unit in objects.items():
        (LOGS / f'{unit.name}.log').write_text(path.with_suffix('.log').read_text())
        os.utime(path)
        os.utime(path.with_suffix('.log'))
    _prune(cache)
    return targets
