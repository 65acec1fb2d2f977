"""The table of docs/reasoning.md is that of the formats."""

from __future__ import annotations

from pathlib import Path

from actorium.actors.config.reasoning_formats import REASONING_FORMATS, ReasoningFormat

PAGE = Path(__file__).parents[2] / "docs" / "reasoning.md"
HEADER = """\
| format | a thought | chosen by | a completion begins | also named |
|---|---|---|---|---|
"""


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def row(name: str, one: ReasoningFormat) -> str:
    """The format's line of the table."""
    marks = zip(one.begin, one.end, strict=False)
    pairs = [f"{code(begin)} ... {code(end)}" for begin, end in marks]
    chosen = " and ".join(map(code, one.shown)) or "its name alone"
    begins = "with a thought" if one.opened else "perhaps with a thought"
    if one.on_request:
        begins += ", if the request turns it on"
    return f"| `{name}` | {'<br>'.join(pairs)} | {chosen} | {begins} | " \
        f"{', '.join(map(code, one.names))} |"


def test_the_table_has_every_format() -> None:
    table = "\n".join(row(name, one) for name, one in REASONING_FORMATS.items())
    assert HEADER + table + "\n\n" in PAGE.read_text(), f"the table should be\n{HEADER}{table}"
