"""What commands print and write alike: aligned tables, a line of progress, files, plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from actorium.actors.errors import BadConfig


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


def write_file(path: str | Path, text: str, field: str) -> None:
    """Writes a file that a flag asked for, making its folder. Raises `BadConfig`, naming the field.
    """
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}", field) from None


def write_json(path: str | Path, value: Any) -> None:
    """Writes what `--json` asked for. Raises `BadConfig`."""
    write_file(path, json.dumps(value, indent=2) + "\n", "json")


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
