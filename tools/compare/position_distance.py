"""How far two distributions over the next token are apart, of which the likeliest tokens alone are
known. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TINY = 1e-9
"""Below it a probability is what rounding has left."""
Likeliest = Mapping[str, float]
"""Token -> log-probability in nats; no token that is not there is likelier than one that is."""


class Distance(NamedTuple):
    """Of two distributions at one position."""

    kl: float
    """At least so many nats, of the first to the second."""
    largest: float
    """Largest difference of a token's log-probabilities, in nats; of a token that one side alone
    names at least."""
    same_first: bool
    """The likeliest token is the same."""
    overlap: float
    """Share of the likeliest tokens that both name."""


def distance(one: Likeliest, other: Likeliest) -> Distance:
    """Both not empty. Where one names more tokens than the other, the likeliest of as many."""
    count = min(len(one), len(other))
    a, b = _first(one, count), _first(other, count)
    least_a, least_b = min(a.values()), min(b.values())
    apart = max(
        abs(a[token] - b[token]) if token in a and token in b else
        max(0.0, a[token] - least_b) if token in a else max(0.0, b[token] - least_a)
        for token in {*a, *b})
    same = max(a, key=a.__getitem__) == max(b, key=b.__getitem__)
    return Distance(_divergence(a, b), apart, same, len(a.keys() & b.keys()) / count)


def _first(told: Likeliest, count: int) -> dict[str, float]:
    return dict(sorted(told.items(), key=lambda item: -item[1])[:count])


def _divergence(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """A lower bound of the Kullback-Leibler divergence: that of the distributions with tokens put
    together (which never adds to it) - those that both name alone, those that `a` alone names, and
    all others. What `b` gives to the second kind is not known but to be no more than its least
    token's each; of what may be, that counts which makes the divergence least."""
    common = a.keys() & b.keys()
    total = sum(math.exp(a[token]) * (a[token] - b[token]) for token in common)
    rest_a = max(0.0, 1.0 - math.fsum(math.exp(a[token]) for token in common))
    rest_b = max(0.0, 1.0 - math.fsum(math.exp(b[token]) for token in common))
    alone = [token for token in a if token not in b]
    if rest_a <= TINY:
        return max(0.0, total)
    rest_b = max(rest_b, TINY)
    mine = min(rest_a, math.fsum(math.exp(a[token]) for token in alone))
    most = min(rest_b, len(alone) * math.exp(min(b.values())))
    share = min(rest_b * mine / rest_a, most)
    total += _term(mine, share) + _term(rest_a - mine, rest_b - share)
    return max(0.0, total)


def _term(p: float, q: float) -> float:
    return 0.0 if p <= TINY else p * math.log(p / max(q, TINY))


def first_divergence(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first position at which they differ; None where they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))
