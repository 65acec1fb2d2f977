"""What an actor worked on when it died: who is suspected, convicted, acquitted; and restarts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.runtime import inflight_journal as journal
from actorium.actors.runtime.inflight_journal import (
    CONVICTS,
    SIZE,
    SUSPECTS,
    InflightJournal,
    name_of,
)
from actorium.actors.watchdog.restart_policy import SUSPECTS_EACH
from actorium.actors.watchdog.supervised import starting
from actorium.actors.watchdog.supervisor import BROKEN, Supervisor

A, B, C = (name_of(text) for text in (b"a", b"b", b"c"))


def lives(*deaths: list[bytes]) -> InflightJournal:
    """The incarnation after those that died with these names in the journal."""
    buffer = bytearray(SIZE)
    for names in deaths:
        InflightJournal(buffer).put_all(names)
    return InflightJournal(buffer)


def test_names_do_not_run_together() -> None:
    assert len({name_of(b"ab", b"c"), name_of(b"a", b"bc"), name_of(b"abc"), A, B}) == 5
    assert name_of(b"a") == A and len(A) == journal.NAME


def test_a_death_makes_a_suspect_and_a_second_one_a_convict() -> None:
    once = lives([A])
    assert once.suspected(A) and not once.convicted(A)
    twice = lives([A], [A])
    assert twice.convicted(A) and not twice.suspected(A)
    assert lives([A], [A], [], [B]).convicted(A), "it stays so"


def test_counts_do_not_end() -> None:
    """Of requests that raise, which anybody can send, most of all."""
    buffer = bytearray(SIZE)
    first = InflightJournal(buffer)
    first.failures = first.deaths = 2**32 - 1
    first.failed(ValueError(), "r")
    assert InflightJournal(buffer).failures == 2**32


def test_a_death_without_requests_suspects_none() -> None:
    found = lives([], [])
    assert found.gauges() == {} and found.quiet


def test_a_finished_request_is_no_suspect() -> None:
    buffer = bytearray(SIZE)
    first = InflightJournal(buffer)
    first.put(A)
    first.clear()
    assert InflightJournal(buffer).quiet


def test_a_suspect_that_gets_to_its_end_is_acquitted() -> None:
    buffer = bytearray(SIZE)
    InflightJournal(buffer).put(A)
    InflightJournal(buffer).finished(A)
    InflightJournal(buffer).put(A)
    found = InflightJournal(buffer)
    assert found.suspected(A) and not found.convicted(A)


def test_of_several_suspects_the_earlier_one_is_convicted() -> None:
    found = lives([A, B, C], [B])
    assert found.convicted(B) and found.suspected(A) and found.suspected(C)
    found = lives([A], [B, A])
    assert found.convicted(A) and not found.suspected(B)
    found = lives([A, B], [A, B])
    assert not (found.convicted(A) or found.convicted(B)), "either may be to blame"


def test_threads_have_places_of_their_own() -> None:
    buffer = bytearray(SIZE)
    living = InflightJournal(buffer)
    living.put(A)
    living.put(B, 1)
    living.put(C, 2)
    living.clear(2)
    living.clear()
    found = InflightJournal(buffer)
    assert (found.suspected(A), found.suspected(B), found.suspected(C)) == (False, True, False)


def test_a_hanging_request_is_convicted_at_once(tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(journal, "monotonic", lambda: now)
    living = journal.open_journal(tmp_path, "scheduler", 0.05)
    living.put(B, 1)
    living.put(A)
    assert living.overdue(now + 0.04) is None
    now += 0.1
    age, allowed = living.overdue(now) or (0.0, 0.0)
    assert age > allowed == 0.05
    journal.mark_hung(tmp_path, "scheduler")
    found = journal.open_journal(tmp_path, "scheduler", 0.05)
    assert found.convicted(A) and not found.suspected(B), "a thread may take longer"
    assert journal.open_journal(tmp_path, "tokenizer", 0.05).quiet, "each role has its own"


def test_a_hang_with_several_requests_convicts_none(tmp_path: Path) -> None:
    living = journal.open_journal(tmp_path, "scheduler", 1e-9)
    living.put_all([A, B])
    journal.mark_hung(tmp_path, "scheduler")
    found = journal.open_journal(tmp_path, "scheduler", 1e-9)
    assert found.suspected(A) and found.suspected(B)


def test_a_request_that_just_began_does_not_count_as_hanging(tmp_path: Path) -> None:
    living = journal.open_journal(tmp_path, "scheduler", 1000.0)
    living.put(A)
    journal.mark_hung(tmp_path, "scheduler")
    found = journal.open_journal(tmp_path, "scheduler", 1000.0)
    assert found.suspected(A) and not found.convicted(A)


def test_without_a_directory_it_lives_as_long_as_its_actor() -> None:
    living = journal.open_journal(Path("/nowhere"), "scheduler", 1.0)
    living.put(A)
    journal.mark_hung(Path("/nowhere"), "scheduler")
    living.convict(A)
    assert living.convicted(A)


def test_kept_entries_are_bounded() -> None:
    names = [name_of(b"%d" % i) for i in range(3 * CONVICTS)]
    buffer = bytearray(SIZE)
    for name in names[:2 * SUSPECTS]:
        InflightJournal(buffer).put(name)
    found = InflightJournal(buffer)
    assert sum(map(found.suspected, names)) == SUSPECTS
    for name in names:
        found.convict(name)
    found = InflightJournal(buffer)
    assert sum(map(found.convicted, names)) == CONVICTS
    assert found.convicted(names[-1]) and not found.convicted(names[0])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.data())
def test_every_killer_and_nobody_else(count: int, data: st.DataObject) -> None:
    """Requests are worked on in batches and by themselves; those that did not get to their end are
    sent again in any order, and now and then somebody kills the actor for no reason."""
    killers = data.draw(st.sets(st.integers(0, count - 1), max_size=min(count, 12)))
    chance = random.Random(data.draw(st.integers(0, 999)))
    names = [name_of(b"%d" % i) for i in range(count)]
    buffer, waiting, refused, deaths = bytearray(SIZE), list(range(count)), set(), 0
    while waiting:
        living = InflightJournal(buffer)
        chance.shuffle(waiting)
        alone = [i for i in waiting if living.suspected(names[i])]
        rest = [i for i in waiting if i not in alone]
        died = False
        for group in [*([i] for i in alone), *(rest[i:i + 5] for i in range(0, len(rest), 5))]:
            for i in group:
                if living.convicted(names[i]):
                    refused.add(i)
                    waiting.remove(i)
            group = [i for i in group if i not in refused]
            living.put_all([names[i] for i in group])
            if killers.intersection(group):
                deaths += 1
                died = True
                break
            living.clear()
            for i in group:
                living.finished(names[i])
                waiting.remove(i)
        if not died:
            break
    assert not waiting and refused == killers
    assert deaths <= 2 * len(killers)


# --- what it means for restarts ------------------------------------------------------------------

class Actor:
    """An actor under a supervisor: `die` with names on its journal, then begin anew."""

    def __init__(self, limit: int = 5) -> None:
        self.supervisor = Supervisor(RecoveryConfig(max_restarts=limit), 0.25, 1)
        self.buffer = bytearray(SIZE)
        self.living = InflightJournal(self.buffer)
        self.supervised, self.now, self.deaths = starting("tokenizer", 1, 1, 0.0), 0.0, 0
        self.supervisor.on_ready("tokenizer", 0.0)

    def die(self, *names: bytes) -> bool:
        """False: it is not started again."""
        self.living.put_all(list(names))
        self.now += 0.01
        self.supervisor.on_exit(self.supervised, -11, "", self.now)
        if self.supervisor.give_up_reason is not None:
            return False
        self.deaths += 1
        self.living = InflightJournal(self.buffer)
        self.supervisor.on_ready("tokenizer", self.now)
        self.supervisor.on_journal_gauges("tokenizer", self.living.gauges())
        return True


def test_poison_does_not_count() -> None:
    actor = Actor()
    for number in range(200):
        poison = name_of(b"%d" % number)
        assert actor.die(poison) and actor.die(poison)
        actor.living.finished(C)
    assert actor.deaths == 400


def test_many_at_once_before_any_is_sent_again() -> None:
    actor = Actor()
    poison = [name_of(b"%d" % number) for number in range(20)]
    for name in poison + poison:
        assert actor.die(name)
    assert all(map(actor.living.convicted, poison))


@pytest.mark.parametrize("names", [0, 1, 3])
def test_an_actor_that_dies_without_requests_ends_the_engine(names: int) -> None:
    """Each death has others in its hands, who are not to blame."""
    actor = Actor()
    for number in range(1000):
        if not actor.die(*(name_of(b"%d %d" % (number, i)) for i in range(names))):
            break
    assert actor.deaths <= (SUSPECTS_EACH if names else 1) * 6
    assert "was started again 5 times" in (actor.supervisor.give_up_reason or "")


def test_an_actor_that_everything_kills_ends_the_engine() -> None:
    actor = Actor()
    for number in range(1000):
        name = name_of(b"%d" % number)
        if not (actor.die(name) and actor.die(name)):
            break
    assert 2 * BROKEN - 2 <= actor.deaths <= 2 * BROKEN + 12


def test_an_actor_that_ends_for_an_upgrade_suspects_nobody(tmp_path: Path) -> None:
    for acquitted in (True, False):
        before = journal.open_journal(tmp_path, "scheduler", 10.0)
        before.put_all([A, B])
        before.put(C, 3)
        if acquitted:
            journal.acquit_all(tmp_path, "scheduler")
        after = journal.open_journal(tmp_path, "scheduler", 10.0)
        assert after.suspected(A) == after.suspected(C) == (not acquitted)
        assert after.deaths == int(not acquitted)
    journal.acquit_all(tmp_path, "nobody")
