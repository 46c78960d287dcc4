"""One side of ab.py: times one build of flash_attn3, a turn at a time, as told on stdin.

    python ab_worker.py BENCH_FOLDER PACKAGE_FOLDER DEVICE TARGET_MS

BENCH_FOLDER is flash_attn3/bench, the same code for both sides; PACKAGE_FOLDER holds the
flash_attn3 to be measured. One JSON object per line, one answer per command, {"na": reason} where
it fails:
    {"prepare": shape} -> {"count": calls in a turn, "ahead_s": s, "error": relative error}
    {"prepare_quantize": cell} -> {"count", "ahead_s", "bytes": read and written, "digest": that of
        the results}
    {"turn": [count, ahead_s]} -> {"ms": ms, "clock_mhz": MHz or null}
"""
from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import sys
from types import ModuleType


def load_file(path: pathlib.Path) -> ModuleType:
    """Import a module by its file, or a package by its __init__.py."""
    is_package = path.name == '__init__.py'
    name = f'ab_{path.parent.name if is_package else path.stem}'
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(path.parent)] if is_package else None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module   # dataclasses and relative imports look it up
    spec.loader.exec_module(module)
    return module


def load_build(folder: str) -> ModuleType:
    """Import flash_attn3 from this folder and from nowhere else."""
    sys.path.insert(0, folder)
    import flash_attn3
    found = pathlib.Path(flash_attn3.__file__).resolve()
    if pathlib.Path(folder).resolve() not in found.parents:
        raise RuntimeError(f'expected flash_attn3 from {folder}, got {found}')
    return flash_attn3


class Side:
    def __init__(self, measure: ModuleType, build: ModuleType, device: str,
                 target_ms: float) -> None:
        import torch
        self.measure, self.build, self.device = measure, build, torch.device(device)
        self.timer = measure.Timer(self.device, target_ms)
        self.timer.spin(0.3)

    def prepare(self, shape: dict) -> dict:
        problem = self.measure.Shape(**shape)
        self.call = None                       # releases the inputs of the previous problem
        sets = self.measure.make_inputs(problem, self.device)
        function = self.measure.function_of(self.build, problem, self.device)
        one = self.measure.Contender('build', function)
        error = self.measure.error_of(problem, one.prepare(sets[0])(), sets[0])
        self.call = one.rotating(sets)
        count, ahead_s = self.timer.calibrate(self.call)
        return dict(count=count, ahead_s=ahead_s, error=error)

    def prepare_quantize(self, problem: dict) -> dict:
        cells = load_file(pathlib.Path(__file__).with_name('quantize_cells.py'))
        cell = cells.Cell(**problem)
        self.call = None
        options = cells.options_of(cell, self.device)
        sets = cells.make_inputs(cell, self.device, self.measure.ROTATED_BYTES)
        results = self.build.quantize_fp8(sets[0], **options)
        self.call = cells.in_turn([functools.partial(self.build.quantize_fp8, x, **options)
                                   for x in sets])
        count, ahead_s = self.timer.calibrate(self.call)
        return dict(count=count, ahead_s=ahead_s, bytes=cells.bytes_of(sets[0], results),
                    digest=cells.digest_of(results))

    def turn(self, settings: list) -> dict:
        done = self.timer.turn(self.call, *settings)
        return dict(ms=done.ms, clock_mhz=done.clock_mhz)

    def answer(self, command: dict) -> dict:
        (verb, argument), = command.items()
        try:
            return {'prepare': self.prepare, 'prepare_quantize': self.prepare_quantize,
                    'turn': self.turn}[verb](argument)
        except Exception as error:
            return dict(na=f'{type(error).__name__}: {error}'[:200])


def main() -> None:
    bench_folder, folder, device, target_ms = sys.argv[1:]
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)   # libraries must not print between the answers
    import torch
    measure = load_file(pathlib.Path(bench_folder) / '__init__.py')
    side = Side(measure, load_build(folder), device, float(target_ms))
    print(json.dumps(dict(ready=torch.__version__)), file=answers, flush=True)
    with torch.no_grad():
        for line in sys.stdin:
            print(json.dumps(side.answer(json.loads(line))), file=answers, flush=True)


if __name__ == '__main__':
    main()
