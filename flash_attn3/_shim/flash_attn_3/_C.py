"""Upstream's extension module, whose import registers `torch.ops.flash_attn_3`."""
from flash_attn3.compat import register_ops

register_ops()
