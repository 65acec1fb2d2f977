"""EAGLE-3 heads change no token: whatever the model's layers are, whatever happens to sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_eagle import follow_tokens_by_head, load_with_head, write_eagle
from helpers_kinds import write_kind
from helpers_speculation import Work, make_runner, tokens_of
from helpers_worker import Ring

from actorium.actors.params import ResolvedParams
from actorium.gpu.step.staging import DeviceArrays, HostArrays

PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), list(range(40, 70)), [7] * 17, [150, 20] * 5]
GREEDY = Work(PROMPTS, [ResolvedParams(max_tokens=24, temperature=0.0)] * len(PROMPTS))
SAMPLED = Work(PROMPTS, [
    ResolvedParams(max_tokens=24, temperature=0.7), ResolvedParams(max_tokens=20, temperature=0.0),
    ResolvedParams(max_tokens=24, temperature=0.8, top_k=20, logprobs=2),
    ResolvedParams(max_tokens=24, temperature=0.6, repetition_penalty=1.3),
    ResolvedParams(max_tokens=24, temperature=0.7, eos_ids=tuple(range(20)), min_tokens=5),
    ResolvedParams(max_tokens=500, temperature=0.5)])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Models with heads whose drafts are often right."""
    @functools.cache
    def model_of(kind: str) -> Any:
        path = tmp_path_factory.mktemp(kind)
        write_kind(path / "model", kind)
        write_eagle(path / "head", path / "model", seed=5,
                    eagle_aux_hidden_state_layer_ids=[0, 1, 1])
        follow_tokens_by_head(path / "model", path / "head")
        return load_with_head(path / "model", path / "head")

    return model_of


@pytest.mark.parametrize(("kind", "work", "arrays"), [
    ("attention", GREEDY, DeviceArrays), ("hybrid", SAMPLED, DeviceArrays),
    ("experts", GREEDY, HostArrays), ("windows", SAMPLED, HostArrays),
    ("latent", GREEDY, HostArrays)])
def test_no_token_changes(make: Callable[[str], Any], kind: str, work: Work, arrays: Any) -> None:
    """In chunks, preempted, with prefixes found again and few slots."""
    model = make(kind)
    want = work.plain(model)
    runner = make_runner(model, 3, slots=4, arrays=arrays, checkpoints=4 if kind == "hybrid" else 0)
    ring = work.ring(runner, budget=30, force_preempt_every=9, speculative="eagle3:3,fixed")
    got = ring.run()
    assert tokens_of(got) == tokens_of(want)
    assert ring.preemptions > 0
    assert accepted(ring) > 30


def accepted(ring: Ring) -> float:
    return ring.core.health().gauges["spec_decode_num_accepted_tokens"]


def test_a_prefix_brings_what_the_head_keeps(make: Callable[[str], Any]) -> None:
    """Of a prompt whose pages are in the cache, the first drafts are those of one computed."""
    model, prompt = make("attention"), [*range(30, 65)]
    params = ResolvedParams(max_tokens=1, temperature=0.0)
    found = []
    for before in ([], [prompt]):
        ring = Ring(make_runner(model, 3), speculative="eagle3:3,fixed")
        for own in before:
            ring.submit(own, params)
            ring.run()
        ring.submit([*prompt, 99], ResolvedParams(max_tokens=9, temperature=0.0))
        while not (len(ring.outputs) > len(before) and [*ring.outputs.values()][-1].tokens):
            ring.step()
        found.append(ring.runner.tables.drafts.tokens[1].tolist())
        assert [*ring.outputs.values()][-1].cached == (32 if before else 0)
    assert found[0] == found[1]


def test_a_head_costs_nothing_where_there_is_none(make: Callable[[str], Any], tmp_path: Path
                                                  ) -> None:
    write_kind(tmp_path, "attention")
    model = load_with_head(tmp_path, None)
    assert model.eagle is None and model.shape.eagle is None
    tapped = []
    inner = model.forward

    def forward(batches: Any, *others: Any) -> torch.Tensor:
        out = inner(batches, *others)
        tapped.append(batches[0].tapped)
        return out

    model.forward = forward
    GREEDY.plain(model)
    assert tapped and not any(tapped)
