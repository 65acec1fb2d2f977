"""The works through the real engine: every process, the SDK, token-id prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from actorium.actors import models
from actorium.actors.config import Config
from actorium.actors.errors import BadConfig
from actorium.actors.params import SamplingParams
from actorium.tools.bench.works import Measured, Work, prompts

if TYPE_CHECKING:
    from actorium.actors.client import Client

SHAPES = Path(__file__).parent / "shapes"
WARM_TOKENS = 4


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


def measure(client: Client, works: Iterable[Work], vocab: int, runs: int,
            say: Callable[[str], None]) -> list[Measured]:
    """Each work once short to warm up, then `runs` times."""
    found: list[Measured] = []
    for work in works:
        _complete(client, prompts(work, vocab, -1), min(WARM_TOKENS, work.output))
        seconds: list[float] = []
        tokens: list[list[int]] = []
        for number in range(runs):
            batch = prompts(work, vocab, number)
            began = perf_counter()
            result = _complete(client, batch, work.output)
            seconds.append(perf_counter() - began)
            tokens = tokens or result
            say(f"actorium {work.name} run {number + 1}/{runs}: {seconds[-1]:.3f} s")
        found.append(Measured(work.name, seconds, tokens))
    return found


def _complete(client: Client, batch: list[list[int]], output: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    done = client.generate(batch, params)
    return [list(completion.token_ids) for completion in done]
