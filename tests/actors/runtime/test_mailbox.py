"""Mailboxes: what is no message harms nothing; nothing is lost in silence; nobody blocks."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers_frames import BAD_FRAMES
from helpers_runtime import Say, Told, Union, short_dir

from actorium.actors import messages as m
from actorium.actors.messages import Generate, SamplingParams
from actorium.actors.runtime import client_endpoint as front_module
from actorium.actors.runtime.client_endpoint import ClientEndpoint
from actorium.actors.runtime.mailbox import Inbox, Outbox, Overflow, describe_bad_frame

encode = msgspec.msgpack.encode

UNIONS = {name: getattr(m, name) for name in (
    "ToTokenizerFront", "ToDetokenizerFront", "ToScheduler", "ToWorker", "ToDetokenizer",
    "ToWatchdog", "ToLauncher", "ToWatchdogFront")}


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    zmq_context: zmq.Context[Any] = zmq.Context()
    yield zmq_context
    zmq_context.destroy(linger=0)


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


def pusher(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    return socket


def dealer(context: zmq.Context[Any], address: str, identity: bytes,
           **options: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(address)
    return socket


def take(box: Any, count: int) -> list[Any]:
    """Wait for `count` good messages."""
    got: list[Any] = []
    while len(got) < count:
        assert box.pending() or box.socket.poll(10_000), f"only {len(got)} of {count} came"
        got += box.receive(256)
    return got


# --- inbox ---

@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_bad_frame_on_an_inbox_is_counted_and_harms_nothing(
        context: zmq.Context[Any], base: Path, kind: str) -> None:
    inbox = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100)
    push = pusher(context, inbox.address)
    push.send(encode(Say("before")))
    push.send(BAD_FRAMES[kind])
    push.send(encode(Say("after")))
    assert [message.text for message in take(inbox, 2)] == ["before", "after"]
    assert inbox.bad.total == 1
    assert not inbox.more


def test_multipart_is_rejected_whole(context: zmq.Context[Any], base: Path) -> None:
    inbox = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100)
    push = pusher(context, inbox.address)
    push.send_multipart([encode(Say("one")), encode(Say("two")), encode(Say("three"))])
    push.send(encode(Say("after")))
    assert [message.text for message in take(inbox, 1)] == ["after"]
    assert inbox.bad.counts == {"multipart": 1}


def test_too_large_a_frame_drops_its_sender_alone(context: zmq.Context[Any], base: Path) -> None:
    inbox = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100, limit=10_000)
    hostile, good = pusher(context, inbox.address), pusher(context, inbox.address)
    hostile.send(encode(Say("x" * 20_000)))
    for i in range(3):
        good.send(encode(Say("fine", i)))
    assert [message.number for message in take(inbox, 3)] == [0, 1, 2]
    hostile.send(encode(Say("small again")))
    assert take(inbox, 1)[0].text == "small again"


def test_socket_files_are_for_the_owner_alone(context: zmq.Context[Any], base: Path) -> None:
    old = os.umask(0)
    try:
        inbox = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100)
        front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
        assert os.umask(0) == 0, "the process's own umask is left alone"
    finally:
        os.umask(old)
    for name in ("x.inbox", "x.front"):
        assert stat.S_IMODE((base / name).stat().st_mode) & 0o077 == 0
    inbox.close()
    front.close()
    context.term()
    assert os.listdir(base) == []


def test_an_older_owner_leaves_the_newer_ones_file(context: zmq.Context[Any], base: Path) -> None:
    old = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100)
    new = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100)
    old.close()
    assert os.listdir(base) == ["x.inbox"]
    pusher(context, new.address).send(encode(Say("to the new one")))
    assert take(new, 1)[0].text == "to the new one"


def test_receive_stops_at_its_limit_and_reports_it(context: zmq.Context[Any], base: Path) -> None:
    inbox = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=100)
    push = pusher(context, inbox.address)
    for i in range(10):
        push.send(encode(Say("x", i)))
    first: list[Any] = []
    while len(first) < 4:
        assert inbox.socket.poll(5000)
        first += inbox.receive(4 - len(first))
    assert inbox.more
    assert [x.number for x in first + take(inbox, 6)] == list(range(10))


def samples() -> dict[str, list[bytes]]:
    """A good frame or two for each union."""
    params = SamplingParams(stop=["x"], logit_bias={3: 1.0})
    resolved = m.ResolvedParams(max_tokens=3)
    return {
        "ToTokenizerFront": [encode(Generate("r", params, text="hello")), encode(m.Abort("r"))],
        "ToDetokenizerFront": [encode(m.Attach())],
        "ToScheduler": [encode(m.Submit("r", b"c", b"1234", 1, resolved, m.TextParams(), 7)),
                        encode(m.StepResult(1, 2, b"\1", b"1234", b"\0"))],
        "ToWorker": [encode(m.StepPlan(1, 2, admit=[
            m.Admit(1, b"1234", 1, 0, b"1234", resolved, 7)], decode=b"1234"))],
        "ToDetokenizer": [encode(m.Open(1, "r", 0, b"c", b"1234", m.TextParams())),
                          encode(m.TokenBatch(1, b"12345678", b"1234", b"\1", b"1234"))],
        "ToWatchdog": [encode(m.Beat("r", 1, 1, "ready", 5, 1.0, {"a": 1.0})),
                       encode(m.Children([m.Child("r", 1, 1)]))],
        "ToLauncher": [encode(m.Kill("r", 1, "why"))],
        "ToWatchdogFront": [encode(m.GetStatus("r", True))],
    }


def mutations(frame: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    for _ in range(count):
        data = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data)) if data else 0
            match rng.randrange(4):
                case 0 if data:
                    data[place] = rng.randrange(256)
                case 1:
                    data[place:place] = rng.randbytes(rng.randint(1, 4))
                case 2 if data:
                    del data[place:place + rng.randint(1, 4)]
                case _:
                    data[place:place] = b"\x91" * rng.choice((1, 5, 2000))
        yield bytes(data)


@pytest.mark.parametrize("name", UNIONS)
def test_mutated_frames_of_every_union(context: zmq.Context[Any], base: Path, name: str) -> None:
    rng = random.Random(name)
    inbox = Inbox(context, f"ipc://{base}/x.inbox", UNIONS[name], hwm=10_000)
    push = pusher(context, inbox.address)
    sent = 0
    for good in samples()[name]:
        for bad in mutations(good, rng, 1500):
            push.send(bad)
            sent += 1
        push.send(good)
        sent += 1
    decoded = 0
    last = samples()[name][-1]
    while decoded + inbox.bad.total < sent:
        assert inbox.pending() or inbox.socket.poll(10_000)
        for message in inbox.receive(256):
            decoded += 1
            final = message
    assert encode(final) == last
    assert inbox.bad.total > 500


# --- what is said about a bad frame ---

@pytest.mark.parametrize(("frame", "wanted"), [
    (["Generate", "r", {"temperature": "hot"}], "params.temperature: Expected `float | null`"),
    (["Generate", "", {}], "rid: Expected `str` of length >= 1"),
    (["Generate", "r", {}, None, None, [{"role": "user"}]], "messages[0]: Object missing required"),
    (["Generate", "r", {"logit_bias": {"a": 1.0}}], "params.logit_bias: Expected `int`"),
    (["Generate", "r", {"zorp": 1}], "params: Object contains unknown field `zorp`"),
    (["Zorp", "r"], "Invalid value 'Zorp'"),
    (["Generate"], "not a message: Expected `array` of at least length 3"),
])
def test_the_reason_names_the_field(frame: list[Any], wanted: str) -> None:
    data = encode(frame)
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.msgpack.decode(data, type=m.ToTokenizerFront)
    text = describe_bad_frame(data, m.ToTokenizerFront, caught.value)
    assert text.startswith(wanted)
    assert "\n" not in text


def test_logging_of_bad_frames_is_limited(context: zmq.Context[Any], base: Path,
                                          caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(context, f"ipc://{base}/x.inbox", Union, hwm=1000)
    push = pusher(context, inbox.address)
    for _ in range(200):
        push.send(b"\xc1")
    push.send(encode(Say("end")))
    take(inbox, 1)
    assert inbox.bad.total == 200
    assert len(caplog.records) == 1


# --- outbox ---

def test_a_full_pipe_keeps_order_and_loses_nothing(context: zmq.Context[Any], base: Path) -> None:
    address = f"ipc://{base}/x.inbox"
    outbox = Outbox(context, address, hwm=50)
    for i in range(80):  # nobody is bound yet: 50 in the pipe, 30 in the backlog
        outbox.send(Told("x", i))
    assert len(outbox.backlog) == 30
    inbox = Inbox(context, address, Union, hwm=10)
    got: list[Any] = []
    while len(got) < 80:
        assert inbox.pending() or inbox.socket.poll(5000)
        got += inbox.receive(7)
        outbox.flush()
    assert [x.number for x in got] == list(range(80))
    assert not outbox.backlog


def test_overflow_is_an_error_that_names_the_stuck_reader(context: zmq.Context[Any],
                                                          base: Path) -> None:
    outbox = Outbox(context, f"ipc://{base}/deaf.inbox", hwm=20)
    with pytest.raises(Overflow, match=r"deaf\.inbox: 20 messages wait"):
        for i in range(100):
            outbox.send(Told("x", i))


def test_lossy_outbox_drops_and_counts(context: zmq.Context[Any], base: Path) -> None:
    outbox = Outbox(context, f"ipc://{base}/deaf.inbox", hwm=20, lossy=True)
    for i in range(100):
        outbox.send(Told("x", i))
    assert outbox.dropped == 80
    assert not outbox.backlog


# --- front ---

@pytest.mark.parametrize("kind", BAD_FRAMES)
def test_bad_frame_on_a_client_endpoint(context: zmq.Context[Any], base: Path, kind: str) -> None:
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
    bad, good = dealer(context, front.address, b"bad"), dealer(context, front.address, b"good")
    bad.send(BAD_FRAMES[kind])
    assert front.socket.poll(5000)
    assert front.receive(10) == []
    assert [client for client, _ in front.refused] == [b"bad"]
    good.send(encode(Say("hello")))
    bad.send(encode(Say("better")))
    assert {client for client, _ in take(front, 2)} == {b"good", b"bad"}
    assert front.bad.total == 1


def test_multipart_on_a_client_endpoint(context: zmq.Context[Any], base: Path) -> None:
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
    client = dealer(context, front.address, b"c")
    client.send_multipart([encode(Say("a")), encode(Say("b"))])
    client.send_multipart([b"", encode(Say("as a REQ socket would"))])
    client.send(encode(Say("after")))
    assert [message.text for _, message in take(front, 1)] == ["after"]
    assert front.bad.counts == {"multipart": 2}


def test_a_lost_client_is_counted(context: zmq.Context[Any], base: Path) -> None:
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
    front.send(b"nobody", Told("x"))
    assert (front.dropped, front.lost) == (1, [b"nobody"])


def test_a_slow_client_is_disconnected_at_the_limit(context: zmq.Context[Any], base: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "CLIENT_BACKLOG_MESSAGES", 500)
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
    slow = dealer(context, front.address, b"slow", RCVHWM=10)
    fast = dealer(context, front.address, b"fast")
    for client in (slow, fast):
        client.send(encode(Say("here")))
    take(front, 2)
    sent = 0
    while not front.lost:
        front.send(b"slow", Told("x" * 2000, sent))
        sent += 1
        assert sent < 20_000
    assert front.lost == [b"slow"]
    assert not front.waiting
    before = front.dropped
    front.send(b"slow", Told("more"))
    assert front.dropped == before + 1
    front.send(b"fast", Told("quick"))
    assert fast.poll(5000) and b"quick" in fast.recv()
    slow.send(encode(Say("awake")))  # who speaks again is heard and answered again
    take(front, 1)
    received = 0
    front.send(b"slow", Told("answer"))
    while b"answer" not in (slow.poll(5000) and slow.recv() or b"answer?"):
        received += 1
        front.flush()
    assert 0 < received <= sent


def test_what_waits_for_a_slow_client_is_bounded_in_bytes(
        context: zmq.Context[Any], base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few messages, but large ones. What it has read, and what was dropped, does not count."""
    monkeypatch.setattr(front_module, "CLIENT_BACKLOG_BYTES", 40_000)
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=1)
    slow = dealer(context, front.address, b"slow", RCVHWM=1, RCVBUF=1)

    def fall_behind(messages: int, size: int, expected: int = 0) -> int:
        """Sends so many that wait in the backlog; returns how many in all. expected: how often it
        was given up before."""
        sent = 0
        while not front.waiting:
            front.send(b"slow", Told("x" * 20_000, sent))
            sent += 1
            assert sent < 1000 and len(front.lost) <= expected, "given up too early"
        for _ in range(messages - 1):
            front.send(b"slow", Told("x" * size, sent))
            sent += 1
        return sent

    for _ in range(3):  # each time within the bound
        slow.send(encode(Say("here")))
        take(front, 1)
        sent, read = fall_behind(2, 15_000), 0
        while len(front._backlogs.get(b"slow", ())) > 1:
            slow.poll(5)
            read += bool(slow.poll(0)) and bool(slow.recv())
            front.flush()
        front.send(b"slow", Told("x" * 15_000, sent))  # behind what is left
        for i in range(read, sent + 1):
            while not slow.poll(0):
                front.flush()
                slow.poll(1)
            assert msgspec.msgpack.decode(slow.recv(), type=Told).number == i
        front.flush()
        assert not front.waiting and front.lost == []
    for dropped in (1, 2):  # beyond it, once and again
        slow.send(encode(Say("here")))
        take(front, 1)
        fall_behind(2, 15_000, dropped - 1)
        assert front.waiting and len(front.lost) == dropped - 1
        front.send(b"slow", Told("x" * 15_000))
        assert front.lost == [b"slow"] * dropped and not front.waiting
        while slow.poll(100):
            slow.recv()


def test_a_slow_client_that_catches_up_gets_everything_in_order(
        context: zmq.Context[Any], base: Path) -> None:
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
    slow = dealer(context, front.address, b"slow", RCVHWM=10)
    slow.send(encode(Say("here")))
    take(front, 1)
    total = 0
    while len(front._backlogs.get(b"slow", ())) < 100:
        front.send(b"slow", Told("x" * 2000, total))
        total += 1
    for i in range(total):
        while not slow.poll(0):
            front.flush()
            slow.poll(1)
        assert msgspec.msgpack.decode(slow.recv(), type=Told).number == i
    front.flush()
    assert not front.waiting and not front.lost and front.dropped == 0
    assert front.pace_changes[0] == (b"slow", True) and front.pace_changes[-1] == (b"slow", False)


def test_an_identity_goes_to_its_newest_connection(context: zmq.Context[Any], base: Path) -> None:
    front = ClientEndpoint(context, f"ipc://{base}/x.front", Union, hwm=100)
    old = dealer(context, front.address, b"same")
    old.send(encode(Say("old")))
    take(front, 1)
    new = dealer(context, front.address, b"same")
    new.send(encode(Say("new")))
    take(front, 1)
    front.send(b"same", Told("to whom"))
    assert new.poll(5000)
    assert not old.poll(0)
