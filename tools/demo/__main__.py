"""What `make demo` shows: a chat answer streaming, a task answered right, where the time goes, and
that nothing is left behind. Exit code 1 when one of these fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.config import sources as settings
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.cli.engines import own_engine
from actorium.tools.cli.start_up import StartUp, process_start

if TYPE_CHECKING:
    from actorium.actors.client.client import Client

CHAT = "Tell me a story about a fox."
GONE_SECONDS = 5.0
SET_UP_SECONDS = 1.0
"""What `make` takes longer than when there was something to set up."""


class Stopwatch:
    """Moments since the command was typed, in seconds."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.marks: list[tuple[str, float]] = []

    def mark(self, what: str, at: float | None = None) -> None:
        """`what` has just ended (or ended `at`, a `time.time()`)."""
        self.marks.append((what, (time.time() if at is None else at) - self.started))

    def table(self) -> str:
        """Each phase, how long it took, and when it was over."""
        lines, before = [f"{'phase':<34} {'took':>8} {'until':>8}"], 0.0
        for what, until in self.marks:
            lines.append(f"{what:<34} {until - before:>6.2f} s {until:>6.2f} s")
            before = until
        return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the demo."""
    flags = argparse.ArgumentParser("demo", description=__doc__)
    flags.add_argument("--started", type=float, help="time.time() when the command was typed")
    flags.add_argument("--ready", type=float, help="time.time() when the set-up was done")
    flags.add_argument("--json", help="file for the times")
    given = flags.parse_args(argv)
    clock = Stopwatch(given.started or process_start())
    if given.ready:
        clock.mark("make (and set-up, the first time)", given.ready)
    clock.mark("python and imports")
    start_up = StartUp(settings.resolve({}), quiet=True)
    with own_engine(start_up.config, start_up) as engine:
        clock.mark("five actors start, load, are ready")
        pids = [engine.pid, *(actor.pid for actor in engine.status.actors)] if engine.status else []
        run_dir = engine_dir(engine.name, engine.config.runtime.run_dir)
        print(f"you> {CHAT}\ndemo> ", end="", flush=True)
        _say(engine.client, CHAT, clock)
        right = _task(engine.client)
        clock.mark("rest of the chat, and a task")
    clock.mark("drain and stop")
    _report(clock, start_up)
    if given.json:
        _write(given.json, clock, start_up)
    left = _left([pid for pid in pids if pid], run_dir)
    print("nothing left behind" if not left else f"LEFT BEHIND: {', '.join(left)}")
    return 0 if right and not left else 1


def _say(client: Client, text: str, clock: Stopwatch) -> None:
    from actorium.actors.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=120)
    first = True
    for delta in client.chat([{"role": "user", "content": text}], params, stream=True):
        if first and delta.token_ids:
            clock.mark("request to first token")
            first = False
        print(delta.text, end="", flush=True)
    print("\n")


def _task(client: Client) -> bool:
    """Ask a held-out item whose answer can be checked."""
    from actorium.actors.params import SamplingParams
    from actorium.tools.demo.demo_tasks import held_out, score

    item = held_out("add", 1)[0]
    done: Any = client.chat([{"role": "user", "content": item.prompt}],
                            SamplingParams(temperature=0.0, max_tokens=32))
    right = score(item, done.text)
    print(f"you> {item.prompt}\ndemo> {done.text.strip()}   "
          f"[{'right' if right else f'WRONG: {item.answer} was expected'}]\n")
    return right


def _report(clock: Stopwatch, start_up: StartUp) -> None:
    print(clock.table())
    for role, seconds in sorted(start_up.ready_at.items(), key=lambda entry: entry[1]):
        phases = ", ".join(f"{doing} {took:.2f}" for doing, took in start_up.phases(role))
        at = start_up.began + seconds - clock.started
        print(f"  {role:<12} ready at {at:5.2f} s  ({phases})")
    first = dict(clock.marks).get("request to first token")
    made = clock.marks[0][1] if clock.marks[0][0].startswith("make") else 0.0
    if first is not None and made > SET_UP_SECONDS:
        print(f"first token {first - made:.2f} s after a set-up of {made:.0f} s")
    elif first is not None:
        print(f"first token {first:.2f} s after the command")


def _write(path: str, clock: Stopwatch, start_up: StartUp) -> None:
    import json

    roles = {role: {"ready_s": seconds + start_up.began - clock.started,
                    "phases_s": dict(start_up.phases(role))}
             for role, seconds in start_up.ready_at.items()}
    Path(path).write_text(json.dumps({"until_s": dict(clock.marks), "actors": roles}, indent=2))


def _left(pids: list[int], run_dir: Path) -> list[str]:
    """Processes and files that should be gone."""
    until = time.monotonic() + GONE_SECONDS
    while True:
        left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
        left += [str(run_dir)] if run_dir.exists() else []
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
