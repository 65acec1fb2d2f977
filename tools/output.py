"""What commands print and write alike: aligned tables, a line of progress, pictures of plots."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns rows of as many cells as lines; columns whose index is in `right` end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) if i in right else cell.ljust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows]


def show_progress(text: str) -> None:
    """Replaces the last line of a terminal; writes nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def load_pyplot() -> Any:
    """Returns matplotlib's pyplot, which draws into files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_plot(figure: Any, path: str | Path, dpi: int = 120) -> None:
    """Writes a figure, making its folder, and frees it."""
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    load_pyplot().close(figure)
