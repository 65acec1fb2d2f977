"""Step events of the actors, and the timeline that is made of them."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_speed import slowness

from actorium.actors.client.client import SamplingParams
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.core import Context
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import Reset, StepPlan, StepResult
from actorium.actors.runtime import step_events as events
from actorium.actors.runtime.step_events import (
    DEVICE,
    HARVEST,
    KINDS,
    LATE,
    LAUNCH,
    PLAN,
    RECORDS,
    RESULT,
    SENT,
    TAKEN,
    TEXT,
    BadEvents,
    EventLabel,
    StepEventFile,
    open_events,
    read_events,
    traced,
)
from actorium.actors.scheduler.core import SchedulerCore
from actorium.gpu.worker.timing import CudaStepTimer, DeviceTimeline, StepTrace
from actorium.tools.bench import timeline as trace
from actorium.tools.cli import main
from actorium.tools.null.null_worker import NullWorker

LABEL = EventLabel("e", "scheduler", 1, "", 7)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def write(path: Path, *records: tuple[int, ...], label: EventLabel = LABEL) -> None:
    file = StepEventFile(path, label, 64)
    for record in records:
        file.add(*record)


def context(where: Path | None, role: str = "scheduler") -> Context:
    runtime = RuntimeConfig(name="e", trace_dir=None if where is None else str(where))
    return Context(Config(runtime=runtime), Path("/nowhere"), role, 1, 0)


# --- the files -----------------------------------------------------------------------------------

def test_the_ring_keeps_the_last_records(tmp_path: Path) -> None:
    file = StepEventFile(tmp_path / "a.events", LABEL, 16)
    began = 2**32 - 30  # a scheduler that is not restarted comes to it
    for step in range(40):
        file.add(PLAN, 2, began + step, 10 * step, 10 * step + 5, step % 3)
    track = read_events(tmp_path / "a.events")
    assert track.label == LABEL and track.lost == 24
    assert [event.step - began for event in track.events] == list(range(24, 40))
    assert track.events[0] == events.StepEvent(PLAN, 2, began + 24, 240, 245, 0)


def test_threads_lose_nothing(tmp_path: Path) -> None:
    file = StepEventFile(tmp_path / "a.events", LABEL, 4096)

    def add(kind: int) -> None:
        for step in range(1000):
            file.add(kind, 1, step, step, step)

    threads = [threading.Thread(target=add, args=(kind,)) for kind in (LAUNCH, HARVEST, DEVICE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_events(tmp_path / "a.events").events
    for kind in (LAUNCH, HARVEST, DEVICE):
        assert [event.step for event in found if event.kind == kind] == list(range(1000))


def test_a_record_costs_little(tmp_path: Path) -> None:
    """0.3 us were measured; the best of many rounds is taken."""
    file = StepEventFile(tmp_path / "a.events", LABEL)
    spent = []
    for _ in range(50):
        start = thread_time()
        for step in range(200):
            file.add(PLAN, 1, step, step, step, 3)
        spent.append((thread_time() - start) / 200)
    assert min(spent) < 2e-6 * slowness()


@pytest.mark.parametrize("spoil", [
    lambda data: b"", lambda data: b"x" + data[1:], lambda data: data[:-1],
    lambda data: data[:20] + b"\xff" + data[21:]])
def test_invalid_trace_files_are_refused(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "a.events"
    write(path, (PLAN, 1, 1, 1, 2))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BadEvents, match="a.events"):
        read_events(path)


def test_off_is_off(tmp_path: Path) -> None:
    core = SchedulerCore(context(None))
    assert traced(core, context(None)) is core
    assert open_events(context(None)) is None
    watched = traced(core, context(tmp_path))
    assert watched is not core and watched.ledger is core.ledger
    other = context(tmp_path, "tokenizer")
    assert traced(core, other) is core, "it has no part in steps"
    assert [path.name for path in tmp_path.iterdir()] == ["e.scheduler.1.events"]


def test_a_core_by_itself_writes_nothing(tmp_path: Path) -> None:
    """As in a replay of its recording, whose configuration names the directory of then."""
    core = SchedulerCore(context(tmp_path / "new"))
    core.on_wake(0.0)
    assert not (tmp_path / "new").exists()


# --- a device's own clock ------------------------------------------------------------------------

def test_a_line_stays_between_queueing_and_being_seen() -> None:
    line = DeviceTimeline()
    assert line.locate(0, 100, queued=1000, seen=5000) == (1000, 1100)
    assert line.locate(50, 100, queued=1020, seen=5000) == (1150, 1250), "behind the one before"
    assert line.locate(50, 100, queued=2000, seen=5000) == (2000, 2100), "not before it was queued"
    assert line.locate(900, 100, queued=2000, seen=2500) == (2400, 2500), "not after it was seen"
    line.reset()
    assert line.locate(10**9, 100, queued=9000, seen=9900) == (9000, 9100)


class FakeDevice(CudaStepTimer):
    """Events are numbers: nanoseconds of a device whose clock is the host's, shifted."""

    def __init__(self, own: StepTrace) -> None:
        super().__init__(own)
        self.marks: list[Any] = []
        self.caught_up = False
        """The device has come to all that is queued."""

    def _event(self) -> Any:
        event = SimpleNamespace(at=0, synchronize=lambda: None, query=lambda: self.caught_up)
        event.record = lambda: self.marks.append(event)
        return event

    def _between(self, first: Any, second: Any) -> int:
        return max(0, round((second.at - first.at) / 1e3))


def test_a_clock_with_events_measures_launch_device_and_harvest(tmp_path: Path,
                                                                monkeypatch: Any) -> None:
    now = 0

    def tick() -> int:
        nonlocal now
        now += 10_000
        return now

    monkeypatch.setattr("actorium.gpu.worker.timing.monotonic_ns", tick)
    clock = FakeDevice(StepTrace(StepEventFile(tmp_path / "a.events", LABEL, 64)))

    def launch(plan: StepPlan, begin: Any) -> Any:
        begin()
        return SimpleNamespace(plan=plan, slots=None, result=lambda busy, idle, late: StepResult(
            1, plan.step, b"", b"", b"", [], [], busy, idle, b"", late))

    host = iter([1.0, 3.0, 3.000007])
    monkeypatch.setattr("actorium.gpu.worker.timing.perf_counter", lambda: next(host))
    steps = []
    for clock.caught_up, number in ((False, 1), (True, 2)):
        steps.append(clock.launch(SimpleNamespace(launch=launch),  # type: ignore[arg-type]
                                  StepPlan(1, number, decode=bytes(8))))
    for mark, at in zip(clock.marks, (5_000_000, 5_020_000, 5_023_000, 5_048_000), strict=True):
        mark.at = at
    now = 200_000
    results = [step.result() for step in steps]
    assert [result.busy_us for result in results] == [20, 25]
    found = {(e.kind, e.step): e for e in read_events(tmp_path / "a.events").events}
    assert {kind for kind, _ in found} == {LAUNCH, DEVICE, HARVEST, LATE}
    assert (found[LAUNCH, 1].begin, found[LAUNCH, 1].end) == (10_000, 30_000)
    assert (found[DEVICE, 1].begin, found[DEVICE, 1].end) == (20_000, 40_000), "when it was queued"
    assert found[DEVICE, 2].begin == 50_000, "queued later than the one before had ended"
    assert found[DEVICE, 2].end - found[DEVICE, 2].begin == 25_000
    assert (LATE, 1) not in found and found[LATE, 2].begin == found[DEVICE, 2].begin
    assert found[LATE, 2].end - found[LATE, 2].begin == 7_000
    assert found[DEVICE, 1].value == 2 and found[HARVEST, 2].begin > found[DEVICE, 2].end


# --- the null worker, without processes ----------------------------------------------------------

def test_the_null_workers_steps(tmp_path: Path) -> None:
    ctx = Context(Config(runtime=RuntimeConfig(name="e", trace_dir=str(tmp_path)),
                         device=Config().device.__class__(null_worker=True)),
                  Path("/nowhere"), "worker-0", 1, 0)
    worker = traced(NullWorker(ctx), ctx)
    worker.on_message(Reset(1, 1), 0.0)
    worker.on_wake(0.0)
    worker.on_message(StepPlan(1, 1), 0.0)
    (sent,) = worker.on_wake(0.0)
    assert isinstance(sent.message, StepResult) and worker.done
    found = {event.kind: event for event in read_events(
        tmp_path / "e.worker-0.1.events").events}
    assert set(found) == {TAKEN, LAUNCH, DEVICE, SENT}
    assert found[DEVICE].end <= found[SENT].begin


# --- joining -------------------------------------------------------------------------------------

def scene(folder: Path) -> None:
    """Three steps; before the second the device waits 60 ns, before the third nobody waits."""
    write(folder / "s.events", (PLAN, 1, 1, 0, 10, 2), (PLAN, 1, 2, 120, 130, 2),
          (PLAN, 1, 3, 300, 310, 0), (RESULT, 1, 1, 105, 110))
    write(folder / "w.events", (TAKEN, 1, 1, 12, 13, 2), (LAUNCH, 1, 1, 14, 20, 2),
          (DEVICE, 1, 1, 18, 100, 2), (TAKEN, 1, 2, 140, 141, 2), (LAUNCH, 1, 2, 145, 165, 2),
          (DEVICE, 1, 2, 160, 260, 2), (LAUNCH, 1, 3, 320, 330, 0), (DEVICE, 1, 3, 330, 400, 0),
          label=EventLabel("e", "worker-0", 1, "", 8))


def test_bubbles_and_their_causes(tmp_path: Path) -> None:
    scene(tmp_path)
    steps = trace.join(trace.load(tmp_path))
    (hole,) = trace.bubbles(steps)
    assert (hole.key, hole.begin, hole.end) == ((1, 2), 100, 160)
    assert hole.causes == {"result under way": 20, "planning": 10, "plan under way": 10,
                           "queueing": 5, "launching": 15}
    found = trace.summary(steps)
    assert found.steps == 3
    assert found.busy == pytest.approx(0.252) and found.idle == pytest.approx(0.060)
    assert found.idle_ratio == pytest.approx(60 / 312)
    assert found.phases["plan to worker"] == pytest.approx(0.006)
    assert "19.23%" in trace.text(found) and "before step 2" in trace.text(found)


def test_a_cause_that_no_record_tells_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "w.events", (DEVICE, 1, 1, 0, 10, 1), (DEVICE, 1, 2, 30, 40, 1))
    (hole,) = trace.bubbles(trace.join(trace.load(tmp_path)))
    assert hole.causes == {"launching": 20}


def test_the_timeline_for_perfetto(tmp_path: Path) -> None:
    scene(tmp_path)
    tracks = trace.load(tmp_path)
    out = json.loads(json.dumps(trace.chrome(tracks, trace.join(tracks))))["traceEvents"]
    spans = [e for e in out if e["ph"] == "X"]
    assert len(spans) == 12 + 1, "every event, and the bubble"
    assert min(e["ts"] for e in spans) == 0 and all(e["dur"] >= 0 for e in spans)
    (idle,) = [e for e in spans if e["name"] == "idle"]
    assert (idle["ts"], idle["dur"]) == (0.1, 0.06)
    named = {(e["pid"], e.get("tid")) for e in out if e["ph"] == "M"}
    assert {(e["pid"], e["tid"]) for e in spans} <= named
    assert {e["pid"] for e in spans if e["name"] == "device"} != {8}, "a process of its own"
    assert [e["id"] for e in out if e["ph"] == "s"] == ["1.1", "1.2", "1.3"]


def test_the_engine_that_wrote_last_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "a.events", (PLAN, 1, 1, 50, 60))
    old = EventLabel("old", "scheduler", 1, "", 1)
    write(tmp_path / "b.events", (PLAN, 1, 1, 10, 20), label=old)
    assert [t.label.engine for t in trace.load(tmp_path)] == ["e"]
    assert [t.label.engine for t in trace.load(tmp_path, "old")] == ["old"]
    with pytest.raises(BadEvents, match="no events of engine nobody"):
        trace.load(tmp_path, "nobody")
    with pytest.raises(BadEvents, match="no events"):
        trace.load(tmp_path / "missing")


# --- whole engines -------------------------------------------------------------------------------

def run_engine(short: Path, **more: Any) -> list[trace.TimelineStep]:
    with Engine("", run_dir=str(short / "run"), trace_dir=str(short / "trace"), max_num_seqs=4,
                **more) as engine:
        done = engine.client.generate([[5, 6, 7]] * 3,
                                      SamplingParams(max_tokens=20, ignore_eos=True))
        assert [len(completion.token_ids) for completion in done] == [20] * 3
    return trace.join(trace.load(short / "trace"))


def assert_ordered(steps: list[trace.TimelineStep], kinds: set[int]) -> None:
    whole = [step for step in steps if set(step.spans) == kinds]
    assert len(whole) >= len(steps) - 2, "the last ones end nobody's wait"
    for step in whole:
        begins = [step.spans[kind][0] for kind in (PLAN, TAKEN, DEVICE, SENT, RESULT, TEXT)]
        assert begins == sorted(begins), f"step {step.key}"
        assert all(begin <= end for begin, end in step.spans.values())
    device = [step.spans[DEVICE] for step in whole]
    assert all(a[1] <= b[0] for a, b in zip(device, device[1:], strict=False)), "one at a time"


def test_a_run_on_the_null_worker(short: Path, capsys: Any) -> None:
    steps = run_engine(short, null_worker=True, skip_tokenizer=True)
    assert_ordered(steps, set(KINDS) - {HARVEST, LATE})
    assert main(["trace", str(short / "trace"), "--plot", str(short / "p.png")]) == 0
    assert "idle ratio" in capsys.readouterr().out
    assert (short / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads((short / "trace/trace.json").read_text())["traceEvents"]) > len(steps)
    assert main(["trace", str(short)]) == 2
    assert "no events" in capsys.readouterr().err


def test_a_run_on_the_cpu(short: Path) -> None:
    steps = run_engine(short, speculative="off")
    assert_ordered(steps, set(KINDS) - {LATE})
    assert max(step.decodes for step in steps) == 3
    files = sorted(path.name.split(".", 1)[1] for path in (short / "trace").iterdir())
    assert files == ["detokenizer.1.events", "scheduler.1.events", "worker-0.1.compute.events",
                     "worker-0.1.events"]
    size = (short / "trace").glob("*.events").__next__().stat().st_size
    assert size < 45 * RECORDS, "bounded, however long it runs"
