"""`python -m flash_attn3.doctor`: what is installed, which clients would find us, which kernels an
example call would take, what stands in the way and how to mend it.

Exit status: 0 if an example call would run on our kernels, else 1. Nothing is computed. With --json
a report for an issue, without the names of folders and machines; its keys stay.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from flash_attn3.tools import doctor_facts
from flash_attn3.tools.doctor_clients import NOTHING

Row = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog='python -m flash_attn3.doctor',
        description='Says whether the kernels of flash_attn3 would run here, and what is missing.')
    parser.add_argument('--json', action='store_true', help='a report for an issue')
    options = parser.parse_args(arguments)
    facts = doctor_facts.report()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0 if facts['ok'] else 1


def show(facts: Mapping) -> None:
    """Prints tables with rich where that is installed, else plain text."""
    sections = {'Installed': _installed(facts), 'Clients': _clients(facts),
                'Example calls': _calls(facts), 'Problems': _problems(facts)}
    try:
        import rich  # noqa: F401
    except ImportError:
        print(plain_text(sections))
    else:
        _print_rich(sections)


def plain_text(sections: Mapping[str, Sequence[Row]]) -> str:
    blocks = []
    for title, rows in sections.items():
        width = max(len(name) for name, _ in rows)
        blocks.append('\n'.join([title, *(f'  {name:{width}}  {text}'.rstrip()
                                          for name, text in rows)]))
    return '\n\n'.join(blocks)


def _print_rich(sections: Mapping[str, Sequence[Row]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    console = Console()
    for title, rows in sections.items():
        table = Table(title=title, title_justify='left', show_header=False)
        for row in rows:    # as Text: brackets would be read as markup
            table.add_row(*map(Text, row))
        console.print(table)


# --------------------------------------------------------------------------------------- the rows
def _installed(facts: Mapping) -> list[Row]:
    install, torch, python = facts['flash_attn3'], facts['torch'], facts['python']
    kernels = (f'{install["library"]} is loaded, {install["kernels"]} of {install["kernels_of"]} '
               'kernels' if install['loaded'] else f'none: {install["problem"]}')
    gpus = [(f'GPU {gpu["index"]}', f'{gpu["name"]}, compute capability '
             f'{gpu["compute_capability"]}, {gpu["memory_gib"]} GiB') for gpu in facts['gpus']]
    return [('flash_attn3', install['version']), ('kernels', kernels),
            ('PyTorch', f'{torch["version"]}, '
                        + (f'CUDA {torch["cuda"]}' if torch['cuda'] else 'without CUDA')),
            ('NVIDIA driver', _driver(facts['driver'])), *(gpus or [('GPU', 'none')]),
            ('Python', f'{python["version"]}, {python["system"]} {python["machine"]}'),
            *facts['environment'].items()]


def _driver(driver: Mapping) -> str:
    if not driver['version'] and not driver['cuda']:
        return 'none'
    return f'{driver["version"] or "version unknown"}, for CUDA up to {driver["cuda"] or "unknown"}'


def _clients(facts: Mapping) -> list[Row]:
    compat = facts['compat']
    if not compat['available']:
        state = 'not in this version'
    else:
        state = 'installed in this process' if compat['installed'] else 'not installed'
    rows = [('flash_attn3.compat', state), ('flash_attn_interface', f'from {compat["interface"]}'),
            ('metadata of flash_attn_3',
             f'from {compat["distribution"]} {compat["distribution_version"]}'.rstrip())]
    absent = [client['name'] for client in facts['clients'] if not client['version']]
    for client in facts['clients']:
        if client['version']:
            turn_on = f'; to change that: {client["turn_on"]}' if client['turn_on'] else ''
            found = 'no FlashAttention-3' if client['finds'] == NOTHING else client['finds']
            rows.append((f'{client["name"]} {client["version"]}', f'finds {found}{turn_on}'))
    return rows + [('not installed', ', '.join(absent))] * bool(absent)


def _calls(facts: Mapping) -> list[Row]:
    rows = []
    for call in facts['calls']:
        kernels = ', '.join(call['kernels'])
        verdict = (f'runs {kernels}' if call['runs'] else
                   f'would take {kernels}, but: {"; ".join(call["reasons"])}')
        rows.append((call['name'], f'{call["function"]}, {call["sizes"]}: {verdict}'))
    return rows


def _problems(facts: Mapping) -> list[Row]:
    rows = []
    for number, problem in enumerate(facts['problems'], 1):
        rows += [(f'{number}', problem['what']), ('', f'remedy: {problem["remedy"]}')]
    return rows or [('none', 'nothing stands in the way')]


if __name__ == '__main__':
    sys.exit(main())
