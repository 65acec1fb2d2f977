"""Whom an evaluation asks: our client and any server tell the same, and what servers lack is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_bench import Scripted, plain
from helpers_served import Served, serving

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench.http_client import Http
from actorium.tools.cli import main
from actorium.tools.compare.comparison import Reading
from actorium.tools.compare.listener import Listener
from actorium.tools.evaluation import http_model
from actorium.tools.evaluation.http_model import HttpModel, letter_values
from actorium.tools.evaluation.needle_test import CASES, contains_answer, units_for
from actorium.tools.evaluation.perplexity import perplexity_figures, windows
from actorium.tools.evaluation.rated_model import AskedPrompt, SdkModel


class Teller(Scripted):
    """A server that knows one letter, and whose prompts' tokens are words."""

    def __init__(self, letter: str = "B", most: int = 20, echoes: bool = True,
                 begin: str = "<s>") -> None:
        super().__init__("vllm")
        self.letter, self.most, self.echoes, self.begin = letter, most, echoes, begin
        self.busy = self.broken = 0

    def answer(self, path: str, body: dict[str, Any]) -> list[bytes]:
        self.seen.append((path, body))
        if path == "/v1/models":
            return plain(b'{"data": [{"id": "org/served"}]}')
        if self.busy:
            self.busy -= 1
            return plain(b'{"error": "busy"}', b"503 Service Unavailable")
        if self.broken and len(self.seen) > 3:
            self.broken -= 1
            return []
        if path == "/v1/chat/completions":
            return self.reply({"message": {"content": f"Answer: {self.letter}"}})
        if (body.get("logprobs") or 0) > self.most:
            return plain(b'{"error": "logprobs: too many"}', b"400 Bad Request")
        if body.get("echo"):
            return self.reply(self.echo(body["prompt"]))
        top = {f" {self.letter}": -0.1, "A": -3.0, " the": -2.0}
        return self.reply({"text": f" {self.letter}",
                           "logprobs": {"top_logprobs": [top]} if self.most else None})

    def echo(self, prompt: str) -> dict[str, Any]:
        """Tokens: the begin of the text, then words with their space;
        a word is the likelier the shorter it is."""
        if not self.echoes:
            return {"text": "x"}
        words = [self.begin, *(f" {word}" for word in prompt.split(" "))]
        return {"text": "", "logprobs": {
            "tokens": [*words, "!"],
            "token_logprobs": [None, *(-float(len(word)) for word in words[1:]), -7.0]}}

    def reply(self, choice: dict[str, Any]) -> list[bytes]:
        return plain(json.dumps({"choices": [choice], "usage": {
            "prompt_tokens": 5, "completion_tokens": 1}}).encode())


class Shifted(Teller):
    """Answers as llama.cpp's Python server does of SmolLM2, which has no beginning-of-text token:
    without the token made, and what follows a token stands in its own place."""

    def echo(self, prompt: str) -> dict[str, Any]:
        words = re.split("( )", prompt)
        tops = [None, *({f"behind {i}": -0.5, word: -9.0} for i, word in enumerate(words) if i)]
        return {"text": f"{prompt}!", "logprobs": {
            "tokens": words, "top_logprobs": tops, "token_logprobs": [None, *[-9.0] * len(words)]}}

    def reply(self, choice: dict[str, Any]) -> list[bytes]:
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        return plain(json.dumps({"choices": [choice], "usage": {
            "prompt_tokens": len(tokens), "completion_tokens": 1}}).encode())


def questions(tmp_path: Path) -> Path:
    """Four questions; B is right in one, the shortest option in two."""
    file = tmp_path / "own.jsonl"
    rows = [(["aaa", "bb", "c"], 2), (["a", "bb", "ccc"], 1), (["aa", "b", "c c c"], 2),
            (["aaa", "b b", "cc"], 2)]
    file.write_text("".join(json.dumps({"question": "q", "choices": choices, "answer": right,
                                        "subject": f"s{i % 2}"}) + "\n"
                            for i, (choices, right) in enumerate(rows)))
    return file


@pytest.mark.parametrize(("method", "score"), [("logits", 0.25), ("generate", 0.25),
                                               ("cloze", 0.5)])
def test_a_run_at_another_makers_server(tmp_path: Path, method: str, score: float,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    with Teller().running() as url:
        argv = ["eval", "mmlu", "--data", str(questions(tmp_path)), "--base-url", url,
                "--method", method, "--json", str(tmp_path / "r.json"),
                "--html", str(tmp_path / "r.html"), "--parallel", "3"]
        assert main([*argv, "--min-score", str(score)]) == 0
        result = json.loads((tmp_path / "r.json").read_text())
        assert main([*argv, "--min-score", str(score + 0.01)]) == 1
    assert (result["score"], result["count"], result["errors"]) == (score, 4, 0)
    assert result["model"] == "org/served" and set(result["categories"]) == {"s0", "s1"}
    assert "chance 33.3%" in capsys.readouterr().out
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_fewer_alternatives_are_asked_for_where_many_are_refused(tmp_path: Path) -> None:
    server = Teller(most=5)
    with server.running() as url:
        assert main(["eval", "mmlu", "--data", str(questions(tmp_path)), "--base-url", url,
                     "--parallel", "1"]) == 0
    assert [body["logprobs"] for _, body in server.seen if body] == [20, 5, 5, 5, 5]


def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_model, "WAITS", (0.0, 0.0))
    server, argv = Teller(), ["eval", "mmlu", "--data", str(questions(tmp_path)), "--parallel", "1"]
    with server.running() as url:
        server.busy = 2
        assert main([*argv, "--base-url", url]) == 0
        server.busy = 3
        assert main([*argv, "--base-url", url, "--json", str(tmp_path / "r.json")]) == 1
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["errors"] == 1 and "503" in result["items"][0]["error"]


def test_a_connection_that_breaks_is_made_again(tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the gateway dies: the engine starts another. A server that never answered is not
    waited for."""
    monkeypatch.setattr(http_model, "WAITS", (0.0, 0.0))
    server, argv = Teller(), ["eval", "mmlu", "--data", str(questions(tmp_path)), "--parallel", "1"]
    with server.running() as url:
        server.broken = 2
        assert main([*argv, "--base-url", url, "--json", str(tmp_path / "r.json")]) == 0
        assert server.broken == 0 and not json.loads((tmp_path / "r.json").read_text())["errors"]

    async def never() -> None:
        await HttpModel(Http("http://127.0.0.1:1"), "m").token_logprobs([1])

    monkeypatch.setattr(http_model, "WAITS", (30.0,))
    with pytest.raises(EngineUnavailable):
        asyncio.run(never())


@pytest.mark.parametrize(("server", "method", "message"), [
    (Teller(most=0), "logits", "POST /v1/completions: 400"),
    (Teller(echoes=False), "cloze", "--method: the server at"),
    (Shifted(), "cloze", "once more behind itself")])
def test_what_a_server_does_not_tell_is_named(
        tmp_path: Path, server: Teller, method: str, message: str,
        capsys: pytest.CaptureFixture[str]) -> None:
    with server.running() as url:
        code = main(["eval", "mmlu", "--data", str(questions(tmp_path)), "--base-url", url,
                     "--method", method, "--json", str(tmp_path / "r.json")])
    if code == 1:
        result = json.loads((tmp_path / "r.json").read_text())
        assert result["errors"] == 4 and message in result["items"][0]["error"]
    else:
        assert code == 2 and message in capsys.readouterr().err


def test_a_text_that_ends_at_once_is_no_answer(tmp_path: Path) -> None:
    """Of the end of a text llama.cpp's Python server tells no alternatives."""
    class Ends(Teller):
        def answer(self, path: str, body: dict[str, Any]) -> list[bytes]:
            if path != "/v1/completions":
                return super().answer(path, body)
            return self.reply({"text": "", "logprobs": {"tokens": [], "top_logprobs": []}})

    with Ends().running() as url:
        assert main(["eval", "mmlu", "--data", str(questions(tmp_path)), "--base-url", url,
                     "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["unanswered"], result["errors"], result["right"]) == (4, 0, 0)


def test_what_is_told_a_token_too_early_is_compared_where_it_belongs() -> None:
    async def read(url: str) -> Reading:
        with contextlib.closing(Http(url)) as http:
            return (await Listener(HttpModel(http, "org/served"))._read("a b", 1, True))[1]

    with Shifted().running() as url:
        reading = asyncio.run(read(url))
    assert reading.tokens == ["a", " ", "b", "!"] and reading.likeliest[:2] == [None, None]
    assert reading.likeliest[2:] == [{"behind 1": -0.5, " ": -9.0}, {"behind 2": -0.5, "b": -9.0}]


def test_a_token_across_the_border_is_one_of_the_continuation() -> None:
    class Merges(HttpModel):
        def __init__(self) -> None:
            pass

        async def _echoed(self, prompt: str | list[int]) -> tuple[list[str], list[float | None]]:
            tokens = ["<s>", "the", " cat", "s"] if prompt == "the cats" else ["<s>", "the", " cat"]
            tokens = ["<s>", "the", " catfish"] if prompt == "the catfish" else tokens
            return tokens, [None, -1.0, -2.0, -4.0][:len(tokens)]

    found = asyncio.run(Merges().ratings("the cat", ["s", "fish"]))
    assert [(one.logprob, one.tokens, one.chars) for one in found] == [(-4.0, 1, 1), (-2.0, 1, 4)]


def test_letters_with_and_without_a_space() -> None:
    told = {" A": -1.0, "A": -0.5, " B": -2.0, "Bob": -0.1, "\u00a0C": -4.0}
    assert letter_values(told, "ABCD") == [-0.5, -2.0, -4.0, None]


# --- a whole engine -------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(device="cpu", exact="on") as running:
        yield running


LETTERS: tuple[AskedPrompt, ...] = ("Sort the words: b a", [{"role": "user", "content": "hello"}])


def test_client_and_server_tell_the_same(served: Served) -> None:
    async def ask() -> None:
        async with AsyncClient(served.engine.name) as client:
            http = Http(served.url)
            own, other = SdkModel(client, "demo"), HttpModel(http, "demo")
            texts = [" Paris", " a small cat", " d\u00e9j\u00e0 vu"]
            mine = await own.ratings("The capital of France is", texts)
            theirs = await other.ratings("The capital of France is", texts)
            for one, two in zip(mine, theirs, strict=True):
                assert (one.logprob, one.tokens, one.chars) == (two.logprob, two.tokens, two.chars)
            ids = await own.token_ids("The fox is in the garden.")
            assert ids == await other.token_ids("The fox is in the garden.")
            values = await own.token_logprobs(ids)
            assert values == await other.token_logprobs(ids)
            assert len(values) == len(ids) - 1 and max(values) < 0
            for prompt in LETTERS:
                found = await own.letter_logprobs(prompt, "AB")
                for one, two in zip(found, await other.letter_logprobs(prompt, "AB"), strict=True):
                    assert one is not None and two in (None, one)
                assert await own.count_tokens(prompt) == await other.count_tokens(prompt)
            asked = [{"role": "user", "content": "What is 2 + 3?"}]
            assert await own.answer(asked, 8) == await other.answer(asked, 8) == "5"
            with pytest.raises(BadConfig, match="has no /tokenize"):
                await HttpModel(Http(served.url + "/nowhere"), "demo").token_ids("x")
            http.close()

    asyncio.run(ask())


def test_the_demo_model_finds_its_needles(served: Served, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", "needle", "--name", served.engine.name, "--style", "pairs", "--lengths", "60",
            "120", "--depths", "0", "1", "--trials", "2", "--json", str(tmp_path / "n.json"),
            "--html", str(tmp_path / "n.html")]
    assert main([*argv, "--min-score", "1"]) == 0
    result = json.loads((tmp_path / "n.json").read_text())
    assert result["count"] == 8 and len(result["cells"]) == 4
    assert all(abs(one["tokens"] - one["length"]) < 25 for one in result["cells"])
    assert "8 of 8 found" in capsys.readouterr().out
    assert (tmp_path / "n.html").read_text().count("<rect") == 4


def test_perplexity_of_a_text(served: Served, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("Once upon a time there was a fox. The fox lived in the forest. " * 6)
    figures = []
    for place in (["--name", served.engine.name], ["--base-url", served.url]):
        assert main(["eval", "perplexity", *place, "--data", str(text), "--window", "32",
                     "--json", str(tmp_path / "p.json"), "--html", str(tmp_path / "p.html")]) == 0
        figures.append(json.loads((tmp_path / "p.json").read_text()))
    assert figures[0]["perplexity"] == figures[1]["perplexity"]
    assert figures[0]["scored"] == figures[0]["tokens"] - 1 > 64
    assert main(["eval", "perplexity", "--name", served.engine.name, "--data", str(text),
                 "--max-perplexity", "1.0"]) == 1


# --- pure parts -----------------------------------------------------------------------------------

@pytest.mark.parametrize(("count", "window", "stride"), [(100, 16, 8), (16, 16, 8), (17, 16, 1),
                                                         (2, 16, 8), (31, 10, 9)])
def test_windows_score_every_token_but_the_first_once(count: int, window: int, stride: int) -> None:
    found = windows(count, window, stride)
    scored = [i for one in found for i in range(one.scored, one.end)]
    assert scored == list(range(1, count))
    assert all(one.end - one.start <= window for one in found)
    assert all(one.scored - one.start >= min(one.scored, window - stride) for one in found)


def test_figures_of_perplexity() -> None:
    half = math.log(0.5)
    found = perplexity_figures([[half, half], [half]], 1.5)
    assert found["perplexity"] == pytest.approx(2) and found["bits_per_byte"] == pytest.approx(2)
    assert found["standard_error_nats"] == 0 and found["scored"] == 3
    assert found["by_window"] == pytest.approx([-half, -half])


def test_needles_are_where_they_should_be() -> None:
    for depth, place in ((0.0, 0), (0.5, 10), (1.0, 20)):
        case = CASES["text"](20, depth, random.Random(1))
        sentences = str(case.prompt).partition("\n\n")[0].split(". ")
        assert f"The secret number is {case.answer}" in sentences[place]
    assert contains_answer(" 12345.", "12345") and not contains_answer("123456", "12345")


def test_the_length_of_a_needles_prompt_is_measured() -> None:
    class Counts(HttpModel):
        def __init__(self) -> None:
            pass

        async def count_tokens(self, prompt: AskedPrompt) -> int:
            return len(str(prompt).split())

    units = asyncio.run(units_for(Counts(), "text", 1000))
    words = len(str(CASES["text"](units, 0.5, random.Random(0)).prompt).split())
    assert abs(words - 1000) < 20
