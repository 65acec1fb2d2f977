"""Two answers to one request, held against each other. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from actorium.tools.compare.comparison import first_divergence

EXACT, CLOSE, OFF = "exact", "close", "off"
"""How log-probabilities are compared: equal to the bit (as they are printed) | within so many nats
| not at all."""
TOKEN, END, TEXT, LOGPROB, SILENCE = "token", "end", "text", "logprob", "silence"
"""What differs first: a token; a token that only one side has, or why it ended; the text, where all
tokens and log-probabilities are the same, and of servers that return no tokens; the log-probability
of a token, though all tokens are the same; that one side has not answered at all."""


class NoAnswer(Struct, frozen=True):
    """Stands for the answer of a request that did not end."""

    seconds: float
    """Seconds waited for it."""

    def __str__(self) -> str:
        return f"no answer within {self.seconds:g} s"


class CaseAnswer(Struct, frozen=True, kw_only=True):
    tokens: tuple[int | str, ...] = ()
    """Ids, or tokens as the server writes them; empty if it returns none."""
    text: str = ""
    finish: str = ""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each token, in nats."""
    tops: tuple[dict[int | str, float], ...] = ()
    """Log-probabilities of the likeliest tokens at each position."""
    died: bool = False
    """The process that computed it died meanwhile."""


def spliced(first: Sequence[CaseAnswer], whole: Sequence[CaseAnswer]) -> tuple[CaseAnswer, ...]:
    """What a caller has who lost a stream after its first part, and read on in the whole."""
    return tuple(msgspec.structs.replace(
        b, tokens=a.tokens + b.tokens[len(a.tokens):], text=a.text + b.text[len(a.text):],
        logprobs=None if b.logprobs is None else (a.logprobs or ()) + b.logprobs[len(a.tokens):],
        tops=a.tops + b.tops[len(a.tokens):]) for a, b in zip(first, whole, strict=True))


class AnswerDifference(Struct, frozen=True, kw_only=True):
    """The first one."""

    kind: str
    at: int
    """Token at which it is; character of a text."""
    choice: int = 0
    plain: str = ""
    """What stands there under the plain condition, and under the other."""
    other: str = ""
    plain_logprobs: dict[str, float] = {}
    """Log-probabilities of both tokens and of the likeliest, as each side reported them here."""
    other_logprobs: dict[str, float] = {}
    nats: float = 0.0
    """Largest difference of the log-probabilities of a token up to there."""


class Strictness(Struct, frozen=True):
    logprobs: str = EXACT
    within: float = 0.0
    """Nats that two may be apart, if they are to be close."""


def difference(plain: Sequence[CaseAnswer], other: Sequence[CaseAnswer], every_choice: bool,
               strictness: Strictness) -> AnswerDifference | None:
    """Compares the first of `plain` with the first of `other`, or each. Neither may be empty."""
    for number, answer in enumerate(other if every_choice else other[:1]):
        found = _of_choice(plain[0], answer, number, strictness)
        if found is not None:
            return found
    return None


def silence(other: NoAnswer, plain: str = "an answer") -> AnswerDifference:
    return AnswerDifference(kind=SILENCE, at=0, plain=plain, other=str(other))


def _of_choice(a: CaseAnswer, b: CaseAnswer, choice: int, strictness: Strictness
               ) -> AnswerDifference | None:
    if not (a.tokens and b.tokens):
        return _of_text(a, b, choice)
    at = first_divergence(a.tokens, b.tokens)
    uneven = _uneven(a, b, len(a.tokens) if at is None else at, strictness)
    if at is not None or a.finish != b.finish:
        place = len(a.tokens) if at is None else at
        both = place < min(len(a.tokens), len(b.tokens))
        return _difference(TOKEN if both else END, a, b, place, choice, uneven[1])
    if uneven[0] is not None:
        return _difference(LOGPROB, a, b, uneven[0], choice, uneven[1])
    return _of_text(a, b, choice)


def _of_text(a: CaseAnswer, b: CaseAnswer, choice: int) -> AnswerDifference | None:
    at = first_divergence(a.text, b.text)
    if at is not None:
        return AnswerDifference(kind=TEXT, at=at, choice=choice, plain=a.text[at:at + 40],
                                other=b.text[at:at + 40])
    return None if a.finish == b.finish else _difference(END, a, b, len(a.tokens), choice, 0.0)


def _uneven(a: CaseAnswer, b: CaseAnswer, common: int, strictness: Strictness
            ) -> tuple[int | None, float]:
    """(first token whose log-probabilities differ, largest difference) of the common ones."""
    if a.logprobs is None or b.logprobs is None or strictness.logprobs == OFF:
        return None, 0.0
    first, largest = None, 0.0
    for i in range(min(common, len(a.logprobs), len(b.logprobs))):
        apart = _apart(a, b, i)
        if first is None and (apart > strictness.within if strictness.logprobs == CLOSE
                              else apart != 0):
            first = i
        largest = max(largest, apart)
    return first, largest


def _apart(a: CaseAnswer, b: CaseAnswer, i: int) -> float:
    """Nats, of the token itself and of the likeliest that both name."""
    assert a.logprobs is not None and b.logprobs is not None
    pairs = [(a.logprobs[i], b.logprobs[i])]
    if i < min(len(a.tops), len(b.tops)):
        pairs += [(value, b.tops[i][token]) for token, value in a.tops[i].items()
                  if token in b.tops[i]]
    return max(0.0 if x == y else abs(x - y) if math.isfinite(x - y) else math.inf
               for x, y in pairs)


def _difference(kind: str, a: CaseAnswer, b: CaseAnswer, at: int, choice: int, nats: float
          ) -> AnswerDifference:
    words = [repr(one.tokens[at]) if at < len(one.tokens) else f"the end ({one.finish})"
             for one in (a, b)]
    return AnswerDifference(kind=kind, at=at, choice=choice, plain=words[0], other=words[1],
                            plain_logprobs=_logprobs(a, at), other_logprobs=_logprobs(b, at),
                            nats=nats)


def _logprobs(answer: CaseAnswer, at: int) -> dict[str, float]:
    found = {}
    if at < len(answer.tops):
        found = {repr(token): value for token, value in answer.tops[at].items()}
    if answer.logprobs is not None and at < min(len(answer.logprobs), len(answer.tokens)):
        found[repr(answer.tokens[at])] = answer.logprobs[at]
    return found
