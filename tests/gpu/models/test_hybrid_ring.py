"""Hybrid models under the scheduler: prefixes through checkpoints, chunks, preemption, aborts.

The scheduler and the worker's runner in one process, with every book audited; pages and states are
full of NaN until they are written. Transformers says which tokens and log-probabilities are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_hybrid import DENSE, NEXT, SPARSE, hybrid_runner, write_hybrid
from helpers_models import load, oracle_logits
from helpers_parity import ATOL, tokens
from helpers_worker import Output, Ring
from torch import Tensor

from actorium.actors.params import ResolvedParams

NEW = 32
TAIL = ["full_attention", "linear_attention", "linear_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (DENSE, {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    "dense-other": (DENSE, {"num_hidden_layers": 3, "layer_types": TAIL,
                            "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    "sparse": (SPARSE, {"linear_num_value_heads": 6, "linear_key_head_dim": 12,
                        "linear_value_head_dim": 20}),
    "next": (NEXT, {"linear_conv_kernel_dim": 2, "num_hidden_layers": 6, "layer_types": [
        "linear_attention", "full_attention", *TAIL, "linear_attention"]}),
}


class Case(NamedTuple):
    model: Any
    oracle: Any

    def ring(self, slots: int = 6, checkpoints: int = 6, pages: int = 400, **more: Any) -> Ring:
        return Ring(hybrid_runner(self.model, slots + 1, checkpoints, pages), **more)

    def wanted(self, tokens: list[int]) -> Tensor:
        """f32[len(tokens), vocab]: log-probabilities of what follows each token."""
        return oracle_logits(self.oracle, tokens).log_softmax(-1)

    def check(self, prompt: list[int], out: Output, count: int = NEW) -> None:
        """Greedy tokens, and their log-probabilities, are those of transformers."""
        want = self.wanted(prompt + out.tokens)[len(prompt) - 1:-1]
        assert out.finish == "length" and len(out.tokens) == count
        assert out.tokens == want.argmax(-1).tolist()
        torch.testing.assert_close(chosen(out), want.amax(-1), atol=ATOL, rtol=0)


RARER = ("dense-other", "sparse")
"""Cases of which `make test` has the like: `next` has experts, too."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        architecture, options = CASES[kind]
        path = tmp_path_factory.mktemp("model")
        oracle = write_hybrid(path, architecture, seed=5, **options)
        return Case(load(path), oracle)

    return cached


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name in RARER)) for name in CASES])
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


def turned(values: list[int]) -> list[Any]:
    """Every case with every value: in `make test` each case with one of them, by turns."""
    return [pytest.param(name, value, marks=[pytest.mark.slow] * (
        name in RARER or i % len(values) != j))
        for i, name in enumerate(CASES) for j, value in enumerate(values)]


def greedy(count: int = NEW, **more: Any) -> ResolvedParams:
    return ResolvedParams(max_tokens=count, temperature=0.0, logprobs=0, **more)


def chosen(out: Output) -> Tensor:
    """f32[tokens]: log-probabilities of what was sampled."""
    return torch.from_numpy(np.concatenate(
        [np.frombuffer(part.chosen, np.float32) for part in out.logprobs]))


def cold(case: Case, prompt: list[int]) -> Output:
    """Alone, in a ring of its own."""
    ring = case.ring()
    ring.submit(prompt, greedy())
    return ring.run()[0]


@pytest.mark.parametrize(("case", "chunk"), turned([7, 1, 513, 64]), indirect=["case"])
def test_turns_through_checkpoints(case: Case, chunk: int) -> None:
    """The next turns of a conversation start from the checkpoint of the last, whatever the chunks
    were: the same tokens as from nothing, and log-probabilities within 1e-4."""
    length = 40 if chunk == 1 else 200
    ring = case.ring(budget=chunk)
    ring.submit(tokens(length), greedy())
    (first,) = ring.run()
    assert first.cached == 0
    case.check(tokens(length), first)
    second = tokens(length) + first.tokens + tokens(21, 2)
    branch = tokens(length) + tokens(30, 3)
    for prompt in (second, branch):
        ring.submit(prompt, greedy())
    (_, *turns) = ring.run()
    for prompt, out in zip((second, branch), turns, strict=True):
        assert out.cached == (length - 1) // 16 * 16
        case.check(prompt, out)
        alone = cold(case, prompt)
        assert alone.cached == 0 and alone.tokens == out.tokens
        torch.testing.assert_close(chosen(out), chosen(alone), atol=ATOL, rtol=0)


def test_prompt_logprobs_of_a_cached_prompt(case: Case) -> None:
    """They need every position: nothing is reused, and nothing is disturbed."""
    ring = case.ring(budget=50)
    prompt = tokens(130)
    ring.submit(prompt, greedy(2))
    ring.run()
    ring.submit(prompt, greedy(8, prompt_logprobs=1))
    out = ring.run()[1]
    assert out.cached == 0
    case.check(prompt, out, 8)
    parts = sorted(out.prompt_logprobs, key=lambda part: part.start)
    got = np.concatenate([np.frombuffer(part.chosen, np.float32) for part in parts])
    want = case.wanted(prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(got.copy()), want, atol=ATOL, rtol=0)


@pytest.mark.parametrize(("overlap", "chunk"), [
    (True, 7), *(pytest.param(*rarer, marks=pytest.mark.slow)
                 for rarer in ((False, 64), (True, 64), (False, 7)))])
def test_preemption_resumes_the_same_stream(case: Case, chunk: int, overlap: bool) -> None:
    """Every ninth step somebody gives up slot and state, with plans in flight, and comes back: from
    a checkpoint where there is one."""
    ring = case.ring(slots=3, budget=chunk, overlap=overlap, force_preempt_every=9)
    prompts = [tokens(n, n) for n in (90, 20, 47, 64, 3)]
    for prompt in prompts:
        ring.submit(prompt, greedy())
    outs = ring.run()
    assert ring.preemptions > 5 and ring.most_in_flight == 1 + overlap
    for prompt, out in zip(prompts, outs, strict=True):
        case.check(prompt, out)


def test_pages_run_out(case: Case) -> None:
    """A pool that holds about two of five sequences, and one checkpoint for all of them."""
    ring = case.ring(slots=5, checkpoints=1, pages=17, budget=64)
    prompts = [tokens(48, 9) + tokens(n, n) for n in (30, 12, 25, 40, 5)]
    for prompt in prompts:
        ring.submit(prompt, greedy())
    outs = ring.run()
    assert ring.core.health().gauges["preemptions_memory"] > 0
    for prompt, out in zip(prompts, outs, strict=True):
        case.check(prompt, out)


@pytest.mark.parametrize(("case", "chunk"), turned([513, 7]), indirect=["case"])
def test_aborts_and_slots_used_again(case: Case, chunk: int) -> None:
    """Requests are given up while they wait, extend and decode, with two plans in flight; their
    slots, states and pages go to others at once."""
    ring = case.ring(slots=3, checkpoints=3, pages=60, budget=chunk)
    prompts = [tokens(20 + 23 * (i % 4), i % 3) for i in range(12)]
    for prompt in prompts[:6]:
        ring.submit(prompt, greedy())
    given_up = {2: 3, 5: 8, 1: 20, 9: 26, 7: 40}
    for step in range(1, 60):
        assert ring.step()
        for request in (r for r, at in given_up.items() if at == step):
            ring.cancel(request)
        if step % 4 == 0 and ring.submitted < len(prompts):
            ring.submit(prompts[ring.submitted], greedy())
    outs = ring.run()
    assert ring.submitted == len(outs) == len(prompts)
    assert {i + 1 for i, out in enumerate(outs) if out.finish == "abort"} == set(given_up)
    assert ring.most_in_flight == 2
    for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        if i + 1 not in given_up:
            case.check(prompt, out)
    gauges = ring.core.health().gauges
    assert gauges["held_pages"] == 0 and gauges["cache_hit_tokens"] > 0
    assert 0 < gauges["checkpoints"] <= 3
