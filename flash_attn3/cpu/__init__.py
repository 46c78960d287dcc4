"""Attention and quantisation in plain PyTorch, for CPU tensors, other GPUs and the tests."""
