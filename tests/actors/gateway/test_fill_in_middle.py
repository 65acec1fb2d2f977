"""Prompts for filling in the middle, and completions of `/v1/completions` with a suffix."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app

from actorium.actors.client.requests import Request
from actorium.actors.gateway.api.fill_in_middle import (
    EDITED_FILE,
    REPOSITORY,
    SNIPPET,
    ExtraFile,
    InfillPrompt,
    fill_in_middle,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.models.fim_tokens import FimTokens

PRE, SUF, MID, PAD, REPO, FILE, BOS = range(1001, 1008)
PLAIN = FimTokens(PRE, SUF, MID)
FULL = FimTokens(PRE, SUF, MID, padding=PAD, repository=REPO, file=FILE)


class Bytes(Scripted):
    """A model whose tokens are bytes, behind a begin of each sequence."""

    def __init__(self, marks: FimTokens | None = FULL) -> None:
        super().__init__(["middle"])
        self._marks = marks

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        return await super().server_info() | {"fim_tokens": None if self._marks is None else {
            name: getattr(self._marks, name) for name in FimTokens.__struct_fields__}}

    async def tokenize(self, text: str, add_special_tokens: bool = True,
                       timeout: float | None = None, parse_special: bool = True) -> list[int]:
        assert text == "a" or not parse_special, "a text may write special tokens"
        return [BOS] * add_special_tokens + list(text.encode())


def infill(*args: Any, marks: FimTokens | None = FULL, **more: Any) -> InfillPrompt:
    engine: Any = SimpleNamespace(client=Bytes(marks))
    model: Any = SimpleNamespace(fim=marks)
    return asyncio.run(fill_in_middle(engine, model, *args, **more))


def test_one_file() -> None:
    assert infill("ab", "c") == ([BOS, PRE, *b"ab", SUF, *b"c", MID], [PAD, REPO, FILE], False)
    assert infill("", "", begun=[7], marks=PLAIN) == ([BOS, PRE, 7, SUF, MID], [], False)


def test_several_files() -> None:
    files = [ExtraFile("x", "a.py"), ExtraFile("y")]
    tail = [PRE, *b"ab", 7, SUF, *b"c", MID]
    assert infill("ab", "c", files=files, begun=[7]).ids == [
        BOS, REPO, *REPOSITORY.encode(), FILE, *b"a.py\nx", FILE, *b"tmp\ny",
        FILE, *EDITED_FILE.encode(), *tail]
    snippet = SNIPPET.encode()
    assert infill("ab", "c", files=files, begun=[7], marks=PLAIN).ids == [
        BOS, *snippet, *b"x", *snippet, *b"y", *tail]


@pytest.mark.parametrize(("room", "before", "after"), [
    (18, b"0123456789", b"abcd"), (17, b"0123456789", b"abc"), (12, b"456789", b"ab"),
    (4, b"", b""), (1, b"", b"")])
def test_what_does_not_fit_is_left_out(room: int, before: bytes, after: bytes) -> None:
    found = infill("0123456789", "abcd", room=room)
    assert found.ids == [BOS, PRE, *before, SUF, *after, MID]
    assert found.truncated == (room < 18)


def test_the_first_files_are_left_out_first() -> None:
    found = infill("0123456789", "abcd", files=[ExtraFile("x" * 9)], marks=PLAIN, room=21)
    assert found.ids == [BOS, *b"xxx", PRE, *b"0123456789", SUF, *b"abcd", MID] and found.truncated


def test_a_model_without_such_tokens() -> None:
    with pytest.raises(HttpError, match="input_suffix: this model has no tokens for filling") as e:
        infill("a", "b", "input_suffix", marks=None)
    assert (e.value.status, e.value.param) == (400, "input_suffix")


def completed(monkeypatch: pytest.MonkeyPatch, script: Bytes, **body: Any) -> Any:
    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(
                app=scripted_app(monkeypatch, script)), base_url="http://gateway") as client:
            return (await client.post("/v1/completions", json={"prompt": "ab"} | body)).json()
    return asyncio.run(ask())


def test_a_suffix_of_openais_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Bytes()
    answer = completed(monkeypatch, script, prompt=["ab", "d"], suffix="c", stop_token_ids=[9])
    assert [choice["text"] for choice in answer["choices"]] == ["middle", "middle"]
    first, second = script.asked
    assert first.prompt == [BOS, PRE, *b"ab", SUF, *b"c", MID]
    assert second.prompt == [BOS, PRE, *b"d", SUF, *b"c", MID]
    assert _stops(first) == [9, PAD, REPO, FILE]
    completed(monkeypatch, script, suffix="c", ignore_eos=True)
    assert _stops(script.asked[-1]) is None
    completed(monkeypatch, script, suffix="")
    assert script.asked[-1].prompt == "ab", "an empty suffix is none"


def _stops(request: Request) -> list[int] | None:
    assert request.params is not None
    return request.params.stop_token_ids


@pytest.mark.parametrize(("body", "field"), [
    ({"prompt": [1, 2]}, "suffix"), ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"), ({"add_special_tokens": False},
                                                  "add_special_tokens")])
def test_what_a_suffix_does_not_go_with(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any],
                                        field: str) -> None:
    answer = completed(monkeypatch, Bytes(), suffix="c", **body)
    assert answer["error"]["param"] == field
    answer = completed(monkeypatch, Bytes(None), suffix="c")
    assert answer["error"]["param"] == "suffix" and "no tokens" in answer["error"]["message"]
