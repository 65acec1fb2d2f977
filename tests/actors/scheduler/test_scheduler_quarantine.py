"""Requests that the scheduler fails on, or dies of: each ends by itself, and the books balance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_masking import GRAMMARS, MaskedRing, vocabulary
from helpers_scheduler import CLIENT, Ring, column, config, expected

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import LEDGER, Context
from actorium.actors.ledger.records import META, LedgerHistory, LedgerMeta, make_record
from actorium.actors.messages import AbortRequest, Hello, ResumeRequest, Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.runtime.inflight_journal import SIZE, InflightJournal
from actorium.actors.scheduler import request_lifecycle
from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery import recovery_log as recovery
from actorium.actors.scheduler.recovery.recovery_log import PriorRun
from actorium.actors.scheduler.recovery.request_faults import RequestFaults, grammar_name
from actorium.actors.scheduler.request_state import new_request_state, request_name
from actorium.actors.scheduler.scheduler_actor import GrammarCompiler, SchedulerActor
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import SlotTable
from actorium.actors.structured.guides import SequenceGuide
from actorium.actors.structured.structured_output import StructuredOutputManager

POISON = 499
"""A prompt that begins with this token is the one to fail on."""


class Killed(KeyboardInterrupt):
    """The process ends here."""


class Panic(BaseException):
    """As Rust code raises it."""


def is_poison(one: Any) -> bool:
    """Of a sequence, a request or a Submit."""
    request = getattr(one, "request", one)
    submit = getattr(request, "submit", request)
    return bool(submit.prompt[:4] == column([POISON]))


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, error: BaseException,
          late: bool = False, whose: Callable[..., bool] | None = None) -> None:
    """The method fails on the poison: at once, or `late`, when it has done its work."""
    usual = getattr(owner, method)

    def planted(*args: Any, **more: Any) -> Any:
        bad = whose(*args) if whose is not None else any(
            is_poison(arg) for arg in args if hasattr(arg, "request") or hasattr(arg, "submit")
            or isinstance(arg, Submit))
        if bad and not late:
            raise error
        made = usual(*args, **more)
        if bad:
            raise error
        return made

    monkeypatch.setattr(owner, method, planted)


def poisoned(ring: Ring, innocents: int = 5, **more: Any) -> tuple[str, list[str]]:
    """A poison among others, that would run for a while; everything to its end."""
    rids = [ring.submit([1, 2, 3, 4, number] * 5, max_tokens=20 + number)
            for number in range(innocents)]
    bad = ring.submit([POISON, 1, 2] * 8, max_tokens=30, **more)
    rids.append(ring.submit([1, 2, 3, 4, 99] * 5, max_tokens=9))
    ring.run()
    return bad, rids


def assert_only(ring: Ring, bad: str, rids: list[str]) -> None:
    """The poison was told `quarantined`, the others all there is."""
    told = ring.of(bad)
    assert told and all(heard.error_code == "quarantined" for heard in told)
    for rid in rids:
        for heard in ring.of(rid):
            assert (heard.tokens, heard.reason) == expected(heard)
    ring.assert_at_rest()


PLACES = [
    (SchedulerState, "admit", False), (SchedulerState, "admit", True),
    (SchedulerState, "can_admit", False),
    (SchedulerState, "chunk_planned", False), (SchedulerState, "chunk_planned", True),
    (SchedulerState, "add_request", False),
    (request_lifecycle, "new_request_state", False),
    (request_lifecycle.RequestLifecycle, "_check", False),
    (request_lifecycle, "open_message", False),
]


@pytest.mark.parametrize(("owner", "method", "late"), PLACES,
                         ids=[f"{m}{'-late' * late}" for _, m, late in PLACES])
@pytest.mark.parametrize("error", [ValueError("xyzzy"), Panic("xyzzy")],
                         ids=lambda e: type(e).__name__)
def test_an_exception_ends_its_request(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str,
                                       late: bool, error: BaseException,
                                       caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring(config(chunk=16, seqs=4))
    with monkeypatch.context() as planted:
        plant(planted, owner, method, error, late)
        assert_only(ring, *poisoned(ring))
    assert "xyzzy" not in caplog.text and ring.scheduler.journal.failures == 1
    rid = ring.submit([5, 6, 7], max_tokens=4)
    ring.run()
    assert ring.of(rid)[0].reason == "length"


def test_of_several_choices_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config(chunk=16, seqs=4))
    plant(monkeypatch, SchedulerState, "chunk_planned", ValueError())
    bad, rids = poisoned(ring, n=3)
    assert len(ring.of(bad)) == 3
    assert_only(ring, bad, rids)


def test_the_rest_is_planned_in_the_same_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config())
    plant(monkeypatch, SchedulerState, "admit", ValueError())
    bad = ring.submit([POISON], max_tokens=4)
    good = ring.submit([1], max_tokens=4)
    ring.wake()
    assert ring.of(bad)[0].error_code == "quarantined" and ring.plans
    ring.run()
    assert ring.of(good)[0].reason == "length"


def test_a_request_that_cannot_be_released_ends_the_scheduler(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """What all share may be broken: the next one goes on from the ledger, and ends it first."""
    ring = Ring(config())
    ring.submit([1, 2, 3], max_tokens=40)
    bad = ring.submit([POISON, 2, 3], max_tokens=40)
    for _ in range(6):
        ring.wake()
        ring.work()
        ring.deliver()
    plant(monkeypatch, SchedulerState, "finish", ValueError())
    ring.tell(AbortRequest(bad, CLIENT))
    with pytest.raises(ValueError):
        ring.wake()
    assert ring.scheduler.journal.convicted(request_name(CLIENT, bad))


def test_a_fault_of_no_request_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config())
    plant(monkeypatch, SchedulerState, "admit", AccountingError("page 7 is free twice"))
    ring.submit([POISON], max_tokens=4)
    with pytest.raises(AccountingError):
        ring.wake()
    assert ring.scheduler.journal.failures == 0


def test_attach_resends_everything_to_a_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config())
    good, bad = ring.submit([1, 2], max_tokens=30), ring.submit([POISON], max_tokens=30)
    for _ in range(4):
        ring.wake()
        ring.work()
        ring.deliver()
    with monkeypatch.context() as planted:
        plant(planted, SlotTable, "drafts_of", ValueError(), whose=lambda _, seq: is_poison(seq))
        known = dict(ring.heard)
        ring.heard.clear()
        ring.tell(Hello("detokenizer", 2))
        ring.heard |= {sid: heard for sid, heard in known.items() if is_poison(heard.submit)}
        ring.wake()
    assert ring.of(bad)[0].error_code == "quarantined"
    assert good in {heard.opened.rid for heard in ring.heard.values()}
    assert not ring.scheduler.state.requests.get((CLIENT, bad))


def test_a_resend_of_an_unknown_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config())
    ring.submits["r9"] = ring.submits[ring.submit([1])]

    def planted(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(ring.scheduler.outgoing, "answer_resume", planted)
    ring.tell(ResumeRequest("r9", CLIENT))
    ring.run()
    assert ring.of("r9")[0].error_code == "quarantined"


def test_ended_requests_that_cannot_be_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(msgspec.structs.replace(config(), recovery=RecoveryConfig(ledger=False)))
    plant(monkeypatch, recovery, "_compact", ValueError(), whose=is_poison)
    bad, good = ring.submit([POISON], max_tokens=3), ring.submit([1], max_tokens=3)
    ring.run()
    assert [ring.of(rid)[0].reason for rid in (bad, good)] == ["length", "length"]
    retained = ring.scheduler.requests.history.retained
    assert [request.submit.rid for request in retained] == [good]


# --- masks ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", ["accept", "masks"])
@pytest.mark.parametrize("error", [ValueError(), Panic()], ids=lambda e: type(e).__name__)
def test_masks_of_many_at_once(monkeypatch: pytest.MonkeyPatch, method: str,
                               error: BaseException) -> None:
    """One of several grammars fails in the middle: by itself, and in the batch of all."""
    ring = MaskedRing(config())
    grammar = GRAMMARS[1]
    rids = [ring.structured(grammar, max_tokens=12, n=2) for _ in range(3)]
    bad_matchers: list[Any] = []
    usual = StructuredOutputManager.add_request

    def add_request(masking: StructuredOutputManager, request: Any) -> Any:
        made = usual(masking, request)
        if request.submit.rid == "g3":
            bad_matchers.extend(masking._guides[sid] for sid in request.live)
        return made

    monkeypatch.setattr(StructuredOutputManager, "add_request", add_request)
    bad = ring.structured(grammar, max_tokens=12)
    name = "accept" if method == "accept" else "rows"
    usual_work, calls = getattr(SequenceGuide, name), [0]

    def work(guide: Any, *args: Any) -> Any:
        if guide in bad_matchers:
            calls[0] += 1
            if calls[0] > 3:
                raise error
        return usual_work(guide, *args)

    monkeypatch.setattr(SequenceGuide, name, work)
    ring.run()
    assert [heard.error_code for heard in ring.of(bad)] == ["quarantined"]
    for rid in rids:
        assert all(heard.reason in ("stop", "length") for heard in ring.of(rid))
    ring.assert_at_rest()


def test_suspects_have_their_masks_made_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = MaskedRing(config())
    rids = [ring.structured(GRAMMARS[0], max_tokens=20) for _ in range(3)]
    ring.scheduler.journal.put_all([request_name(CLIENT, rid) for rid in rids[:2]])
    journal = InflightJournal(ring.scheduler.journal._buffer)
    ring.scheduler.state.guard.journal = journal
    batches: list[int] = []
    usual = StructuredOutputManager._rows
    monkeypatch.setattr(StructuredOutputManager, "_rows", lambda masking, wanted: (
        batches.append(len(wanted)), usual(masking, wanted))[1])
    ring.run()
    assert batches and set(batches) == {1}
    assert journal.quiet, "all have got to their ends"


def test_a_grammar_that_kills_is_refused_for_every_client() -> None:
    ring = MaskedRing(config())
    ring.scheduler.journal.convict(grammar_name(GRAMMARS[0]))
    actor = SchedulerActor(ring.scheduler, Context(config(), Path("/nowhere"), "scheduler", 3, 0))
    actor.on_start(lambda: None)
    ring.scheduler = actor  # type: ignore[assignment]
    bad, good = ring.structured(GRAMMARS[0]), ring.structured(GRAMMARS[1])
    until_known(actor.compiler)
    ring.run()
    assert ring.of(bad)[0].error_code == "quarantined"
    assert ring.of(good)[0].reason in ("stop", "length")


def until_known(core: GrammarCompiler) -> None:
    for job in core._jobs.values():
        while not job.done:
            pass


# --- deaths --------------------------------------------------------------------------------------

class Lives:
    """Incarnations of a scheduler that die of a request, each from the ledger of those before."""

    def __init__(self) -> None:
        self.settings = msgspec.structs.replace(config(), recovery=RecoveryConfig(restart=True))
        self.buffer, self.epoch, self.deaths = bytearray(SIZE), 0, 0
        self.ledger = [make_record(META, LedgerMeta("boot", ""))]
        self.told: list[Any] = []
        self.start()

    def start(self) -> None:
        self.epoch += 1
        context = Context(self.settings, Path("/nowhere"), "scheduler", self.epoch, 0)
        past = PriorRun(LedgerHistory().read(self.ledger), True, 100.0)
        self.ring = Ring(config(), start=False)
        self.ring.scheduler = SchedulerCore(context, past, vocabulary, InflightJournal(self.buffer))

    def live(self, *submits: Submit) -> None:
        """Send these (again), with a fresh worker; until it dies or all is done."""
        ring = self.ring
        usual = ring.scheduler.on_wake

        def on_wake(now: float) -> list[Any]:
            sends = usual(now)
            self.ledger += [send.message for send in sends if send.to == LEDGER]
            self.told += [send.message for send in sends if send.to == "detokenizer"]
            return [send for send in sends if send.to.startswith("worker")]

        ring.scheduler.on_wake = on_wake  # type: ignore[method-assign]
        try:
            for submit in submits:
                ring.tell(submit)
            ring.start()
            for _ in range(400):
                if not ring.deliver() and not ring.work():
                    break
        except Killed:
            self.deaths += 1
            self.start()

    def ends(self) -> dict[str, list[str]]:
        """Reasons or codes by rid."""
        rids = {m.sid: m.rid for m in self.told if type(m).__name__ == "Open"}
        found: dict[str, list[str]] = {}
        for message in self.told:
            for event in getattr(message, "events", ()):
                if event.finish_reason:
                    found.setdefault(rids[event.sid], []).append(
                        event.error_code or event.finish_reason)
        return found


def submit(rid: str, first: int) -> Submit:
    return Submit(rid=rid, client=CLIENT, prompt=column([first, 2, 3]), n=1,
                  params=ResolvedParams(max_tokens=8), text=TextParams(), seed=1)


@pytest.mark.parametrize("method", ["admit", "chunk_planned", "finish", "add_request"])
def test_a_death_is_found_by_the_second_one(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    lives = Lives()
    everybody = [submit("a", 1), submit("p", POISON), submit("b", 3)]
    with monkeypatch.context() as planted:
        plant(planted, SchedulerState, method, Killed(),
              whose=lambda _, one, *__: is_poison(one) and not _refused(one))
        for _ in range(4):
            lives.live(*everybody)
            if "p" in lives.ends():
                break
    assert lives.deaths == 2
    assert lives.ends()["p"][-1] == "quarantined"
    assert {rid: lives.ends()[rid][-1] for rid in "ab"} == {"a": "length", "b": "length"}
    before = lives.deaths
    lives.start()  # once more from the ledger: it is over there, too
    lives.buffer[:] = bytes(SIZE)
    lives.start()
    lives.live()
    assert lives.deaths == before and not lives.ring.scheduler.state.requests


def _refused(one: Any) -> bool:
    """The end that a refusal is, which cannot be what kills."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "fail_request":
            return True
        frame = frame.f_back
    return False


# --- what is no request's fault ---

def test_want_of_memory_ends_the_scheduler_and_convicts_nobody() -> None:
    guard = RequestFaults(InflightJournal(bytearray(SIZE)))
    request = new_request_state(Submit("r", CLIENT, column([1, 2]), 1, ResolvedParams(max_tokens=4),
                                       TextParams(), seed=1), 1)
    with pytest.raises(MemoryError), guard.of(request):
        raise MemoryError
    with guard.of(request):
        raise ValueError

    def ends(_: Any, why: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        guard.end_failed({request.key: request}, lambda: None, ends, ends)
    guard.convict(request, MemoryError())
    assert guard.journal.convictions == 0 and not guard.journal.convicted(request.name)
    guard.convict(request, ValueError())
    assert guard.journal.convicted(request.name)


def test_what_the_machine_lacks_ends_a_request_as_one_that_may_be_sent_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(config())
    plant(monkeypatch, SchedulerState, "admit", OSError(12, "Cannot allocate memory"))
    ring.submit([POISON, 2, 3])
    good = ring.submit([1, 2, 3])
    ring.run()
    (bad,), (heard,) = (ring.of(rid) for rid in ("r0", good))
    assert bad.events[-1].error_code == "unavailable" and expected(heard)[0] == heard.tokens
    assert ring.scheduler.journal.failures == 0
