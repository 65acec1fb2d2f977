"""Requests that kill the tokenizer: they alone are refused, whichever way they kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_text import context, loaded, write_model

from actorium.actors.messages import Abort, Accepted, Detokenize, Generate, Rejected, Tokenize
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.inflight_journal import SIZE, InflightJournal
from actorium.actors.tokenizer.core import TokenizerCore
from actorium.actors.tokenizer.prompt_encoder import SHORT_CHARS, PromptEncoder
from actorium.actors.tokenizer.request_queue import PendingMessage

CLIENT, NOW = b"client", 50.0
LONG = "hello " * (SHORT_CHARS // 5)


class Panic(BaseException):
    """As Rust code raises it: no Exception."""


class Killed(KeyboardInterrupt):
    """The process ends here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=1 << 16)


class Lives:
    """Incarnations of a tokenizer; what `poison` texts do is up to the test."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch,
                 die: Callable[[], None]) -> None:
        self.model, self.buffer, self.deaths = model, bytearray(SIZE), 0
        usual = PromptEncoder._prompt

        def ids(prompts: PromptEncoder, message: Any, render: Any) -> Any:
            if "poison" in (message.text or ""):
                die()
            return usual(prompts, message, render)

        monkeypatch.setattr(PromptEncoder, "_prompt", ids)
        self.start()

    def start(self) -> None:
        self.core: TokenizerCore = loaded(TokenizerCore(context(self.model), InflightJournal(
            self.buffer, actor="tokenizer")))

    def ask(self, *messages: Any) -> dict[str, Any]:
        """The answers by rid; a death takes those of its wake, and is followed by a new life."""
        for message in messages:
            self.core.on_client(CLIENT, message, NOW)
        try:
            sends = self.core.on_wake(NOW)
        except Killed:
            self.deaths += 1
            self.start()
            return {}
        return {send.message.rid: send.message for send in sends if send.to == "client"}


def generate(rid: str, text: str = "hello") -> Generate:
    return Generate(rid, SamplingParams(max_tokens=4), text=text)


def raising(error: BaseException) -> Callable[[], None]:
    def die() -> None:
        raise error
    return die


@pytest.mark.parametrize("error", [ValueError("poison xyzzy"), RecursionError(),
                                   Panic("poison xyzzy")], ids=lambda e: type(e).__name__)
def test_an_exception_ends_its_request(model: Path, monkeypatch: pytest.MonkeyPatch,
                                       error: BaseException,
                                       caplog: pytest.LogCaptureFixture) -> None:
    lives = Lives(model, monkeypatch, raising(error))
    told = lives.ask(generate("a"), generate("p", "poison"), generate("b"),
                     Tokenize("q", text="poison"))
    assert isinstance(told["a"], Accepted) and isinstance(told["b"], Accepted)
    for rid in ("p", "q"):
        assert told[rid].code == "quarantined" and type(error).__name__ in told[rid].message
        assert "xyzzy" not in told[rid].message
    assert "xyzzy" not in caplog.text and "request p" in caplog.text
    assert lives.core.journal.gauges()["journal_quarantined"] == 2.0


@pytest.mark.parametrize("text", ["poison", LONG + "poison"], ids=["at once", "on a thread"])
def test_want_of_memory_ends_the_process_and_is_blamed_on_nobody(
        model: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    lacks = [True, False, True, True, True]

    def work() -> None:
        if lacks.pop(0):
            raise MemoryError

    lives = Lives(model, monkeypatch, work)

    def answered(rid: str) -> Any:
        lives.core.on_start(lambda: None)
        lives.core.on_client(CLIENT, generate(rid, text), NOW)
        while not lives.core.done:
            for send in lives.core.on_wake(NOW):
                if send.to == "client":
                    return send.message
        return None

    with pytest.raises(MemoryError):
        answered("a")
    lives.start()
    assert isinstance(answered("a"), Accepted), "it is sent again, and acquitted"
    assert lives.core.journal.quiet and lives.core.journal.failures == 0
    for _ in range(2):
        with pytest.raises(MemoryError):
            answered("b")
        lives.start()
    refused = answered("b")
    assert refused.code == "quarantined" and "died each time" in refused.message


def test_what_the_machine_lacks_is_no_quarantine(model: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(model, monkeypatch, raising(OSError(24, "Too many open files")))
    told = lives.ask(generate("a"), generate("p", "poison"))
    assert isinstance(told["a"], Accepted)
    assert told["p"].code == "unavailable" and "Too many open files" in told["p"].message
    assert lives.core.journal.gauges() == {}


def test_a_death_is_found_by_the_second_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(model, monkeypatch, raising(Killed()))
    everybody = [generate("a"), generate("p", "poison"), generate("b")]
    assert lives.ask(*everybody) == {} == lives.ask(*everybody)
    assert lives.deaths == 2
    for _ in range(3):  # as often as it is sent again
        told = lives.ask(*everybody)
        assert isinstance(told["a"], Accepted) and isinstance(told["b"], Accepted)
        assert told["p"].code == "quarantined" and "died" in told["p"].message
    other = Generate("p", SamplingParams(), text="hello")
    lives.core.on_client(b"another client", other, NOW)
    sends = lives.core.on_wake(NOW)
    assert any(isinstance(send.message, Accepted) for send in sends), "names are a client's own"


def test_a_bystander_is_acquitted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = [Killed(), None, Killed(), None]

    def die() -> None:
        if (error := deaths.pop(0)) is not None:
            raise error

    lives = Lives(model, monkeypatch, die)
    for rid in ("p", "q"):  # killed by chance: each is sent again
        assert lives.ask(generate(rid, "poison")) == {}
        assert isinstance(lives.ask(generate(rid, "poison"))[rid], Accepted)
    assert lives.core.journal.quiet


def test_an_abort_is_never_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(model, monkeypatch, raising(Killed()))
    for _ in range(2):
        lives.ask(generate("p", "poison"))
    lives.core.on_client(CLIENT, Abort("p"), NOW)
    assert [send.to for send in lives.core.on_wake(NOW)] == ["scheduler"]


# --- on a thread ---------------------------------------------------------------------------------

def settle(lives: Lives, *rids: str) -> dict[str, Any]:
    """Wake until these are answered."""
    told: dict[str, Any] = {}
    until = time.monotonic() + 20.0
    while not told.keys() >= set(rids):
        assert time.monotonic() < until, f"no answer: {told}"
        told |= lives.ask()
        time.sleep(0.002)
    return told


def test_an_exception_on_a_thread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(model, monkeypatch, raising(Panic()))
    lives.core.on_start(lambda: None)
    lives.ask(Tokenize("p", text=LONG + "poison"), Tokenize("a", text=LONG))
    told = settle(lives, "p", "a")
    assert told["p"].code == "quarantined" and "Panic" in told["p"].message
    assert not isinstance(told["a"], Rejected)


def test_a_death_on_threads_is_narrowed_down(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads are at work at the death: both are suspects, and each is worked on by itself."""
    at_work: list[bytes] = []
    usual = InflightJournal.put

    def put(journal: InflightJournal, name: bytes, place: int = 0) -> None:
        usual(journal, name, place)
        if place:
            at_work.append(name)

    lives = Lives(model, monkeypatch, lambda: None)
    poison, innocent = generate("p", LONG + "poison"), generate("a", LONG)
    names = [PendingMessage(CLIENT, message, NOW).name for message in (poison, innocent)]

    def both_at_work_at_the_death() -> None:
        before = InflightJournal(lives.buffer)
        before.put(names[0], 1)
        before.put(names[1], 2)
        lives.start()
        lives.core.on_start(lambda: None)

    both_at_work_at_the_death()
    monkeypatch.setattr(InflightJournal, "put", put)
    lives.ask(innocent, poison)
    assert not isinstance(settle(lives, "a", "p")["a"], Rejected)
    assert sorted(at_work) == sorted(names) and lives.core.journal.quiet
    both_at_work_at_the_death()
    InflightJournal(lives.buffer).put(names[0], 1)  # by itself: and dies of it
    lives.start()
    told = lives.ask(poison, generate("b"))
    assert told["p"].code == "quarantined" and isinstance(told["b"], Accepted)


def test_a_short_suspect_waits_until_the_threads_rest(model: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(model, monkeypatch, raising(Killed()))
    lives.ask(generate("p", "poison"))
    lives.core.on_start(lambda: None)
    monkeypatch.setattr(lives.core._offload, "_waiting", 1)
    assert lives.ask(generate("p", "poison"), Detokenize("d", b"\1\0\0\0")).keys() == {"d"}
    assert lives.deaths == 1 and not lives.core.done
    monkeypatch.setattr(lives.core._offload, "_waiting", 0)
    assert lives.ask() == {} and lives.deaths == 2
    assert lives.ask(generate("p", "poison"))["p"].code == "quarantined"
