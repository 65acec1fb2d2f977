"""`actorium replay` and `actorium trace`: what a flight recorder has recorded, played again; the
steps of a run on one timeline."""

from __future__ import annotations

import sys
from collections import Counter, deque
from pathlib import Path

import numpy as np
from msgspec import Struct

from actorium.actors.config import tree as configs
from actorium.actors.errors import BadConfig
from actorium.actors.messages import StepPlan
from actorium.actors.recorder.recording import BadRecording, RecordedTurn, Recording
from actorium.actors.recorder.replay import ReplayedTurn, load_recording, replay
from actorium.actors.runtime.step_events import BadEvents
from actorium.tools.bench import timeline as trace
from actorium.tools.cli.command_line import parse

ABOUT = """Feed a fresh scheduler with a recording (RUN_DIR/scheduler.tape0, or a crash report) and
show the plans that it makes. Exit codes: 0 they are those of then, 1 they are not."""


class ReplayOptions(Struct, frozen=True, kw_only=True):
    """What to play, and what to show."""

    file: str = ""
    """A file of the recording, or a crash report (.tar.gz)."""
    until: int | None = None
    """Stop before the first plan beyond this step."""
    show: int = 10
    """How many plans to show, the last ones."""


def run(command: str, argv: list[str]) -> int:
    if command == "trace":
        return _trace(argv)
    words = ["--file", *argv] if argv and not argv[0].startswith("-") else argv
    options = parse("actorium replay FILE", words, ReplayOptions, ABOUT, model=False).options
    if not options.file:
        raise BadConfig("replay: which FILE?", "file")
    if options.show < 0:
        raise BadConfig(f"--show: must not be negative, got {options.show}", "show")
    try:
        recording = load_recording(Path(options.file))
    except BadRecording as error:
        raise BadConfig(error.message, "file") from None
    print(heading(recording))
    return _replay(recording, options) if recording.complete else _mid_life(recording, options)


def heading(recording: Recording) -> str:
    header, turns = recording.header, recording.turns
    config = configs.load(header.config)
    events = [event.now for turn in turns for event in turn.events]
    seconds = max(events) - min(events) if events else 0.0
    tokens = "redacted" if header.redacted else "as they were"
    initial = "" if header.initial is None else (
        f"; began with {len(header.initial.requests)} requests of its ledger")
    damaged = "; its end cannot be read" if recording.damaged else ""
    return (f"{header.role} of engine {config.runtime.name!r}, epoch {header.epoch}: "
            f"{len(turns)} turns, {len(events)} messages in {seconds:.1f} s, tokens {tokens}"
            f"{initial}{damaged}")


def _replay(recording: Recording, options: ReplayOptions) -> int:
    shown: deque[str] = deque(maxlen=options.show)
    plans, wrong = 0, ""
    for played in replay(recording, options.until):
        plans += len(played.plans)
        shown.extend(plan_line(plan) for plan in played.plans)
        if played.error:
            shown.append(f"raised {played.error}")
        if not played.same:
            wrong = _difference(played)
            break
    print("\n".join(shown))
    if wrong:
        print(f"actorium: error: {wrong}", file=sys.stderr)
        return 1
    print(f"{plans} plans, all as they were")
    return 0


def _difference(played: ReplayedTurn) -> str:
    if played.error:
        return f"the scheduler raises {played.error}, which it did not then"
    steps = ", ".join(str(plan.step) for plan in played.plans) or "none"
    return (f"the plans differ from those of then (now: steps {steps}; then: "
            f"{len(played.turn.plans)} plans)")


def plan_line(plan: StepPlan) -> str:
    parts = []
    if plan.release:
        parts.append(f"release {_row(plan.release)}")
    parts += [f"admit {a.slot} ({len(a.tokens) // 4} tokens, {a.cached_len} cached)"
              for a in plan.admit]
    if plan.extend:
        pairs = np.frombuffer(plan.extend, np.int32).reshape(-1, 2).tolist()
        parts.append("extend " + " ".join(f"{slot}+{count}" for slot, count in pairs))
    if plan.decode:
        parts.append(f"decode {_row(plan.decode)}")
    if plan.page_appends:
        parts.append(f"{len(plan.page_appends)} bytes of pages")
    if plan.drafts:
        parts.append(f"{plan.drafts} drafts")
    return f"step {plan.step}: " + "; ".join(parts)


def _row(column: bytes) -> str:
    values = np.frombuffer(column, np.int32).tolist()
    text = " ".join(map(str, values[:16]))
    return text if len(values) <= 16 else f"{text} ... ({len(values)})"


def _mid_life(recording: Recording, options: ReplayOptions) -> int:
    """Without its beginning a recording cannot be replayed: shows the last messages received."""
    print(f"the recording begins in mid-life, with turn {recording.header.turn}: what went before "
          "it was overwritten, so its plans cannot be made again. The last messages received:")
    for turn in recording.turns[len(recording.turns) - options.show:]:
        print(turn_line(turn))
    return 0


def turn_line(turn: RecordedTurn) -> str:
    names = Counter(event.call or type(event.message).__name__ for event in turn.events)
    heard = ", ".join(f"{count} {name}" for name, count in names.items()) or "nothing"
    now = turn.now if turn.now is not None else turn.events[-1].now if turn.events else 0.0
    made = "it raised" if turn.now is None else f"{len(turn.plans)} plans"
    return f"{now:.6f}: {heard}; {made}"


TRACE_ABOUT = """Read what an engine that was started with --trace DIR has written there, and tell
when the device idled, and why."""


class TraceOptions(Struct, frozen=True, kw_only=True):
    """What to read, and what to make of it."""

    dir: str = ""
    """The directory that --trace named."""
    engine: str | None = None
    """Of which engine, where several have written there; default: the last one."""
    out: str = ""
    """A file for Perfetto (ui.perfetto.dev) or chrome://tracing; default: DIR/trace.json."""
    plot: str = ""
    """A picture (.png) of some steps."""
    step: int | None = None
    """The first step of the picture; default: in the middle."""


def _trace(argv: list[str]) -> int:
    words = ["--dir", *argv] if argv and not argv[0].startswith("-") else argv
    options = parse("actorium trace DIR", words, TraceOptions, TRACE_ABOUT, model=False).options
    if not options.dir:
        raise BadConfig("trace: which DIR?", "dir")
    try:
        tracks = trace.load(Path(options.dir), options.engine)
    except BadEvents as error:
        raise BadConfig(str(error), "dir") from None
    steps = trace.join(tracks)
    print(trace.text(trace.summary(steps)))
    out = Path(options.out) if options.out else Path(options.dir) / "trace.json"
    trace.write_chrome(out, tracks, steps)
    print(f"timeline: {out}")
    if options.plot:
        trace.plot(Path(options.plot), steps, options.step)
        print(f"picture: {options.plot}")
    return 0
