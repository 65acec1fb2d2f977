"""Models against transformers: sequences under a driver, every logit and every token compared.

What must hold whatever a model's layers are stands here once; the tests of each family call it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers_hybrid import Held, HybridDriver, hybrid_runner
from helpers_models import generated, oracle_logits
from torch import Tensor

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.gpu.step.states import row_bytes
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.worker.device import OpenedDevice, open_device

NEW, ATOL = 24, 1e-4
SAVES = {48: 1, 160: 2, 192: 4}
"""Checkpoints a donor keeps, by length."""


def tokens(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 199) for _ in range(count)]


def alone(model: Any, chunk: int, prompt: int, new: int = NEW, **pool: Any) -> Held:
    """A sequence by itself, to its end."""
    driver = HybridDriver(hybrid_runner(model, **pool), chunk)
    s = driver.admit(tokens(prompt), prompt + new)
    driver.run()
    return s


@dataclass
class Case:
    """A checkpoint as we serve it and as transformers does."""

    model: Any
    oracle: Any
    path: Path

    def driver(self, chunk: int, **pool: Any) -> HybridDriver:
        """pool: of `hybrid_runner`."""
        return HybridDriver(hybrid_runner(self.model, **pool), chunk)

    def logits(self, ids: list[int]) -> Tensor:
        """f32[len(ids), vocab]: by transformers."""
        return oracle_logits(self.oracle, ids)

    def check(self, *held: Held) -> None:
        """Every logit as transformers has it, and every token its greedy choice."""
        for s in held:
            want = self.logits(s.tokens)
            assert len(s.tokens) == s.goal and s.logits
            for length, logits in s.logits.items():
                torch.testing.assert_close(logits, want[length - 1], atol=ATOL, rtol=0)
                assert s.tokens[length] == int(want[length - 1].argmax())

    def check_against_generate(self) -> None:
        """Transformers' own decode path."""
        s = alone(self.model, 33, 70)
        assert s.tokens[70:] == generated(self.oracle, tokens(70), NEW)

    def check_admissions_in_the_middle(self, chunk: int, later: Sequence[int]) -> None:
        """Sequences come and go; slots, states and pages are used again at once.
        later: lengths of the prompts that come as others end."""
        driver, number = self.driver(chunk, slots=5), 4 + len(later)
        held = [driver.admit(tokens(n, n), n + new) for n, new in ((30, 40), (3, 5), (1, 20))]
        driver.run(9)
        held.append(driver.admit(tokens(65, 5), 85))
        while any(not s.finished for s in driver.running) or len(held) < number:
            driver.run(1)
            for s in [s for s in driver.running if s.finished and s not in driver.over]:
                driver.release(s)
                if len(held) < number:
                    n = later[len(held) - 4]
                    held.append(driver.admit(tokens(n, len(held)), n + 10))
        self.check(*held)

    def check_preemption(self) -> None:
        """A sequence gives up its slot and comes back with all its tokens, beside others."""
        driver = self.driver(50, slots=4)
        a, b = driver.admit(tokens(40), 68), driver.admit(tokens(90, 2), 124)
        driver.run(14)
        driver.release(a)
        c = driver.admit(tokens(30, 3), 50)
        again = driver.admit(a.tokens, a.goal, prompt=40)
        driver.run()
        assert c.slot == a.slot
        self.check(again, b, c)

    def check_a_prefix(self, chunk: int, later: Sequence[tuple[int, int]]) -> list[Held]:
        """Within 1e-4 of the cold run, while the donor decodes on and after it has gone; a model
        with states goes on from checkpoints, at the ends of chunks and between them.
        later: (prompt, tokens of it that are cached) of those who come when the donor is gone, and
        who are returned."""
        saves = SAVES if self.model.shape.recurrent else {}
        driver, prompt = self.driver(chunk, slots=6), tokens(200)
        donor = driver.admit(prompt, 230, saves=saves)
        driver.run(8)
        first = driver.admit(prompt[:170] + tokens(9, 4), 220, donor, 160, saves.get(160, 0))
        driver.run()
        driver.release(donor)
        driver.free_pages = [p for p in driver.free_pages if p not in donor.pages]
        others = [driver.admit(prompt[:n], n + 20, donor, cached, saves.get(cached, 0))
                  for n, cached in later]
        driver.run()
        self.check(donor, first, *others)
        return others

    def check_states_in_bf16(self) -> None:
        """They stay near, and are not those of fp32."""
        s = alone(self.model, 50, 120, 20, state_dtype=torch.bfloat16)
        want = self.logits(s.tokens)
        error = max(float((logits - want[n - 1]).abs().max()) for n, logits in s.logits.items())
        assert 0 < error < 0.05 * float(want.abs().max())

    def opened(self, **memory: Any) -> OpenedDevice:
        """As a worker opens the checkpoint, for 4 sequences."""
        config = Config(model=ModelConfig(model=str(self.path)),
                        memory=MemoryConfig(page_size=16, **memory),
                        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
                        device=DeviceConfig(device="cpu", threads=1))
        return open_device(config, 1, lambda *_: None, {})

    def check_what_the_worker_tells(self) -> None:
        """Of the states of 4 sequences, and 3 checkpoints: padding has none."""
        found = self.opened(max_total_tokens=1600, checkpoints=3)
        shape, states = self.model.shape, found.runner.states
        assert found.ready.recurrent and found.ready.checkpoints == 3
        assert states is not None and [len(states.layers), len(found.runner.pools[0].layers)] == [
            len(shape.recurrent), len(shape.attention_layers) or 1]
        assert states.layers[0].state.shape[0] == 4 + 3
        assert states.bytes == 7 * row_bytes(shape.state, len(shape.recurrent), torch.float32,
                                             TORCH_DTYPES[shape.dtype])
