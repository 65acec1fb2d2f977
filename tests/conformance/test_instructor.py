"""instructor: answers as pydantic models, by schema and by tools."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from wire import Server

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.conformance
ASK = [{"role": "user", "content": "Anna is 5 and happy. Who is it?"}]


class Person(BaseModel):
    """Somebody."""

    name: Literal["Anna", "Ben"]
    age: int = Field(ge=0, le=9)


class People(BaseModel):
    """Some of them."""

    people: list[Person] = Field(min_length=1, max_length=2)


def patched(server: Server, mode: Any) -> Any:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
@pytest.mark.parametrize("kind", [Person, People])
def test_a_model(server: Server, mode: str, kind: type[BaseModel]) -> None:
    client = patched(server, instructor.Mode[mode])
    found = client.chat.completions.create(model=server.model, messages=ASK, response_model=kind,
                                           max_tokens=120, max_retries=0)
    assert isinstance(found, kind)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_partial_model(server: Server, mode: str) -> None:
    client = patched(server, instructor.Mode[mode])
    found = list(client.chat.completions.create_partial(
        model=server.model, messages=ASK, response_model=Person, max_tokens=80, max_retries=0))
    assert found[-1].name in ("Anna", "Ben") and found[-1].age is not None
