"""The chaos battery: an engine of real processes, whose every token can be checked, under faults.

`python -m actorium.tools.chaos` runs all rows; `tests/engine/test_chaos.py` a slice of them. The
worker is one without a model (`worker`), clients are the SDK (`streams`), faults come by a seeded
plan (`faults`), and each row is a function that returns what it has measured and what was wrong.
"""
