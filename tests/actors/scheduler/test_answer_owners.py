"""Who shares answers that drafts are made of: those who share prefixes."""

from __future__ import annotations

from itertools import product

import pytest
from helpers_scheduler import Ring, config

from actorium.actors.config.tree import Config, SpeculationConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.messages import NamedAdapter, Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.scheduler.answer_owners import MOST_NAMES, AnswerOwners
from actorium.actors.scheduler.request_state import salt_of


def test_each_owner_has_a_number() -> None:
    """Of tenant, salt, adapter and weights; never the same one again after a flush."""
    owners = AnswerOwners(3)
    adapters = [None, NamedAdapter("x", "/x", b"1" * 32), NamedAdapter("x", "/x", b"2" * 32)]
    names = [weights + salt_of(Submit("r", b"c", b"", 1, ResolvedParams(max_tokens=1), TextParams(),
                                      1, tenant=tenant, cache_salt=salt, adapter=adapter))
             for weights, tenant, salt, adapter in product(
                 ("", "\2w"), ("", "a", "ab"), ("", "a", "b"), adapters)]
    numbers = [owners.number(name) for name in names]
    assert len({*numbers}) == len(names) == 54 and min(numbers) > 3 << 32
    assert numbers == [owners.number(name) for name in names]
    owners.flush()
    assert {*numbers}.isdisjoint(owners.number(name) for name in names)


def test_names_that_were_not_seen_for_longest_are_dropped() -> None:
    owners = AnswerOwners(1)
    numbers = [owners.number(str(i)) for i in range(MOST_NAMES)]
    assert owners.number("0") == numbers[0]
    owners.number("one more")  # in the place of 1
    assert owners.number("0") == numbers[0] and owners.number("2") == numbers[2]
    assert owners.number("1") not in numbers


def test_nothing_is_told_where_it_is_off() -> None:
    ring = Ring(config(speculative="suffix:4,fixed"))
    ring.submit(4, max_tokens=2)
    ring.run()
    assert [admit.answers for plan in ring.sent for admit in plan.admit] == [0]


@pytest.mark.parametrize(("fields", "why"), [
    ({"speculative": "suffix", "suffix_global_bytes": 4096}, "between 1 MiB"),
    ({"speculative": "ngram", "suffix_global_bytes": 1 << 26}, "needs the method suffix"),
    ({"suffix_global_bytes": 1 << 26}, "needs the method suffix")])
def test_what_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(BadConfig, match=f"suffix_global_bytes: .*{why}"):
        validate(Config(speculation=SpeculationConfig(**fields)))  # type: ignore[arg-type]
