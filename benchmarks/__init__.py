"""Benchmarks of the checkout; run as modules: python -m benchmarks.bench_forward."""
