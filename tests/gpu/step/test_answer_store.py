"""Drafts of earlier answers in a ring: whose answers they are made of, and until when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers_drafting import follow_tokens
from helpers_models import load, write_checkpoint
from helpers_speculation import make_runner
from helpers_worker import Ring

from actorium.actors.config.tree import Config, SpeculationConfig
from actorium.actors.errors import BadConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.gpu.step.text_proposer import TextProposer, text_proposers
from actorium.gpu.worker.device import draft_methods
from actorium.gpu.worker.measure import held_bytes

MOST, PROMPT, TOKENS = 4, [*range(40, 75)], 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, seed=5)
    follow_tokens(path)
    return load(path)


def runner_of(model: Any, nbytes: int = 1 << 20) -> ModelRunner:
    runner = make_runner(model, MOST)
    runner.tables.keep_history()
    runner.proposers = text_proposers(SpeculationConfig(
        speculative=f"suffix:{MOST},fixed", suffix_global_bytes=nbytes), runner.tables)
    return runner


class Asking:
    """Answers, each drawn with its own seed, and how many of its drafts were right."""

    def __init__(self, runner: ModelRunner, **more: Any) -> None:
        self.ring = Ring(runner, speculative=f"suffix:{MOST},fixed", **more)

    def ask(self, seed: int = 1, prompt: list[int] = PROMPT, **more: Any) -> tuple[list[int], int]:
        before = self._accepted()
        self.ring.submit(prompt, ResolvedParams(max_tokens=TOKENS, temperature=1.0), seed, **more)
        (out,) = self.ring.run()[-1:]
        return out.tokens, self._accepted() - before

    def _accepted(self) -> int:
        return int(self.ring.core.health().gauges["spec_decode_num_accepted_tokens"])


OTHERS = [{"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}, {"cache_salt": "a"}]


def test_an_answer_drafts_for_the_same_owner_alone(model: Any) -> None:
    """The same request of somebody else has the drafts of one that comes first."""
    asking = Asking(runner_of(model))
    tokens, alone = asking.ask(tenant="a")
    again, shared = asking.ask(tenant="a")
    assert again == tokens and shared >= TOKENS // 2 > alone
    for other in OTHERS:
        assert asking.ask(**other) == (tokens, alone), other
    for other in [{"tenant": "a"}, *OTHERS]:
        assert asking.ask(**other) == (tokens, shared), other
    assert Asking(runner_of(model, 0)).ask() == (tokens, alone)


def test_a_flush_forgets(model: Any) -> None:
    asking = Asking(runner_of(model))
    alone, shared = asking.ask(), asking.ask()
    asking.ring.core.state.flush_cache()
    assert asking.ask() == alone != shared == asking.ask()


def test_other_weights_forget(model: Any) -> None:
    asking = Asking(runner_of(model))
    alone = asking.ask()
    asking.ring.core.state.change_weights(1, "other")
    assert asking.ask() == alone != asking.ask()


@pytest.mark.parametrize("way", [{"force_preempt_every": 3}, {"budget": 24}, {"overlap": False}])
def test_what_is_kept_is_what_was_answered(model: Any, way: dict[str, int]) -> None:
    """By its owner, whoever had the slot before, also of those that are preempted within their
    prompts."""
    runner = runner_of(model)
    (own,) = runner.proposers.values()
    assert isinstance(own, TextProposer) and own.earlier is not None
    ring, prompts = Asking(runner, **way).ring, list[list[int]]()
    owners = ring.core.state.answer_owners
    assert owners is not None
    for i in range(24):
        prompts.append([(50 * i + j) % 190 for j in range(5 + 3 * i)])
        ring.submit(prompts[i], ResolvedParams(max_tokens=5 + i, temperature=1.0), i,
                    tenant=f"t{i % 8}")
    wholes = dict[int, list[list[int]]]()
    for i, (prompt, out) in enumerate(zip(prompts, ring.run(), strict=True)):
        wholes.setdefault(owners.number(f"t{i % 8}"), []).append(prompt + out.tokens)
    answers = own.earlier._answers
    ends = np.flatnonzero(answers.text[:answers.end] == -1)
    parts = np.split(answers.text[:answers.end], ends + 1)[:-1]
    assert len(parts) >= 20
    for part, end in zip(parts, ends.tolist(), strict=True):
        text = part[:-1].tolist()
        assert any(whole[at:at + len(text)] == text for whole in wholes[answers.owner[end - 1]]
                   for at in range(len(whole))), text


def test_the_bytes_are_told(model: Any) -> None:
    """And are no more than were asked for."""
    assert 0.9 * (1 << 20) < held_bytes(runner_of(model))["earlier_answers"] <= 1 << 20
    assert "earlier_answers" not in held_bytes(runner_of(model, 0))


def test_it_is_refused_on_a_device(model: Any) -> None:
    config = Config(speculation=SpeculationConfig(
        speculative=f"suffix:{MOST}", suffix_global_bytes=1 << 20))
    assert draft_methods(config, runner_of(model)) == {"suffix": MOST}
    with pytest.raises(BadConfig, match="suffix_global_bytes: .* on a cpu alone"):
        draft_methods(config, make_runner(model, MOST, arrays=DeviceArrays))
