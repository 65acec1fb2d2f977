"""Compiles grammars for the first time in a process that can be killed.

Nearly all compile in milliseconds; some short ones take minutes or gigabytes, in native code that
cannot be interrupted. A grammar that compiles here takes no longer in the scheduler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import GrammarVocabulary, grammar_of
from actorium.actors.tokenizer.bounded_process import MEMORY, BoundedProcess, serve

CPU_SECONDS = 1.0


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
