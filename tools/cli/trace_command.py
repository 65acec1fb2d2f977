"""`actorium trace`: the steps of a run on one timeline."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.step_events import BadEvents
from actorium.tools.bench import timeline as trace
from actorium.tools.cli.command_line import parse

ABOUT = """Read what an engine that was started with --trace DIR has written there, and tell when
the device idled, and why."""


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


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    words = ["--dir", *argv] if argv and not argv[0].startswith("-") else argv
    options = parse("actorium trace DIR", words, TraceOptions, ABOUT, model=False).options
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
