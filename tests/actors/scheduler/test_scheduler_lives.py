"""The simulation: schedules of random deaths in virtual time, every token checked."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from helpers_examples import examples
from helpers_lives import Lives

SCHEDULES = examples(20, 5000)
MOVES = 250


def live(seed: int, pools: float = 0.0) -> Lives:
    lives = Lives(seed, pools)
    lives.play(MOVES)
    lives.finish()
    assert not (bad := list(lives.violations())), f"seed {seed}: {bad}"
    return lives


def test_schedules() -> None:
    deaths: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    tokens, start = 0, time.monotonic()
    for seed in range(SCHEDULES):
        try:
            lives = live(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        deaths.update(lives.deaths)
        ends.update(told.reason or "" for told in lives.received.values())
        ends.update(told.error or "" for told in lives.received.values())
        tokens += sum(len(told.tokens) for told in lives.received.values())
    print(f"{SCHEDULES} schedules, {tokens} tokens, deaths {dict(deaths)}, ends {dict(ends)}, "
          f"{time.monotonic() - start:.1f} s")
    assert min(deaths.values()) > SCHEDULES, "every actor dies more than once a schedule"
    assert min(ends[r] for r in ("length", "stop", "abort", "deadline", "quarantined")) > 0


def test_vectors_are_computed_again_whoever_dies() -> None:
    """The ledger does not have them: who waits for one that a dead scheduler had gets it anew."""
    vectors, lost = 0, 0
    for seed in range(examples(10, 2000)):
        lives = live(seed, pools=0.6)
        written = b"".join(payload for _, payload in lives.ledger)
        told = [each.pooled for each in lives.received.values() if each.pooled is not None]
        assert not any(pooled.data in written for pooled in told)
        vectors += len(told)
        lost += sum(lives.submits[rid].pooling is not None for rid in lives.reader.unknown)
    assert vectors > 30 and lost > 5


def test_a_seed_replays() -> None:
    one, two = live(7), live(7)
    assert one.received == two.received and one.deaths == two.deaths


def test_a_request_refused_when_it_is_sent_again_ends_with_all_its_choices() -> None:
    """Sent again with its deadline past, when it is forgotten and its client had seen two choices
    begin, or one of them end."""
    told = live(105).received
    assert told["r0", 0].error == "deadline" and told["r0", 1].reason is None
    assert live(1162).received["r2", 0].reason == "deadline"


@pytest.mark.parametrize("tooth", ["uncommitted", "forgetful", "unfenced"])
def test_it_has_teeth(tooth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the rules, the simulation fails."""
    from actorium.actors.scheduler.recovery import recovery_log as recovery
    from actorium.actors.scheduler.recovery.recovery_log import RecoveryLog
    from actorium.tools.null.null_worker import NullWorker

    if tooth == "uncommitted":  # tokens are told without being written down
        monkeypatch.setattr(RecoveryLog, "reported", lambda self, batch: None)
    elif tooth == "forgetful":  # what was emitted is not restored
        monkeypatch.setattr(recovery, "_restore", lambda sequence, said: None)
    else:  # a worker takes whatever plans come
        monkeypatch.setattr(NullWorker, "_reset", lambda self, reset: (
            setattr(self, "_epoch", reset.epoch), setattr(self, "_taken", True)))
    with pytest.raises(Exception):  # noqa: B017  (whatever breaks first)
        for seed in range(40):
            live(seed)
