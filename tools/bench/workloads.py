"""The fixed workloads W1, W2 and W3: what they are, how engines run them, and their figures.

`measure` runs them through a real engine (every process, the SDK, prompts of token ids), in turns
with other engines where there are some.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models import model_dir as models
from actorium.actors.params import SamplingParams
from actorium.tools.output import aligned, load_pyplot, save_plot

if TYPE_CHECKING:
    from actorium.actors.client.client import Client


class Workload(Struct, frozen=True):
    """`requests` prompts of `prompt` random tokens, all at once, each completed by `output`."""

    name: str
    requests: int
    prompt: int
    output: int
    figure: str
    """The figure that it is judged by: output_tok_s or input_tok_s."""


WORKLOADS = (
    Workload("W1", 1, 128, 128, "output_tok_s"),
    Workload("W2", 32, 128, 64, "output_tok_s"),
    Workload("W3", 1, 2048, 1, "input_tok_s"),
)


class WorkloadRun(Struct):
    seconds: float
    tokens: list[list[int]]


class WorkloadRuns(Struct):
    """What one engine did of one work: seconds of each run, and the tokens of the first one."""

    work: str
    seconds: list[float]
    tokens: list[list[int]]


def prompts(work: Workload, vocab: int, run: int) -> list[list[int]]:
    """The prompts of a run: fresh ones each time, the same for every engine."""
    rng = random.Random(f"{work.name}-{run}")
    return [[rng.randrange(vocab) for _ in range(work.prompt)] for _ in range(work.requests)]


def workload_figures(work: Workload, seconds: list[float]) -> dict[str, float]:
    """Medians over the runs: latency in seconds, requests and tokens a second."""
    latency = statistics.median(seconds)
    inputs, outputs = work.requests * work.prompt, work.requests * work.output
    return {
        "latency_s": latency,
        "latency_min_s": min(seconds),
        "latency_max_s": max(seconds),
        "requests_s": work.requests / latency,
        "input_tok_s": inputs / latency,
        "output_tok_s": outputs / latency,
        "total_tok_s": (inputs + outputs) / latency,
        "ms_per_token": 1000 * latency / work.output,
    }


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the positions before the first difference, over all requests."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return same / max(total, 1)


def figures_row(engine: str, work: Workload, measured: WorkloadRuns) -> dict[str, Any]:
    return {"engine": engine, "work": work.name, "requests": work.requests,
            "prompt_tokens": work.prompt, "output_tokens": work.output,
            "runs": len(measured.seconds), **workload_figures(work, measured.seconds),
            "seconds": measured.seconds}


def neighbour_ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times as long theirs took: the median over runs next to each other, where the two
    took turns (ours first), so that a machine that changes its speed does so to both."""
    after = [b / a for a, b in zip(ours, theirs, strict=True)]
    before = [b / a for a, b in zip(ours[1:], theirs, strict=False)]
    return statistics.median(after + before)


# --- engines --------------------------------------------------------------------------------------

SHAPES = Path(__file__).parent / "shapes"
WARM_TOKENS = 4
SETTLE = 0.05
"""Seconds between runs of different engines: threads that wait for each other spin for up to 20 ms
before they sleep (libgomp's default, which transformers has)."""


def shape_names() -> list[str]:
    """Shapes that ship with the package."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def shape_dir(shape: str, folder: Path) -> Path:
    """A model directory, under `folder`, that holds the config.json of `shape` alone.

    shape: a shipped name (S06, TINY, ...), a config.json, or a model directory.
    Raises `BadConfig`.
    """
    path = Path(shape)
    if (SHAPES / f"{shape}.json").is_file():
        path = SHAPES / f"{shape}.json"
    elif path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        known = ", ".join(shape_names())
        raise BadConfig(f"--shape: {shape}: neither one of {known} nor a config.json", "shape")
    target = folder / path.stem if path.stem != "config" else folder / "shape"
    target.mkdir()
    shutil.copyfile(path, target / "config.json")
    return target


def vocabulary(config: Config) -> int:
    """Tokens in the model's vocabulary, from its config.json."""
    raw = json.loads((models.resolve(config.model.model) / "config.json").read_text())
    size = raw.get("vocab_size") or raw.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise BadConfig("vocab_size: missing in config.json", "model.model")
    return size


class MeasuredEngine(Protocol):
    name: str

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        """One run, each prompt completed by `output` tokens. number: which prompts."""


class ClientEngine:
    name = "actorium"

    def __init__(self, client: Client, vocab: int) -> None:
        self._client, self._vocab = client, vocab

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        batch = prompts(work, self._vocab, number)
        began = perf_counter()
        done = self._client.generate(batch, params)
        return WorkloadRun(perf_counter() - began,
                           [list(completion.token_ids) for completion in done])


def measure(engines: Sequence[MeasuredEngine], works: Iterable[Workload], runs: int,
            say: Callable[[str], None],
            settle: float = SETTLE) -> dict[str, list[WorkloadRuns]]:
    """Each work once short to warm up, then `runs` times; several engines take turns, so that a
    machine that changes its speed does so to all. By engine, in the order of the works."""
    measured: dict[str, list[WorkloadRuns]] = {engine.name: [] for engine in engines}
    for work in works:
        for engine in engines:
            engine.run(work, -1, min(WARM_TOKENS, work.output))
            measured[engine.name].append(WorkloadRuns(work.name, [], []))
        for number in range(runs):
            for engine in engines:
                if len(engines) > 1:
                    sleep(settle)
                ran, own = engine.run(work, number, work.output), measured[engine.name][-1]
                own.seconds.append(ran.seconds)
                own.tokens = own.tokens or ran.tokens
                say(f"{engine.name} {work.name} run {number + 1}/{runs}: {ran.seconds:.3f} s")
    return measured


# --- table, JSON and plot -------------------------------------------------------------------------

COLUMNS = (
    ("work", "work", "{}"),
    ("engine", "engine", "{}"),
    ("requests", "requests", "{}"),
    ("prompt_tokens", "in", "{}"),
    ("output_tokens", "out", "{}"),
    ("latency_s", "latency s", "{:.3f}"),
    ("ms_per_token", "ms/token", "{:.2f}"),
    ("requests_s", "req/s", "{:.2f}"),
    ("input_tok_s", "input tok/s", "{:,.1f}"),
    ("output_tok_s", "output tok/s", "{:,.1f}"),
    ("total_tok_s", "total tok/s", "{:,.1f}"),
    ("ratio", "x peer", "{:.2f}"),
)
"""(key of a row, heading, format)"""


def add_ratios(rows: list[dict[str, Any]], peer: str) -> None:
    """Give each row of ours, under `ratio`, how many times as fast as the peer it was."""
    theirs = {row["work"]: row for row in rows if row["engine"] == peer}
    for row in rows:
        if row["engine"] != peer and row["work"] in theirs:
            row["ratio"] = neighbour_ratio(row["seconds"], theirs[row["work"]]["seconds"])


def workload_table(rows: list[dict[str, Any]]) -> str:
    columns = [c for c in COLUMNS if any(c[0] in row for row in rows)]
    lines = [[heading for _, heading, _ in columns]]
    lines += [[form.format(row[key]) if key in row else "" for key, _, form in columns]
              for row in sorted(rows, key=lambda row: row["work"])]
    return "\n".join(aligned(lines, range(2, len(columns))))


def workload_plot(path: str, title: str, rows: list[dict[str, Any]],
                  judged: dict[str, str]) -> None:
    """One panel a work: the figure that it is judged by, per engine, with the runs' spread."""
    works = sorted({row["work"] for row in rows})
    figure, axes = load_pyplot().subplots(
        1, len(works), figsize=(3.2 * len(works), 3.4), squeeze=False)
    for axis, work in zip(axes[0], works, strict=True):
        mine = [row for row in rows if row["work"] == work]
        key = judged[work]
        values = [row[key] for row in mine]
        scale = [row[key] * row["latency_s"] for row in mine]
        spread = [[v - s / row["latency_max_s"] for v, s, row in zip(values, scale, mine,
                                                                     strict=True)],
                  [s / row["latency_min_s"] - v for v, s, row in zip(values, scale, mine,
                                                                     strict=True)]]
        bars = axis.bar([row["engine"] for row in mine], values, yerr=spread, capsize=4,
                        color=["#3b6ea5" if row["engine"] == "actorium" else "#b0b0b0"
                               for row in mine])
        axis.bar_label(bars, fmt="{:,.0f}", padding=3)
        axis.set_title(f"{work}: {key.replace('_tok_s', '')} tokens/s", fontsize=10)
        axis.margins(y=0.2)
    figure.suptitle(title, fontsize=11)
    save_plot(figure, path)
