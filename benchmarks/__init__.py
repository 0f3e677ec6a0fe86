"""Benchmarks: each checks every contender's result first, then times them interleaved in one run.

`python -m benchmarks.end_to_end` times whole replies of a real model, `python -m
benchmarks.anchor_attention` the attention operator alone. Both write the same JSON (`rows.py`).
"""
