"""Grammars are compiled before their requests reach the scheduler's core; nobody waits for them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers_masking import EOS, MODEL, SIZE, vocabulary
from helpers_scheduler import CLIENT, column, config

from actorium.actors.core import Context
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import AbortRequest, Submit, TextParams
from actorium.actors.params import ResolvedParams
from actorium.actors.runtime.offload import THREADS
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.scheduler_actor import SchedulerActor
from actorium.actors.structured.grammar import GrammarVocabulary, json_grammar, regex_grammar

CONTEXT = Context(config(queued=5), Path("/nowhere"), "scheduler", 3, 0)


class Slow(GrammarVocabulary):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(MODEL / "tokenizer.json", SIZE, [EOS])
        self.may, self.threads = threading.Event(), list[str]()

    def compile(self, grammar: str) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self.may.wait(60)
        return super().compile(grammar)


class Heard(SchedulerCore):
    """A core that keeps what it gets, and does nothing of it."""

    def __init__(self, words: GrammarVocabulary) -> None:
        super().__init__(CONTEXT, load=lambda: words)
        self.heard: list[Any] = []

    def on_message(self, message: Any, now: float) -> None:
        self.heard.append(message)

    @property
    def done(self) -> bool:
        return True


def submit(rid: str, grammar: str = "") -> Submit:
    return Submit(rid, CLIENT, column([1, 2]), 1, ResolvedParams(max_tokens=4,
                                                                 masked=bool(grammar)),
                  TextParams(), seed=1, grammar=grammar)


class Stage:
    """A wrapped core, and the threads that wake it."""

    def __init__(self) -> None:
        self.words = Slow()
        self.core = Heard(self.words)
        self.woken = threading.Semaphore(0)
        self.wrapped = SchedulerActor(self.core, CONTEXT)
        self.wrapped.on_start(lambda: self.woken.release())

    def tell(self, *messages: Any) -> list[str]:
        """What has reached the core."""
        for message in messages:
            self.wrapped.on_message(message, 0.0)
        self.wrapped.on_wake(0.0)
        return [getattr(one, "rid", "") for one in self.core.heard]

    def later(self) -> list[str]:
        assert self.woken.acquire(timeout=60)
        return self.tell()


def test_others_do_not_wait() -> None:
    stage, grammar = Stage(), regex_grammar("[ab]{3}")
    assert stage.tell(submit("a", grammar), submit("b"), submit("c", grammar)) == ["b"]
    assert not stage.wrapped.done
    assert stage.tell(submit("d")) == ["b", "d"]
    stage.words.may.set()
    assert stage.later() == ["b", "d", "a", "c"] and stage.wrapped.done
    assert [name.split("-")[0] for name in stage.words.threads] == ["offload"]
    assert stage.tell(submit("e", grammar))[-1] == "e", "it is known by now"
    assert stage.core.masks.knows(grammar)


def test_a_cancelled_request_never_reaches_the_core() -> None:
    stage, grammar = Stage(), regex_grammar("[ab]{4}")
    cancels = [AbortRequest("a", b"other"), AbortRequest("a", CLIENT)]
    assert stage.tell(submit("a", grammar), *cancels) == ["a", "a"]
    stage.words.may.set()
    stage.tell()
    assert [type(one) for one in stage.core.heard] == [AbortRequest, AbortRequest]
    assert stage.wrapped.done


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    stage, grammars = Stage(), [regex_grammar(f"[ab]{{{number}}}") for number in range(4)]
    for rid, number in (("a", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 3)):
        stage.tell(submit(rid, grammars[number]))
        while number < THREADS and len(stage.words.threads) <= number:
            threading.Event().wait(0.001)
    stage.tell(*(AbortRequest(rid, CLIENT) for rid in "bcd"))
    stage.words.may.set()
    while not stage.wrapped.done:
        stage.later()
    assert {one.rid for one in stage.core.heard if isinstance(one, Submit)} == {"a", "e"}
    known = [stage.core.masks.knows(grammar) for grammar in grammars]
    assert known[0] and known[3] and not known[2] and len(stage.words.threads) == 3


def test_few_wait_for_their_grammars() -> None:
    stage, grammar = Stage(), regex_grammar("[ab]{5}")
    told = stage.tell(*(submit(str(number), grammar) for number in range(9)))
    assert told == ["5", "6", "7", "8"], "for these the core compiles it"
    stage.words.may.set()
    assert stage.later() == ["5", "6", "7", "8", "0", "1", "2", "3", "4"]


def test_the_core_refuses_grammars_that_do_not_compile() -> None:
    stage = Stage()
    stage.words.may.set()
    bad = regex_grammar("(")
    assert stage.tell(submit("a", bad)) == [] and stage.later() == ["a"]
    assert len(stage.words.threads) == 1
    with pytest.raises(InvalidRequest, match="does not compile"):
        stage.words.matcher(bad)
    assert len(stage.words.threads) == 1, "and not once more"


def test_without_a_vocabulary_the_core_reports_it() -> None:
    stage = Stage()

    def nothing() -> Any:
        raise InvalidRequest("structured: none", "structured")

    stage.core.masks._load = nothing
    assert stage.tell(submit("a", "x")) == [] and stage.later() == ["a"]


def test_a_whole_scheduler_uses_the_compiled_grammar() -> None:
    core = SchedulerCore(CONTEXT, load=lambda: vocabulary())
    assert core.masks is not None
    wrapped = SchedulerActor(core, CONTEXT)
    assert wrapped.next_sid == 1
    woken = threading.Event()
    wrapped.on_start(woken.set)
    grammar = json_grammar(json.dumps({"enum": ["compiled", "elsewhere"]}))
    wrapped.on_message(submit("a", grammar), 1.0)
    wrapped.on_wake(1.0)
    assert not core.state.requests and woken.wait(60)
    wrapped.on_wake(1.0)
    assert [rid for _, rid in core.state.requests] == ["a"] and bool(core.masks)
