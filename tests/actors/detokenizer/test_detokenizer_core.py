"""The detokenizer actor's core: numbering, stops, events, one batch for each client."""

from __future__ import annotations

import struct
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import msgspec
import pytest
from helpers_speed import slowness
from helpers_text import attached, byte_level, context, i4, i8, ints, loaded, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.core import Send
from actorium.actors.detokenizer.client_connections import PROBE_INTERVAL, RETURN
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.messages import (
    AbortRequest,
    Answer,
    Attach,
    Attached,
    Delta,
    Hello,
    Open,
    Reply,
    RoutedExperts,
    RowExperts,
    RowLogprobs,
    SequenceEvent,
    Stop,
    TextBatch,
    TokenBatch,
)
from actorium.actors.params import TextParams

A, B = b"client a", b"client b"
EOS = byte_level().token_to_id("<eos>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def core(model: Path) -> DetokenizerCore:
    return attached(model, A, B)


def opened(core: DetokenizerCore, sid: int = 1, rid: str = "r", client: bytes = A, index: int = 0,
           prompt: bytes = b"hi", emitted: bytes = b"", end: SequenceEvent | None = None,
           epoch: int = 0, again: bool = False, **text: Any) -> None:
    core.on_message(Open(sid, rid, index, client, i4(list(prompt)), TextParams(**text), 0,
                         i4(list(emitted)), end=end, epoch=epoch, again=again), 0.0)


def batch(core: DetokenizerCore, *rows: tuple[int, int, list[int]],
          events: list[SequenceEvent] | None = None) -> None:
    """rows: (sid, start, tokens)."""
    core.on_message(TokenBatch(1, i8([r[0] for r in rows]), i4([r[1] for r in rows]),
                               bytes(len(r[2]) for r in rows),
                               i4([t for r in rows for t in r[2]]), events or []), 0.0)


def wake(core: DetokenizerCore) -> tuple[dict[bytes, list[Delta]], list[Any]]:
    """(deltas by client, messages to the scheduler)."""
    deltas: dict[bytes, list[Delta]] = {}
    others = []
    for send in core.on_wake(0.0):
        if isinstance(send.message, TextBatch):
            assert send.client not in deltas, "one batch for each client"
            deltas[send.client] = send.message.deltas
            msgspec.msgpack.decode(msgspec.msgpack.encode(send.message), type=TextBatch)
        else:
            others.append(send.message)
    return deltas, others


def only(core: DetokenizerCore) -> Delta:
    deltas, _ = wake(core)
    ((delta,),) = deltas.values()
    return delta


def test_attach_and_loading(model: Path) -> None:
    core = DetokenizerCore(context(model))
    assert core.health().phase == "loading" and core.next_timer() == 0.0
    opened(core)
    batch(core, (1, 0, [65]))
    core.on_client(A, Attach(), 0.0)
    assert core.on_wake(0.0) == [Send("scheduler", Hello("tokenizer", 3))]
    sends = core.on_wake(0.0)
    assert sends[0].message == Attached(3) and sends[1].message.deltas[0].text == "A"
    assert core.health().phase == "stepping" and not core.done


def test_one_batch_a_client_and_wake(core: DetokenizerCore) -> None:
    opened(core, 1, "r", A)
    opened(core, 2, "r", A, index=1)
    opened(core, 3, "q", B)
    for step in range(3):
        batch(core, (1, step, [65 + step]), (2, step, [97 + step]), (3, step, [48]))
    deltas, _ = wake(core)
    assert {c: [(d.rid, d.index, d.start, d.text) for d in ds] for c, ds in deltas.items()} == {
        A: [("r", 0, 0, "ABC"), ("r", 1, 0, "abc")], B: [("q", 0, 0, "000")]}
    assert wake(core) == ({}, [])
    batch(core, (2, 3, [100, 101]))
    delta = only(core)
    assert (delta.start, ints(delta.tokens), delta.text) == (3, [100, 101], "de")


def test_the_first_delta_tells_what_was_recorded_of_the_request(core: DetokenizerCore) -> None:
    """And a stream that is told again does so, too."""
    first = Open(1, "r", 0, A, i4(list(b"hi")), TextParams(), prompt_before=998, created=17)
    core.on_message(first, 0.0)
    found = [only(core)]
    batch(core, (1, 0, [65]))
    found.append(only(core))  # the receipt was empty
    batch(core, (1, 1, [66]))
    found.append(only(core))
    core.on_message(msgspec.structs.replace(first, emitted=i4([65, 66]), again=True), 0.0)
    found.append(only(core))
    assert [(one.prompt_tokens, one.created) for one in found] == [
        (1000, 17), (1000, 17), (0, 0), (1000, 17)]


def test_duplicates_are_dropped_and_gaps_requested(core: DetokenizerCore) -> None:
    opened(core)
    batch(core, (1, 0, [65, 66]))
    batch(core, (1, 0, [65, 66]))
    batch(core, (1, 1, [66, 67]))
    delta = only(core)
    assert (delta.text, ints(delta.tokens)) == ("ABC", [65, 66, 67])
    batch(core, (1, 5, [70]), (99, 0, [1]), events=[SequenceEvent(1, "length")])
    batch(core, (1, 6, [71]))
    assert wake(core) == ({}, [Hello("tokenizer", 3, [1])])
    opened(core, emitted=b"ABCDEF", end=SequenceEvent(1, "length"))
    delta = only(core)
    assert (delta.start, delta.text, delta.finish_reason) == (3, "DEF", "length")
    assert core.done


def test_half_characters_wait_and_are_flushed_at_the_end(core: DetokenizerCore) -> None:
    opened(core)
    batch(core, (1, 0, [0xE2]))
    assert (d := only(core)).text == "" and ints(d.tokens) == [0xE2]
    batch(core, (1, 1, [0x82, 0xAC, 0xC3]))
    assert only(core).text == "€"
    batch(core, (1, 4, [0xC3]), events=[SequenceEvent(1, "length")])
    last = only(core)
    assert (last.text, last.finish_reason) == ("\ufffd\ufffd", "length")
    assert last.usage == msgspec.convert([2, 0, 5], type(last.usage))


def test_stop_string_across_tokens(core: DetokenizerCore) -> None:
    opened(core, stop=("END",))
    batch(core, (1, 0, [65]), events=[SequenceEvent(1, cached_tokens=16)])
    batch(core, (1, 1, [ord("E")]))
    delta = only(core)
    assert (delta.text, ints(delta.tokens)) == ("A", [65, ord("E")])
    batch(core, (1, 2, [ord("N")]))
    assert only(core).text == ""
    batch(core, (1, 3, [ord("D"), 66, 67]))
    batch(core, (1, 6, [68]))
    deltas, sent = wake(core)
    last = deltas[A][0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "END")
    assert ints(last.tokens) == [ord("D")] and sent == [Stop(1, 4)]
    assert last.usage is not None
    assert (last.usage.cached_tokens, last.usage.completion_tokens) == (16, 4)
    batch(core, (1, 7, [69]), events=[SequenceEvent(1, "stop")])
    assert wake(core) == ({}, []) and core.done


def test_held_back_text_comes_with_the_end(core: DetokenizerCore) -> None:
    opened(core, stop=("END",))
    batch(core, (1, 0, list(b"xEN")), events=[SequenceEvent(1, "length")])
    assert only(core).text == "xEN"


def test_include_stop_and_min_tokens(core: DetokenizerCore) -> None:
    opened(core, stop=("b",), include_stop=True, min_tokens=3)
    batch(core, (1, 0, list(b"abcab")))
    last = only(core)
    assert (last.text, last.stop_reason, len(ints(last.tokens))) == ("abcab", "b", 5)
    opened(core, 2, stop=("b",), min_tokens=2)
    batch(core, (2, 0, list(b"ab")))
    assert only(core).finish_reason is None
    batch(core, (2, 2, list(b"bz")))
    last = only(core)
    assert (last.text, last.finish_reason) == ("", "stop")


def test_stop_tokens_are_not_text_unless_asked_for(core: DetokenizerCore) -> None:
    for sid, include, special, text in ((1, False, True, "A"), (2, True, True, "AZ"),
                                        (3, False, False, "A")):
        opened(core, sid, skip_special_tokens=special, include_stop=include)
        batch(core, (sid, 0, [65, 90]), events=[SequenceEvent(sid, "stop", stop_token=90)])
        last = only(core)
        assert (last.text, last.stop_reason, ints(last.tokens)) == (text, 90, [65, 90])
        assert last.usage is not None and last.usage.completion_tokens == 2
    opened(core, 4, skip_special_tokens=False)
    batch(core, (4, 0, [65, EOS, 66]))
    assert only(core).text == "A<eos>B"


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abé€", min_size=1, max_size=20), cut=st.lists(st.booleans()),
       stop=st.text(alphabet="abé€", min_size=1, max_size=3), wakes=st.integers(1, 4))
def test_any_batching_gives_the_same(model: Path, text: str, cut: list[bool], stop: str,
                                     wakes: int) -> None:
    """Text, tokens, reason and usage do not depend on how tokens are cut into batches."""
    ids = list(text.encode())
    groups: list[list[int]] = [[]]
    for n, token in enumerate(ids):
        groups[-1].append(token)
        if n < len(cut) and cut[n]:
            groups.append([])
    results = []
    for batches in ([[t] for t in ids], [g for g in groups if g]):
        core = attached(model, A, B)
        opened(core, stop=(stop,))
        deltas: list[Delta] = []
        at = 0
        for n, tokens in enumerate(batches):
            last = n == len(batches) - 1
            batch(core, (1, at, tokens), events=[SequenceEvent(1, "length")] if last else None)
            at += len(tokens)
            if n % wakes == 0 or last:
                deltas += wake(core)[0].get(A, [])
        starts = [d.start for d in deltas]
        assert starts == [sum(len(ints(p.tokens)) for p in deltas[:i]) for i in range(len(deltas))]
        tokens = [t for d in deltas for t in ints(d.tokens)]
        results.append(("".join(d.text for d in deltas), tokens, deltas[-1].finish_reason,
                        deltas[-1].usage))
    assert results[0] == results[1]
    shown, tokens, reason, _ = results[0]
    assert shown == (text[:text.index(stop)] if stop in text else text)
    assert reason == ("stop" if stop in text else "length")
    assert bytes(tokens).decode().endswith(stop) if reason == "stop" else tokens == ids


def f4(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_logprobs(core: DetokenizerCore) -> None:
    opened(core, stop=("b",))
    prompt = RowLogprobs(0, 1, f4(-0.5), i4([2]), i4([9, 8]), f4(-0.1, -0.2))
    rows = RowLogprobs(0, 0, f4(-1.0, -2.0, -3.0), i4([1, 1, 4]), i4([97, 98, 99]),
                       f4(-1.0, -2.0, -4.0))
    core.on_message(TokenBatch(1, b"", b"", b"", b"", [SequenceEvent(1, prompt_logprobs=prompt)]),
                    0.0)
    assert only(core).prompt_logprobs is None, "prompt logprobs wait for the first token"
    batch(core, (1, 0, list(b"abc")), events=[SequenceEvent(1, logprobs=rows)])
    delta = only(core)
    assert delta.prompt_logprobs is not None and delta.prompt_logprobs[0] is None
    first = delta.prompt_logprobs[1]
    assert first is not None and (first.token_id, first.rank) == (ord("i"), 2)
    assert [t for t, _ in first.top] == [9, 8]
    assert delta.logprobs is not None
    assert [(p.token_id, p.logprob, p.rank) for p in delta.logprobs] == [(97, -1.0, 1),
                                                                         (98, -2.0, 1)]
    opened(core, 2)
    two = RowLogprobs(0, 0, f4(-1.0, -2.0), i4([1, 1]), b"", b"")
    batch(core, (2, 0, [1]))
    batch(core, (2, 0, [1, 2]), events=[SequenceEvent(2, logprobs=two)])
    delta = only(core)
    assert delta.logprobs is not None and delta.logprobs[-1].token_id == 2
    assert len(delta.logprobs) == 1 and delta.logprobs[0].top == []


@pytest.mark.parametrize("reason", ["abort", "deadline", "length"])
def test_other_ends(core: DetokenizerCore, reason: str) -> None:
    opened(core)
    batch(core, events=[SequenceEvent(1, reason)])
    last = only(core)
    assert (last.finish_reason, last.text, last.error) == (reason, "", None)
    assert last.usage is not None and last.usage.completion_tokens == 0 and core.done


def test_errors(core: DetokenizerCore) -> None:
    opened(core)
    batch(core, events=[SequenceEvent(1, "error", error_code="queue_full", error="full")])
    last = only(core)
    assert last.error is not None
    assert (last.finish_reason, last.error.code, last.error.message) == ("error", "queue_full",
                                                                         "full")


def test_reopened_after_a_restart_starts_over(core: DetokenizerCore) -> None:
    opened(core, emitted=b"abc", stop=("cd",))
    first = only(core)
    assert (first.start, first.text, ints(first.tokens)) == (0, "ab", list(b"abc"))
    batch(core, (1, 2, list(b"cx")))
    assert (d := only(core)).text == "cx" and d.start == 3
    opened(core)
    batch(core, (1, 4, [65]))
    assert only(core).text == "A", "a second Open changes nothing"


def test_a_disconnected_client_aborts_its_requests(core: DetokenizerCore) -> None:
    opened(core, 1, "r", A)
    opened(core, 2, "r", A, index=1)
    opened(core, 3, "s", A)
    opened(core, 4, "t", B)
    batch(core, (1, 0, [65]), (4, 0, [66]))
    core.on_client_lost(A, 0.0)
    core.on_client_lost(b"unknown", 0.0)
    deltas, sent = wake(core)
    assert sent == [] and list(deltas) == [B] and core.next_timer() == PROBE_INTERVAL
    assert [(s.client, s.message) for s in core.on_wake(PROBE_INTERVAL)] == [(A, TextBatch([]))]
    core.on_client_lost(A, PROBE_INTERVAL)
    assert core.next_timer() == 2 * PROBE_INTERVAL
    assert [s.message for s in core.on_wake(RETURN) if s.client != B] == [
        AbortRequest("r", A), AbortRequest("s", A)]
    batch(core, (1, 1, [65]), events=[SequenceEvent(1, "abort")])
    assert wake(core) == ({}, [])
    core.on_client(A, Attach(), 0.0)
    deltas, _ = wake(core)
    assert [(d.rid, d.finish_reason) for d in deltas[A]] == [("r", "error"), ("s", "error")]
    core.on_client(A, Attach(), 0.0)
    assert wake(core)[0] == {}


def test_answers_of_the_scheduler_are_passed_on(core: DetokenizerCore) -> None:
    opened(core, client=A)
    batch(core, (1, 0, [65]))
    core.on_message(Reply("f", B, b"{}"), 0.0)
    assert not core.done
    answer, text = core.on_wake(0.0)
    assert (answer.to, answer.client, answer.message) == ("client", B, Answer("f", b"{}"))
    assert text.client == A and text.message.deltas[0].text == "A"
    assert core.on_wake(0.0) == []


def test_an_answer_before_the_tokenizer_is_loaded(model: Path) -> None:
    core = DetokenizerCore(context(model))
    core.on_message(Reply("f", A, b"{}"), 0.0)
    core.on_wake(0.0)
    assert [send.message for send in core.on_wake(0.0)] == [Answer("f", b"{}")]


def test_an_answer_to_a_client_that_is_gone(core: DetokenizerCore) -> None:
    """The shell finds out when it sends: its requests are given up, as with any other news."""
    opened(core, client=A)
    core.on_message(Reply("f", A, b"{}"), 0.0)
    core.on_wake(0.0)
    core.on_client_lost(A, 0.0)
    assert [send.message for send in core.on_wake(RETURN)] == [AbortRequest("r", A)]
    assert core.done


def test_without_a_tokenizer(tmp_path: Path) -> None:
    core = loaded(DetokenizerCore(context(tmp_path / "none", skip_tokenizer=True)))
    core.on_client(A, Attach(), 0.0)
    core.on_wake(0.0)
    opened(core)
    batch(core, (1, 0, [65, 66]), events=[SequenceEvent(1, "length")])
    last = only(core)
    assert (last.text, ints(last.tokens)) == ("", [65, 66])


def test_256_sequences_a_step(core: DetokenizerCore) -> None:
    """Aim: 10 us a token; the test allows for less than a third of that speed."""
    for sid in range(1, 257):
        opened(core, sid, f"r{sid}", A, stop=("nowhere", "\n\n") if sid % 2 else ())
    sids = list(range(1, 257))
    times = []
    for step in range(60):
        message = TokenBatch(step, i8(sids), i4([step] * 256), b"\1" * 256,
                             i4([32 + (step * 7 + s) % 90 for s in sids]))
        begin = thread_time()
        core.on_message(message, 0.0)
        core.on_wake(0.0)
        times.append(thread_time() - begin)
    assert median(times) / 256 < 30e-6 * slowness()


def test_partial_prompt_logprobs_count_the_whole_prompt(core: DetokenizerCore) -> None:
    core.on_message(Open(1, "r", 0, A, i4(list(b"hi")), TextParams(), prompt_before=998,
                         emitted=i4(list(b"!")), end=SequenceEvent(1, "stop")), 0.0)
    (delta,) = [delta for send in core.on_wake(0.0) if isinstance(send.message, TextBatch)
                for delta in send.message.deltas]
    assert delta.usage is not None and delta.usage.prompt_tokens == 1000


def test_numbers_of_sequences_of_more_than_32_bits(core: DetokenizerCore) -> None:
    sid = 2**31 + 7
    opened(core, sid, stop=("c",))
    opened(core, 7, "other")
    batch(core, (sid, 0, [97, 98]), (7, 0, [120]))
    batch(core, (sid, 2, [99]), events=[SequenceEvent(7, "length")])
    deltas, others = wake(core)
    assert {delta.rid: delta.text for delta in deltas[A]} == {"r": "ab", "other": "x"}
    assert others == [Stop(sid, 3)]


def test_experts_come_with_the_end_as_far_as_its_tokens(core: DetokenizerCore) -> None:
    def event(sid: int, start: int, *numbers: int, **more: Any) -> SequenceEvent:
        return SequenceEvent(sid, experts=RowExperts(
            0, start, RoutedExperts((len(numbers), 1, 1), bytes(numbers))), **more)

    opened(core, 1, "r", stop=("bc",))
    opened(core, 2, "s")
    batch(core, (1, 0, list(b"a")), (2, 0, list(b"x")), events=[
        event(1, 0, 10, 11), event(2, 0, 20, 21)])
    assert all(delta.routed_experts is None for delta in wake(core)[0][A])
    batch(core, (1, 1, list(b"bcd")), (2, 1, list(b"y")), events=[
        event(1, 2, 12, 13, 14), event(2, 2, 22, finish_reason="length")])
    sends = [send for send in core.on_wake(0.0) if isinstance(send.message, TextBatch)]
    assert [len(send.message.deltas) for send in sends] == [1, 1], "each in a message of its own"
    found = {delta.rid: delta.routed_experts for send in sends for delta in send.message.deltas}
    assert {rid: own.tolist() for rid, own in found.items() if own} == {
        "r": [[[10]], [[11]], [[12]], [[13]]],  # of "hi", and of "abc" all but the last
        "s": [[[20]], [[21]], [[22]]]}
