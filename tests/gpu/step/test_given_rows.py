"""Prompts given as embeddings through scheduler and runner: the tokens of the same prompt by ids,
and those of transformers' `inputs_embeds`, however prompts are cut, cached and preempted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_graphs import with_segments
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import CPU, load, write_checkpoint
from helpers_ranks import run_ranks, whole
from helpers_speculation import make_runner
from helpers_worker import Output, Ring
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig
from actorium.actors.messages import PromptEmbeds, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.actors.prompt_embeds import checked, of_array
from actorium.actors.runtime.beat_gauges import eager_key
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.step.given_rows import check_prompt_embeds

GREEDY = ResolvedParams(max_tokens=8, temperature=0)
IDS = [[(11 * i + 5) % 199 for i in range(30)], [(7 * i + 3) % 199 for i in range(41)], [9, 8, 7]]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "granite": ("GraniteForCausalLM", {
        "attention_multiplier": 0.1, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0}),
    "bloom": ("BloomForCausalLM", {}),
    "hybrid": (DENSE, {}),
}


class Served(NamedTuple):
    """A checkpoint as transformers has it, and as we have."""

    oracle: Any
    model: Decoder
    path: Path

    def ring(self, drafts: int = 0, pages: int = 400, **ring: Any) -> Ring:
        return Ring(make_runner(self.model, drafts, pages=pages, checkpoints=4), **ring)

    def table_rows(self, ids: list[int]) -> Tensor:
        """f32[len(ids), hidden]: what transformers makes of token ids."""
        with torch.no_grad():
            found: Tensor = self.oracle.get_input_embeddings()(torch.tensor(ids))
        return found

    def random_rows(self, tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, self.model.shape.hidden, generator=generator) * 0.3

    def want(self, rows: Tensor, new: int = 8) -> list[int]:
        """Greedy tokens of transformers' `generate`."""
        found: list[int] = self.oracle.generate(
            inputs_embeds=rows[None], attention_mask=torch.ones(1, len(rows)), do_sample=False,
            max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0)[0].tolist()
        return found


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    @functools.cache
    def cached(kind: str) -> Served:
        path = tmp_path_factory.mktemp(kind)
        architecture, options = KINDS[kind]
        write = write_hybrid if kind == "hybrid" else write_checkpoint
        oracle = write(path, architecture, **options)
        return Served(oracle, load(path), path)

    return cached


@pytest.fixture
def served(request: pytest.FixtureRequest, make: Callable[[str], Served]) -> Served:
    return make(getattr(request, "param", "llama"))


def given(rows: Tensor) -> PromptEmbeds:
    return checked(of_array(rows), rows.shape[1])


def ask(ring: Ring, *prompts: Tensor, params: ResolvedParams = GREEDY) -> list[Output]:
    before = len(ring.outputs)
    for rows in prompts:
        ring.submit([0] * len(rows), params, embeds=given(rows))
    return ring.run()[before:]


@pytest.mark.parametrize("served", KINDS, indirect=True)
def test_rows_of_the_table_are_the_prompt_by_ids(served: Served) -> None:
    by_ids = served.ring(budget=24)
    for ids in IDS:
        by_ids.submit(ids, GREEDY)
    found = ask(served.ring(budget=24), *map(served.table_rows, IDS))
    assert [one.tokens for one in found] == [one.tokens for one in by_ids.run()]


@pytest.mark.parametrize("served", KINDS, indirect=True)
@pytest.mark.parametrize("budget", [7, 512])
def test_rows_of_no_table_are_as_in_transformers(served: Served, budget: int) -> None:
    """In chunks of any size, and beside a prompt by ids."""
    ring, rows = served.ring(budget=budget), [served.random_rows(9 + 11 * n, n) for n in range(3)]
    ring.submit(IDS[0], GREEDY)
    _, *found = ask(ring, *rows)
    assert [one.tokens for one in found] == [served.want(own) for own in rows]


def test_prefixes_are_shared_by_rows(served: Served) -> None:
    """Pages of 8 tokens: of the same rows all are found, of others those before they differ; by
    ids, even as many zeros, none."""
    ring, rows = served.ring(), served.random_rows(41, 1)
    other = torch.cat((rows[:20], served.random_rows(21, 2)))
    by_type = rows.half().float()
    first, again, branched, rounded = [ask(ring, own)[0]
                                       for own in (rows, rows, other, by_type)]
    assert [one.cached for one in (first, again, branched, rounded)] == [0, 40, 16, 0]
    assert again.tokens == first.tokens == served.want(rows)
    assert branched.tokens == served.want(other)
    ring.submit([0] * 41, GREEDY)
    assert ring.run()[-1].cached == 0


def test_what_was_emitted_is_found_behind_rows(served: Served) -> None:
    """A conversation that goes on by embeddings: a page with rows and emitted tokens is shared by
    nobody else, and rows of those tokens are a prompt of their own."""
    ring, rows = served.ring(), served.random_rows(12, 3)
    out, = ask(ring, rows)
    more = torch.cat((rows, served.table_rows(out.tokens)))
    on, = ask(ring, more)
    assert on.cached == 8 and on.tokens == served.want(more)


@pytest.mark.parametrize("served", ["llama", "hybrid"], indirect=True)
def test_preemption_and_a_new_worker_change_nothing(served: Served) -> None:
    rows = [served.random_rows(20 + n, n) for n in range(6)]
    want = [served.want(own) for own in rows]
    ring = served.ring(budget=16, force_preempt_every=3)
    assert [one.tokens for one in ask(ring, *rows)] == want
    assert ring.preemptions > 3
    ring = served.ring(budget=16)
    for own in rows:
        ring.submit([0] * len(own), GREEDY, embeds=given(own))
    for _ in range(5):
        ring.step()
    ring.lose_worker()
    assert [one.tokens for one in ring.run()] == want


def test_the_rows_of_unfinished_requests_are_bounded(served: Served,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended is retained without its rows."""
    rows = served.random_rows(20, 1)
    size = len(given(rows).data)
    monkeypatch.setattr("actorium.actors.scheduler.request_lifecycle.MAX_HELD_EMBEDS", 2 * size)
    ring, ended = served.ring(), list[Any]()
    monkeypatch.setattr(ring.core.requests.metrics, "request_ended", ended.append)
    found = ask(ring, rows, rows, rows)
    assert [one.error for one in found[:2]] == [None, None]
    assert "more than" in str(found[2].error)
    assert [one.error for one in ask(ring, rows, rows)] == [None, None]
    assert [own.submit.embeds for own in ended] == [None] * 4


def test_rows_are_kept_until_they_are_computed(served: Served) -> None:
    ring, rows = served.ring(budget=8), served.random_rows(20, 1)
    ring.submit([0] * 20, GREEDY, embeds=given(rows))
    held = []
    while ring.step():
        held.append(len(ring.runner.tables.given))
    assert held[:4] == [1, 1, 0, 0] and sum(held) == 2


def test_a_plan_is_one_message(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are admitted together as far as their rows fit: here three."""
    rows = [served.random_rows(20, n) for n in range(8)]
    size = 2 * 3 * len(given(rows[0]).data)
    monkeypatch.setattr("actorium.actors.scheduler.planner.MAX_MESSAGE_BYTES", size)
    ring, plans = served.ring(), list[StepPlan]()
    run = ring.runner.run
    monkeypatch.setattr(ring.runner, "run", lambda plan: (plans.append(plan), run(plan))[1])
    assert [one.tokens for one in ask(ring, *rows)] == [served.want(own) for own in rows]
    assert [len(plan.admit) for plan in plans if plan.admit] == [3, 3, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_halves(served: Served, dtype: torch.dtype) -> None:
    rows = served.random_rows(17, 5).to(dtype)
    out, = ask(served.ring(), rows)
    assert out.tokens == served.want(rows.float())


def test_penalties_count_no_token_of_the_prompt(served: Served) -> None:
    """As in transformers, where a prompt of `inputs_embeds` has no ids."""
    rows, penalty = served.random_rows(30, 4), 1.8
    params = ResolvedParams(max_tokens=12, temperature=0, repetition_penalty=penalty)
    out, = ask(served.ring(), rows, params=params)
    tokens: list[int] = []
    for _ in range(12):
        inputs = torch.cat((rows, served.table_rows(tokens))) if tokens else rows
        with torch.no_grad():
            logits = served.oracle(inputs_embeds=inputs[None]).logits[0, -1]
        for token in set(tokens):
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        tokens.append(int(logits.argmax()))
    assert out.tokens == tokens
    ring = served.ring(budget=8)
    ring.submit([0] * 30, params, embeds=given(rows))
    ring.step()
    assert not ring.runner.tables.counts[1:].any()


def test_drafts_change_nothing(served: Served) -> None:
    """Of a draft model, which sees the prompt's ids alone."""
    rows = served.random_rows(25, 6)
    ring = Ring(make_runner(served.model, 3, draft=served.model), speculative="draft:3,fixed",
                budget=16)
    out, = ask(ring, rows)
    assert out.tokens == served.want(rows)
    assert ring.core.health().gauges["spec_decode_num_draft_tokens"] > 3


def test_choices_share_the_prompt(served: Served) -> None:
    rows, ring = served.random_rows(33, 7), served.ring()
    ring.submit([0] * 33, GREEDY, n=3, embeds=given(rows))
    assert [one.tokens for one in ring.run()] == [served.want(rows)] * 3


def test_steps_with_rows_pass_captured_segments_by(served: Served) -> None:
    ring, rows = served.ring(), served.random_rows(20, 8)
    with_segments(ring.runner, [4, 8, 24, 32])
    ring.submit(IDS[0], GREEDY)
    ring.run()
    captured = ring.runner.served["piecewise_graph"]
    assert captured >= 8
    out, = ask(ring, rows)
    assert out.tokens == served.want(rows)
    assert ring.runner.served["piecewise_graph"] == captured + 7, "its decodes"
    assert ring.runner.served[eager_key("prompt_embeds")] == 1


def test_two_ranks(served: Served, tmp_path: Path) -> None:
    rows, plans = served.random_rows(20, 9), list[StepPlan]()
    ring = served.ring(budget=8)
    ring.runner.run = lambda plan, run=ring.runner.run: (  # type: ignore[method-assign]
        plans.append(plan), run(plan))[1]
    out, = ask(ring, rows)

    def rank(group: RankGroup) -> list[bytes]:
        config = Config(device=DeviceConfig(tensor_parallel_size=2))
        model = load_model(served.path, config, CPU, lambda *_: None, group)
        runner = make_runner(model, 0, checkpoints=4)
        return [runner.run(plan).tokens for plan in plans]

    first, second = whole(run_ranks(tmp_path, 2, rank))
    assert first == second and b"".join(first) == np.array(out.tokens, np.int32).tobytes()


def test_models_that_read_ids_in_every_layer_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "Gemma3nForCausalLM", num_hidden_layers=4, num_kv_shared_layers=0,
                     vocab_size_per_layer_input=199, hidden_size_per_layer_input=8,
                     laurel_rank=4, altup_num_inputs=2, sliding_window=8,
                     layer_types=["sliding_attention", "full_attention"] * 2)
    config = Config(model=ModelConfig(enable_prompt_embeds=True))
    shape = read_shape(tmp_path, config)
    check_prompt_embeds(Config(), shape)
    with pytest.raises(BadConfig, match="enable_prompt_embeds: every layer of Gemma3n"):
        check_prompt_embeds(config, shape)
