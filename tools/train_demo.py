"""`python -m actorium.tools.train_demo`: the name that `demo_training.train` had before."""

from __future__ import annotations

from actorium.tools.demo_training.train import main

if __name__ == "__main__":
    main()
