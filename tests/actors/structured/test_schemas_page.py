"""What docs/schemas.md says of schemas is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers_masking import says, vocabulary

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.schema_formats import GRAMMARS, PATTERNS
from actorium.actors.structured.schemas import unheld

PAGE = (Path(__file__).parents[3] / "docs" / "schemas.md").read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the first table behind a title, without the marks of code."""
    lines = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0].splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip("`") for cell in cells] for cells in found[1:]]


def grammar(schema: str, lenient: bool = False) -> str:
    return grammar_of(Structured(json_schema=schema, lenient=lenient))


@pytest.mark.parametrize("what, schema, good, bad", rows("Enforced"))
def test_what_is_enforced(what: str, schema: str, good: str, bad: str) -> None:
    assert says(grammar(schema), good) and not says(grammar(schema), bad), what
    assert unheld(json.loads(schema)) == []


@pytest.mark.parametrize("what, schema, good", rows("Says nothing"))
def test_what_says_nothing(what: str, schema: str, good: str) -> None:
    assert says(grammar(schema), good), what
    assert unheld(json.loads(schema)) == []


@pytest.mark.parametrize("schema, place", rows("Refused, unless asked to pass over it"))
def test_what_is_passed_over_when_asked(schema: str, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(schema)
    assert re.match(rf"structured: json_schema: {re.escape(place)}[ ,]", caught.value.message)
    assert "cannot be enforced (passed over with structured_outputs.lenient)" in \
        caught.value.message
    vocabulary().matcher(grammar(schema, lenient=True))
    assert (place, place.split(".")[-1]) in unheld(json.loads(schema))


@pytest.mark.parametrize("schema, error", rows("Refused"))
@pytest.mark.parametrize("lenient", [False, True])
def test_what_is_refused(schema: str, error: str, lenient: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(schema, lenient)
    assert caught.value.message.startswith(f"structured: json_schema: {error}")


def test_the_formats() -> None:
    told = PAGE.split("Formats that are enforced: ")[1].split(". Beside")[0]
    names = set(re.findall(r"`([\w-]+)`", told))
    names |= {f"{kind}{version}" for kind in ("uuid", "uuidv") for version in range(1, 9)}
    assert names == GRAMMARS | PATTERNS.keys()
