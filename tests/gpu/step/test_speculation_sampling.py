"""The distribution of what speculation emits, and drafts in an engine's worker."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_deepseek import add_mtp
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint
from helpers_speculation import i4
from helpers_worker import CPU
from numpy.typing import NDArray

from actorium import Engine, SamplingParams
from actorium.actors.config.tree import (
    Config,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.layer_weights import RoutingTape
from actorium.gpu.plan.memory_plan import demand_of, make_plan
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.worker.device import OpenedDevice, open_device

VOCAB, PROMPT = 6, [4, 0, 4]
LOGITS = np.array([[1.0, 0.2, -0.5, 0.7, 0.4, -1.0], [0.1, 0.9, 0.5, -0.8, 0.3, 0.6],
                   [0.3, -0.4, 1.2, 0.2, -0.1, 0.8], [-0.2, 0.6, 0.1, 0.5, 0.9, 0.0],
                   [0.8, 0.3, 0.6, -0.6, 0.2, 0.5], [0.0, 0.4, 0.2, 0.9, -0.7, 1.1]], np.float32)
"""Of what follows on each token."""
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3}, "logit_bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "repetition": {"repetition_penalty": 2.0}, "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 1.5}, "min_tokens": {"eos_ids": (1, 2), "min_tokens": 2},
    "all": {"temperature": 0.9, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "logit_bias": {1: 0.8},
            "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5,
            "eos_ids": (2,), "min_tokens": 1},
}


class Bigrams:
    """A model whose logits depend on the last token alone."""

    drafter, tape = None, RoutingTape()

    def forward(self, batches: Any, pools: Any, recurrent: Any = None) -> torch.Tensor:
        """The tokens of the wanted rows."""
        rows: torch.Tensor = batches[0].tokens[batches[0].logit_rows]
        return rows[:, None]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """f32[R, VOCAB]"""
        return torch.from_numpy(LOGITS)[rows[:, 0]]


def wanted(p: ResolvedParams, done: tuple[int, ...]) -> NDArray[np.float64]:
    """Probabilities of the token after the prompt and `done`, by the definitions."""
    logits = LOGITS[(*PROMPT, *done)[-1]].astype(np.float64)
    seen, out = {*PROMPT, *done}, np.bincount(done, minlength=VOCAB)
    for t in seen:
        logits[t] = logits[t] / p.repetition_penalty if logits[t] > 0 \
            else logits[t] * p.repetition_penalty
    logits -= p.frequency_penalty * out + p.presence_penalty * (out > 0)
    for t, bias in p.logit_bias.items():
        logits[t] += bias
    if len(done) < p.min_tokens:
        logits[list(p.eos_ids)] = -math.inf
    logits /= p.temperature
    if p.top_k:
        logits[logits < np.sort(logits)[-p.top_k]] = -math.inf
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    order = np.argsort(-chances)
    before = np.cumsum(chances[order]) - chances[order]
    keep = np.zeros(VOCAB, bool)
    keep[order[before < p.top_p]] = True
    keep &= chances >= p.min_p * chances.max()
    chances[~keep] = 0
    return chances / chances.sum()


@pytest.mark.parametrize(("kind", "arrays"), [
    pytest.param(kind, arrays, marks=[pytest.mark.slow] * (
        arrays is HostArrays and kind != "all"))
    for kind in KINDS for arrays in (HostArrays, DeviceArrays)])
def test_distribution_of_what_is_emitted(kind: str, arrays: Any) -> None:
    """Triples of tokens, by chi-square; the drafts are what is likeliest, and often right."""
    params, number = ResolvedParams(max_tokens=3, **KINDS[kind]), 4000
    tables = SlotTables(arrays(CPU), number + 1, 2, 16, VOCAB, 32, drafts=2)
    pool = KVPagePool(SimpleNamespace(kv_row=(1, 1), layers=1),  # type: ignore[arg-type]
                      1, 16, torch.float32, CPU)
    runner = ModelRunner(Bigrams(), [pool], tables,  # type: ignore[arg-type]
                         propose=lambda slots, at, k: np.tile(np.array([0, 3], np.int32)[:k],
                                                              (len(slots), 1)))
    slots = range(1, number + 1)
    admits = [Admit(slot, i4(*PROMPT), 3, 0, i4(0), params, slot) for slot in slots]
    got: list[list[int]] = [[] for _ in slots]
    accepted = 0
    for i in range(3):
        step = {"admit": admits, "extend": i4(*((slot, 3) for slot in slots))} if not i else {
            "decode": i4(*slots)}
        result = runner.run(StepPlan(1, i, drafts=2, **step))  # type: ignore[arg-type]
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        for own, count in zip(got, result.counts, strict=True):
            own += [next(tokens) for _ in range(count)]
            accepted += count == 2 and i > 0
    assert accepted > number / 50
    expected: dict[tuple[int, ...], float] = {}
    for done in itertools.product(range(VOCAB), repeat=3):
        at, chance = (), float(number)
        for token in done:
            chance *= wanted(params, at)[token]
            at = (*at, token)
            if token in params.eos_ids:
                break
        expected[at] = chance
    assert chi_square([tuple(own) for own in got], expected) < 4.5


def chi_square(seen: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations the statistic lies above its mean; rare outcomes together."""
    counts = {key: 0 for key in expected}
    for key in seen:
        counts[key] += 1
    assert all(counts[key] == 0 for key, value in expected.items() if value == 0)
    common = [key for key, value in expected.items() if value >= 8]
    rare = [key for key, value in expected.items() if value < 8]
    pairs = [(counts[key], expected[key]) for key in common]
    if sum(expected[key] for key in rare) >= 8:
        pairs.append((sum(counts[key] for key in rare), sum(expected[key] for key in rare)))
    freedom = len(pairs) - 1
    statistic = sum((have - want) ** 2 / want for have, want in pairs)
    return (statistic - freedom) / math.sqrt(2 * freedom)


# --- an engine's worker --------------------------------------------------------------------------

def opened(path: Path, speculative: str, force: str = "") -> tuple[Config, OpenedDevice]:
    config = Config(model=ModelConfig(model=str(path), max_model_len=64),
                    memory=MemoryConfig(kv_cache_bytes=4 << 20),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
                    speculation=SpeculationConfig(speculative=speculative,
                                                  force_acceptance=force))
    return config, open_device(config, 1, lambda *_: None, {})


def test_planned_bytes_are_allocated(tmp_path: Path) -> None:
    add_mtp(tmp_path, write_hybrid(tmp_path, DENSE, 5, mtp_num_hidden_layers=1))
    for speculative, drafts in (("off", 0), ("auto", 2), ("mtp:3", 3)):
        config, own = opened(tmp_path, speculative)
        runner = own.runner
        plan = make_plan(runner.model.shape, demand_of(config), 4 << 20)
        assert own.ready.drafts == plan.demand.drafts == runner.tables.drafts.max_drafts == drafts
        assert [pool.pages for pool in runner.all_pools] == [pool.pages for pool in plan.pools]
        assert runner.states is not None and not runner.tables.sequences
        assert runner.states.bytes + sum(pool.bytes for pool in runner.all_pools) == plan.used
        assert len(runner.draft_pools) == (drafts > 0)
        measured, planned = own.footprint.measured, own.footprint.planned
        assert measured["pages"] == planned["pages"] and measured["states"] == planned["states"]
        assert measured["tables"] == planned["tables"]


def test_what_drafts_by_text_is_planned_and_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    _, own = opened(tmp_path, "suffix:3")
    assert own.ready.drafts == 3 and own.ready.draft_methods == {"suffix": 3}
    history = own.runner.tables.history
    assert history.shape == (5, 64 + 3 + 1)
    assert own.footprint.measured["tables"] == own.footprint.planned["tables"] > history.nbytes


def test_drafts_without_a_drafter_are_refused(tmp_path: Path) -> None:
    plain, promised = tmp_path / "plain", tmp_path / "promised"
    write_checkpoint(plain)
    write_hybrid(promised, DENSE, 5, mtp_num_hidden_layers=1)
    for path in (plain, promised):
        _, own = opened(path, "auto")
        assert own.ready.drafts == 0 and not own.runner.draft_pools
    with pytest.raises(BadConfig, match="speculative: Qwen3ForCausalLM"):
        opened(plain, "mtp:2")
    with pytest.raises(BadModel, match="mtp"):
        opened(promised, "mtp:2")


def test_forced_acceptance_is_configured(tmp_path: Path) -> None:
    add_mtp(tmp_path, write_hybrid(tmp_path, DENSE, 5, mtp_num_hidden_layers=1))
    runner = opened(tmp_path, "mtp:2", "1")[1].runner
    params = ResolvedParams(max_tokens=7, temperature=1.0)
    runner.run(StepPlan(1, 1, admit=[Admit(1, i4(5, 6, 7), 3, 0, i4(1), params, 1)],
                        extend=i4((1, 3)), drafts=2))
    counts = [runner.run(StepPlan(1, 2, decode=i4(1), drafts=2)).counts for _ in range(3)]
    assert counts == [b"\3", b"\3", b"\0"]


@pytest.mark.slow
def test_through_all_processes(tmp_path: Path) -> None:
    """An engine that drafts with its own layer says what one says that does not."""
    add_mtp(tmp_path, write_hybrid(tmp_path, DENSE, 5, mtp_num_hidden_layers=1))
    base = tempfile.mkdtemp(dir="/tmp", prefix="act")
    prompts = [[(7 * i + n) % 199 for i in range(n)] for n in (5, 64, 3, 100)] * 3
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    loose = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=1, frequency_penalty=1)
    said = []
    try:
        for speculative in ("off", "mtp:2", "mtp:3,fixed"):
            with Engine(tmp_path, run_dir=base, skip_tokenizer=True, device="cpu", threads=1,
                        speculative=speculative, max_num_seqs=5, max_model_len=256,
                        max_num_batched_tokens=48, debug_memory=True) as engine:
                got = [c for params in (greedy, loose)
                       for c in engine.client.generate(prompts, params)]
                assert all(len(c.logprobs or ()) in (0, len(c.token_ids)) for c in got)
                said.append([list(c.token_ids) for c in got])
                drafted = sum(c.usage.draft_tokens for c in got)
                assert (drafted > 0) == (speculative != "off")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert said[1] == said[0] and said[2] == said[0]
