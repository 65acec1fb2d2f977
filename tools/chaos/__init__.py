"""The chaos battery: an engine of real processes, whose every token can be checked, under faults.

`python -m actorium.tools.chaos` runs all rows; `tests/engine/test_chaos.py` a slice of them. The
worker has no model (`fault_injection`), clients are the SDK (`checked_streams`), faults follow a
seeded plan (`faults`) or are drawn without end (`drawn_faults`), and each row (`..._rows`) is a
function that returns its measurements and everything that went wrong. `running_trials` and
`lifecycle_trials` strike any actor at any moment.
"""
