"""What passes through an actor leaves nothing in it: after many requests, clients and deaths its
containers hold as much as after a few, within the bounds of `retention` (few here)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from helpers_cluster import ClusterBox, settings
from helpers_containers import FEW, few_are_retained, grown, sizes_of
from helpers_runtime import short_dir
from helpers_scheduler import Ring, column, config
from helpers_text import attached, context, i4, i8, loaded, write_model

from actorium.actors.client.core import ClientCore
from actorium.actors.client.requests import Request
from actorium.actors.cluster.routing import prefix_index
from actorium.actors.cluster.scaling import autoscale
from actorium.actors.config.tree import Config, RecoveryConfig, RuntimeConfig
from actorium.actors.launcher.launcher import Launcher
from actorium.actors.messages import (
    Abort,
    Attach,
    Beat,
    Child,
    Children,
    Delta,
    Detokenize,
    Exited,
    Fatal,
    Generate,
    GetStatus,
    Hello,
    Open,
    Rejected,
    Resume,
    SequenceEvent,
    Submit,
    TextBatch,
    ToDetokenizerFront,
    TokenBatch,
    Tokenize,
    Usage,
)
from actorium.actors.params import ResolvedParams, SamplingParams, TextParams
from actorium.actors.runtime import client_endpoint as front_module
from actorium.actors.runtime.client_endpoint import ClientEndpoint
from actorium.actors.tokenizer.core import TokenizerCore
from actorium.actors.watchdog.core import WatchdogCore

ROUNDS = 2 * FEW
Round = Callable[[int], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    few_are_retained(monkeypatch)


def drive(actor: Any, once: Round, rounds: int = ROUNDS) -> None:
    """Rounds leave nothing: three times as many as were enough to fill what is bounded."""
    for number in range(rounds):
        once(number)
    before = sizes_of(actor)
    for number in range(rounds, 4 * rounds):
        once(number)
    assert len(before) > 2 and grown(before, sizes_of(actor)) == {}


def test_the_test_itself_sees_what_grows() -> None:
    core = ClientCore("c")
    with pytest.raises(AssertionError, match="waiting"):
        drive(core, lambda number: core.waiting.update({str(number): SimpleNamespace()}))


def test_tokenizer(model: Path) -> None:
    core: TokenizerCore = loaded(TokenizerCore(context(model)))

    def once(number: int) -> None:
        client, rid = f"c{number}".encode(), f"r{number}"
        for message in (Generate(rid, SamplingParams(), text="hello", tenant=f"t{number}"),
                        Generate(f"{rid}b", SamplingParams(top_p=7.0), text="hello"),
                        Tokenize(f"{rid}t", "hello"), Detokenize(f"{rid}d", i4([65])),
                        Resume(rid), Abort(rid), Abort("unknown")):
            core.on_client(client, message, float(number))
        core.on_bad_client(client, "no message")
        core.on_wake(float(number))

    drive(core, once)


def test_detokenizer(model: Path) -> None:
    core = attached(model)

    def once(number: int) -> None:
        client, sid, now = f"c{number}".encode(), 3 * number + 1, 100.0 * number
        core.on_client(client, Attach(), now)
        for index in range(3):
            core.on_message(Open(sid + index, f"r{number}-{index}", 0, client, i4([65]),
                                 TextParams(), 0, b""), now)
        core.on_message(TokenBatch(1, i8([sid, sid + 1]), i4([0, 5]), bytes([1, 1]), i4([66, 67]),
                                   [SequenceEvent(sid, "length"), SequenceEvent(sid + 2, "abort")]
                                   ), now)
        core.on_wake(now)
        core.on_client_slow(client, True, now)
        core.on_client_lost(client, now)
        for later in (1.0, 30.0, 70.0):
            core.on_wake(now + later)

    drive(core, once)


def test_scheduler() -> None:
    ring = Ring(msgspec.structs.replace(config(policy="fair"), recovery=RecoveryConfig(
        restart=True, ledger=False)))
    ring.state.queue.fair._keep = FEW  # type: ignore[attr-defined]

    def once(number: int) -> None:
        rid = ring.submit(4, max_tokens=3, n=2, tenant=f"t{number}", deadline=1e6)
        ring.submit(3000, max_tokens=3, tenant=f"u{number}")
        gone = ring.submit(4, max_tokens=300)
        ring.wake()
        ring.cancel(gone)
        ring.run()
        if number % 8 == 0:
            ring.lose_worker()
            hears, ring._hear = ring._hear, lambda message: None  # type: ignore[method-assign]
            ring.tell(Hello("detokenizer", 2 + number))
            ring.run()
            ring._hear = hears  # type: ignore[method-assign]
        ring.now += 10.0
        assert ring.of(rid)[0].reason

    drive(ring.scheduler, once, FEW)


def test_client() -> None:
    core = ClientCore("c")

    def once(number: int) -> None:
        now = 100.0 * number
        done, refused, aborted, late = (core.submit(
            Request(prompt="x", params=SamplingParams(), timeout=9.0), now, True)[0]
            for _ in range(4))
        core.on_message(TextBatch([Delta(done.rid, 0, 0, "a", i4([65]), None, None, "stop", None,
                                         Usage(1, 0, 1))]), now)
        core.on_message(Rejected(refused.rid, "queue_full", "full"), now)
        assert core.forget(aborted.rid, now)
        core.on_message(TextBatch([Delta(aborted.rid, 0, 0, "", b"", finish_reason="abort")]), now)
        assert [abort.rid for abort in core.expire(now + 50.0)] == [late.rid]
        core.resend(now + 60.0)

    drive(core, once)


def test_watchdog() -> None:
    core = WatchdogCore("e", 1, 99, 100.0, RecoveryConfig(), 0.25, 7)
    core.on_message(Children([Child("a", 1, 1)], True), 0.0)

    def once(number: int) -> None:
        now, pid, epoch = 1000.0 * (1 + number), 1 + number, 1 + number
        core.on_message(Beat("a", pid, epoch, "idle", 1, 60.0), now)
        core.on_client(f"c{number}".encode(), GetStatus(f"r{number}", True), now)
        core.on_message(Fatal("a", pid, epoch, "ValueError"), now)
        core.on_message(Fatal("a", 10_000 + pid, epoch, "of one that nobody knows"), now)
        core.on_message(Exited("a", pid, epoch, 1), now)
        for later in (0.0, 50.0):
            core.on_wake(now + later)
        core.on_message(Children([Child("a", pid + 1, epoch + 1)], True), now + 60.0)

    drive(core, once)


def test_launcher() -> None:
    launcher = Launcher(Config(runtime=RuntimeConfig(name="e")))

    def once(number: int) -> None:
        launcher._on_message(Fatal("worker-0", number, number, "ValueError: x"))

    drive(launcher, once)
    child: Any = SimpleNamespace(role="worker-0", pid=4 * ROUNDS - 1)
    assert launcher._fatal_of(child).message == "ValueError: x"
    child.pid -= 1
    assert launcher._fatal_of(child).message == "", "of one before it"
    launcher._clean_up()


def test_client_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never read, and never say anything again."""
    monkeypatch.setattr(front_module, "CLIENT_BACKLOG_MESSAGES", 2)
    context_: zmq.Context[Any] = zmq.Context()
    with short_dir() as base:
        front = ClientEndpoint(context_, f"ipc://{base}/x.front", ToDetokenizerFront, hwm=1)

        def once(number: int) -> None:
            client = f"c{number}".encode()
            front._keep(client, b"1")
            for _ in range(2):
                front._keep(client, b"2")
            front.send(client, Rejected("r", "x", "y"))
            front.lost.clear()
            front.pace_changes.clear()

        drive(front, once)
        front.close()
    context_.destroy(linger=0)


def test_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """All within the seconds for which it counts first tokens, and expects pages."""
    monkeypatch.setattr(autoscale, "SAMPLES", FEW)
    monkeypatch.setattr(prefix_index, "SOON_PAGES", FEW)
    box = ClusterBox(settings())

    def once(number: int) -> None:
        box.submit([1 + number, 2, 3], max_tokens=3)
        box.run()
        if number % 8 == 7:
            box.kill(number // 8 % 2)
            box.run()

    drive(box.router, once)


def test_a_submit_that_is_refused_leaves_nothing() -> None:
    core, params = Ring(config()).scheduler, ResolvedParams(max_tokens=4)

    def once(number: int) -> None:
        core.on_message(Submit(f"x{number}", b"c", b"123", 1, params, TextParams(), 1), 1.0)
        core.on_message(Submit(f"y{number}", b"c", column([1]), 1, params, TextParams(), 1,
                               deadline=0.5), 1.0)
        assert len(core.on_wake(1.0)) == 4

    drive(core, once)
