"""Frames that are no messages, and bytes that are no frames, at every socket of an engine, while
four clients stream: counted, and otherwise without effect."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from helpers_keys import free_ports, key_dir
from helpers_runtime import short_dir
from helpers_wire_frames import bad_frames, encode

from actorium.actors import messages as m
from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.security import curve_keys as keys
from actorium.actors.tokenizer.core import NoActorMessages

PROMPT, PARAMS = list(range(1, 40)), SamplingParams(max_tokens=120, seed=3, ignore_eos=True)
INBOXES: dict[str, Any] = {
    "tokenizer": NoActorMessages, "scheduler": m.ToScheduler, "worker-0": m.ToWorker,
    "detokenizer": m.ToDetokenizer, "watchdog": m.ToWatchdog, "launcher": m.ToLauncher}
FRONTS: dict[str, Any] = {
    "tokenizer": m.ToTokenizerFront, "detokenizer": m.ToDetokenizerFront,
    "watchdog": m.ToWatchdogFront}
TCP = ("tokenizer", "detokenizer", "watchdog")
"""In the order of their ports."""
GROWTH = 96 << 20
"""Bytes by which an actor may be larger afterwards: pools of its allocator, queues of libzmq."""


class Target:
    """An engine on ipc and tcp, and four clients that stream all the time."""

    def __init__(self, base: Path) -> None:
        self.base, self.port = base, free_ports()
        self.keys = key_dir(base, "ann")
        self.pair = keys.read_pair(base / "ann.key")
        self.engine = Engine(
            run_dir=str(base), listen=f"tcp://127.0.0.1:{self.port}", keys_dir=str(self.keys),
            null_worker=True, skip_tokenizer=True, drain_timeout=5.0, restart=True,
            crash_reports=False)
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4096)
        self.done, self.harmed = 0, list[object]()

    def socket_file(self, name: str) -> Path:
        (found,) = self.base.glob(f"*/{name}")
        assert stat.S_ISSOCK(found.stat().st_mode)
        return found

    def connected(self, kind: int, address: str, pair: keys.KeyPair | None = None
                  ) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        made.setsockopt(zmq.LINGER, 30_000)
        made.setsockopt(zmq.SNDTIMEO, 60_000)
        if kind == zmq.DEALER:
            made.setsockopt(zmq.ROUTING_ID, os.urandom(8).hex().encode())
        if pair is not None:
            made.setsockopt(zmq.CURVE_SERVERKEY, pair.server.encode())
            made.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            made.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        made.connect(address)
        return made

    @contextlib.contextmanager
    def streams(self) -> Iterator[None]:
        """Four clients that stream until the end; all of them get what is theirs."""
        want, over = self.engine.client.generate(PROMPT, PARAMS).token_ids, threading.Event()

        def run() -> None:
            try:
                with Client(str(self.socket_file("tokenizer.front").parent)) as client:
                    while not over.is_set():
                        found = [t for delta in client.stream(PROMPT, PARAMS)
                                 for t in delta.token_ids]
                        assert found == want
                        self.done += 1
            except BaseException as error:
                self.harmed.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(60)

    def actors(self) -> dict[str, m.ActorStatus]:
        return {actor.role: actor for actor in self.engine.client.status().actors}

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Of each actor: (resident bytes, descriptors)."""
        found = {}
        for role, actor in self.actors().items():
            process = psutil.Process(actor.pid)
            found[role] = (process.memory_info().rss, process.num_fds())
        return found

    def counted(self, gauge: str, role: str, at_least: float) -> float:
        """What an actor has counted, once it is so many."""
        until = time.monotonic() + 60
        while (found := self.actors()[role].gauges.get(gauge, 0.0)) < at_least:
            assert time.monotonic() < until, f"{role}: {gauge} is {found}, not {at_least}"
            time.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with short_dir() as base:
        made = Target(base)
        with made.engine:
            yield made
        made.context.destroy(linger=0)


@pytest.fixture(scope="module", autouse=True)
def silent(target: Target, request: pytest.FixtureRequest) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, made before all else: they end while others are tried."""
    count = 2000 if request.config.getoption("--adversary") else 60
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(
            ("127.0.0.1", target.port + i % 3), timeout=10)) for i in range(count)]
        with Client(f"tcp://127.0.0.1:{target.port}", key=target.base / "ann.key") as client:
            assert client.generate(PROMPT, PARAMS).token_ids
        yield made


@pytest.fixture
def unharmed(target: Target) -> Iterator[Target]:
    """Around an attack: streams go on, no actor is started again or grows."""
    with target.streams():
        before, sizes = target.actors(), target.sizes()
        yield target
        done, until = target.done, time.monotonic() + 60
        while target.done < done + 8 and time.monotonic() < until and not target.harmed:
            time.sleep(0.05)
    assert target.harmed == [] and target.done >= done + 8
    after = target.actors()
    assert {role: (a.pid, a.epoch) for role, a in after.items()} == {
        role: (a.pid, a.epoch) for role, a in before.items()}
    until = time.monotonic() + 30  # connections end a while after their clients
    while (fat := [(role, sizes[role], now) for role, now in target.sizes().items()
                   if now[0] > sizes[role][0] + GROWTH or now[1] > sizes[role][1] + 8]):
        assert time.monotonic() < until, fat
        time.sleep(0.5)


@pytest.mark.mended("frames that are no messages were counted, but nobody was told: "
                    "actorium:bad_frames_total")
def test_bad_frames_at_every_inbox(unharmed: Target, tried: Any, amount: Any) -> None:
    """Of the ring, as this user can send them; many of them real messages of other actors."""
    rng, count = random.Random(1), amount(300, 10_000)
    for role, union in INBOXES.items():
        push = unharmed.connected(zmq.PUSH, f"ipc://{unharmed.socket_file(f'{role}.inbox')}")
        before = 0.0 if role == "launcher" else unharmed.counted("bad_frames", role, 0)
        for i, frame in enumerate(bad_frames(union, rng, count)):
            push.send_multipart([frame, b"more"] if i % 50 == 0 else [frame])
        push.close()
        if role != "launcher":  # which has no heartbeat
            assert unharmed.counted("bad_frames", role, before + count) == before + count
        tried(count)


def test_bad_frames_at_every_front(unharmed: Target, tried: Any, amount: Any) -> None:
    """By ipc and, with a key, by tcp. Who sends them does not read the refusals."""
    rng, count = random.Random(2), amount(200, 7_000)
    for port, role in enumerate(TCP):
        for address, pair in ((f"ipc://{unharmed.socket_file(f'{role}.front')}", None),
                              (f"tcp://127.0.0.1:{unharmed.port + port}", unharmed.pair)):
            before = unharmed.counted("bad_frames", role, 0)
            dealer = unharmed.connected(zmq.DEALER, address, pair)
            for i, frame in enumerate(bad_frames(FRONTS[role], rng, count)):
                dealer.send_multipart([b"", frame] if i % 50 == 0 else [frame])
            unharmed.counted("bad_frames", role, before + count)
            dealer.close(linger=0)
            tried(count)


def test_frames_that_are_too_large(unharmed: Target, tried: Any, amount: Any) -> None:
    """They cost their senders the connection."""
    for role in list(INBOXES)[:amount(2, len(INBOXES))]:
        push = unharmed.connected(zmq.PUSH, f"ipc://{unharmed.socket_file(f'{role}.inbox')}")
        push.send(bytes(m.MAX_MESSAGE_BYTES + 1))
        push.close()
        tried()
    for port in range(len(TCP)):
        dealer = unharmed.connected(
            zmq.DEALER, f"tcp://127.0.0.1:{unharmed.port + port}", unharmed.pair)
        dealer.send(bytes(m.MAX_CLIENT_MESSAGE_BYTES + 1))
        dealer.close()
        tried()


def test_real_frames_again(unharmed: Target, tried: Any, amount: Any) -> None:
    """A client's own, doubled and replayed by others; of the ring, those of older epochs."""
    rng, count = random.Random(4), amount(50, 1500)
    frames = [encode(message) for message in (
        m.Generate("again", PARAMS, tokens=bytes(4)), m.Abort("again"), m.Attach(),
        m.Resume("again"), m.ServerInfo("again"), m.Generate("again", PARAMS, text="x"))]
    for role in ("tokenizer", "detokenizer"):
        address = f"ipc://{unharmed.socket_file(f'{role}.front')}"
        dealers = [unharmed.connected(zmq.DEALER, address) for _ in range(4)]
        for _ in range(count):
            rng.choice(dealers).send(rng.choice(frames))
        for dealer in dealers:
            dealer.close(linger=2000)
        tried(count)
    old = encode(m.StepResult(0, 2, b"\1", b"1234", b"\0"))
    push = unharmed.connected(zmq.PUSH, f"ipc://{unharmed.socket_file('scheduler.inbox')}")
    for _ in range(count):
        push.send(old)
    push.close()
    tried(count)


def strangers(target: Target) -> Iterator[tuple[str, Callable[[str], zmq.Socket[bytes]]]]:
    """Whoever may not get in: (why, how it connects)."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    other = zmq.curve_keypair()[0].decode()
    for what, pair in (("no key", None),
                       ("an unknown key", keys.KeyPair(public, secret, target.pair.server)),
                       ("another server's key", target.pair.__class__(
                           target.pair.public, target.pair.secret, other))):
        yield what, lambda address, pair=pair: target.connected(  # type: ignore[misc]
            zmq.DEALER, address, pair)


@pytest.mark.mended("each connection with an unknown key wrote a line into the log, however often "
                    "it came back; nobody was told how many there were")
def test_strangers_at_the_ports(unharmed: Target, tried: Any, amount: Any) -> None:
    count = amount(10, 300)
    (log,) = unharmed.base.glob("*/tokenizer.log")
    lines = log.read_text().count("refused a client")
    for port, role in enumerate(TCP):
        before = unharmed.counted("bad_frames", role, 0)
        made = {what: [connect(f"tcp://127.0.0.1:{unharmed.port + port}") for _ in range(count)]
                for what, connect in strangers(unharmed)}
        for one in (one for some in made.values() for one in some):
            one.send(encode(m.ServerInfo("x")))
        time.sleep(0.3)
        unharmed.counted("refused_connections", role, count)  # those with an unknown key
        for what, some in made.items():
            assert not any(one.poll(0) for one in some), what
            for one in some:
                one.close(linger=0)
            tried(count)
        assert unharmed.counted("bad_frames", role, 0) == before, "came in"
    assert log.read_text().count("refused a client") - lines <= 2 + 9 * 6


def test_bytes_that_are_no_frames(unharmed: Target, tried: Any, amount: Any) -> None:
    """Half a greeting, a greeting and then anything, HTTP; at tcp ports and ipc sockets."""
    rng, count = random.Random(6), amount(40, 1500)
    files = [unharmed.socket_file(f"{role}.inbox") for role in INBOXES]
    files += [unharmed.socket_file(f"{role}.front") for role in FRONTS]
    for i in range(count):
        name = rng.choice([b"NULL", b"CURVE", b"PLAIN", rng.randbytes(20)])
        greeting = (b"\xff" + bytes(8) + b"\x7f\x03" + bytes([rng.randrange(3)])
                    + name.ljust(20, b"\0") + bytes(32))
        data = rng.choice([b"", greeting, greeting[:rng.randrange(64)], b"GET / HTTP/1.1\r\n\r\n",
                           greeting + b"\x04\x26\x05READY" + rng.randbytes(30),
                           greeting + b"\x06" + b"\xff" * 8 + rng.randbytes(50)])
        data += rng.randbytes(rng.randrange(200))
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            if i % 2:
                with socket.create_connection(
                        ("127.0.0.1", unharmed.port + rng.randrange(3)), timeout=10) as made:
                    made.sendall(data)
            else:
                with socket.socket(socket.AF_UNIX) as made:
                    made.settimeout(10)
                    made.connect(str(rng.choice(files)))
                    made.sendall(data)
        tried()


def test_connections_that_say_nothing(unharmed: Target, silent: list[socket.socket],
                                      tried: Any) -> None:
    """They end by themselves, after the time that a handshake may take."""
    for one in silent:
        one.settimeout(60)
        while one.recv(4096):
            pass
    tried(len(silent))
