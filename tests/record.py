"""Runs tests/gpu, its files and their parts spread over several processes that share the GPU, and
counts.

    python -m tests.record                         # all
    python -m tests.record --smoke                 # the short selection
    python -m tests.record --sanitize --out benchmarks/results    # the committed record

The processes take the visible GPUs in turn. Files with tests that ask for much memory run after the
others, one at a time; between tests a process gives back what its allocator keeps (conftest.py). A
file that cannot be imported has failed. --sanitize also runs `make sanitize`, and says so where the
host refuses it.
"""
from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import harness
from tests.conftest import missing_hopper

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ('passed', 'failed', 'skipped')
SANITIZED = re.compile(r'ERROR SUMMARY: (\d+) error')


def pytest_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *map(str, arguments)]


def counts_of(report: Path) -> dict[str, int]:
    """Counts of a JUnit file; an error outside of a test counts as a failure."""
    suites = list(xml.parse(report).getroot().iter('testsuite')) if report.exists() else []
    found = {name: sum(int(suite.get(name, 0)) for suite in suites)
             for name in ('tests', 'failures', 'errors', 'skipped')}
    failed = found['failures'] + found['errors']
    return dict(passed=found['tests'] - failed - found['skipped'], failed=failed,
                skipped=found['skipped'])


def parts_of(text: str) -> int:
    """In how many parts a file of tests is run: what a line like PARTS = 3 says, else one."""
    found = re.search(r'^PARTS = (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 1


def visible_gpus() -> list[str]:
    given = os.environ.get('CUDA_VISIBLE_DEVICES')
    return given.split(',') if given else list(map(str, range(torch.cuda.device_count())))


def run_part(path: Path, part: str, options: Sequence[str], folder: Path, gpu: str) -> dict:
    """The counts of the tests of a file, or those of a part like 2/3. pytest's 5: the selection has
    none of them.
    """
    report, began = folder / f'{path.stem}-{part.replace("/", "-")}.xml', time.monotonic()
    done = subprocess.run(pytest_command(path, '--part', part, *options, f'--junitxml={report}'),
                          cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, env=os.environ | {'CUDA_VISIBLE_DEVICES': gpu})
    counts = counts_of(report)
    if done.returncode not in (0, 5) and not counts['failed']:
        counts['failed'] = 1
    result = dict(file=path.name, **counts, seconds=round(time.monotonic() - began, 1))
    print(f'{path.name} {part}: ' + ', '.join(f'{counts[name]} {name}' for name in COUNTS)
          + f', {result["seconds"]} s', flush=True)
    if counts['failed']:
        print(done.stdout[-6000:], flush=True)
    return result


def run_files(files: Sequence[Path], options: Sequence[str], processes: int) -> list[dict]:
    """The counts of each file. The longest come first; those that ask for much memory alone, after
    the others.
    """
    texts = {path: path.read_text() for path in files}
    alone = [path for path in files if 'needs_memory' in texts[path]]
    shared = sorted(set(files) - set(alone),
                    key=lambda path: (-parts_of(texts[path]), -len(texts[path])))
    gpus = itertools.cycle(visible_gpus())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        def run(path: Path, part: str) -> dict:
            return run_part(path, part, options, Path(folder), next(gpus))

        parts = [(path, f'{number + 1}/{parts_of(texts[path])}')
                 for path in shared for number in range(parts_of(texts[path]))]
        results = list(pool.map(lambda part: run(*part), parts))
        results += [run(path, '1/1') for path in alone]
    totals: dict[str, dict] = {}
    for result in results:
        total = totals.setdefault(result['file'], dict(
            file=result['file'], **dict.fromkeys(COUNTS, 0), seconds=0.0))
        for name in (*COUNTS, 'seconds'):
            total[name] = round(total[name] + result[name], 1)
    return sorted(totals.values(), key=lambda total: total['file'])


def sanitize() -> list[dict]:
    """The errors of each tool, or the last line where it did not run."""
    done = subprocess.run(['make', 'sanitize'], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    errors = list(map(int, SANITIZED.findall(done.stdout)))
    tools = ('memcheck', 'initcheck')
    if len(errors) != len(tools):
        reason = (done.stdout.strip().splitlines() or ['no output'])[-1]
        return [dict(what='make sanitize', na=reason[:200])]
    return [dict(what=f'compute-sanitizer --tool {tool}', errors=count)
            for tool, count in zip(tools, errors)]


def record_of(args: argparse.Namespace, results: list[dict], seconds: float) -> dict:
    what = 'pytest tests/gpu' + ' -m smoke' * args.smoke
    total = {name: sum(result[name] for result in results) for name in COUNTS}
    whole = dict(what=f'{what}, {args.processes} processes', **total, seconds=round(seconds))
    return dict(subject='gpu_tests', time=time.strftime('%Y-%m-%d'), commit=args.commit,
                environment=harness.environment(torch.device('cuda')),
                command='python -m tests.record', results=[whole], files=results)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m tests.record', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--smoke', action='store_true')
    parser.add_argument('--sanitize', action='store_true')
    parser.add_argument('--processes', type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument('--commit', default=harness.commit(), help='default: that of the checkout')
    parser.add_argument('--out', type=Path, help='the folder of the record; default: none written')
    parser.add_argument('--where-possible', action='store_true',
                        help='without a Hopper GPU only import the tests, which is no error')
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if reason := missing_hopper():
        print(f'tests/gpu: not run: {reason}')
        return subprocess.run(pytest_command('tests/gpu', '--collect-only', '-qq'), cwd=ROOT,
                              stdout=subprocess.DEVNULL).returncode if args.where_possible else 1
    began = time.monotonic()
    results = run_files(sorted((ROOT / 'tests/gpu').glob('test_*.py')),
                        ['-m', 'smoke'] if args.smoke else [], args.processes)
    record = record_of(args, results, time.monotonic() - began)
    print(record['results'][0])
    if args.sanitize:
        record['results'] += sanitize()
        print(*record['results'][1:], sep='\n')
    if args.out:
        print(f'written: {harness.save(record, args.out)}')
    return int(record['results'][0]['failed'] > 0)


if __name__ == '__main__':
    sys.exit(main())
