"""Fingerprints of compiled kernels: proves that a refactoring changed no machine code.

    python -m tests.sass fingerprint LIBRARY [--out F.json]
    python -m tests.sass compare OLD NEW

LIBRARY is a library, a cubin or a folder of cubins; OLD and NEW also a JSON file of `fingerprint`.
A kernel has one line: its opcodes and registers, in order. Masked are labels, offsets into the
kernel's parameters, and the mangled name, of which the kernel's and the variant's name remain.
`compare` says of each kernel:

    equal      the same instructions
    constants  the same opcodes and registers; immediates differ, such as the offset of a tensor map
               in the parameters; each pair is listed, unless a side is a JSON file
    changed    anything else: instruction counts, and the opcodes whose count changed
    missing    in OLD alone
    new        in NEW alone
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Names in a mangled name, each after its length; numbers and substitutions are no lengths.
NAME_PARTS = re.compile(r'L[a-z]n?\d+E|S[0-9A-Z]*_|(\d+)')
VARIANT = re.compile(r'(Fwd|Bwd)(Bf16|Fp16|E4m3)D\d')
FUNCTION = re.compile(r'\s*Function : (\S+)')
INSTRUCTION = re.compile(r'\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;')
# Instructions whose immediate is a location in the code.
JUMP = re.compile(r'\b(BRA|BRX|BSSY|CALL|JMP|JMX|LEPC|RET|WARPSYNC|BMOV)\b')
# From here on bank 0 holds the kernel's parameters; before, the sizes of the launch.
FIRST_PARAMETER = 0x210
BANK = re.compile(r'c\[(0x[0-9a-f]+)\]\[([^\]]*)\]')
LABEL = re.compile(r'`\([^)]*\)|(?<![\w.])-?0x[0-9a-f]+')
IMMEDIATE = re.compile(r'(?<![\w.])-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b'
                       r'|[+-](?:INF|QNAN)')


class Kernel(NamedTuple):
    """instructions: masked, in order; empty when the kernel comes from a JSON file."""
    count: int
    exact: str       # hash of the masked instructions
    registers: str   # hash of opcodes and registers alone
    opcodes: dict[str, int]
    instructions: list[str]


def cuobjdump() -> str:
    """That of the CUDA toolkit, else the one inside the triton wheel, which torch brings."""
    home = os.environ.get('CUDA_HOME')
    found = (home and shutil.which(f'{home}/bin/cuobjdump')) or shutil.which('cuobjdump')
    if not found:
        triton = Path(find_spec('triton').submodule_search_locations[0])
        found = str(triton / 'backends' / 'nvidia' / 'bin' / 'cuobjdump')
    return found


def disassemble(path: str | Path) -> dict[str, list[str]]:
    """The instructions of every kernel in a library or a cubin, by mangled name."""
    done = subprocess.run([cuobjdump(), '-sass', path], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'tests.sass: expected a library or a cubin, got {path}; '
                         f'hint: cuobjdump says {done.stderr.strip()[-300:]}')
    return parse(done.stdout)


def parse(listing: str) -> dict[str, list[str]]:
    kernels: dict[str, list[str]] = {}
    for line in listing.splitlines():
        if start := FUNCTION.match(line):
            kernels[start[1]] = []
        elif instruction := INSTRUCTION.match(line):
            kernels[list(kernels)[-1]].append(instruction[1])
    return kernels


def names_in(mangled: str) -> list[tuple[str, int]]:
    """The identifiers of a mangled name, each with the location where it ends."""
    names, at = [], 0
    while found := NAME_PARTS.search(mangled, at):
        at = found.end()
        if found[1]:
            at += int(found[1])
            names.append((mangled[found.end():at], at))
    return names


def key_of(mangled: str) -> str:
    """`kernel:variant`, or the kernel and its template arguments."""
    names = names_in(mangled)
    kernel = next((one for one in names if one[0].endswith('_kernel')), (mangled, len(mangled)))
    variant = next((name for name, _ in names if VARIANT.match(name)), '')
    if variant:
        return f'{kernel[0]}:{variant}'
    arguments = re.match(r'I(.*)EEv', mangled[kernel[1]:])
    return kernel[0] + (f'<{arguments[1]}>' if arguments else '')


def opcode(instruction: str) -> str:
    return re.sub(r'^@!?U?P\w+\s+', '', instruction).split()[0]


def _mask_bank(found: re.Match) -> str:
    bank, index = found[1], found[2]
    register, _, offset = index.rpartition('+')
    register = register or ('' if index.startswith('0x') else index)
    is_launch = (bank == '0x0' and not register and int(offset or index, 16) < FIRST_PARAMETER)
    return found[0] if is_launch else f'c[{bank}][{register}+PARAMETER]'


def mask(instruction: str) -> str:
    """Without labels and without offsets into constant banks."""
    masked = BANK.sub(_mask_bank, instruction)
    return LABEL.sub('LABEL', masked) if JUMP.search(masked) else masked


def registers_only(masked: str) -> str:
    """The opcode and the registers of a masked instruction, without its immediates."""
    name, _, operands = masked.partition(' ')
    if name.startswith('@'):
        name, _, rest = operands.partition(' ')
        return f'{masked.split()[0]} {name} {IMMEDIATE.sub("#", rest)}'
    return f'{name} {IMMEDIATE.sub("#", operands)}'


def _hash(lines: list[str]) -> str:
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:16]


def kernel_of(instructions: list[str]) -> Kernel:
    masked = [mask(one) for one in instructions]
    while masked and opcode(masked[-1]) in ('NOP', 'BRA'):    # alignment at the kernel's end
        masked.pop()
    return Kernel(len(masked), _hash(masked), _hash([registers_only(one) for one in masked]),
                  dict(sorted(Counter(map(opcode, masked)).items())), masked)


def load(path: str | Path) -> dict[str, Kernel]:
    """The kernels of a library, a cubin, a folder of cubins or a JSON file, by key."""
    path = Path(path)
    if path.suffix == '.json':
        return {key: Kernel(**one, instructions=[]) for key, one in json.loads(
            path.read_text()).items()}
    kernels: dict[str, Kernel] = {}
    for file in sorted(path.glob('*.cubin')) if path.is_dir() else [path]:
        for mangled, instructions in disassemble(file).items():
            key = key_of(mangled)
            if key in kernels:
                raise SystemExit(f'tests.sass: expected one kernel {key}, got two; hint: {mangled}')
            kernels[key] = kernel_of(instructions)
    return kernels


def save(kernels: dict[str, Kernel], path: str | Path) -> None:
    facts = {key: one._asdict() for key, one in sorted(kernels.items())}
    for one in facts.values():
        del one['instructions']
    Path(path).write_text(json.dumps(facts, indent=1) + '\n')


def changed_constants(old: Kernel, new: Kernel) -> Counter[tuple[str, str]]:
    """(old, new) immediates that differ, and how often."""
    pairs: Counter[tuple[str, str]] = Counter()
    for lines in zip(old.instructions, new.instructions):
        pairs.update(pair for pair in zip(*map(IMMEDIATE.findall, lines)) if pair[0] != pair[1])
    return pairs


def changed_opcodes(old: Kernel, new: Kernel) -> dict[str, int]:
    counts = {name: new.opcodes.get(name, 0) - old.opcodes.get(name, 0)
              for name in old.opcodes | new.opcodes}
    return {name: count for name, count in sorted(counts.items(), key=lambda x: -abs(x[1]))
            if count}


def status(old: Kernel | None, new: Kernel | None) -> str:
    if old is None or new is None:
        return 'new' if old is None else 'missing'
    if old.exact == new.exact:
        return 'equal'
    return 'constants' if old.registers == new.registers else 'changed'


def describe(old: Kernel, new: Kernel) -> str:
    """What differs between two kernels, in one line."""
    if status(old, new) == 'constants':
        pairs = changed_constants(old, new).most_common(6)
        return ', '.join(f'{a} -> {b} ({count} times)' for (a, b), count in pairs)
    changes = list(changed_opcodes(old, new).items())[:8]
    return ' '.join([f'{old.count} -> {new.count} instructions:',
                     *(f'{name} {count:+d}' for name, count in changes)]
                    if changes else [f'{old.count} instructions, in another order or registers'])


def compare(old: dict[str, Kernel], new: dict[str, Kernel]) -> Counter[str]:
    """Prints a line for each kernel that is not equal, and a summary; the count of each status."""
    counts: Counter[str] = Counter()
    for key in sorted(old | new):
        pair = old.get(key), new.get(key)
        result = status(*pair)
        counts[result] += 1
        if result != 'equal':
            print(f'{result:10}{key}  {describe(*pair) if all(pair) else ""}'.rstrip())
    print(', '.join(f'{count} {name}' for name, count in sorted(counts.items())) or 'no kernels')
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m tests.sass', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    one = commands.add_parser('fingerprint')
    one.add_argument('library')
    one.add_argument('--out', help='a JSON file to write')
    two = commands.add_parser('compare')
    two.add_argument('old')
    two.add_argument('new')
    options = parser.parse_args(arguments)
    if options.command == 'compare':
        counts = compare(load(options.old), load(options.new))
        return int(set(counts) - {'equal', 'constants'} != set())
    kernels = load(options.library)
    for key, kernel in sorted(kernels.items()):
        print(f'{kernel.exact} {kernel.registers} {kernel.count:6} {key}')
    if options.out:
        save(kernels, options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
