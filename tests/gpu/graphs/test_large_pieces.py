"""Steps of up to 512 tokens in segments, behind long prefixes too, give what steps run operation by
operation give: to the bit, in hidden rows, pages and states, whatever rows of padding hold."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers_graphs import check_freed_pages, model_of_kind, with_segments
from helpers_speculation import make_runner
from torch import Tensor

from actorium.actors.config.tree import Config
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.piecewise_graphs import StaticInputs
from actorium.gpu.plan.graph_memory import segment_sizes
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays

pytestmark = pytest.mark.usefixtures("as_on_a_device")
KINDS = ("llama", "experts", "windows", "hybrid", "deepseek", "mamba")
LENGTH, PAGE, PAGES = 1016, 8, 140
"""Of the longest sequence, of a page; pages of a sequence of that length, and some more."""
LADDER = segment_sizes(Config())
STEPS: tuple[tuple[dict[int, int], tuple[int, ...], int], ...] = (
    ({1: 550}, (), 0),
    ({1: 401, 2: 77}, (), 480),
    ({1: 11, 2: 3, 3: 488}, (), 512),
    ({4: 509}, (1, 2, 3), 512),
    ({3: 200}, (1, 2, 4), 224),
    ({3: 254}, (1, 2, 4), 288),
    ({3: 58}, (1, 2, 4), 64),
)
"""(tokens of each slot's prompt, slots that decode, size that serves the step): a chunk of one is
larger than all sizes, later chunks and prompts are behind long prefixes."""
SERVED = Counter(size for _, _, size in STEPS if size)
PROMPTS = {1: 962, 2: 80, 3: 1000, 4: 509}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return functools.cache(lambda kind: model_of_kind(tmp_path_factory.mktemp(kind), kind, LENGTH))


def test_segments_serve_steps_of_up_to_512_tokens(make: Callable[[str], Any]) -> None:
    assert LADDER[0] == 512 and SERVED.keys() <= set(LADDER)


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind == "mamba")) for kind in KINDS])
def test_a_step_is_the_same_to_the_bit(make: Callable[[str], Any], kind: str,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step whatever segments take in points elsewhere, and when it is filled, the rows of
    padding are rubbish again."""
    want, eager = played(make(kind), [])
    plant(monkeypatch)
    got, runner = played(make(kind), [size for size in LADDER if size in SERVED])
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        assert same(a, b), f"step {number}"
    for name, a, b in kept(eager, runner):
        assert same(a, b), name
    own = {f"piecewise_graph_of_{size}": count for size, count in SERVED.items()}
    assert dict(runner.served) == {"full_graph": 0, "program": 0, "eager": 1, "eager_of_1024": 1,
                                   "eager_for_tokens": 1, "piecewise_graph": 6, **own}
    assert dict(eager.served)["eager_for_off"] == len(STEPS)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = StaticInputs.fill

    def filled(self: StaticInputs, batches: Sequence[Any], size: int) -> None:
        self._numbers.fill_(PAGE * 3 + 1)
        for middle in self._middles.values():
            middle.fill_(torch.nan)
        fill(self, batches, size)
        count = len(batches[0].tokens)
        assert not self._numbers[2:, count:size].any(), "padding is written to the sink"
        self._numbers[:2, count:size] = torch.arange(count, size) % 50
        for middle in self._middles.values():
            middle[count:size] = torch.nan

    monkeypatch.setattr(StaticInputs, "fill", filled)


def played(model: Any, sizes: list[int]) -> tuple[list[Tensor], ModelRunner]:
    """The hidden rows of each step, and who ran it."""
    torch.manual_seed(3)
    runner = make_runner(model, 0, slots=6, pages=4 * PAGES + 1, checkpoints=2,
                         arrays=DeviceArrays)
    if sizes:
        with_segments(runner, sizes)
    rows, plain, rng = [], runner.wanted_rows, np.random.default_rng(7)

    def wanted(*given: Any) -> Tensor:
        rows.append(plain(*given).clone())
        return rows[-1]

    runner.wanted_rows = wanted  # type: ignore[method-assign]
    runner.served.clear()
    seen: set[int] = set()
    for number, (extends, decodes, _) in enumerate(STEPS):
        admits = []
        for slot in extends.keys() - seen:
            pages = np.arange(PAGES, dtype=np.int32) + 1 + (slot - 1) * PAGES
            tokens = rng.integers(2, 99, PROMPTS[slot], dtype=np.int32)
            own = np.concatenate([pages[:LENGTH // PAGE]] * runner.tables.groups)
            admits.append(Admit(slot, tokens.tobytes(), len(tokens), 0, own.tobytes(),
                                ResolvedParams(max_tokens=9, temperature=0.0), slot))
        seen |= extends.keys()
        extend = np.array([*extends.items()], np.int32)
        runner.run(StepPlan(1, number, admit=admits, extend=extend.tobytes(),
                            decode=np.array(decodes, np.int32).tobytes()))
    return rows, runner


def kept(*runners: ModelRunner) -> list[tuple[str, Tensor, Tensor]]:
    """What steps leave, of two runners: pages but for the sink, and states."""
    a, b = ([(f"pages of group {g}, layer {i}", layer[PAGE:])
             for g, pool in enumerate(own.pools) for i, layer in enumerate(pool.layers)]
            + [(f"{name} of layer {i}", getattr(layer, name))
               for i, layer in enumerate(own.states.layers if own.states else [])
               for name in layer._fields] for own in runners)
    return [(name, x, y) for (name, x), (_, y) in zip(a, b, strict=True)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_padding_of_512_is_of_no_sequence_that_was_there_before(make: Callable[[str], Any]) -> None:
    """Freed pages and slots stay, byte for byte."""
    prompts = [[3, 14, 15, 92], [65], list(range(40, 75))]
    segments = check_freed_pages(make("windows"), prompts,
                                 lambda runner: with_segments(runner, [512, 288]))
    assert segments.replays == 18
