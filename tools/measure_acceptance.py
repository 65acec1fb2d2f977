"""`python -m actorium.tools.measure_acceptance`: the name that `demo_training.draft_acceptance` had
before."""

from __future__ import annotations

from actorium.tools.demo_training.draft_acceptance import main

if __name__ == "__main__":
    main()
