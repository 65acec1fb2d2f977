"""The chaos battery: an engine of real processes, whose every token can be checked, under faults.

`python -m actorium.tools.chaos` runs all rows; `tests/engine/test_chaos.py` a slice of them. The
worker is one without a model (`paced_worker`), clients are the SDK (`checked_streams`), faults come
by a seeded plan (`faults`), and each row (`..._rows`) is a function that returns what it has
measured and what was wrong. `running_trials` and `lifecycle_trials` strike any actor at any moment.
"""
