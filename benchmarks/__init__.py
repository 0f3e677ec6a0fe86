"""What Radar costs and what it is compared with.

`python -m benchmarks.end_to_end` times whole replies, `python -m benchmarks.kernels` every
operator. All write the same JSON (`rows.py`).
"""
