"""From the events of an engine's actors (`runtime.trace_dir`) to a timeline: what each step waited
for, when the device idled and why; as text, as a file for Perfetto or chrome://tracing, as a
picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.runtime.step_events import (
    DEVICE,
    HARVEST,
    KINDS,
    LATE,
    LAUNCH,
    PLAN,
    RESULT,
    SENT,
    SUFFIX,
    TAKEN,
    TEXT,
    BadEvents,
    Track,
    read_events,
)
from actorium.tools.output import load_pyplot, save_plot

CAUSES = ("result under way", "planning", "plan under way", "queueing", "launching")
"""What a step may be doing while the device idles before it: its plan waits for a result; it is
made; it travels; it waits for the thread that launches; it is being launched."""
LANES = {PLAN: "plan", TAKEN: "taken", LAUNCH: "launch", DEVICE: "device", HARVEST: "harvest",
         SENT: "sent", RESULT: "result", TEXT: "text"}
DRAWN = (PLAN, LAUNCH, DEVICE, HARVEST, RESULT, TEXT)
SHOWN = 12
"""Steps in a picture."""
Span = tuple[int, int]
Key = tuple[int, int]
"""(epoch of the scheduler, step)"""


@dataclass(slots=True)
class TimelineStep:
    """What is known of one; nanoseconds."""

    key: Key
    spans: dict[int, Span] = field(default_factory=dict)
    decodes: int = 0
    """Sequences that decode in it: they waited for it."""


class Bubble(NamedTuple):
    """The device had nothing to do, though sequences waited for it."""

    key: Key
    """The step that came next."""
    begin: int
    end: int
    causes: dict[str, int]
    """Nanoseconds by cause; causes without a record are missing."""


def load(folder: Path, name: str | None = None) -> list[Track]:
    """Loads the tracks in a directory, of the engine of this name (default: the one that wrote
    last)."""
    try:
        tracks = [read_events(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    except OSError as error:
        raise BadEvents(f"{folder}: {error.strerror or error}") from None
    last = {track.label.engine: track.events[-1].end
            for track in sorted((t for t in tracks if t.events), key=lambda t: t.events[-1].end)}
    wanted = name if name is not None else next(reversed(last), None)
    tracks = [track for track in tracks if track.label.engine == wanted]
    if not any(track.events for track in tracks):
        raise BadEvents(f"{folder}: no events" + (f" of engine {name}" if name else ""))
    return tracks


def join(tracks: Iterable[Track]) -> list[TimelineStep]:
    """The steps, in the order of their plans (of the device, where that is all there is)."""
    steps: dict[Key, TimelineStep] = {}
    for track in tracks:
        for event in track.events:
            key = event.epoch, event.step
            step = steps.setdefault(key, TimelineStep(key))
            step.spans[event.kind] = event.begin, event.end
            if event.kind != TEXT:
                step.decodes = max(step.decodes, event.value)
    return [steps[key] for key in sorted(steps)]


def bubbles(steps: Sequence[TimelineStep]) -> list[Bubble]:
    """Every time that the device waited for a step which sequences waited for."""
    ran = sorted((s for s in steps if DEVICE in s.spans), key=lambda s: s.spans[DEVICE])
    waits = [(after, before.spans[DEVICE][1], after.spans[DEVICE][0])
             for before, after in zip(ran, ran[1:], strict=False) if after.decodes]
    return [Bubble(step.key, begin, end, _causes(step, begin, end))
            for step, begin, end in waits if begin < end]


def _causes(step: TimelineStep, begin: int, end: int) -> dict[str, int]:
    """The bubble, cut where the step went from one hand to the next."""
    plan, taken, launch = (step.spans.get(kind) for kind in (PLAN, TAKEN, LAUNCH))
    edges = [plan and plan[0], plan and plan[1], taken and taken[0], launch and launch[0], end]
    out: dict[str, int] = {}
    at = begin
    for cause, edge in zip(CAUSES, edges, strict=True):
        if edge is not None and edge > at:
            out[cause] = min(edge, end) - at
            at = min(edge, end)
    return out


class Summary(NamedTuple):
    """A run in figures; microseconds."""

    steps: int
    busy: float
    """Busy time: from each step's start to its end on the device."""
    idle: float
    """Idle time between steps while sequences waited."""
    late: float
    """Part of busy in which the device may have idled, since the host was still queueing."""
    phases: dict[str, float]
    """Medians: how long each phase took, and what lay between."""
    causes: dict[str, float]
    """All bubbles, by cause."""
    worst: list[Bubble]

    @property
    def idle_ratio(self) -> float:
        """The largest possible idle share of the time in which sequences waited for the device."""
        return (self.idle + self.late) / (self.busy + self.idle) if self.busy else 0.0


def summary(steps: Sequence[TimelineStep], worst: int = 5) -> Summary:
    ran = [step.spans[DEVICE] for step in steps if DEVICE in step.spans]
    holes = bubbles(steps)
    late = [end - begin for begin, end in (s.spans[LATE] for s in steps if LATE in s.spans)]
    causes = {cause: sum(hole.causes.get(cause, 0) for hole in holes) / 1e3 for cause in CAUSES}
    return Summary(len(ran), sum(end - begin for begin, end in ran) / 1e3,
                   sum(hole.end - hole.begin for hole in holes) / 1e3, sum(late) / 1e3,
                   _phases(steps),
                   {cause: spent for cause, spent in causes.items() if spent},
                   sorted(holes, key=lambda hole: hole.begin - hole.end)[:worst])


def _phases(steps: Sequence[TimelineStep]) -> dict[str, float]:
    """(name, from the begin or end of one phase to that of another)."""
    ways = {"plan": (PLAN, 0, PLAN, 1), "plan to worker": (PLAN, 1, TAKEN, 0),
            "wait to launch": (TAKEN, 0, LAUNCH, 0), "launch": (LAUNCH, 0, LAUNCH, 1),
            "queued on the device": (LAUNCH, 1, DEVICE, 0), "device": (DEVICE, 0, DEVICE, 1),
            "harvest": (HARVEST, 0, HARVEST, 1), "device to sent": (DEVICE, 1, SENT, 0),
            "result to scheduler": (SENT, 0, RESULT, 0), "result": (RESULT, 0, RESULT, 1),
            "text": (TEXT, 0, TEXT, 1)}
    out = {}
    for name, (first, side, second, other) in ways.items():
        spent = [s.spans[second][other] - s.spans[first][side] for s in steps
                 if first in s.spans and second in s.spans]
        if spent and (median := statistics.median(spent)) >= 0:  # below: one within the other
            out[name] = median / 1e3
    return out


def text(found: Summary) -> str:
    lines = [f"{found.steps} steps; device busy {found.busy / 1e3:.3f} ms, idle while sequences "
             f"waited {found.idle / 1e3:.3f} ms, in steps that were still being queued at most "
             f"{found.late / 1e3:.3f} ms: idle ratio at most {found.idle_ratio:.2%}",
             "medians, us: " + ", ".join(f"{name} {us:.1f}" for name, us in found.phases.items())]
    if found.causes:
        lines.append("idle by cause, us a step: " + ", ".join(
            f"{name} {us / found.steps:.2f}" for name, us in found.causes.items()))
    for hole in found.worst:
        parts = ", ".join(f"{name} {ns / 1e3:.1f}" for name, ns in hole.causes.items())
        spent = (hole.end - hole.begin) / 1e3
        lines.append(f"  before step {hole.key[1]}: {spent:.1f} us ({parts})")
    return "\n".join(lines)


# --- for Perfetto and chrome://tracing -----------------------------------------------------------

def chrome(tracks: Sequence[Track], steps: Sequence[TimelineStep]) -> dict[str, Any]:
    """The Trace Event Format: a process for each actor, the device a process of its own, arrows
    from plan to launch to device to text."""
    start = min(event.begin for track in tracks for event in track.events)
    out: list[dict[str, Any]] = []
    device = 1 << 30  # beyond every pid
    for track in tracks:
        label = track.label
        out += _names(label.pid, f"{label.role} (epoch {label.epoch})", LANES)
        for event in track.events:
            pid = device if event.kind in (DEVICE, LATE) else label.pid
            out.append(_span(KINDS[event.kind], pid, event.kind, event.begin - start,
                             event.end - event.begin,
                             {"step": event.step, "epoch": event.epoch, "sequences": event.value}))
            out += _arrow(event.kind, event.epoch, event.step, pid, event.begin - start)
    out += _names(device, "device", {DEVICE: "steps", LATE: "still queued", 0: "idle"})
    out += [_span("idle", device, 0, hole.begin - start, hole.end - hole.begin,
                  {"before step": hole.key[1]} | {c: f"{ns / 1e3:.1f} us"
                                                  for c, ns in hole.causes.items()})
            for hole in bubbles(steps)]
    return {"displayTimeUnit": "ns", "traceEvents": out}


def _names(pid: int, process: str, lanes: Mapping[int, str]) -> list[dict[str, Any]]:
    return [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
            *({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}
              for lane, name in lanes.items())]


def _span(name: str, pid: int, lane: int, at: int, lasts: int, args: dict[str, Any]
          ) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "step", "pid": pid, "tid": lane, "ts": at / 1e3,
            "dur": lasts / 1e3, "args": args}


def _arrow(kind: int, epoch: int, step: int, pid: int, at: int) -> list[dict[str, Any]]:
    phase = {PLAN: "s", LAUNCH: "t", DEVICE: "t", TEXT: "f"}.get(kind)
    if phase is None:
        return []
    return [{"ph": phase, "name": "step", "cat": "step", "id": f"{epoch}.{step}", "pid": pid,
             "tid": kind, "ts": at / 1e3, **({"bp": "e"} if phase == "f" else {})}]


def write_chrome(path: Path, tracks: Sequence[Track], steps: Sequence[TimelineStep]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome(tracks, steps)) + "\n")


# --- a picture -----------------------------------------------------------------------------------

def plot(path: Path, steps: Sequence[TimelineStep], first: int | None = None, shown: int = SHOWN,
         title: str = "") -> None:
    """Some steps, lane by lane, and every step's bubble. first: the first step to show; default:
    from the middle of the run."""
    ran = [step for step in steps if DEVICE in step.spans]
    if first is None:
        first = ran[max(0, (len(ran) - shown) // 2)].key[1] if ran else 0
    part = [step for step in ran if step.key[1] >= first][:shown]
    figure, (above, below) = load_pyplot().subplots(2, 1, figsize=(11, 6), height_ratios=(3, 2))
    _draw_lanes(above, part)
    holes = {hole.key: (hole.end - hole.begin) / 1e3 for hole in bubbles(steps)}
    waited = [step for step in ran if step.decodes]
    below.plot([holes.get(step.key, 0.0) for step in waited], ".", markersize=3, color="#b23b3b")
    below.set_xlabel("step that sequences waited for")
    below.set_ylabel("device idle before it, us")
    figure.suptitle(title or f"idle ratio {summary(steps).idle_ratio:.2%}", fontsize=11)
    save_plot(figure, path, 110)


def _draw_lanes(axis: Any, part: Sequence[TimelineStep]) -> None:
    """Neighbouring steps differ in colour."""
    colours = ("#3b6ea5", "#e08a3c", "#5a9e6f")
    start = min((span[0] for step in part for span in step.spans.values()), default=0)
    for lane, kind in enumerate(reversed(DRAWN)):
        for step in part:
            if (span := step.spans.get(kind)) is not None:
                axis.broken_barh([((span[0] - start) / 1e3, max(span[1] - span[0], 500) / 1e3)],
                                 (lane + 0.1, 0.8), color=colours[step.key[1] % 3])
    for hole in bubbles(part):
        axis.axvspan((hole.begin - start) / 1e3, (hole.end - start) / 1e3, color="#b23b3b",
                     alpha=0.25, linewidth=0)
    axis.set_yticks([lane + 0.5 for lane in range(len(DRAWN))],
                    [KINDS[kind] for kind in reversed(DRAWN)])
    axis.set_xlabel("us; red: the device idles")
