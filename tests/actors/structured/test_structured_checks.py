"""Grammars are checked in a process that is killed where one takes too long; nobody else waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from helpers_masking import EOS, MODEL, SIZE
from helpers_text import Asked

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import Abort, AbortRequest, Accepted, Generate, Rejected, Submit
from actorium.actors.models import model_dir as models
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.structured.grammar_validator import GrammarProcess
from actorium.actors.tokenizer import bounded_process as child

SLOW = Structured(grammar="root ::= r0\n" + "\n".join(
    f'r{i} ::= "a" r{i + 1}*' for i in range(2500)) + '\nr2500 ::= "b"')
"""Takes a quarter of a minute."""


@pytest.fixture
def checker() -> Iterator[GrammarProcess]:
    made = GrammarProcess(MODEL / "tokenizer.json", SIZE, [EOS])
    yield made
    made.close()


def test_a_grammar_that_takes_too_long_is_refused(checker: GrammarProcess) -> None:
    assert "[ab]" in checker.check(Structured(regex="[ab]"))
    first = checker.child.process
    with pytest.raises(InvalidRequest, match="takes more than 1 s or 4 GiB to compile"):
        checker.check(SLOW)
    assert first is not None and first.returncode is not None, "it is dead"
    assert "[cd]" in checker.check(Structured(regex="[cd]")), "there is another one"
    with pytest.raises(InvalidRequest, match="does not compile"):
        checker.check(Structured(regex="("))
    assert checker.check(Structured(choice=["\U0001f600", 'a"b']))


def test_a_process_that_does_not_answer_is_killed(checker: GrammarProcess,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    checker.check(Structured(regex="a"))
    assert checker.child.process is not None
    pid = checker.child.process.pid
    monkeypatch.setattr(child, "PATIENCE", 0.2)
    os.kill(pid, 19)  # SIGSTOP
    with pytest.raises(InvalidRequest, match="takes more than"):
        checker.check(Structured(regex="b"))
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_has_died_is_replaced(checker: GrammarProcess) -> None:
    checker.check(Structured(regex="a"))
    assert checker.child.process is not None
    checker.child.process.kill()
    checker.child.process.wait()
    assert "b{3}" in checker.check(Structured(regex="b{3}"))


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked(models.resolve(""))
    yield made
    assert made.core._model is not None
    made.core._model.grammars.close()


def generate(rid: str, wanted: Structured | None) -> Generate:
    return Generate(rid, SamplingParams(structured=wanted, max_tokens=4), text="a")


def test_others_are_answered_meanwhile(asked: Asked) -> None:
    assert asked.tell(generate("slow", SLOW)) == []
    assert asked.tell(generate("good", Structured(regex="a"))) == []
    submit, accepted = asked.tell(generate("plain", None))
    assert isinstance(submit, Submit) and isinstance(accepted, Accepted)
    assert not asked.core.done, "two wait"
    (refused,) = asked.later()
    assert isinstance(refused, Rejected) and "takes more than" in refused.message
    assert (refused.rid, refused.param, refused.code) == ("slow", "structured", "invalid_request")
    assert not asked.core.done
    submit, accepted = asked.later()
    assert isinstance(submit, Submit) and asked.core.done


def test_checked_grammars_are_answered_at_once(asked: Asked) -> None:
    wanted = Structured(regex="[xy]")
    assert asked.tell(generate("one", wanted)) == [] and asked.tell(generate("two", wanted)) == []
    first = asked.later()
    assert [m.rid for m in first if isinstance(m, Submit)] == ["one", "two"]
    submit, accepted = asked.tell(generate("three", wanted))
    assert isinstance(submit, Submit) and "[xy]" in submit.grammar
    (refused,) = asked.tell(generate("four", Structured(regex="a" * 70_000)))
    assert isinstance(refused, Rejected) and "exceed the limit" in refused.message


def test_a_request_that_is_aborted_while_it_waits_is_never_sent(asked: Asked) -> None:
    assert asked.tell(generate("gone", Structured(regex="[pq]"))) == []
    ended, cancel = asked.tell(Abort("gone"))
    assert isinstance(cancel, AbortRequest)
    assert isinstance(ended, Rejected) and ended.code == "aborted"
    assert asked.core.done and asked.wake() == []


def test_a_check_that_nobody_waits_for_any_more_is_left_out(
        asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    first, checked = threading.Event(), list[str | None]()

    def check(self: GrammarProcess, wanted: Structured) -> str:
        assert first.wait(60)
        checked.append(wanted.regex)
        return f"start: /{wanted.regex}/"

    monkeypatch.setattr(GrammarProcess, "check", check)
    for rid, regex in (("a", "u"), ("b", "v"), ("c", "w"), ("d", "w"), ("e", "x")):
        assert asked.tell(generate(rid, Structured(regex=regex))) == []
    for rid in ("b", "c"):  # nobody else wants what the first asked for
        asked.tell(Abort(rid))
    first.set()
    said: list[Any] = []
    while len(said) < 6:
        said += asked.later()
    assert {m.rid for m in said if isinstance(m, Submit)} == {"a", "d", "e"}
    assert checked == ["u", "w", "x"] and asked.core.done


def test_more_grammars_at_once_than_are_kept(asked: Asked,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorium.actors.structured.grammar_validator.CHECKED_BYTES", 3000)
    for number in range(8):
        assert asked.tell(generate(str(number), Structured(regex=f"x{{{number + 1}}}"))) == []
    said: list[Any] = []
    while len(said) < 16:
        said += asked.later()
    assert {m.rid for m in said if isinstance(m, Submit)} == {str(n) for n in range(8)}


def test_a_checker_that_cannot_start_is_reported_once(asked: Asked,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GrammarProcess, wanted: Structured) -> str:
        raise OSError("no more processes")

    wanted = Structured(regex="k")
    with monkeypatch.context() as patch:
        patch.setattr(GrammarProcess, "check", fails)
        assert asked.tell(generate("one", wanted)) == []
        (refused,) = asked.later()
        assert refused.message == "structured: grammars cannot be checked: no more processes"
        assert refused.code == "unavailable", "it is not the request's fault"
    assert asked.tell(generate("two", wanted)) == []
    assert [type(message) for message in asked.later()] == [Submit, Accepted]


@pytest.mark.parametrize("times", [1, 2])
def test_a_check_killed_from_outside_does_not_refuse_the_grammar(
        checker: GrammarProcess, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, say, that is short of memory: but not again and again."""
    usual, killed = child._write, []

    def write(pipe: IO[bytes], frame: bytes) -> None:
        assert checker.child.process is not None
        if len(killed) < times:
            killed.append(checker.child.process.pid)
            checker.child.process.kill()
            checker.child.process.wait()
        usual(pipe, frame)

    checker.check(Structured(regex="a"))
    monkeypatch.setattr(child, "_write", write)
    if times == 1:
        assert "[xy]" in checker.check(Structured(regex="[xy]"))
    else:
        with pytest.raises(InvalidRequest, match="takes more than"):
            checker.check(Structured(regex="[xy]"))
    assert len(set(killed)) == times
