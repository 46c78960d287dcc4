"""What Hugging Face's `kernels` loads from this directory in place of a kernel of its hub, where
LOCAL_KERNELS says so: upstream's functions, as flash_attn3/_shim has them.
"""
from flash_attn3.compat.functions import *  # noqa: F403
