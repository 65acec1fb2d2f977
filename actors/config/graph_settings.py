"""The settings of graphs: which sizes of steps are captured, and what a level of optimisation sets.

Numbers of tokens are SGLang's where all are asked for: close together where a step waits for its
launches, farther apart where its products take most of the time. What padding adds to a step is at
most an eighth from 257 to 1,024 tokens and from 2,049 on, and a quarter between.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from actorium.actors.config.tree import DeviceConfig
from actorium.actors.errors import BadConfig

LARGEST, MOST_TOKENS = 32768, 8192
"""Of any size; of one of tokens: a layer of more keeps a device busy for milliseconds."""
TOKEN_LADDER = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
                *range(1280, 4097, 256), *range(4608, MOST_TOKENS + 1, 512))
"""Tokens of the steps that are captured where all are asked for: 58."""
FEW_TOKENS = (16, 32, *range(64, 513, 32))
"""Unless others are asked for. Up to some 200 of them an H100 takes as long to read a weight as to
multiply with it, so padding costs little there; from 257 on it adds at most an eighth. A layer of
an 8B shape in bf16 multiplies for some 0.4 ms at 512 tokens, and Python takes about as long for its
ten launches; beyond that the device is behind. That is arithmetic: `benchmarks/gpucheck` measures
steps of 16 to 512 tokens with segments and without."""
LEVELS = range(4)
"""Of optimisation: 0 nothing, 1 passes, 2 and graphs, 3 and what is measured."""


class SizeSetting(NamedTuple):
    """Which sizes are asked for."""

    sizes: tuple[int, ...] = ()
    """These alone, rising; empty: see `word`."""
    word: str = ""
    """auto, off or all; empty where there are sizes."""


def parse_sizes(text: str, name: str, words: tuple[str, ...], most: int = LARGEST) -> SizeSetting:
    """A setting of sizes: one of the words, or numbers with commas or spaces between them. name:
    the field's, of [device]; most: the largest number. Raises `BadConfig`."""
    if text in words:
        return SizeSetting(word=text)
    numbers = text.replace(",", " ").split()
    if not numbers or not all(n.isdecimal() and 1 <= int(n) <= most for n in numbers):
        raise BadConfig(f"{name}: must be {', '.join(words)}, or numbers between 1 and {most} "
                        f"as 1,2,4,8, got {text!r}", f"device.{name}")
    return SizeSetting(tuple(sorted({int(n) for n in numbers})))


def batch_setting(device: DeviceConfig) -> SizeSetting:
    """Sequences of the decode steps to capture; off with `enforce_eager`. Raises `BadConfig`."""
    setting = parse_sizes(device.graph_batch_sizes, "graph_batch_sizes", ("auto", "off"))
    return _bounded(device, setting, device.graph_max_batch_size)


def token_setting(device: DeviceConfig) -> SizeSetting:
    """Tokens of the steps with prompts to capture; off with `enforce_eager`. auto where only the
    few are to be. Raises `BadConfig`."""
    setting = parse_sizes(device.graph_token_counts, "graph_token_counts", ("auto", "all", "off"),
                        MOST_TOKENS)
    most = device.graph_max_tokens
    if setting.word == "auto" and most is not None:
        setting = SizeSetting(word="all")
    return _bounded(device, setting, most)


def why_no_graphs(device: DeviceConfig) -> str:
    """The flag that keeps decode steps from being captured; empty where none does."""
    if batch_setting(device).word != "off":
        return ""
    if device.enforce_eager:
        return "--enforce-eager"
    if device.graph_max_batch_size == 0:
        return "--graph-max-batch-size 0"
    if device.optimization_level < 2:
        return f"-O{device.optimization_level}"
    return "--graph-batch-sizes off"


def _bounded(device: DeviceConfig, setting: SizeSetting, most: int | None) -> SizeSetting:
    if device.enforce_eager or setting.word == "off" or most == 0:
        return SizeSetting(word="off")
    if setting.sizes and most is not None:
        kept = tuple(size for size in setting.sizes if size <= most)
        return SizeSetting(kept) if kept else SizeSetting(word="off")
    return setting


def level_settings(level: int, given: Set[str]) -> dict[str, str]:
    """What a level sets of the fields of [device] that nobody has given: field -> value.

    A field that is given wins, and so does one that speaks of the same graphs: whoever names sizes
    at level 1 gets graphs of these sizes, and of the other kind none.
    """
    settings: dict[str, str] = {}
    if "passes" not in given:
        settings["passes"] = {0: "none", 1: "all", 2: "all"}.get(level, "auto")
    if level < 2 and "enforce_eager" not in given:
        for field, most in (("graph_batch_sizes", "graph_max_batch_size"),
                            ("graph_token_counts", "graph_max_tokens")):
            if not {field, most} & given:
                settings[field] = "off"
    return settings
