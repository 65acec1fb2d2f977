"""Measures an engine's step model: few loads, of which the scheduler's own counters tell how many
steps they took and how long, and a fit."""

from __future__ import annotations

import random
import statistics
from time import sleep
from typing import Any

from actorium.actors.client.client import Client
from actorium.actors.errors import BadModel
from actorium.actors.params import SamplingParams
from actorium.tools.bench.datasets.sample import TokenVocabulary
from actorium.tools.simulate.step_model import StepSeconds, StepSums, fit_step_model

PROMPTS = ((64, 12), (256, 8), (1024, 4))
"""(tokens of a prompt, how many, one after the other)"""
DECODES = ((1, 32), (1, 768), (4, 32), (8, 256), (16, 32), (16, 256))
"""(sequences at once, tokens of each prompt)"""
OUTPUT = 48
"""Tokens that each of these decodes."""
SHORT = 16
"""Tokens of the prompts that come before all others."""


class StepCalibration:
    """The loads, through a client of an engine that does nothing else."""

    def __init__(self, client: Client, settle: float) -> None:
        """settle: seconds after which the counters tell all. Raises `BadModel` where the
        context is too short."""
        info = client.server_info()
        self._client, self._settle = client, settle
        self._vocabulary, self._chance = TokenVocabulary(info["vocab_size"]), random.Random(1)
        self._longest = int(info["max_model_len"]) - OUTPUT
        if self._longest < SHORT:
            raise BadModel("--measure: the model's context is too short", "measure")

    def measure(self, about: str, rounds: int = 3) -> tuple[StepSeconds, float]:
        """The model, without what lies beside steps (`link_delays`), and the mean relative error
        with which it gives the loads' own times."""
        self._ask(4, SHORT, 8)  # what is made once is made now
        sums: list[StepSums] = []
        for _ in range(rounds):
            sums += [self._counted(1, min(length, self._longest), 1, count)
                     for length, count in PROMPTS]
            sums += [self._counted(number, min(length, self._longest), OUTPUT)
                     for number, length in DECODES]
        model = fit_step_model(sums, about)
        return model, fit_error(model, sums)

    def _counted(self, number: int, length: int, output: int, times: int = 1) -> StepSums:
        """What so many requests at once did, so many times, and how long it took."""
        before = self._counters()
        for _ in range(times):
            self._ask(number, length, output)
        done = {name: value - before[name] for name, value in self._counters().items()}
        decoded = times * number * (output - 1)
        context = times * number * sum(length + i for i in range(1, output))
        return StepSums(int(done["steps"]), times * number * length, decoded, context,
                        times * number * length**2 / 2, done["busy_us"] / 1e6)

    def _ask(self, number: int, length: int, output: int) -> None:
        prompts: list[Any] = [self._vocabulary.draw(self._chance, length) for _ in range(number)]
        self._client.generate(prompts, SamplingParams(max_tokens=output, ignore_eos=True))

    def _counters(self) -> dict[str, float]:
        sleep(self._settle)
        actors = self._client.status().actors
        gauges = next(actor.gauges for actor in actors if actor.role == "scheduler")
        return {name: gauges[name] for name in ("steps", "busy_us")}


def fit_error(model: StepSeconds, sums: list[StepSums]) -> float:
    """Mean relative error of the model for these."""
    return statistics.fmean(abs(
        (model.base * each.steps + model.prompt * each.prompt + model.sequence * each.sequences
         + model.context * each.context + model.pair * each.pairs) / each.seconds - 1)
        for each in sums)
