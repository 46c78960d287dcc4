"""The table of clients: from the modules of flash_attn3.integrations and their contract tests."""
from __future__ import annotations

import importlib
import inspect
import re

from benchmarks.harness import ROOT
from benchmarks.kernel_tables import table
from flash_attn3 import integrations

_EMULATED = 'its calls, emulated'
_REAL = 'the client itself'


def tested_modules() -> set[str]:
    """The modules of flash_attn3.integrations that a contract test names."""
    text = '\n'.join(path.read_text()
                     for path in (ROOT / 'tests' / 'cpu').glob('test_integrations_*.py'))
    return {name for name in integrations.CLIENTS if re.search(rf'\b{name}\b', text)}


def clients_part() -> str:
    """What each is, how it is turned on, and by what its contract test is made."""
    tested, rows = tested_modules(), []
    for name in integrations.CLIENTS:
        module = importlib.import_module(f'flash_attn3.integrations.{name}')
        text = inspect.getdoc(module)
        what = ' '.join(text.split('\n\n')[0].split()).rstrip('.')
        calls = '\n'.join(line.split('#')[0].strip() for line in text.splitlines()
                          if line.startswith('    ') and 'enable()' not in line)
        calls = calls.replace(',\n', ', ').splitlines()    # a call may have several lines
        evidence = _EMULATED if 'Only emulated' in ' '.join(text.split()) else _REAL
        rows.append([f'`{name}`', what, '<br>'.join(f'`{call}`' for call in calls) or '-',
                     evidence if name in tested else 'none'])
    header = ['NAME', 'client', 'turned on by', 'contract test on CPU tensors']
    return ('`import flash_attn3.integrations.NAME; flash_attn3.integrations.NAME.enable()`, then:'
            '\n\n' + table(header, rows))
