"""The module `flash_attn_interface`, under its other name."""
from flash_attn_interface import *  # noqa: F403
