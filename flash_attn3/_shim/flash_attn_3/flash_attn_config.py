"""The module `flash_attn_config`, under its other name."""
from flash_attn_config import *  # noqa: F403
