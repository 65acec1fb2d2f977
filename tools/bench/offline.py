"""The works through the real engine: every process, the SDK, token-id prompts. And by turns with
another, where there is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Protocol

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models import model_dir as models
from actorium.actors.params import SamplingParams
from actorium.tools.bench.works import Workload, WorkloadRun, WorkloadRuns, prompts

if TYPE_CHECKING:
    from actorium.actors.client.client import Client

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
    """What is measured."""

    name: str

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        """One run, each prompt completed by `output` tokens. number: which prompts."""


class ClientEngine:
    """The engine behind a client."""

    name = "actorium"

    def __init__(self, client: Client, vocab: int) -> None:
        self._client, self._vocab = client, vocab

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        """See `MeasuredEngine`."""
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
    found: dict[str, list[WorkloadRuns]] = {engine.name: [] for engine in engines}
    for work in works:
        for engine in engines:
            engine.run(work, -1, min(WARM_TOKENS, work.output))
            found[engine.name].append(WorkloadRuns(work.name, [], []))
        for number in range(runs):
            for engine in engines:
                if len(engines) > 1:
                    sleep(settle)
                ran, own = engine.run(work, number, work.output), found[engine.name][-1]
                own.seconds.append(ran.seconds)
                own.tokens = own.tokens or ran.tokens
                say(f"{engine.name} {work.name} run {number + 1}/{runs}: {ran.seconds:.3f} s")
    return found
