"""Clears what Python and transformers cache about installed packages."""
from __future__ import annotations

import importlib
import importlib.metadata
import sys

_FA3 = 'flash_attention_3'    # as transformers calls it


def forget_packages() -> None:
    """Makes the next search for a package use the present sys.path."""
    importlib.invalidate_caches()
    if (utils := sys.modules.get('transformers.utils.import_utils')) is not None:
        # One dictionary, which several modules of transformers have imported by its name.
        mapping = getattr(utils, 'PACKAGE_DISTRIBUTION_MAPPING', None)
        if mapping is not None:
            distributions = importlib.metadata.packages_distributions()
            mapping.clear()
            mapping.update(distributions)
        for name in ('_package_distribution_mapping', 'is_flash_attn_3_available'):
            clear = getattr(getattr(utils, name, None), 'cache_clear', None)
            if clear is not None:
                clear()
    functions = sys.modules.get('transformers.modeling_flash_attention_utils')
    if getattr(functions, '_loaded_implementation', None) == _FA3:
        functions._loaded_implementation = None    # the functions are imported again
