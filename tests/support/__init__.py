"""Helpers of tests/cpu, tests/gpu and the commands of tests: cases, layouts, oracles, the bar."""
