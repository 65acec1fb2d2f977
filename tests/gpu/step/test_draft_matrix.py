"""Every method of drafts against every kind of layer, of sampling, and of way through the
scheduler: the tokens are those without drafts.

Each batch has a request of every kind of sampling. A new method needs a line in `MAKERS`: how its
runner is made, and for which of the models.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers_deepseek import add_mtp
from helpers_drafting import follow_tokens
from helpers_eagle import with_head
from helpers_hybrid import DENSE, write_hybrid
from helpers_masking import EOS, GRAMMARS, SIZE, vocabulary
from helpers_models import load, write_checkpoint
from helpers_pairs import pairs
from helpers_parity import ATOL
from helpers_speculation import Guess, make_runner
from helpers_worker import Output, Ring

from actorium.actors.config.parsed_values import DRAFTS, parse_speculative
from actorium.actors.config.tree import SpeculationConfig
from actorium.actors.messages import TokenRules
from actorium.actors.params import ResolvedParams
from actorium.actors.structured.grammar import json_grammar
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.text_proposer import text_proposers

SLOTS, MOST, STOP_AT = 18, 3, 9
SHARED = 24
"""Tokens with which every prompt begins."""

# --- the models, and what drafts for them --------------------------------------------------------

EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
           "moe_intermediate_size": 24, "use_qk_norm": True, "num_nextn_predict_layers": 1}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MODELS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda path: write_checkpoint(path, seed=5, vocab_size=SIZE),
    "hybrid": lambda path: add_mtp(path, write_hybrid(
        path, DENSE, 5, vocab_size=SIZE, mtp_num_hidden_layers=1)),
    "experts": lambda path: add_mtp(path, write_checkpoint(
        path, "Glm4MoeForCausalLM", 5, vocab_size=SIZE, **EXPERTS)),
    "windows": lambda path: write_checkpoint(
        path, "Qwen2ForCausalLM", 5, vocab_size=SIZE, **WINDOWS)}


class Maker(NamedTuple):
    models: tuple[str, ...]
    """Those that it can draft for."""
    runner: Callable[[Any], ModelRunner]
    """Of a loaded model."""


def by_guesses(model: Any) -> ModelRunner:
    """Drafts that know the answer, and are right in three of four cases."""
    dice = random.Random(3)
    guess = Guess(lambda *_: dice.random() < 0.75)
    runner = make_runner(model, MOST, guess, SLOTS, checkpoints=4)
    guess.tables = runner.tables
    return runner


def by_text(model: Any, method: str, earlier: int = 0, arrays: Any = HostArrays) -> ModelRunner:
    """Drafts of the sequence's own text, wherever its last tokens occurred before, and of so many
    bytes of earlier answers; arrays: `DeviceArrays` for the kernels of a device."""
    runner = make_runner(model, MOST, None, SLOTS, checkpoints=4, arrays=arrays)
    runner.tables.keep_history()
    runner.proposers = texts_of(runner, method, earlier)
    return runner


def by_model(model: Any) -> ModelRunner:
    """Drafts of a smaller model."""
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "LlamaForCausalLM", 2, vocab_size=SIZE, num_hidden_layers=2)
        follow_tokens(Path(folder))
        return make_runner(model, MOST, None, SLOTS, draft=load(Path(folder)), checkpoints=4)


def by_several(model: Any) -> ModelRunner:
    """Drafts of a head, of texts and of grammars; dice choose what each plan makes."""
    runner = by_head(model)
    runner.tables.keep_history()
    for method in ("ngram", "suffix"):
        runner.proposers |= texts_of(runner, method)
    return runner


def texts_of(runner: ModelRunner, method: str, earlier: int = 0) -> dict[str, Any]:
    """The method by texts, which drafts wherever it can."""
    return text_proposers(SpeculationConfig(
        speculative=f"{method}:{MOST},fixed", prompt_lookup_min=1, suffix_global_bytes=earlier),
        runner.tables)


def by_head(model: Any) -> ModelRunner:
    """Drafts of an EAGLE-3 head over the model's hidden states."""
    with TemporaryDirectory() as folder:
        return make_runner(with_head(model, Path(folder) / "head"), MOST, None, SLOTS,
                           checkpoints=4)


SEVERAL = "eagle3:3+ngram:3+suffix:3+grammar:2"
MAKERS = {
    "guesses": Maker(tuple(MODELS), by_guesses),
    "mtp": Maker(("hybrid", "experts"),
                 lambda model: make_runner(model, MOST, None, SLOTS, mtp=True, checkpoints=4)),
    "eagle3": Maker(tuple(MODELS), by_head), "draft": Maker(tuple(MODELS), by_model),
    "ngram": Maker(tuple(MODELS), partial(by_text, method="ngram")),
    "suffix": Maker(tuple(MODELS), partial(by_text, method="suffix")),
    "suffix, earlier answers": Maker(tuple(MODELS), partial(
        by_text, method="suffix", earlier=1 << 20)),
    "ngram, on a device": Maker(("plain", "hybrid"), partial(
        by_text, method="ngram", arrays=DeviceArrays)),
    "suffix, on a device": Maker(("windows", "experts"), partial(
        by_text, method="suffix", arrays=DeviceArrays)),
    "grammar": Maker(tuple(MODELS),
                     lambda model: make_runner(model, MOST, None, SLOTS, checkpoints=4)),
    "several": Maker(("hybrid", "windows"), by_several)}


# --- the requests --------------------------------------------------------------------------------

class Kind(NamedTuple):
    """A request."""

    params: ResolvedParams
    more: dict[str, Any] = {}
    """Other fields of its `Submit`."""


def of_kind(temperature: float = 0.0, tokens: int = 20, **params: Any) -> ResolvedParams:
    return ResolvedParams(max_tokens=tokens, temperature=temperature, **params)


def column(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


KEYS = {"type": "object", "properties": {
    name: {"enum": [False, True]} for name in ("temperature_celsius", "wind_speed", "cloudy")},
    "required": ["temperature_celsius", "wind_speed", "cloudy"]}
"""Of an object of which a grammar leaves hardly any choice."""
KINDS = {
    "greedy": Kind(of_kind()),
    "sampled": Kind(of_kind(0.5)),
    "truncated": Kind(of_kind(1.2, top_k=40, top_p=0.95)),
    "min_p": Kind(of_kind(1.3, min_p=0.02)),
    "penalties": Kind(of_kind(0.5, repetition_penalty=1.3, presence_penalty=0.4,
                              frequency_penalty=0.3)),
    "logit_bias": Kind(of_kind(0.9, logit_bias={7: 4.0, 11: -3.0, 900: 5.0})),
    "ends": Kind(of_kind(0.9, eos_ids=tuple(range(0, SIZE, 3)), min_tokens=5)),
    "grammar": Kind(of_kind(tokens=40, masked=True, eos_ids=(EOS,)), {"grammar": GRAMMARS[0]}),
    "sampled grammar": Kind(of_kind(1.0, masked=True, eos_ids=(EOS,)), {"grammar": GRAMMARS[1]}),
    "long keys": Kind(of_kind(0.7, tokens=40, masked=True, eos_ids=(EOS,)),
                      {"grammar": json_grammar(json.dumps(KEYS))}),
    "rules": Kind(of_kind(0.7, masked=True), {"rules": TokenRules(
        SIZE, column(*range(40, 60)), [column(41), column(44, 45), column(50, 50)])}),
    "stopped": Kind(of_kind(0.5, tokens=30)),
    "choices": Kind(of_kind(1.0), {"n": 3}),
    "logprobs": Kind(of_kind(0.6, logprobs=2)),
}
WAYS: dict[str, dict[str, Any]] = {
    "two plans in flight": {}, "one plan in flight": {"overlap": False},
    "preempted": {"force_preempt_every": 3}, "chunks": {"budget": SLOTS * (1 + MOST) + 11},
    "cached": {}, "worker lost": {}}


class Case(NamedTuple):
    model: Any
    prompts: list[list[int]]
    without: dict[str, list[Output]]
    """What is to come out: by kind, of each choice."""


def played(prompts: list[list[int]], runner: ModelRunner, way: str, speculative: str,
           without: dict[str, list[Output]] | None = None) -> tuple[Ring, dict[str, list[Output]]]:
    """The requests' way through the scheduler. without: what guesses are to know."""
    ring = Ring(runner, speculative=speculative, load=vocabulary, **WAYS[way])
    if speculative == SEVERAL:
        policy, dice = ring.core._planner.drafting, random.Random(5)
        made = [choice for choice in policy.choices if choice.method != "grammar"]
        policy.next = lambda batch: dice.choice(made)
    for _ in range(2 if way == "cached" else 1):
        whose = submitted(ring, prompts, without)
        stopping = next(sid for sid, kind in whose.items() if kind == "stopped")
        steps, stopped = 0, False
        while ring.step():
            steps += 1
            if not stopped and len(ring.outputs[stopping].tokens) >= STOP_AT:
                stopped = True
                ring.stop(stopping, STOP_AT)
            if way == "worker lost" and steps in (6, 13):
                ring.lose_worker()
    outputs: dict[str, list[Output]] = {}
    for sid, kind in whose.items():
        outputs.setdefault(kind, []).append(ring.outputs[sid])
    return ring, outputs


def submitted(ring: Ring, prompts: list[list[int]], without: dict[str, list[Output]] | None
              ) -> dict[int, str]:
    """The kind of each sequence."""
    whose: dict[int, str] = {}
    for i, ((kind, own), prompt) in enumerate(zip(KINDS.items(), prompts, strict=True)):
        ring.submit(prompt, own.params, i + 1, **own.more)
        sequences = ring.core.state.sequences
        fresh = [sid for sid in sequences if sid not in whose and sid not in ring.outputs]
        for sid, wanted in zip(fresh, without[kind] if without else fresh, strict=True):
            whose[sid] = kind
            if isinstance(ring.runner._hook, Guess) and isinstance(wanted, Output):
                (low, _) = np.array([sequences[sid].seed], np.uint64).view(np.int32).tolist()
                ring.runner._hook.wholes[low] = prompt + wanted.tokens
    return whose


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each model once, in whatever order tests ask for them."""
    @functools.cache
    def cached(name: str) -> Case:
        path = tmp_path_factory.mktemp("model")
        MODELS[name](path)
        follow_tokens(path)
        model, dice = load(path), random.Random(7)
        shared = [dice.randrange(SIZE) for _ in range(SHARED)]
        prompts = [shared + [dice.randrange(SIZE) for _ in range(dice.randint(1, 40))]
                   for _ in KINDS]
        runner = make_runner(model, 0, None, SLOTS, checkpoints=4)
        return Case(model, prompts, played(prompts, runner, "two plans in flight", "off")[1])

    return cached


@pytest.fixture(scope="module")
def runner_of(case_of: Callable[[str], Case]) -> Callable[[str, str], ModelRunner]:
    """One for each method and model."""
    return functools.cache(lambda method, name: MAKERS[method].runner(case_of(name).model))


def log_probabilities(out: Output) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(
        [np.frombuffer(part.chosen, np.float32) for part in out.logprobs]))


# --- the tests -----------------------------------------------------------------------------------

PLACES = [(method, name) for method, maker in MAKERS.items() for name in maker.models]


def test_every_method_has_its_line() -> None:
    assert {name.partition(",")[0] for name in MAKERS} - {"guesses", "several"} == set(DRAFTS)


@pytest.mark.parametrize(("method", "name", "way"), pairs(PLACES, WAYS))
@pytest.mark.parametrize("fixed", [True, False])
def test_the_tokens_are_those_without_drafts(
        method: str, name: str, way: str, fixed: bool, case_of: Callable[[str], Case],
        runner_of: Callable[[str, str], ModelRunner]) -> None:
    """With as many drafts in every step, and with as many as pay."""
    case, runner = case_of(name), runner_of(method, name)
    asked = "mtp" if method == "guesses" else method.partition(",")[0]
    setting = SEVERAL if method == "several" else f"{asked}:{MOST}{',fixed' * fixed}"
    ring, outputs = played(case.prompts, runner, way, setting, case.without)
    for kind, wanted in case.without.items():
        for own, want in zip(outputs[kind], wanted, strict=True):
            upto = STOP_AT if kind == "stopped" else None
            assert own.tokens[:upto] == want.tokens[:upto], kind
            assert own.finish == want.finish and want.finish in ("stop", "length"), kind
            if kind == "logprobs":
                torch.testing.assert_close(log_probabilities(own), log_probabilities(want),
                                           atol=ATOL, rtol=0)
    gauges = ring.core.health().gauges
    drafted, accepted = (gauges[f"spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    if method == "several":
        assert all(gauges[f"spec_decode_by_{own}_num_draft_tokens"]
                   for own in parse_speculative(SEVERAL).methods)
    if fixed or method != "grammar":  # whose few drafts need not pay here
        assert accepted > 5
    assert accepted >= 0.6 * drafted if method == "grammar" else drafted > accepted
    assert (gauges["preemptions"] > 0) == (way in ("preempted", "worker lost"))
    assert way != "cached" or all(own.cached >= SHARED for outs in outputs.values() for own in outs)


def test_what_is_to_come_out_is_not_all_the_same(case_of: Callable[[str], Case]) -> None:
    """Else drafts that change a parameter would not be seen."""
    several = [case_of(name).without for name in MODELS]
    for kind in ("ends", "grammar", "sampled grammar"):
        assert {without[kind][0].finish for without in several} >= {"stop"}, kind
    for without in several:
        assert len(without["ends"][0].tokens) >= 5
        assert len({tuple(out.tokens) for out in without["choices"]}) > 1
        ruled = without["rules"][0].tokens
        assert set(ruled) <= set(range(40, 60)) - {41}
        assert (44, 45) not in zip(ruled, ruled[1:], strict=False)
