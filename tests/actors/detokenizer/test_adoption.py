"""Requests that can be resumed: a client goes, another one takes them up. The cores alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_scheduler import Ring, column, config, ints
from helpers_text import context, i4, loaded, write_model

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.ledger.records import (
    ADMISSION,
    AdmissionRecord,
    LedgerEntry,
    LedgerHistory,
    SequenceOutput,
    entry_records,
    make_record,
)
from actorium.actors.messages import (
    AbortRequest,
    Attach,
    Delta,
    Open,
    ResumeRequest,
    Submit,
    TextBatch,
    Unknown,
)
from actorium.actors.params import ResolvedParams, TextParams

A, B = b"gateway-a", b"gateway-b"
RID = "name.asked"


def ring() -> Ring:
    settings = msgspec.structs.replace(config(), recovery=RecoveryConfig(ledger=False))
    return Ring(settings)


def submit(client: bytes = A, resume_seconds: float = 9.0, tenant: str = "t", rid: str = RID,
           tokens: int = 30) -> Submit:
    return Submit(rid, client, column([1, 2, 3]), 1, ResolvedParams(max_tokens=tokens, eos_ids=[]),
                  TextParams(), seed=7, resume_seconds=resume_seconds, tenant=tenant)


def asked(one: Ring, resume: ResumeRequest) -> list[Any]:
    """What the detokenizer is told of it."""
    one.scheduler.on_message(resume, one.now)
    return [send.message for send in one.scheduler.on_wake(one.now)
            if send.to == "detokenizer" and isinstance(send.message, Open | Unknown)]


@pytest.mark.parametrize(("resume", "known"), [
    (ResumeRequest(RID, B, True, "t"), True), (ResumeRequest(RID, B, False, "t"), False),
    (ResumeRequest(RID, B, True, "u"), False), (ResumeRequest(RID, A, True, "u"), False),
    (ResumeRequest("name.other", B, True, "t"), False),
    (ResumeRequest("other.asked", B, True, "t"), False)])
def test_requests_are_adopted_within_their_tenant(resume: ResumeRequest, known: bool) -> None:
    one = ring()
    one.scheduler.on_message(submit(), one.now)
    one.scheduler.on_wake(one.now)
    (told,) = asked(one, resume)
    assert isinstance(told, Open if known else Unknown)
    if isinstance(told, Open):
        assert told.client == B and told.again and told.resume_seconds == 9.0
        assert isinstance(asked(one, ResumeRequest(RID, A))[0], Unknown)
        one.scheduler.on_message(AbortRequest(RID, A), one.now)
        assert one.scheduler.state.requests
        one.scheduler.on_message(AbortRequest(RID, B), one.now)
        assert not one.scheduler.state.requests
    else:
        assert told.other == (resume.rid == "name.other")


def test_without_resumption_a_request_belongs_to_its_client() -> None:
    one = ring()
    one.scheduler.on_message(submit(resume_seconds=0.0), one.now)
    one.scheduler.on_wake(one.now)
    assert isinstance(asked(one, ResumeRequest(RID, B, True, "t"))[0], Unknown)


def test_equal_requests_share_one_run() -> None:
    one = ring()
    for client in (A, B):
        one.scheduler.on_message(submit(client), one.now)
    assert [key for key in one.scheduler.state.requests] == [(B, RID)]


def test_an_aborted_request_may_be_sent_again() -> None:
    one = ring()
    for client in (A, B):
        one.scheduler.on_message(submit(client), one.now)
        one.scheduler.on_wake(one.now)
        one.scheduler.on_message(AbortRequest(RID, client), one.now)
        one.scheduler.on_wake(one.now)
        assert isinstance(asked(one, ResumeRequest(RID, B, True, "t"))[0], Unknown)


def test_the_ledger_knows_the_new_client() -> None:
    said = SequenceOutput(4, bytearray(column([5, 6])))
    old, new = submit(), submit(B)
    records = [*entry_records(LedgerEntry(old, [said])), *entry_records(LedgerEntry(new, [said]))]
    for twice in (records, records + records, records[1:] + records):
        history = LedgerHistory().read(twice)
        assert list(history.entries) == [(B, RID)]
        assert ints(bytes(history.entries[B, RID].choices[0].tokens)) == [5, 6]
    other = make_record(ADMISSION, AdmissionRecord(submit(A, rid="else"), 9))
    assert len(LedgerHistory().read([*records, other]).entries) == 2


# --- the detokenizer ---

@pytest.fixture
def core(tmp_path: Path) -> DetokenizerCore:
    core: DetokenizerCore = loaded(DetokenizerCore(context(write_model(tmp_path / "m"))))
    for client in (A, B):
        core.on_client(client, Attach(), 0.0)
    core.on_wake(0.0)
    return core


def open_(core: DetokenizerCore, sid: int, client: bytes, resume_seconds: float, now: float = 0.0,
          **more: Any) -> None:
    core.on_message(Open(sid, f"r{sid}", 0, client, i4(list(b"hi")), TextParams(),
                         resume_seconds=resume_seconds, **more), now)


def deltas(core: DetokenizerCore, now: float) -> list[tuple[bytes, Delta]]:
    return [(send.client, delta) for send in core.on_wake(now)
            if isinstance(send.message, TextBatch) for delta in send.message.deltas]


def cancels(core: DetokenizerCore, now: float) -> list[str]:
    return [send.message.rid for send in core.on_wake(now)
            if isinstance(send.message, AbortRequest)]


def test_resumable_requests_are_aborted_later(core: DetokenizerCore) -> None:
    open_(core, 1, A, 0.0)
    open_(core, 2, A, 5.0)
    open_(core, 3, A, 9.0)
    core.on_wake(0.0)
    found: list[tuple[float, str]] = []
    for tick in range(120):
        now = tick / 10
        core.on_client_lost(A, now)
        found += [(now, rid) for rid in cancels(core, now)]
    assert [rid for _, rid in found] == ["r1", "r2", "r3"]
    assert found[0][0] < 1.0 < 4.9 < found[1][0] < 5.5 < 8.9 < found[2][0] < 9.5


def test_the_adopter_gets_all_tokens_and_the_former_client_an_end(core: DetokenizerCore) -> None:
    open_(core, 1, A, 5.0, emitted=i4(list(b"abc")))
    assert [(c, d.text) for c, d in deltas(core, 0.0)] == [(A, "abc")]
    open_(core, 1, B, 5.0, emitted=i4(list(b"abcd")), again=True)
    told = {client: delta for client, delta in deltas(core, 0.1)}
    assert told[B].text == "abcd" and told[B].start == 0
    assert told[A].error is not None and told[A].error.code == "aborted"
    core.on_client_lost(A, 0.2)
    assert all(not cancels(core, now / 10) for now in range(3, 120))
