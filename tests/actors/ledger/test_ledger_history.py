"""What a ledger's records say, read once or twice, whole or from where a compaction has cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
from helpers_ledger import admission, batch, ints, row, submit

from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import (
    ADMISSION,
    BATCH,
    COUNTS,
    META,
    AdmissionRecord,
    CountsRecord,
    LedgerHistory,
    LedgerMeta,
    SequenceMarks,
    cut,
    entry_records,
    make_record,
)
from actorium.actors.ledger.segments import MAGIC, LedgerRecord, pack
from actorium.actors.messages import RoutedExperts, RowExperts, SequenceEvent, joined_experts


def test_a_history() -> None:
    end = SequenceEvent(2, finish_reason="stop", stop_token=5)
    history = LedgerHistory().read([
        admission(submit("a", n=2), 1),
        make_record(BATCH, batch((1, 0, [10]), (2, 0, [20, 21]),
                            events=[SequenceEvent(1, cached_tokens=16, logprobs=row(-1.0))])),
        make_record(BATCH, batch((1, 1, [11, 12]), (2, 2, [5]),
                            events=[end, SequenceEvent(1, logprobs=row(-2.0, -3.0))])),
        make_record(BATCH, batch((2, 3, [99]), (7, 0, [1]))),
    ])
    entry = history.entries[b"client", "a"]
    first, second = entry.choices
    assert (bytes(first.tokens), first.cached_tokens) == (ints(10, 11, 12), 16)
    assert [len(r.chosen) // 4 for r in first.logprobs] == [1, 2]
    assert (bytes(second.tokens), second.finish) == (ints(20, 21, 5), end), "later tokens are void"
    assert history.next_sid == 3 and not entry.finished and history.unreadable == 0


def test_numbers_of_more_than_32_bits_and_segments_from_before_them(tmp_path: Path) -> None:
    high = 2**31 - 1
    ledger = Ledger(tmp_path)
    ledger.append(ADMISSION, AdmissionRecord(submit("a", n=3), high))
    ledger.append(BATCH, batch((high, 0, [1, 2]), (high + 1, 0, [3]), (high + 2, 0, [4])))
    ledger.commit()
    ledger.close()
    again = Ledger(tmp_path)
    said = [bytes(choice.tokens) for choice in again.history.entries[b"client", "a"].choices]
    assert said == [ints(1, 2), ints(3), ints(4)] and again.history.next_sid == high + 3
    again.close()
    old = make_record(BATCH, msgspec.structs.replace(
        batch((5, 0, [1]), (6, 0, [2])), sids=ints(5, 6)))  # as version 1 wrote it
    (tmp_path / "00000001.seg").write_bytes(MAGIC[:-1] + b"\x01" + pack([
        make_record(META, LedgerMeta("boot", "", 1, again.id)), admission(submit("b", n=2), 5),
        old]))
    mixed = Ledger(tmp_path)
    said = [bytes(choice.tokens) for choice in mixed.history.entries[b"client", "b"].choices]
    assert said == [ints(1), ints(2)] and not mixed.damaged
    mixed.close()


def test_records_are_idempotent() -> None:
    records = [admission(submit("a"), 4),
               make_record(BATCH, batch((4, 0, [1, 2]), events=[
                   SequenceEvent(4, logprobs=row(-1.0, -2.0), prompt_logprobs=row(-9.0))])),
               make_record(BATCH, batch((4, 2, [3]), events=[
                   SequenceEvent(4, finish_reason="length", logprobs=row(-3.0))]))]
    once, twice = LedgerHistory().read(records), LedgerHistory().read([*records, *records])
    assert once.entries == twice.entries and once.next_sid == twice.next_sid == 5
    overlap = LedgerHistory().read([*records[:2], make_record(BATCH, batch((4, 1, [2, 3]), events=[
        SequenceEvent(4, finish_reason="length", logprobs=row(-2.0, -3.0))]))])
    said = overlap.entries[b"client", "a"].choices[0]
    assert bytes(said.tokens) == ints(1, 2, 3)
    assert b"".join(r.chosen for r in said.logprobs) == row(-1.0, -2.0, -3.0).chosen


def test_experts_are_kept_once_in_whatever_pieces_they_came() -> None:
    def piece(start: int, *numbers: int) -> RowExperts:
        return RowExperts(0, start, RoutedExperts((len(numbers), 1, 1), bytes(numbers)))

    history = LedgerHistory().read([admission(submit("a"), 4), *(
        make_record(BATCH, batch((4, i, [i]), events=[SequenceEvent(4, experts=own)]))
        for i, own in enumerate((piece(0, 7, 8, 9), piece(1, 8, 9, 10), piece(1, 8),
                                 piece(9, 99), piece(4, 11))))])
    said = history.entries[b"client", "a"].choices[0]
    assert joined_experts(said.experts).tolist() == [[[own]] for own in (7, 8, 9, 10, 11)]
    again = LedgerHistory().read(r for e in history.entries.values() for r in entry_records(e))
    assert again.entries == history.entries


def test_a_row_of_logprobs_is_cut() -> None:
    assert cut(row(-1.0, -2.0, -3.0), 1).chosen == row(-2.0, -3.0).chosen
    assert cut(row(-1.0, -2.0), 1).top_ids == ints(2, 3)
    assert cut(row(-1.0, k=0), 0) == row(-1.0, k=0)


def test_compaction_keeps_the_state() -> None:
    history = LedgerHistory().read([
        admission(submit("a", n=2), 1), admission(submit("b"), 3),
        make_record(BATCH, batch((1, 0, [10]), (3, 0, [30, 31]), events=[
            SequenceEvent(1, cached_tokens=0, logprobs=row(-1.0), prompt_logprobs=row(-2.0)),
            SequenceEvent(3, finish_reason="length")]))])
    again = LedgerHistory().read(r for e in history.entries.values() for r in entry_records(e))
    assert again.entries == history.entries and again.next_sid == history.next_sid


def test_unknown_records_are_counted() -> None:
    history = LedgerHistory().read([LedgerRecord(77, b"x"), LedgerRecord(ADMISSION, b"\xc1"),
                              admission(submit("a"), 1)])
    assert history.unreadable == 2 and len(history.entries) == 1


def test_drafts_are_counted_from_the_batches() -> None:
    first = batch((1, 0, [1]), (2, 0, [1, 2]))  # 1 has the token after its prompt here
    first = msgspec.structs.replace(first, drafts=3, firsts=1)
    second = msgspec.structs.replace(batch((1, 1, [2, 3, 4]), (2, 2, [3])), drafts=2)
    opened = [admission(submit(rid), sid) for sid, rid in ((1, "a"), (2, "b"))]
    records = [*opened, *(make_record(BATCH, b) for b in (first, second, second))]
    history = LedgerHistory().read(records)
    said = [entry.choices[0] for entry in history.entries.values()]
    assert [(s.drafted, s.accepted) for s in said] == [(2, 2), (5, 1)]
    compacted = [r for entry in history.entries.values() for r in entry_records(entry)]
    for again in (compacted, compacted + records, records + compacted):
        assert LedgerHistory().read(again).entries == history.entries


def test_a_rid_that_was_used_again_is_another_request() -> None:
    end = batch(events=[SequenceEvent(1, "length")])
    first = [admission(submit("a"), 1), make_record(BATCH, batch((1, 0, [5]))),
             make_record(BATCH, end)]
    second = [admission(submit("a"), 7), make_record(BATCH, batch((7, 0, [6])))]
    history = LedgerHistory().read(first + second)
    (entry,) = history.entries.values()
    assert not entry.finished and bytes(entry.choices[0].tokens) == ints(6)
    assert LedgerHistory().read(first + second + second).entries == history.entries
    (entry,) = LedgerHistory().read(first[:2] + second).entries.values()
    assert entry.choices[0].sid == 1, "it is the same as long as it is not over"


def counts(number: int, whole: bool = False, **added: float) -> LedgerRecord:
    return make_record(COUNTS, CountsRecord(number, added, float(number), whole=whole))


def test_counts_are_added_once() -> None:
    """In whatever order a compaction has left them."""
    first, second, fourth = counts(1, a=1.0, b=2.0), counts(2, a=3.0), counts(4, b=1.0)
    third = counts(3, whole=True, a=4.0, b=2.0)
    for records in ([first, second, fourth], [first, first, second, second, first, fourth],
                    [first, second, third, fourth], [second, third, fourth, second, third],
                    [third, first, second, fourth], [counts(4, whole=True, a=4.0, b=3.0), third]):
        history = LedgerHistory().read(records)
        assert history.all_counts == {"a": 4.0, "b": 3.0}, records
        assert history.counted == 4


def test_what_has_no_counts_behind_it_is_counted_by_itself() -> None:
    """A write was cut short, or an earlier version has written it."""
    new = [make_record(META, LedgerMeta("boot", "", 5)), admission(submit("a", n=2), 5),
           make_record(BATCH, batch((5, 0, [1, 2]), (6, 0, [3]), events=[
               SequenceEvent(6, finish_reason="stop")]))]
    want = {"started_sequences": 2.0, "tokens": 3.0, "finished_stop": 1.0}
    history = LedgerHistory().read(new)
    assert history.all_counts == want and history.counts == {}
    assert history.read([counts(1, **want)]).all_counts == want
    history.read([make_record(BATCH, batch((5, 1, [2, 4])))])
    assert history.all_counts == want | {"tokens": 4.0}
    anew = [make_record(META, LedgerMeta("boot", "", 7)), counts(9, whole=True, **want),
            *entry_records(history.entries[b"client", "a"])]
    assert LedgerHistory().read(anew).all_counts == want, "what is written anew is counted already"


def test_marks_say_when_a_sequence_had_its_last_token() -> None:
    mark = SequenceMarks(1.0, 2.0, 2.0, 16, 1)
    history = LedgerHistory().read([
        admission(submit("a"), 1), make_record(BATCH, batch((1, 0, [1]))),
        make_record(COUNTS, CountsRecord(1, {"tokens": 1.0}, 2.0, {1: mark})),
        make_record(BATCH, batch((1, 1, [2]))), counts(2, tokens=1.0)])
    output = history.entries[b"client", "a"].choices[0]
    assert output.marks == msgspec.structs.replace(mark, last=2.0)
    history.read([make_record(BATCH, batch((1, 2, [2]))), counts(7, tokens=1.0)])
    assert output.marks == msgspec.structs.replace(mark, last=7.0)
    again = LedgerHistory().read(entry_records(history.entries[b"client", "a"]))
    assert again.entries == history.entries
    assert mark.shifted(10.0) == SequenceMarks(11.0, 12.0, 12.0, 16, 1)
    assert SequenceMarks().shifted(10.0) == SequenceMarks()
