"""Reads PTX: the kernels of a file, their registers, shared memory and instructions.

As much of the language (PTX ISA 9.0) as nvcc writes for this project: no functions that are called,
no local memory, no tables of branches. Names inside the braces of inline assembly get a number, so
that a kernel has all of them side by side.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

WIDTHS = {'pred': 1, 'b8': 8, 'u8': 8, 's8': 8, 'b16': 16, 'u16': 16, 's16': 16, 'f16': 16,
          'b32': 32, 'u32': 32, 's32': 32, 'f32': 32, 'b64': 64, 'u64': 64, 's64': 64}
STATIC_BASE = 1024    # where a CTA's shared memory begins; the GPU keeps what lies before
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/', re.DOTALL)
_PRAGMA = re.compile(r'\.(pragma|loc|file)\b[^;\n]*[;\n]')
_ENTRY = re.compile(r'\.entry\s+(\w+)\s*\(')
_DYNAMIC = re.compile(r'\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[\]')
_MOST_REGISTERS = re.compile(r'\.maxnreg\s+(\d+)')
_CLUSTER_CTAS = re.compile(r'\.reqnctapercluster\s+(\d+)')
_GUARD = re.compile(r'@(!?)([%\w]+)\s+(.*)', re.DOTALL)
_LABEL = re.compile(r'(?:^|(?<=[;{}:]))\s*([\w$]+)\s*:(?!:)')
_WORD = re.compile(r'(?<![\w.$%])[%$]?[A-Za-z_][\w$]*')


class PtxError(Exception):
    """The text has what this reader does not know."""


@dataclass
class Instruction:
    """Attributes:
        op: as written, such as 'add.s32'.
        operands: texts; a list in braces or brackets is one.
        guard: register of the predicate, ''; negated: whether it runs where that is false.
    """
    op: str
    operands: list[str]
    guard: str = ''
    negated: bool = False


@dataclass
class Label:
    name: str


@dataclass
class Kernel:
    """Attributes:
        registers: width in bits by name; predicates have 1.
        shared: address of each static variable; static_bytes: their size.
        most_registers: those a thread may have; 255 if nothing is said.
        cluster_ctas: CTAs of a cluster; a launch may say another number where this is 1.
    """
    name: str
    most_registers: int = 255
    cluster_ctas: int = 1
    registers: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static_bytes: int = 0
    body: list[Instruction | Label] = field(default_factory=list)


def split_operands(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, depth, begin = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in '{[(') - (letter in '}])')
        if letter == ',' and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return parts + [last] if last else parts


def _closing(text: str, begin: int) -> int:
    """Where the brace that opens at `begin` closes."""
    depth = 0
    for match in re.finditer('[{}]', text[begin:]):
        depth += 1 if match[0] == '{' else -1
        if depth == 0:
            return begin + match.start()
    raise PtxError('a brace is not closed')


class _Scopes:
    """The meaning of names in nested braces."""

    def __init__(self) -> None:
        self._stack: list[dict[str, str]] = [{}]
        self._count = 0

    def enter(self, labels: list[str]) -> None:
        self._count += 1
        self._stack.append({label: f'{label}_{self._count}' for label in labels})

    def leave(self) -> None:
        self._stack.pop()

    def declare(self, name: str) -> str:
        if len(self._stack) > 1:
            self._stack[-1][name] = f'{name}_{self._count}'
        return self.resolve(name)

    def resolve(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._stack) if name in scope), name)

    def resolve_all(self, text: str) -> str:
        return _WORD.sub(lambda match: self.resolve(match[0]), text)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Where each begins, and it without its semicolon; '{' and '}' of a scope, labels with their
    colon."""
    at = 0
    while at < len(text):
        letter = text[at]
        if letter.isspace():
            at += 1
        elif letter in '{}':
            yield at, letter
            at += 1
        elif label := re.match(r'([\w$]+)\s*:(?!:)', text[at:]):
            yield at, label[1] + ':'
            at += label.end()
        else:
            end = text.index(';', at)
            yield at, ' '.join(text[at:end].split())
            at = end + 1


class _Reader:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.scopes = kernel, _Scopes()

    def read(self, text: str) -> None:
        for begin, statement in _statements(text):
            if statement == '{':
                self.scopes.enter(_LABEL.findall(text[begin + 1:_closing(text, begin)]))
            elif statement == '}':
                self.scopes.leave()
            elif statement.endswith(':'):
                self.kernel.body.append(Label(self.scopes.resolve(statement[:-1])))
            elif statement.startswith('.'):
                self._declare(statement)
            else:
                self._append(self.scopes.resolve_all(statement))

    def _declare(self, statement: str) -> None:
        if match := re.fullmatch(r'\.reg \.(\w+) (.*)', statement):
            for name in split_operands(match[2]):
                self._declare_registers(name, WIDTHS[match[1]])
        elif match := re.fullmatch(r'\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]', statement):
            align, size = int(match[1]), int(match[3])
            kernel = self.kernel
            kernel.static_bytes = -(-kernel.static_bytes // align) * align
            kernel.shared[match[2]] = STATIC_BASE + kernel.static_bytes
            kernel.static_bytes += size
        else:
            raise PtxError(f'{self.kernel.name}: {statement}')

    def _declare_registers(self, name: str, width: int) -> None:
        many = re.fullmatch(r'(%?\w+)<(\d+)>', name)
        names = [f'{many[1]}{i}' for i in range(int(many[2]))] if many else [name]
        for one in names:
            self.kernel.registers[self.scopes.declare(one)] = width

    def _append(self, statement: str) -> None:
        guard = _GUARD.fullmatch(statement)
        op, _, rest = (guard[3] if guard else statement).partition(' ')
        self.kernel.body.append(Instruction(op, split_operands(rest), guard[2] if guard else '',
                                            bool(guard and guard[1])))


def read_kernels(text: str) -> tuple[list[Kernel], set[str]]:
    """The kernels of a file and the names of dynamic shared memory."""
    text = _PRAGMA.sub('', _COMMENT.sub('', text))
    kernels = []
    for entry in _ENTRY.finditer(text):
        begin = text.index('{', entry.end())
        limit = _MOST_REGISTERS.search(text, entry.end(), begin)
        cluster = _CLUSTER_CTAS.search(text, entry.end(), begin)
        kernel = Kernel(entry[1], int(limit[1]) if limit else 255,
                        int(cluster[1]) if cluster else 1)
        _Reader(kernel).read(text[begin + 1:_closing(text, begin)])
        kernels.append(kernel)
    return kernels, set(_DYNAMIC.findall(text))
