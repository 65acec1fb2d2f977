"""Drafts by a smaller model: they are what it would say next; tokens are those without any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers_drafting import follow_tokens
from helpers_kinds import write_kind
from helpers_models import generated, load, write_checkpoint
from helpers_parity import tokens
from helpers_speculation import Hand, Work, make_runner, tokens_of

from actorium.actors.params import ResolvedParams
from actorium.actors.scheduler.draft_policy import DraftChoice
from actorium.gpu.step.draft_model import CATCH_UP
from actorium.gpu.step.staging import DeviceArrays, HostArrays

GREEDY = ResolvedParams(max_tokens=200, temperature=0.0)
LAMA, QWEN, GEMMA = "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"
WINDOWED = {"num_hidden_layers": 4, "sliding_window": 12, "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2}


def check_drafts(hand: Hand, oracle: Any, drafts: int) -> None:
    """Those of every sequence are what transformers' model would say, up to its end."""
    for s in hand.seqs:
        most = min(drafts, s.prompt + s.params.max_tokens - len(s.tokens))
        if most and not s.finish:
            found = hand.runner.tables.drafts.tokens[s.slot].tolist()
            assert found[:most] == generated(oracle, s.tokens, most)


@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
@pytest.mark.parametrize(("architecture", "options"), [
    (LAMA, {"num_hidden_layers": 2}), (GEMMA, WINDOWED)])
def test_drafts_are_what_the_model_would_say(architecture: str, options: dict[str, Any],
                                             arrays: Any, tmp_path: Path) -> None:
    """After steps that draft, that draft nothing for long, beside sequences that begin."""
    write_checkpoint(tmp_path / "target", seed=1)
    oracle = write_checkpoint(tmp_path / "draft", architecture, 2, **options)
    follow_tokens(tmp_path / "target")
    follow_tokens(tmp_path / "draft")
    oracle = type(oracle).from_pretrained(tmp_path / "draft").eval()
    runner = make_runner(load(tmp_path / "target"), 4, draft=load(tmp_path / "draft"),
                         arrays=arrays)
    hand = Hand(runner)

    def check(drafts: int) -> None:
        check_drafts(hand, oracle, drafts)

    hand.admit(tokens(19), GREEDY, 4)
    check(4)
    for drafts in (4, 4, 1, 3, 0, 0, 2, 4, 4):
        hand.decode(drafts)
        check(drafts)
    hand.decode(0)
    hand.admit(tokens(1, 7), GREEDY, 0)
    hand.decode(4)
    check(4)
    for _ in range(4 * CATCH_UP + 9):
        hand.decode(0)
    hand.admit(tokens(2, 3), GREEDY, 0)
    hand.decode(3)
    check(3)
    hand.decode(4)
    check(4)
    emitted = [count for s in hand.seqs for count in s.emitted]
    assert 5 in emitted and {2, 3, 4} & set(emitted) and 1 in emitted


def check_pages(hand: Hand, model: Any) -> None:
    """What was kept of every sequence's tokens is what the model keeps of them as a prompt."""
    (pool,), t = hand.runner.draft_pools, hand.runner.tables
    for s in hand.seqs:
        alone = Hand(make_runner(model, 0))
        alone.admit(s.tokens, GREEDY, 0)
        at = np.arange(len(s.tokens))
        found, want = (table[at // 8] * 8 + at % 8 for table in (
            t.pages[0][s.slot], alone.runner.tables.pages[0][1]))
        for ours, theirs in zip(pool.layers, alone.runner.pools[0].layers, strict=True):
            torch.testing.assert_close(ours[found], theirs[want], atol=1e-4, rtol=1e-4)


def test_its_pages_are_whole_when_it_drafts(tmp_path: Path) -> None:
    """Behind few and many plans that drafted nothing, beside sequences of other lengths, and where
    others have made the drafts."""
    write_checkpoint(tmp_path / "target", seed=1)
    write_checkpoint(tmp_path / "draft", LAMA, 2)
    model = load(tmp_path / "draft")
    hand = Hand(make_runner(load(tmp_path / "target"), 4, draft=model))
    run, method = hand.runner.run, ""
    hand.runner.run = lambda plan: run(  # type: ignore[method-assign]
        msgspec.structs.replace(plan, draft_method=method))
    hand.admit(tokens(9), GREEDY, 0)
    for zeros, beside in ((1, 1), (4, 3), (13, 17), (4 * CATCH_UP + 9, 2)):
        for _ in range(zeros):
            hand.decode(0)
        hand.admit(tokens(beside), GREEDY, 0)
        hand.decode(4)
        check_pages(hand, model)
        hand.decode(2)
        hand.decode(0)
        hand.decode(1)
        check_pages(hand, model)
        method = "ngram"  # which leaves the drafts that were there
        for _ in range(3):
            hand.decode(4)
        method = ""
        hand.decode(4)
        check_pages(hand, model)
        hand.decode(0)


def test_nothing_is_written_to_pages_of_others(tmp_path: Path) -> None:
    """Of a sequence shorter than the window that is read, and at the end of one: entries of its
    page table that it has no use for yet name pages of the other one."""
    oracle = write_checkpoint(tmp_path, LAMA, 2)
    model = load(tmp_path)
    hand = Hand(make_runner(model, 4, draft=model))
    table = hand.runner.tables.pages[0]
    hand.admit(tokens(30), GREEDY, 0)
    for _ in range(12):
        hand.decode(0)
    for prompt, params in ((1, GREEDY), (5, ResolvedParams(max_tokens=3, temperature=0.0))):
        hand.admit(tokens(prompt), params, 0)
        own = hand.seqs[-1].slot
        kept, table[own, 1:] = table[own].copy(), table[1, :-1]
        hand.decode(4)
        check_drafts(hand, oracle, 4)
        table[own] = kept
        hand.decode(0)
    hand.decode(4)
    check_drafts(hand, oracle, 4)


# --- the same tokens -----------------------------------------------------------------------------

PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17,
           list(range(40, 72)), [150, 20] * 5, [44, 45, 46, 47]]
EACH = [ResolvedParams(max_tokens=40, temperature=0.0),
        ResolvedParams(max_tokens=30, temperature=0.7),
        ResolvedParams(max_tokens=20, temperature=0.6, top_k=20, repetition_penalty=1.2),
        ResolvedParams(max_tokens=5000, temperature=0.0)]
WORK = Work(PROMPTS, [EACH[i % 4] for i in range(len(PROMPTS))])
KINDS = ("attention", "windows", "hybrid", "deepseek")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Targets of each kind, and "draft", a model of two layers that often says the same."""
    @functools.cache
    def model_of(name: str) -> Any:
        path = tmp_path_factory.mktemp(name)
        if name == "draft":
            write_checkpoint(path, LAMA, 2, num_hidden_layers=2)
        else:
            write_kind(path, name)
        follow_tokens(path)
        return load(path, max_model_len=96)

    return model_of


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_drafts(make: Callable[[str], Any], kind: str) -> None:
    """Prompts in chunks beside windows, shared prefixes, preemptions, plans that draft nothing."""
    model, choices = make(kind), [4, 4, 2, 0, 0, 0, 3, 4, 1]
    want = WORK.plain(model)
    for preempt_every in (0, 7):
        runner = make_runner(model, 4, draft=make("draft"), slots=6, checkpoints=8)
        ring = WORK.ring(runner, budget=24, force_preempt_every=preempt_every,
                         speculative="draft:4")
        chosen = iter(choices * 1000)
        ring.core._planner.drafting.next = lambda batch, chosen=chosen: DraftChoice(
            "draft", next(chosen))
        got = ring.run()
        assert tokens_of(got) == tokens_of(want)
        gauges = ring.core.health().gauges
        assert gauges["spec_decode_num_accepted_tokens"] > 50
        assert (ring.preemptions > 0) == (preempt_every > 0)


@pytest.mark.parametrize(("kind", "preempt_every"), [
    ("attention", 0), ("attention", 7), ("windows", 0), ("deepseek", 0),
    pytest.param("experts", 0, marks=pytest.mark.slow)])
def test_a_model_that_drafts_for_itself_is_always_right(make: Callable[[str], Any], kind: str,
                                                        preempt_every: int) -> None:
    """Its keys and values are whole after chunks, preemptions, in shared prefixes, and behind plans
    that drafted nothing."""
    model, wrong = make(kind), []
    greedy = ResolvedParams(max_tokens=40, temperature=0.0)
    work = Work(PROMPTS, [greedy] * len(PROMPTS))
    runner = make_runner(model, 4, draft=model, slots=6)
    ring = work.ring(runner, budget=24, force_preempt_every=preempt_every,
                     speculative="draft:4")
    chosen = iter([4, 4, 2, 0, 0, 3, 4, 1, *[0] * 22, 4, 4] * 1000)
    drafting = ring.core._planner.drafting
    drafting.next = lambda batch: DraftChoice("draft", next(chosen))
    drafting.verified = lambda method, seen: wrong.append(sum(seen.going[1:-1]))
    assert tokens_of(ring.run()) == tokens_of(work.plain(model))
    assert len(wrong) > 10 and not any(wrong), wrong
    assert (ring.preemptions > 0) == (preempt_every > 0)
