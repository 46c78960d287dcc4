"""Turns the kernels of PTX files into C++ that machine.h runs, thread by thread.

An instruction on numbers becomes a call of instructions.h: `add.s32 %r1, %r2, 1` is
`r1 = op_add<i32>(r2, 1u)`, `fma.rn.f32` is `op_fma_rn_f32`. One that has to do with memory, other
threads or the engines of an SM becomes a call of the thread.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.ptx_emulator.ptx import (Instruction, Kernel, Label, PtxError, read_kernels,
                                    split_operands)

SPECIAL_REGISTERS = {
    '%tid.x': 't.index()', '%ntid.x': 't.cta->threads_count', '%ctaid.x': 't.cta->number',
    '%nctaid.x': 't.cta->grid', '%clusterid.x': 't.cta->cluster->number', '%clusterid.y': '0u',
    '%clusterid.z': '0u', '%cluster_ctarank': 't.cta->rank', '%laneid': 't.lane()'}
INTEGERS = {f'{kind}{bits}': f'{"i" if kind == "s" else "u"}{bits}'
            for kind in 'sub' for bits in (8, 16, 32, 64)} | {'pred': 'bool'}
# Without effect here: launches run one after the other, all registers exist, and all other threads
# see a thread's writes at once (but not the copy engine and the tensor cores).
NOTHING = re.compile(
    r'griddepcontrol\.\w+|fence\.mbarrier_init\.release\.cluster|'
    r'membar\.(?:gl|cta)|fence\.acq_rel\.gpu|cp\.async\.bulk\.prefetch\.tensor.*|'
    r'wgmma\.fence\.sync\.aligned|prefetch\.(?:tensormap|global.*)|'
    r'fence\.proxy\.async\.global|setmaxnreg\..*')
WIDTH_TYPES = {1: 'bool', 8: 'u8', 16: 'u16', 32: 'u32', 64: 'u64'}
KERNELS_OF_A_FILE = 6

Handler = Callable[['_Writer', re.Match, list[str], int], str]
_HANDLERS: list[tuple[re.Pattern, Handler]] = []


def _handles(pattern: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.append((re.compile(pattern), handler))
        return handler
    return register


class _Writer:
    """Writes one kernel."""

    def __init__(self, kernel: Kernel, dynamic: set[str]) -> None:
        self.kernel, self._dynamic = kernel, dynamic

    def value(self, operand: str) -> str:
        """A register, a number, or the address of a name."""
        if operand in SPECIAL_REGISTERS:
            return SPECIAL_REGISTERS[operand]
        if operand in self.kernel.registers:
            return operand.strip('%')
        if re.fullmatch(r'-?\d+', operand):
            return f'{int(operand) & (1 << 64) - 1}ull'
        if number := re.fullmatch(r'0[xX]([0-9a-fA-F]+)U?', operand):
            return f'0x{number[1]}ull'
        if number := re.fullmatch(r'0f([0-9A-Fa-f]{8})', operand):
            return f'0x{number[1]}u'
        if operand == f'{self.kernel.name}_param_0':
            return 'u64(t.cta->parameters)'
        if operand in self.kernel.shared:
            return f'{self.kernel.shared[operand]}u'
        if operand in self._dynamic:
            return 't.cta->dynamic_begin'
        raise PtxError(f'{self.kernel.name}: operand {operand}')

    def values(self, operands: Sequence[str]) -> list[str]:
        return [self.value(operand) for operand in operands]

    def list_(self, operand: str) -> list[str]:
        """The operands in braces, or a single one."""
        return split_operands(operand[1:-1]) if operand.startswith('{') else [operand]

    def address(self, operand: str) -> str:
        address = re.fullmatch(r'\[(.+?)(?:\+(-?\d+))?\]', operand)
        if address is None:
            raise PtxError(f'{self.kernel.name}: address {operand}')
        return f'(u64({self.value(address[1].strip())}) + i64({address[2] or 0}))'

    def tensor_coordinates(self, operand: str) -> str:
        """The operand of a tensor copy: [map, {coordinates}]."""
        tensor_map, coordinates = split_operands(operand[1:-1])
        numbers = ', '.join(f'i32({one})' for one in self.values(self.list_(coordinates)))
        return f'{self.value(tensor_map)}, {{{numbers}}}'

    def assign_each(self, operand: str, values: Sequence[str]) -> str:
        targets = zip(self.list_(operand), values)
        return ' '.join(f'{self.value(one)} = {value};' for one, value in targets if one != '_')

    def instruction(self, instruction: Instruction, site: int) -> str:
        text = self._text(instruction, site)
        if instruction.guard:
            condition = self.value(instruction.guard)
            return f'  if ({"!" if instruction.negated else ""}{condition}) {{ {text} }}'
        return f'  {{ {text} }}'

    def _text(self, instruction: Instruction, site: int) -> str:
        op, operands = instruction.op, instruction.operands
        if NOTHING.fullmatch(op):
            return ''
        for pattern, handler in _HANDLERS:
            if match := pattern.fullmatch(op):
                return handler(self, match, operands, site)
        return self._arithmetic(op, operands)

    def _arithmetic(self, op: str, operands: list[str]) -> str:
        if not operands or any(one[0] in '[{' for one in operands):
            raise PtxError(f'{self.kernel.name}: {op} {operands}')
        name, *parts = op.split('.')
        types = []
        while parts and parts[-1] in INTEGERS:
            types.insert(0, INTEGERS[parts.pop()])
        # A type of a float is part of the function's name.
        if types and parts and re.fullmatch(r'f\d+|\w+x2', parts[-1]):
            parts += [op.split('.')[-1]]
            types = []
        function = '_'.join(['op', name, *parts]) + (f'<{", ".join(types)}>' if types else '')
        result, *arguments = self.values(operands)
        return f'{result} = {function}({", ".join(arguments)});'

    def function(self, name: str) -> str:
        """The kernel as a C++ function. A register that nothing was written to has odd bits."""
        body, used = [], set()
        for site, one in enumerate(self.kernel.body, 1):
            if isinstance(one, Label):
                body.append(f' {one.name.replace("$", "")}:;')
            else:
                body.append(self.instruction(one, site))
                used.update(re.findall(r'\w+', body[-1]))
        registers = [f'  {WIDTH_TYPES[width]} {register.strip("%")} = kUnset;'
                     for register, width in self.kernel.registers.items()
                     if register.strip('%') in used]
        return '\n'.join([f'static void {name}(Thread& t) {{', *registers, *body, '}'])


# ------------------------------------------------------------------------------ the flow of control
@_handles(r'bra(\.uni)?')
def _branch(writer, match, operands, site):
    return f'goto {operands[0].replace("$", "")};'


@_handles(r'ret|exit')
def _return(writer, match, operands, site):
    return 'return;'


# ------------------------------------------------------------------------------------ loads, stores
@_handles(r'ld\.param(?:\.v\d)?\.(\w\d+)')
def _load_parameter(writer, match, operands, site):
    return _loads(writer, 'parameter', match[1], operands, site)


@_handles(r'ld(?:\.volatile)?\.shared(?:::cta|::cluster)?(?:\.v\d)?\.(\w\d+)')
def _load_shared(writer, match, operands, site):
    return _loads(writer, 'shared', match[1], operands, site)


@_handles(r'ld(?:\.volatile)?(?:\.global)?(?:\.nc|\.c[ag])?(?:\.L\d::\w+)*(?:\.v\d)?\.(\w\d+)')
def _load_global(writer, match, operands, site):
    return _loads(writer, 'global', match[1], operands, site)


@_handles(r'ld\.(?:relaxed|acquire)\.gpu\.global\.(\w\d+)')
def _load_in_order(writer, match, operands, site):
    """Other threads may have to write it: they run first."""
    return 't.yield(); ' + _loads(writer, 'global', match[1], operands, site)


def _loads(writer, space, type_, operands, site):
    element = INTEGERS.get(type_, f'u{type_[1:]}')
    targets = writer.list_(operands[0])
    values = [f'found[{i}]' for i in range(len(targets))]
    address = writer.address(operands[1])
    return (f'auto found = t.load_{space}<{element}, {len(targets)}>({address}, {site}); '
            f'{writer.assign_each(operands[0], values)}')


@_handles(r'st\.shared(?:::cta)?(?:\.v\d)?\.(\w\d+)')
def _store_shared(writer, match, operands, site):
    return _stores(writer, 'shared', match[1], operands, site)


@_handles(r'st(?:\.(?:relaxed|release)\.gpu)?(?:\.global)?(?:\.c[ag])?(?:\.v\d)?\.(\w\d+)')
def _store_global(writer, match, operands, site):
    return _stores(writer, 'global', match[1], operands, site)


def _stores(writer, space, type_, operands, site):
    values = [f'u{type_[1:]}({one})' for one in writer.values(writer.list_(operands[1]))]
    return (f't.store_{space}<u{type_[1:]}, {len(values)}>({writer.address(operands[0])}, '
            f'{{{", ".join(values)}}}, {site});')


@_handles(r'cvta\.(to\.global|param)\.u64')
def _generic_address(writer, match, operands, site):
    return f'{writer.value(operands[0])} = {writer.value(operands[1])};'


@_handles(r'cvta\.shared\.u64')
def _generic_address_of_shared(writer, match, operands, site):
    return f'{writer.value(operands[0])} = {writer.value(operands[1])} + t.kSharedWindow;'


@_handles(r'atom(?:\.acq_rel\.gpu)?\.(shared|global)\.(add|max|min)\.([us]\d+)')
def _atomic(writer, match, operands, site):
    result, address, value = operands
    kind, added = INTEGERS[match[3]], writer.value(value)
    change = (f'old + {added}' if match[2] == 'add' else
              f'std::{match[2]}<{kind}>(old, {added})')
    return (f'{writer.value(result)} = t.update_{match[1]}<{kind}>({writer.address(address)}, '
            f'[&]({kind} old) {{ return {kind}({change}); }}, {site});')


@_handles(r'atom\.relaxed\.gpu\.global\.cas\.b32')
def _compare_and_swap(writer, match, operands, site):
    result, address, expected, value = operands
    return (f'{writer.value(result)} = t.compare_and_swap({writer.address(address)}, '
            f'{writer.value(expected)}, {writer.value(value)}, {site});')


@_handles(r'red\.relaxed\.gpu\.global\.add\.v\d\.f32')
def _add_floats(writer, match, operands, site):
    values = ', '.join(writer.values(writer.list_(operands[1])))
    return f't.add_floats({writer.address(operands[0])}, {{{values}}}, {site});'


# ------------------------------------------------------------------------------------------- moves
@_handles(r'mov\.b(\d+)')
def _move_bits(writer, match, operands, site):
    target, source = operands
    if source.startswith('{'):
        parts = writer.values(writer.list_(source))
        bits = int(match[1]) // len(parts)
        whole = ' | '.join(f'u64(u{bits}({one})) << {bits * i}' for i, one in enumerate(parts))
        return f'{writer.value(target)} = {whole};'
    if target.startswith('{'):
        count = len(writer.list_(target))
        bits = int(match[1]) // count
        parts = [f'u{bits}(whole >> {bits * i})' for i in range(count)]
        return f'u64 whole = {writer.value(source)}; {writer.assign_each(target, parts)}'
    return f'{writer.value(target)} = {writer.value(source)};'


@_handles(r'mov\.\w+')
def _move(writer, match, operands, site):
    return f'{writer.value(operands[0])} = {writer.value(operands[1])};'


# ---------------------------------------------------------------------------- the threads of a warp
@_handles(r'shfl\.sync\.(bfly|idx|up|down)\.b32')
def _shuffle(writer, match, operands, site):
    results = operands[0].split('|')
    arguments = ', '.join(writer.values(operands[1:]))
    text = (f'Shuffled got = t.shuffle_{match[1]}({arguments}, {site}); '
            f'{writer.value(results[0])} = got.value;')
    return text + (f' {writer.value(results[1])} = got.is_inside;' if len(results) > 1 else '')


@_handles(r'vote\.sync\.(ballot\.b32|any\.pred|all\.pred)')
def _vote(writer, match, operands, site):
    result, vote, mask = writer.values(operands)
    compared = {'ballot.b32': '', 'any.pred': ' != 0', 'all.pred': f' == {mask}'}[match[1]]
    return f'{result} = t.ballot({vote}, {mask}, {site}){compared};'


@_handles(r'redux\.sync\.(max|min|add|and|or)\.[ub]32')
def _reduce(writer, match, operands, site):
    result, value, mask = writer.values(operands)
    return f'{result} = t.reduce_{match[1]}({value}, {mask}, {site});'


@_handles(r'bar\.warp\.sync')
def _meet_in_warp(writer, match, operands, site):
    return f't.ballot(0, {writer.value(operands[0])}, {site});'


@_handles(r'elect\.sync')
def _elect(writer, match, operands, site):
    lane, is_it = writer.values(operands[0].split('|'))
    return (f't.ballot(0, {writer.value(operands[1])}, {site}); {lane} = 0; '
            f'{is_it} = t.lane() == 0;')


@_handles(r'(ld|st)matrix\.sync\.aligned\.x(\d)(\.trans)?\.m8n8\.shared(?:::cta)?\.b16')
def _matrices(writer, match, operands, site):
    is_load, count, trans = match[1] == 'ld', int(match[2]), 'true' if match[3] else 'false'
    if is_load:
        found = [f'words[{i}]' for i in range(count)]
        return (f'u32 words[{count}]; t.load_matrices(words, {count}, {trans}, '
                f'{writer.address(operands[1])}, {site}); {writer.assign_each(operands[0], found)}')
    words = ', '.join(f'u32({one})' for one in writer.values(writer.list_(operands[1])))
    return (f'u32 words[] = {{{words}}}; t.store_matrices(words, {count}, {trans}, '
            f'{writer.address(operands[0])}, {site});')


# ---------------------------------------------------------------------- barriers of CTA and cluster
@_handles(r'bar\.(sync|arrive)')
def _barrier(writer, match, operands, site):
    name, *count = writer.values(operands)
    return f't.{"meet" if match[1] == "sync" else "arrive"}({name}, {(count or ["0"])[0]}, {site});'


@_handles(r'bar\.red\.and\.pred')
def _all_agree(writer, match, operands, site):
    result, name, vote = writer.values(operands)
    return f'{result} = t.all_agree({name}, {vote}, {site});'


@_handles(r'barrier\.cluster\.(arrive|wait)\.aligned')
def _cluster_barrier(writer, match, operands, site):
    return f't.cluster_{match[1]}();'


@_handles(r'mapa\.shared::cluster\.u32')
def _map_address(writer, match, operands, site):
    result, address, rank = writer.values(operands)
    return f'{result} = t.address_of_rank({address}, {rank});'


@_handles(r'mbarrier\.expect_tx\.shared::cta\.b64')
def _expect_bytes(writer, match, operands, site):
    return f't.expect_at_mbarrier({writer.address(operands[0])}, {writer.value(operands[1])});'


@_handles(r'mbarrier\.(init|arrive|arrive\.expect_tx|try_wait\.parity)'
          r'\.shared::(?:cta|cluster)\.b64')
def _mbarrier(writer, match, operands, site):
    if match[1] == 'init':
        return f't.init_mbarrier({writer.address(operands[0])}, {writer.value(operands[1])});'
    address = writer.address(operands[1])
    if match[1] == 'arrive':
        return f't.arrive_at_mbarrier({address}, 0);'
    if match[1] == 'arrive.expect_tx':
        return f't.arrive_at_mbarrier({address}, {writer.value(operands[2])});'
    return f'{writer.value(operands[0])} = t.try_mbarrier({address}, {writer.value(operands[2])});'


# ------------------------------------------------------------------------------------------- copies
@_handles(r'cp\.async\.c[ag]\.shared\.global(\.L2::\d+B)?')
def _copy_by_thread(writer, match, operands, site):
    """The last operand, if there are four: bytes of the source, before zeros."""
    target, source, size, *read = operands
    return (f't.copy_later({writer.address(target)}, {writer.address(source)}, '
            f'{writer.value(size)}, {writer.value(read[0] if read else size)}, {site});')


@_handles(r'cp\.async\.mbarrier\.arrive\.noinc\.shared(?:::cta)?\.b64')
def _arrive_after_copies(writer, match, operands, site):
    return f't.arrive_after_copies({writer.address(operands[0])});'


@_handles(r'cp\.async\.commit_group')
def _commit_copies(writer, match, operands, site):
    return 't.commit_copies();'


@_handles(r'cp\.async\.(wait_group|wait_all)')
def _wait_for_copies(writer, match, operands, site):
    if match[1] == 'wait_all':
        return 't.commit_copies(); t.wait_for_copies(0);'
    return f't.wait_for_copies({writer.value(operands[0])});'


@_handles(r'cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes'
          r'(\.L2::cache_hint)?')
def _load_tensor(writer, match, operands, site):
    target, source, barrier = operands[:3]
    return (f't.load_tensor({writer.address(target)}, {writer.tensor_coordinates(source)}, '
            f'{writer.address(barrier)}, {site});')


@_handles(r'cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta(\.tile)?\.bulk_group')
def _store_tensor(writer, match, operands, site):
    return (f't.store_tensor({writer.tensor_coordinates(operands[0])}, '
            f'{writer.address(operands[1])}, {site});')


@_handles(r'cp\.async\.bulk\.shared::cluster\.(global|shared::cta)\.mbarrier::complete_tx::bytes')
def _bulk_load(writer, match, operands, site):
    target, source, size, barrier = operands
    return (f't.bulk_{"load" if match[1] == "global" else "send"}({writer.address(target)}, '
            f'{writer.address(source)}, {writer.value(size)}, {writer.address(barrier)}, {site});')


@_handles(r'cp\.(reduce\.)?async\.bulk\.global\.shared::cta\.bulk_group(\.add\.f32)?')
def _bulk_store(writer, match, operands, site):
    target, source, size = operands
    return (f't.bulk_{"add" if match[1] else "store"}({writer.address(target)}, '
            f'{writer.address(source)}, {writer.value(size)}, {site});')


@_handles(r'cp\.async\.bulk\.commit_group')
def _commit_stores(writer, match, operands, site):
    return 't.commit_stores();'


@_handles(r'cp\.async\.bulk\.wait_group(\.read)?')
def _wait_for_stores(writer, match, operands, site):
    return f't.wait_for_stores({writer.value(operands[0])});'


@_handles(r'st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.f32')
def _send_words(writer, match, operands, site):
    target, words, barrier = operands
    values = ', '.join(f'u32({word})' for word in writer.values(writer.list_(words)))
    return (f't.send_words({writer.address(target)}, {{{values}}}, '
            f'{writer.address(barrier)}, {site});')


@_handles(r'fence\.proxy\.async\.shared::cta')
def _fence(writer, match, operands, site):
    return 't.mark_fenced();'


# ----------------------------------------------------------------------------------------- products
@_handles(r'wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(e4m3|f16|bf16)\.\2')
def _product(writer, match, operands, site):
    sums = writer.values(writer.list_(operands[0]))
    first, second, *rest = operands[1:]
    adds, first_sign, second_sign, *transposed = writer.values(rest)
    # Whether each of the two operands is transposed: with FP8 none is, one in registers is not.
    transposed = ['0'] * (2 - len(transposed)) + transposed
    declared, words, descriptor = '', 'nullptr', '0'
    if first.startswith('{'):
        words = 'words'
        declared = f'u32 words[] = {{{", ".join(writer.values(writer.list_(first)))}}}; '
    else:
        descriptor = writer.value(first)
    results = ' '.join(f'{one} = sums[{i}];' for i, one in enumerate(sums))
    return (f'u32 sums[] = {{{", ".join(sums)}}}; {declared}'
            f'Operand first{{{descriptor}, {transposed[0]} != 0}}; '
            f'Operand second{{{writer.value(second)}, {transposed[1]} != 0}}; '
            f't.multiply(sums, {words}, first, second, {match[1]}, Element::k_{match[2]}, {adds}, '
            f'{first_sign} == 1 && {second_sign} == 1, {site}); {results}')


@_handles(r'wgmma\.commit_group\.sync\.aligned')
def _commit_products(writer, match, operands, site):
    return 't.commit_products();'


@_handles(r'wgmma\.wait_group\.sync\.aligned')
def _wait_for_products(writer, match, operands, site):
    return f't.wait_for_products({writer.value(operands[0])}, {site});'


# ------------------------------------------------------------------------------------------- files
def translate(texts: Sequence[str], folder: Path) -> list[Path]:
    """Writes C++ files for the kernels of some PTX files, and one that registers them all."""
    functions, registered = [], []
    for text in texts:
        kernels, dynamic = read_kernels(text)
        for kernel in kernels:
            name = f'kernel_{len(functions)}'
            functions.append(_Writer(kernel, dynamic).function(name))
            registered.append(f'  add_kernel({{"{kernel.name}", {name}, {kernel.most_registers}, '
                              f'{kernel.static_bytes}, {kernel.cluster_ctas}}});')
    files = []
    for begin in range(0, len(functions), KERNELS_OF_A_FILE):
        number = len(files)
        part = slice(begin, begin + KERNELS_OF_A_FILE)
        files.append(folder / f'kernels_{number}.cpp')
        files[-1].write_text('\n'.join([
            '#include "instructions.h"', '#include "machine.h"', 'using namespace emulator;',
            *functions[part], f'void register_kernels_{number}() {{', *registered[part], '}\n']))
    files.append(folder / 'kernels_all.cpp')
    numbers = range(len(files) - 1)
    files[-1].write_text('\n'.join([
        *(f'void register_kernels_{i}();' for i in numbers), 'void register_kernels() {',
        *(f'  register_kernels_{i}();' for i in numbers), '}\n']))
    return files
