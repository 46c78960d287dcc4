"""Upstream's package name. What it holds leads to flash_attn3."""
__version__ = '3.0.0+flash.attn3'
