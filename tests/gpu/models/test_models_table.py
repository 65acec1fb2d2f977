"""What is proven of each model class: the cells of the table in docs/models.md (`make parity`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers_adapters import (
    UNSERVED,
    AdapterDriver,
    check_adapted,
    open_with_adapters,
    toy_adapter,
)
from helpers_models import assert_greedy, load
from helpers_quantised import told_of
from helpers_ranks import GREEDY, asked, opened_config, run_ranks, serve, whole
from helpers_toys import write_toy
from helpers_worker import Ring
from msgspec.structs import replace

from actorium.actors.errors import BadConfig
from actorium.actors.models.encoders import ENCODERS, encoder_family
from actorium.gpu.families.architectures import ARCHITECTURES
from actorium.gpu.parallel.rank_group import LoneRank
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import open_device
from actorium.tools.models_table import COLUMNS, END, PAGE, names_in

BOUNDS = {"fp8": 0.4, "int8": 0.1, "int4": 0.75}
"""Of what another prompt's log-probabilities are off, by which a toy's may be. Weights this random
lose more than trained ones; what codes must stand for is held to 1e-4 by test_online_grouped.py."""
Cell = str
"""What the table says."""


def tokens(path: Path, architecture: str) -> Cell:
    """Greedy tokens of transformers; a prompt that is part of another finds its pages."""
    oracle = write_toy(path, architecture)
    served = serve(opened_config(path), LoneRank(), speculative="off")
    for prompt, out in zip(asked(), served.outputs, strict=False):
        assert_greedy(oracle, prompt, out.tokens, GREEDY.max_tokens)
    assert served.outputs[3].cached > 0
    return "yes"


def preempted(path: Path, architecture: str) -> Cell:
    """Every third step somebody gives up pages, and nobody's tokens change."""
    write_toy(path, architecture)
    plain = serve(opened_config(path), LoneRank(), speculative="off")
    other = serve(opened_config(path), LoneRank(), speculative="off", force_preempt_every=3)
    assert other.preemptions > 2
    assert [out.tokens for out in other.outputs] == [out.tokens for out in plain.outputs]
    return "yes"


def ranks(path: Path, architecture: str) -> Cell:
    """Two ranks sample what the model alone does."""
    write_toy(path, architecture)
    config = opened_config(path)
    alone = serve(config, LoneRank())
    one, other = whole(run_ranks(path.parent / "group", 2, lambda group: serve(config, group)))
    assert str(one.outputs) == str(other.outputs)
    assert [out.tokens for out in one.outputs] == [out.tokens for out in alone.outputs]
    return "yes"


def exact(path: Path, architecture: str) -> Cell:
    """In bfloat16 on a CPU, by C's kernels: alone and together the same bits."""
    write_toy(path, architecture, torch.bfloat16)
    config = opened_config(path, dtype="bfloat16")
    config = replace(config, device=replace(config.device, exact="on"))
    try:
        runner = open_device(config, 1, lambda *_: None, {}, LoneRank()).runner
    except BadConfig as error:
        return f"no: {str(error).partition(' not exact here: ')[2].partition(' (--')[0] or error}"
    alone = []
    for prompt in asked()[:3]:
        alone += bits_of(runner, [prompt])
    assert bits_of(runner, asked()[:3]) == alone
    return "yes"


def program(path: Path, architecture: str) -> Cell:
    """In bfloat16 on a CPU: decode steps are one call of C each, with the bits of steps that are
    run operation by operation."""
    write_toy(path, architecture, torch.bfloat16)
    opened = open_device(opened_config(path, dtype="bfloat16"), 1, lambda *_: None, {}, LoneRank())
    if opened.runner.segments is None:
        return f"no: {opened.info.no_graphs.partition(': ')[2]}"
    captured = bits_of(opened.runner, asked()[:3])
    assert opened.runner.served["program"] > 3  # of 5 steps of decodes alone
    opened.runner.segments = None
    assert bits_of(opened.runner, asked()[:3]) == captured
    return "yes"


def bits_of(runner: ModelRunner, prompts: list[list[int]]) -> list[tuple[list[int], bytes]]:
    """Tokens and log-probabilities of the prompts, served together."""
    runner.reset()
    ring = Ring(runner, budget=48)
    for prompt in prompts:
        ring.submit(prompt, GREEDY)
    return [(out.tokens, b"".join(part.chosen + part.top_logprobs for part in out.logprobs))
            for out in ring.run()]


def quantised(bits: str, path: Path, architecture: str) -> Cell:
    """Weights are made in so many bits when the checkpoint is read: log-probabilities stay near."""
    write_toy(path, architecture)
    try:
        model = load(path, quantization=bits)
    except BadConfig as error:
        return f"no: {error}"
    want = told_of(load(path))
    off, chance = ((got - want).abs().mean() for got in (told_of(model), want.roll(1)))
    assert 0 < off < BOUNDS[bits] * chance
    return "yes"


def adapted(path: Path, architecture: str) -> Cell:
    """A random LoRA adapter of every module that can have one: logits equal those of transformers'
    model with the adapter merged into its weights, beside a sequence without."""
    oracle = write_toy(path, architecture)
    adapter = toy_adapter(oracle, path.parent / "adapter", targets=("",), skip=UNSERVED)
    driver = AdapterDriver(open_with_adapters(path, seqs=2))
    driver.load(1, path.parent / "adapter")
    # Float32 of both is that far from float64 where recurrent layers amplify.
    check_adapted(driver, oracle, adapter, atol=5e-5)
    return "yes"


DECODERS = [name for name in ARCHITECTURES if not encoder_family(name)]
CELLS: dict[str, Callable[[Path, str], Cell]] = {
    "tokens": tokens, "preempted": preempted, "ranks": ranks, "exact": exact,
    "program": program, **{bits: partial(quantised, bits) for bits in BOUNDS},
    "lora": adapted,
}


@pytest.mark.slow
@pytest.mark.parametrize(("column", "architecture"), [
    (column, architecture) for architecture in DECODERS for column in CELLS])
def test_cell(column: str, architecture: str, tmp_path: Path,
              record_property: Callable[[str, object], None]) -> None:
    record_property("cell", CELLS[column](tmp_path / "toy", architecture))


def test_table_names_every_class() -> None:
    assert names_in(PAGE.read_text()) == sorted(DECODERS)
    assert [own for own in COLUMNS if own != "gguf"] == list(CELLS)


def test_page_names_every_encoder() -> None:
    table = PAGE.read_text().partition("<!-- table: encoders -->")[2].partition(END)[0]
    assert set(re.findall(r"`(\w+)Model`", table)) == set(ENCODERS)
