"""The tokenizer's side of structured output: converts what a request asks for to a checked grammar.

A grammar is compiled for the first time in a process that can be killed: nearly all compile in
milliseconds; some short ones take minutes or gigabytes, in native code that cannot be interrupted.
One that compiles there takes no longer in the scheduler. The process is started by the first
request that needs it, not at start-up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config.retention import CHECKED_BYTES
from actorium.actors.errors import EngineUnavailable, InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.runtime.offload import Offload, OffloadJob
from actorium.actors.tokenizer.bounded_process import MEMORY, BoundedProcess, serve
from actorium.actors.tokenizer.defaults import ModelFacts

CPU_SECONDS = 1.0
ANSWER_BYTES = 1024
"""Bytes of a dict's entry and an error's objects, beside the texts."""
Post = Callable[[], None]


class Unchecked(EngineUnavailable):
    """A failure that is not the request's fault: reported once, and the next check tries again."""


class GrammarValidator:
    """Checks grammars against the model's vocabulary, in a process that may be killed."""

    def __init__(self, path: Path, facts: ModelFacts) -> None:
        """path: the model's directory."""
        self._path, self._facts = path, facts
        self._checker: GrammarProcess | None = None
        self._checking = threading.Lock()
        """Held while the process checks: for one thread at a time."""
        self._known: dict[bytes, str | InvalidRequest | Unchecked] = {}
        self._bytes = 0
        """The sum of `_weight` over all results."""
        self._lock = threading.Lock()
        """Guards the results and the jobs: threads add and remove them."""
        self._offload = Offload()
        self._jobs: dict[bytes, tuple[OffloadJob[Any], int]] = {}
        """Checks that are not done, and how many requests want each."""

    def knows(self, wanted: Structured) -> bool:
        """Returns whether `grammar` answers at once."""
        return (not self._facts.has_tokenizer or not self._facts.eos_ids
                or msgspec.msgpack.encode(wanted) in self._known)

    def ask(self, wanted: Structured, post: Post) -> None:
        """Starts a check on a thread; when its result is known, `waits` turns false and the thread
        calls `post`."""
        key = msgspec.msgpack.encode(wanted)
        with self._lock:
            job, askers = self._jobs.get(key, (None, 0))
            if job is None:
                job = self._offload.submit(partial(self._answer, key, wanted), post)
            self._jobs[key] = job, askers + 1

    def forget(self, wanted: Structured) -> None:
        """Drops one of the requests that `ask` was called for; a check that no other one wants, and
        that has not begun, is left out."""
        key = msgspec.msgpack.encode(wanted)
        with self._lock:
            job, askers = self._jobs.get(key, (None, 0))
            if job is not None and askers > 1:
                self._jobs[key] = job, askers - 1
            elif job is not None and job.cancel():
                del self._jobs[key]

    def _answer(self, key: bytes, wanted: Structured) -> None:
        if not self.knows(wanted):
            self._find_out(wanted)
        with self._lock:
            self._jobs.pop(key, None)

    def waits(self, wanted: Structured) -> bool:
        """True while a check is under way."""
        return msgspec.msgpack.encode(wanted) in self._jobs

    def grammar(self, wanted: Structured) -> str:
        """Returns the grammar for the scheduler, waiting for the check if it has no result yet.
        Raises `InvalidRequest` and `Unchecked`."""
        facts = self._facts
        if not facts.has_tokenizer:
            raise InvalidRequest("structured: the engine runs without a tokenizer "
                                 "(skip_tokenizer)", "structured")
        if not facts.eos_ids:
            raise InvalidRequest("structured: the model has no end-of-sequence token",
                                 "structured")
        key = msgspec.msgpack.encode(wanted)
        found = self._known.get(key) or self._find_out(wanted)
        if isinstance(found, Unchecked):
            with self._lock:
                self._drop(key)
            raise Unchecked(found.message)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.message, found.param)
        return found

    def _find_out(self, wanted: Structured) -> str | InvalidRequest | Unchecked:
        result: str | InvalidRequest | Unchecked
        try:
            with self._checking:
                if self._checker is None:
                    self._checker = GrammarProcess(self._path / "tokenizer.json",
                                                   self._facts.vocab_size, self._facts.eos_ids)
                result = self._checker.check(wanted)
        except InvalidRequest as error:
            result = error
        except Exception as error:
            result = Unchecked(f"structured: grammars cannot be checked: {error}")
        self._keep(msgspec.msgpack.encode(wanted), result)
        return result

    def _keep(self, key: bytes, found: str | InvalidRequest | Unchecked) -> None:
        """Caches a result, until later ones fill `CHECKED_BYTES`."""
        with self._lock:
            self._drop(key)
            self._known[key] = found
            self._bytes += _weight(key, found)
            while self._bytes > CHECKED_BYTES and len(self._known) > 1:
                self._drop(next(iter(self._known)))

    def _drop(self, key: bytes) -> None:
        found = self._known.pop(key, None)
        if found is not None:
            self._bytes -= _weight(key, found)

    def close(self) -> None:
        """Ends the process."""
        if self._checker is not None:
            self._checker.close()


def _weight(key: bytes, found: str | InvalidRequest | Unchecked) -> int:
    text = found if isinstance(found, str) else found.message
    return ANSWER_BYTES + len(key) + 4 * len(text)


# --- the parent's side of the process -------------------------------------------------------------

class GrammarVerdict(Struct, array_like=True):
    """The result of a check: exactly one of these fields is set."""

    grammar: str = ""
    error: str = ""


_decode_verdict = msgspec.msgpack.Decoder(GrammarVerdict).decode
"""Made at import, since threads check: see `client/connection.py`."""


class GrammarProcess:
    """The parent's side of the process. For one thread at a time."""

    def __init__(self, path: Path, size: int, eos: Sequence[int]) -> None:
        """path: the model's directory; size, eos: see `GrammarVocabulary`."""
        self.child = BoundedProcess(__name__, str(path), str(size), *(str(token) for token in eos))

    def check(self, wanted: Structured) -> str:
        """Compiles a grammar in llguidance's syntax. Waits. Raises `InvalidRequest` if it does not
        compile, or needs too much time or memory."""
        answer = self.child.ask(msgspec.msgpack.encode(wanted))
        if answer is None:
            raise InvalidRequest(f"structured: the grammar takes more than {CPU_SECONDS:g} s or "
                                 f"{MEMORY >> 30} GiB to compile", "structured")
        verdict: GrammarVerdict = _decode_verdict(answer)
        if verdict.error:
            raise InvalidRequest(verdict.error, "structured")
        return verdict.grammar

    def close(self) -> None:
        """Ends the process."""
        self.child.close()


# --- the process ----------------------------------------------------------------------------------

def main(path: str, size: str, *eos: str) -> None:
    """Answers frames until the parent closes the pipe."""
    from actorium.actors.structured.grammar import GrammarVocabulary, grammar_of

    vocabulary = GrammarVocabulary(Path(path), int(size), [int(token) for token in eos])

    def answer(frame: bytes) -> bytes:
        try:
            grammar = grammar_of(msgspec.msgpack.decode(frame, type=Structured))
            vocabulary.matcher(grammar)
            verdict = GrammarVerdict(grammar=grammar)
        except InvalidRequest as error:
            verdict = GrammarVerdict(error=error.message)
        except Exception as error:  # any failure means that it is not a grammar
            verdict = GrammarVerdict(error=f"structured: {type(error).__name__}: {error}"[:500])
        return msgspec.msgpack.encode(verdict)

    serve(answer, CPU_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
