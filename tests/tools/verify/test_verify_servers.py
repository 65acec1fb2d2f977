"""`actorium verify` at servers: what they take is tried first, and what they tell is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from helpers_served import serving
from helpers_simulated import mixed

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench.http_client import RefusedByServer
from actorium.tools.cli import main
from actorium.tools.cli.verify_command import run
from actorium.tools.evaluation.http_model import CHAT, COMPLETIONS
from actorium.tools.verify.conditions import PLAIN, Condition, differing
from actorium.tools.verify.http_readers import (
    ServerAbilities,
    ServerAsker,
    parsed_logprobs,
    probed,
    request_body,
)
from actorium.tools.verify.verify_cases import VerifyCase, Vocabulary, drawn_cases
from actorium.tools.verify.verify_run import VerifyOptions, VerifyRun

WORDS = [" a", " b", " c", " d", " e", " f", " g"]


class FakeServer:
    """Answers are a hash of the prompt; with a fault, as a condition would make them."""

    def __init__(self, path: str = COMPLETIONS, refuses: tuple[str, ...] = (), fault: str = "",
                 seeds: bool = True) -> None:
        self.path, self.refuses, self.fault, self.seeds = path, refuses, fault, seeds
        self.under_way = self.asked = 0
        self.seen: set[str] = set()

    async def events(self, path: str, body: dict[str, Any], headers: str = "",
                     _reader: object = None) -> AsyncGenerator[bytes, None]:
        assert headers.startswith("Authorization")
        if path != self.path:
            raise RefusedByServer("not found", 404)
        for name in self.refuses:
            if name in body:
                raise RefusedByServer(f"{name}: unknown", 400)
        if isinstance(body.get("cache_salt"), int):
            raise RefusedByServer("cache_salt: must be a string", 422)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        again, self.asked = prompt in self.seen, self.asked + 1
        self.seen.add(prompt)
        self.under_way += 1
        try:
            await asyncio.sleep(0)
            if self.fault == "silent" and self.under_way > 15:
                await asyncio.sleep(3600)
            wrong = (self.fault == "neighbours" and self.under_way > 1 or
                     self.fault == "stream" and body["stream"] or
                     self.fault == "cold" and not again)
            luck = self.asked if body["temperature"] and not self.seeds else 0
            words = [WORDS[mixed(prompt, body.get("seed"), body["temperature"], i, luck,
                                 wrong and i > 2) % 7] for i in range(body["max_tokens"])]
            if not body["stream"]:
                yield self.part(body, words, "length")
                return
            for i, word in enumerate(words):
                await asyncio.sleep(0)
                yield self.part(body, [word], "length" if i == len(words) - 1 else None)
        finally:
            self.under_way -= 1

    def part(self, body: dict[str, Any], words: list[str], finish: str | None) -> bytes:
        choices = []
        for index in range(body.get("n", 1)):
            choice: dict[str, Any] = {"index": index, "finish_reason": finish}
            text = "".join(words)
            told = [{"token": word, "logprob": -1.5, "top_logprobs": []} for word in words]
            if self.path == CHAT:
                choice["delta" if body["stream"] else "message"] = {"content": text}
                choice["logprobs"] = {"content": told} if body.get("logprobs") else None
            else:
                choice["text"] = text
                choice["logprobs"] = {"tokens": words, "token_logprobs": [-1.5] * len(words)} if (
                    body.get("logprobs")) else None
            choices.append(choice)
        return msgspec.json.encode({"choices": choices})


HEADERS = "Authorization: Bearer x\r\n"


def verified(server: FakeServer) -> tuple[ServerAsker, VerifyRun]:
    async def work() -> tuple[ServerAsker, VerifyRun]:
        can = await probed(server, "m", HEADERS)  # type: ignore[arg-type]
        asker = ServerAsker(server, "m", HEADERS, can,  # type: ignore[arg-type]
                            patience=0.1 if server.fault == "silent" else 60.0)
        cases = drawn_cases(2, 35, Vocabulary(seeds=can.seeds, penalties=False), 40, 12)
        own = VerifyRun(asker, cases, VerifyOptions(100 if server.fault else 400, 1, shrink=1))
        await own.run()
        return asker, own

    return asyncio.run(work())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("refuses", [(), ("cache_salt", "n", "seed"), ("logprobs",)])
def test_a_server_that_keeps_its_answers(path: str, refuses: tuple[str, ...]) -> None:
    asker, own = verified(FakeServer(path, refuses))
    assert asker.can.path == path and own.tally.comparisons >= 400
    assert not own.tally.observed and not own.tally.unanswered
    assert asker.can.logprobs is ("logprobs" not in refuses)
    assert asker.can.salts is asker.can.seeds is ("seed" not in refuses)
    assert ("choices" in asker.values) is ("n" not in refuses)
    assert asker.plain == (PLAIN if asker.can.salts else Condition(cache="warm"))


def test_whose_seeds_are_not_kept_is_asked_greedily() -> None:
    asker, own = verified(FakeServer(seeds=False))
    assert not asker.can.seeds and not own.tally.observed


@pytest.mark.parametrize(("fault", "axes"), [
    ("neighbours", {"neighbours"}), ("stream", {"reading"}), ("cold", {"cache"}),
    ("silent", {"neighbours"})])
def test_faults_of_servers_are_found(fault: str, axes: set[str]) -> None:
    asker, own = verified(FakeServer(fault=fault, refuses=("cache_salt",)))
    [found] = own.tally.shrunk
    assert set(differing(found.condition, asker.plain)) - {"order"} == axes
    if fault == "silent":
        assert found.condition.neighbours >= 15 and found.difference is not None
        assert found.difference.kind == "silence"


def test_a_server_that_says_nothing_at_all() -> None:
    server = FakeServer(fault="silent")
    server.under_way, server.url = 15, "http://here"  # type: ignore[attr-defined]
    with pytest.raises(EngineUnavailable, match=r"here: no answer within 0.1 s"):
        asyncio.run(probed(server, "m", HEADERS, 0.1))  # type: ignore[arg-type]


def test_bodies_have_what_is_taken_alone() -> None:
    case = VerifyCase(prompt="x", max_tokens=3, temperature=1.0, seed=5, top_k=4,
                      repetition_penalty=1.2)
    condition = Condition(choices=4)
    assert request_body("m", case, condition, "s", ServerAbilities(CHAT)) == {
        "model": "m", "max_tokens": 3, "temperature": 1.0, "top_p": 1.0,
        "messages": [{"role": "user", "content": "x"}]}
    all_of_it = ServerAbilities(COMPLETIONS, frozenset(("seed", "n", "top_k", "ignore_eos")),
                                True, True, True)
    body = request_body("m", case, condition, "s", all_of_it)
    assert body["seed"] == 5 and body["top_k"] == 4 and body["ignore_eos"] and "n" not in body
    greedy = msgspec.structs.replace(case, temperature=0.0)
    assert request_body("m", greedy, condition, "s", all_of_it)["n"] == 4


def test_both_forms_of_log_probabilities() -> None:
    assert parsed_logprobs({"content": [{"token": "a", "logprob": -1.0, "top_logprobs": [
        {"token": "b", "logprob": -0.5}]}]}) == [("a", -1.0, {"b": -0.5})]
    assert parsed_logprobs({"tokens": ["a", "b"], "token_logprobs": [-1.0, None],
                          "top_logprobs": None}) == [("a", -1.0, {})]
    assert parsed_logprobs({}) == []


@pytest.mark.parametrize(("argv", "says"), [
    (["--comparisons", "0"], "--comparisons: must be at least 1"),
    (["--logprobs", "maybe"], "--logprobs: must be exact, close or off"),
    (["--axes", "neighbours,moon"], "--axes: 'moon' is none of"),
    (["--minutes", "0"], "--minutes: must be positive"),
    (["--patience", "0"], "--patience: must be positive"),
    (["--shrink", "-1"], "--shrink: must not be negative"),
    (["--logprobs-within", "-1"], "--logprobs-within: must not be negative")])
def test_wrong_words_are_refused(argv: list[str], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        run("verify", argv)


@pytest.mark.slow
def test_our_own_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(exact="on", device="cpu") as served:
        assert main(["verify", "--base-url", served.url, "--comparisons", "150", "--cases", "20",
                     "--answer-tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert "keeps seeds: yes; keeps prompts apart by salts: yes" in shown.err
    assert "reading           cut" in shown.out
