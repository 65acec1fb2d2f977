"""What the ring's wires cost: hops, one-token requests, an idle engine.

Each hop goes through the whole runtime: core, shell, encode, PUSH, ipc, FD readiness under uvloop,
decode, core.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
from harness import Processors, Rows, p99, scenario, timed
from msgspec import Meta

from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import Message
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.process import python
from actorium.actors.runtime.rundir import address

PAYLOAD = 1200
"""Bytes: about a steady decode plan for 256 sequences."""
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Ping(Message):
    """Goes to and fro `left` times."""

    left: Count
    payload: bytes = b""


class Result(Message):
    """Microseconds of each round trip."""

    micros: list[float]


Union = Ping | Result


class WireCore(Core):
    """Role `near` measures (a benchmark's core may read the clock), role `far` answers."""

    inbox: Any = Union
    client_inbox: Any = Union
    done = False

    def __init__(self, role: str) -> None:
        self.near = role == "near"
        self.sends: list[Send] = []
        self.client = b""
        self.micros: list[float] = []
        self.sent_at = 0.0

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self.client, self.micros, self.sent_at = client, [], time.perf_counter()
        self.sends.append(Send("far", message))

    def on_message(self, message: Any, now: float) -> None:
        if self.near:
            self._on_pong(message)
        else:
            self.sends.append(Send("near", message))

    def _on_pong(self, ping: Ping) -> None:
        now = time.perf_counter()
        self.micros.append((now - self.sent_at) * 1e6)
        self.sent_at = now
        if ping.left:
            self.sends.append(Send("far", Ping(ping.left - 1, ping.payload)))
        else:
            self.sends.append(Send(CLIENT, Result(self.micros), self.client))

    def on_wake(self, now: float) -> Sequence[Send]:
        sends, self.sends = self.sends, []
        return sends

    def next_timer(self) -> float | None:
        return None

    def drain(self, now: float) -> None:
        self.done = True

    def health(self) -> Health:
        return Health("idle", 0, 10.0)


def build(ctx: Context) -> WireCore:
    return WireCore(ctx.role)


@contextmanager
def actors() -> Iterator[Path]:
    """`near` and `far`, run by the real main; yields their run directory."""
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="wire-"))
    (directory / "config.json").write_bytes(configs.dump(Config()))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    running = [subprocess.Popen(python("actorium.actors.runtime.main", role, str(directory), "1",
                                       str(os.getpid()), "scenarios.wire:build"), env=env)
               for role in ("near", "far")]
    try:
        yield directory
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        shutil.rmtree(directory)


def ask(directory: Path, message: Message) -> Result:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(8))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address(directory, "near.front"))
        socket.send(msgspec.msgpack.encode(message))
        return msgspec.msgpack.decode(socket.recv(), type=Result)


def raw_hop(hops: int) -> float:
    """Median microseconds of a bare blocking PUSH/PULL hop between threads over ipc: the wire
    itself on this machine, for the ratio."""
    directory = tempfile.mkdtemp(dir="/tmp", prefix="wire-")
    context: zmq.Context[Any] = zmq.Context()
    pulls = [context.socket(zmq.PULL) for _ in range(2)]
    pushes = [context.socket(zmq.PUSH) for _ in range(2)]
    for i in range(2):
        pulls[i].bind(f"ipc://{directory}/{i}")
        pushes[i].connect(f"ipc://{directory}/{i}")

    def echo() -> None:
        for _ in range(hops):
            pushes[1].send(pulls[0].recv())

    thread = threading.Thread(target=echo)
    thread.start()
    micros = []
    for _ in range(hops):
        began = time.perf_counter()
        pushes[0].send(bytes(PAYLOAD))
        pulls[1].recv()
        micros.append((time.perf_counter() - began) * 1e6 / 2)
    thread.join()
    context.destroy(linger=0)
    shutil.rmtree(directory)
    return statistics.median(micros)


@scenario
def hops(hops: int = 5000) -> Rows:
    """Microseconds of a hop from process to process, beside a bare one over ZeroMQ."""
    with actors() as directory:
        ask(directory, Ping(200))  # connects, warms up
        plan = [m / 2 for m in ask(directory, Ping(hops, bytes(PAYLOAD))).micros]
    yield {"hop_us_p50": statistics.median(plan), "hop_us_p99": p99(plan),
           "raw_hop_us_p50": raw_hop(min(hops, 3000))}


@scenario
def requests(requests: int = 2000) -> Rows:
    """Milliseconds of a one-token request through the SDK, without a model."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with Engine(null_worker=True, skip_tokenizer=True) as engine:
        millis = [1e3 * timed(lambda i=i: engine.client.generate(  # type: ignore[misc]
            [1, 2, 3, 4 + i % 100], params)) for i in range(requests + 50)][50:]
    yield {"request_ms_p50": statistics.median(millis), "request_ms_p99": p99(millis)}


@scenario
def idle(seconds: float = 30.0, real: bool = False) -> Rows:
    """Shares of one core that the processes of an idle engine take; --real: the demo model's."""
    options: dict[str, Any] = {} if real else {"null_worker": True, "skip_tokenizer": True}
    with Engine(**options) as engine:
        assert engine.status is not None and engine.pid is not None
        pids = {actor.role: actor.pid for actor in engine.status.actors}
        time.sleep(2.0)  # what is left of starting
        processors, began = Processors(pids | {"launcher": engine.pid}), time.monotonic()
        time.sleep(seconds)
        spent, passed = processors.spent(), time.monotonic() - began
    shares = {role: own / passed for role, own in spent.items()}
    yield {"idle_share": shares, "idle_all": sum(shares.values())}
