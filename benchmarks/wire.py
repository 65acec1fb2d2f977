"""What the ring's wires cost: a hop from process to process, a burst, an idle engine.

    python benchmarks/wire.py [--hops 5000] [--burst 20000] [--idle 30] [--real] [--json FILE]

Each hop goes through the whole runtime: core, shell, encode, PUSH, ipc, FD readiness under uvloop,
decode, core. `--idle` watches all processes of an engine (null worker, or the demo model with
`--real`) by their threads' CPU time in /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.messages import Message
from actorium.actors.runtime.process import python
from actorium.actors.runtime.rundir import address

HOP_TARGET_US = 45.0
IDLE_TARGET = 0.01
PAYLOAD = 1200
"""Bytes: about a steady decode plan for 256 sequences."""
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Ping(Message):
    """Goes to and fro `left` times."""

    left: Count
    payload: bytes = b""


class Burst(Message):
    count: Count
    payload: bytes = b""


class Item(Message):
    left: Count
    payload: bytes = b""


class Result(Message):
    """Microseconds of each round trip, or of the burst; wakes the burst took."""

    micros: list[float]
    wakes: Count = 0


Union = Ping | Burst | Item | Result


class WireCore(Core):
    """Role `near` measures (a benchmark's core may read the clock), role `far` answers."""

    inbox: Any = Union
    front: Any = Union
    done = False

    def __init__(self, role: str) -> None:
        self.near = role == "near"
        self.other = "far" if self.near else "near"
        self.sends: list[Send] = []
        self.client = b""
        self.micros: list[float] = []
        self.sent_at = 0.0
        self.wakes = 0
        self.counting = False

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self.client, self.micros = client, []
        self.sent_at = time.perf_counter()
        if isinstance(message, Ping):
            self.sends.append(Send("far", message))
        else:
            self.sends += [Send("far", Item(message.count - 1 - i, message.payload))
                           for i in range(message.count)]

    def on_message(self, message: Any, now: float) -> None:
        match message:
            case Ping() if not self.near:
                self.sends.append(Send("near", message))
            case Ping():
                self._on_pong(message)
            case Item():
                self.counting = True
                if message.left == 0:
                    self.sends.append(Send("near", Result([], self.wakes + 1)))
                    self.counting, self.wakes = False, -1
            case Result():
                took = (time.perf_counter() - self.sent_at) * 1e6
                self.sends.append(Send(CLIENT, Result([took], message.wakes), self.client))

    def _on_pong(self, ping: Ping) -> None:
        now = time.perf_counter()
        self.micros.append((now - self.sent_at) * 1e6)
        self.sent_at = now
        if ping.left:
            self.sends.append(Send("far", Ping(ping.left - 1, ping.payload)))
        else:
            self.sends.append(Send(CLIENT, Result(self.micros), self.client))

    def on_wake(self, now: float) -> Sequence[Send]:
        if self.counting or self.wakes < 0:
            self.wakes += 1
        sends, self.sends = self.sends, []
        return sends

    def next_timer(self) -> float | None:
        return None

    def drain(self, now: float) -> None:
        self.done = True

    def health(self) -> Health:
        return Health("idle", 0, 10.0)


def build(ctx: Context) -> WireCore:
    """The role's entry."""
    return WireCore(ctx.role)


@contextmanager
def actors() -> Iterator[Path]:
    """`near` and `far`, run by the real main; yields their run directory."""
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="wire-"))
    config = Config(runtime=RuntimeConfig(queue_messages=100_000))
    (directory / "config.json").write_bytes(configs.dump(config))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    running = [subprocess.Popen(python("actorium.actors.runtime.main", role, str(directory), "1",
                                       str(os.getpid()), "wire:build"), env=env)
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
    """Have `near` measure."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(8))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address(directory, "near.front"))
        socket.send(msgspec.msgpack.encode(message))
        return msgspec.msgpack.decode(socket.recv(), type=Result)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


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


def measure_wires(hops: int, burst: int) -> dict[str, float]:
    """Hop latencies in microseconds and burst throughput in messages a second."""
    with actors() as directory:
        ask(directory, Ping(200))  # connects, warms up
        plan = [m / 2 for m in ask(directory, Ping(hops, bytes(PAYLOAD))).micros]
        small = [m / 2 for m in ask(directory, Ping(hops)).micros]
        result = ask(directory, Burst(burst, bytes(PAYLOAD)))
    return {"hop_us_p50": statistics.median(plan), "hop_us_p99": percentile(plan, 0.99),
            "hop_small_us_p50": statistics.median(small),
            "raw_hop_us_p50": raw_hop(min(hops, 3000)),
            "burst_messages_per_s": burst / result.micros[0] * 1e6,
            "burst_messages_per_wake": burst / max(1, result.wakes)}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all threads: to the nanosecond where the kernel keeps schedstat, else
    in clock ticks (10 ms)."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_idle(seconds: float, real: bool) -> dict[str, float]:
    """Share of one core that each process of an idle engine takes, and their sum."""
    from actorium.actors.launcher.engine import Engine

    options: dict[str, Any] = {} if real else {"null_worker": True, "skip_tokenizer": True}
    with Engine(**options) as engine:
        assert engine.status is not None and engine.pid is not None
        pids = {actor.role: actor.pid for actor in engine.status.actors}
        pids["launcher"] = engine.pid
        time.sleep(2.0)  # what is left of starting
        before = {role: cpu_seconds(pid) for role, pid in pids.items()}
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        shares = {f"idle_{role}": (cpu_seconds(pid) - before[role]) / passed
                  for role, pid in pids.items()}
    return shares | {"idle_all": sum(shares.values())}


def measure_requests(count: int) -> dict[str, float]:
    """Milliseconds from a request's start in the SDK to its first token, with the null worker."""
    from actorium.actors.launcher.engine import Engine
    from actorium.actors.params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with Engine(null_worker=True, skip_tokenizer=True) as engine:
        millis = []
        for i in range(count + 50):
            began = time.perf_counter()
            engine.client.generate([1, 2, 3, 4 + i % 100], params)
            millis.append((time.perf_counter() - began) * 1e3)
    millis = millis[50:]
    return {"request_ms_p50": statistics.median(millis), "request_ms_p99": percentile(millis, 0.99)}


def show(figures: dict[str, float]) -> None:
    """A small table, with the targets."""
    targets = {"hop_us_p50": f"<= {HOP_TARGET_US:g}", "idle_all": f"< {IDLE_TARGET:.0%}",
               "request_ms_p50": "<= 1", "request_ms_p99": "<= 3"}
    for name, value in figures.items():
        text = f"{value:.2%}" if name.startswith("idle") else f"{value:,.1f}"
        print(f"{name:26} {text:>12}  {targets.get(name, '')}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Latency, throughput and idle cost of the wires.")
    parser.add_argument("--hops", type=int, default=5000, help="round trips to time")
    parser.add_argument("--burst", type=int, default=20_000, help="messages of the burst")
    parser.add_argument("--requests", type=int, default=0, help="one-token requests to time")
    parser.add_argument("--idle", type=float, default=0, metavar="SECONDS",
                        help="watch an idle engine for so long")
    parser.add_argument("--real", action="store_true", help="idle with the demo model's worker")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    figures = measure_wires(args.hops, args.burst)
    if args.requests:
        figures |= measure_requests(args.requests)
    if args.idle:
        figures |= measure_idle(args.idle, args.real)
    show(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
