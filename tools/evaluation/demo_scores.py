"""The demo tasks' held-out items, by exact match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from actorium.actors.client.requests import Request
from actorium.actors.errors import ActoriumError
from actorium.actors.params import SamplingParams
from actorium.tools.demo.demo_tasks import TASKS, TaskItem, held_out, score

if TYPE_CHECKING:
    from actorium.actors.client.client import Client

MAX_TOKENS = 256


class TaskScore(Struct):
    task: str
    count: int = 0
    right: int = 0
    errors: int = 0
    wrong: list[dict[str, str]] = []
    """The first few wrong answers: prompt, expected, got."""

    @property
    def share(self) -> float:
        return self.right / max(self.count, 1)


class Score(Struct):
    tasks: list[TaskScore]
    seconds: float
    output_tokens: int

    @property
    def share(self) -> float:
        return sum(t.right for t in self.tasks) / max(sum(t.count for t in self.tasks), 1)


def evaluate(client: Client, count: int, params: SamplingParams | None = None,
             say: Callable[[int], None] | None = None) -> Score:
    """Asks `count` held-out items of every task and compares. `say`: called with the number
    done."""
    items = [item for task in TASKS for item in held_out(task, count)]
    asked = params or SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    scores = {task: TaskScore(task, wrong=[]) for task in TASKS}
    began, tokens = perf_counter(), 0
    for done, (index, result) in enumerate(client.run(_requests(items, asked)), 1):
        item = items[index]
        entry = scores[item.task]
        entry.count += 1
        if isinstance(result, ActoriumError):
            entry.errors += 1
            _note(entry, item, f"error: {result.message}")
            continue
        tokens += len(result[0].token_ids)
        right = score(item, result[0].text)
        entry.right += right
        if not right:
            _note(entry, item, result[0].text)
        if say is not None:
            say(done)
    return Score(list(scores.values()), perf_counter() - began, tokens)


def _requests(items: list[TaskItem], params: SamplingParams) -> Iterator[Request]:
    for item in items:
        yield Request(messages=[{"role": "user", "content": item.prompt}], params=params)


def _note(entry: TaskScore, item: TaskItem, got: str) -> None:
    if len(entry.wrong) < 3:
        entry.wrong.append({"prompt": item.prompt, "expected": item.answer, "got": got})


def as_dict(result: Score) -> dict[str, Any]:
    tasks = {t.task: {"count": t.count, "right": t.right, "share": t.share, "errors": t.errors,
                      "wrong": t.wrong} for t in result.tasks}
    return {"share": result.share, "count": sum(t.count for t in result.tasks),
            "seconds": result.seconds, "output_tokens": result.output_tokens, "tasks": tasks}


def score_table(result: Score) -> str:
    lines = [f"{'task':<10} {'right':>6} {'of':>6} {'share':>7}"]
    lines += [f"{t.task:<10} {t.right:>6} {t.count:>6} {100 * t.share:>6.1f}%"
              + (f"  ({t.errors} errors)" if t.errors else "") for t in result.tasks]
    count = sum(t.count for t in result.tasks)
    right = sum(t.right for t in result.tasks)
    lines.append(f"{'all':<10} {right:>6} {count:>6} {100 * result.share:>6.1f}%  "
                 f"{result.output_tokens} tokens in {result.seconds:.1f} s")
    return "\n".join(lines)
