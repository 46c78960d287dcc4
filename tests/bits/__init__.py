"""One set of bits: with split_size a row of out and LSE has the same bits however it is computed.

A draw is a sequence and ways to compute its prompt: by its seed and number alone (`draw.py`).
`ways.py` makes the calls and compares; `python -m tests.bits` runs many and prints a digest.
"""
