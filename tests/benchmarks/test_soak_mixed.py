"""The judgement of a soak: what it fails for, and what it says it cannot judge."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_benchmarks import benchmark

soak = benchmark("scenarios.soak_mixed")
FLAT = {"worker-0": {"mb_a_minute": 0.05, "descriptors_a_minute": 0.0}}


def crowd(*ended: str, repeated: int = 0) -> Any:
    made = soak.Crowd("http://127.0.0.1:1", 1, 1)
    made.ended.update(ended)
    made.repeated = repeated
    return made


def chats(growth: float) -> list[tuple[float, float]]:
    """A thousand over a hundred seconds; growth: of the time that one takes, as a share."""
    return [(at / 10, 0.1 * (1 + growth * at / 1000) + 0.001 * (at % 7)) for at in range(1000)]


@pytest.mark.parametrize(("growth", "fails"), [(0.0, False), (0.15, False), (0.5, True),
                                               (-0.5, False)])
def test_a_drift_of_chats(growth: float, fails: bool) -> None:
    found = soak.drift([(-1.0, 9.0), *chats(growth)], 0.0)
    assert found["chats"] == 1000
    assert found["drift"] == pytest.approx(growth / (1 + growth / 2), abs=0.05)
    wrong = soak.faults(FLAT, crowd("chat 200", "refused 400", "chat left"), found, soak.WARM)
    assert bool(wrong) == fails


def test_too_few_chats_are_no_proof() -> None:
    found = soak.drift(chats(0.0)[:5], 0.0)
    assert soak.faults(FLAT, crowd(), found, soak.WARM) == [
        "5 chats are too few to see a drift"]


def test_what_it_fails_for() -> None:
    rows = {"tokenizer": {"mb_a_minute": 0.2, "descriptors_a_minute": 0.1}}
    steady = soak.drift(chats(0.0), 0.0)
    ended = crowd("chat broken", "adapter 503", "chat 200", repeated=2)
    assert soak.faults(rows, ended, steady, soak.WARM) == [
        "1 adapter 503", "1 chat broken", "2 ids of answers came twice",
        "tokenizer opens 0.10 descriptors a minute", "tokenizer grows by 0.20 MB a minute"]
    assert soak.faults(rows, crowd(), steady, soak.WARM - 1) == [
        "tokenizer opens 0.10 descriptors a minute"], "memory is not judged before it can be flat"
