"""The table of clients: from the modules of flash_attn3.integrations and their contract tests."""
from __future__ import annotations

import importlib
import inspect

from benchmarks.kernel_tables import table
from flash_attn3 import integrations
from tests.support.client_evidence import EVIDENCE


def clients_part() -> str:
    """What each is, how it is turned on, and by what its contract test is made."""
    rows = []
    for name in integrations.CLIENTS:
        text = inspect.getdoc(importlib.import_module(f'flash_attn3.integrations.{name}'))
        what = ' '.join(text.split('\n\n')[0].split()).rstrip('.')
        calls = '\n'.join(line.split('#')[0].strip() for line in text.splitlines()
                          if line.startswith('    ') and 'enable()' not in line)
        calls = calls.replace(',\n', ', ').splitlines()    # a call may have several lines
        rows.append([f'`{name}`', what, '<br>'.join(f'`{call}`' for call in calls) or '-',
                     EVIDENCE[name][0]])
    header = ['NAME', 'client', 'turned on by', 'contract test on CPU tensors']
    return ('`import flash_attn3.integrations.NAME; flash_attn3.integrations.NAME.enable()`, then:'
            '\n\n' + table(header, rows))
