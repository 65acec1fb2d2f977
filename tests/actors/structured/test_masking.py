"""Structured output in the ring: every token is one that the grammar allows, and which ones they
are does not depend on how they came about."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_masking import GRAMMARS, MaskedRing, follows
from helpers_scheduler import CLIENT, Heard, column, config

from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.errors import EngineUnavailable, InvalidRequest
from actorium.actors.messages import Masks, StepPlan, StepResult, Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.recorder.recorder import plan_checksum
from actorium.actors.recorder.replay import load_recording, replay
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.scheduler_actor import SchedulerActor
from actorium.actors.structured.structured_output import VocabularyLoader, no_vocabulary
from actorium.tools.null.null_worker import BadPlan

EOS = 2


def said(ring: MaskedRing) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return {(h.opened.rid, h.opened.index): (h.tokens, h.reason) for h in ring.heard.values()}


def day(ring: MaskedRing, dice: random.Random | None = None) -> None:
    """Requests with and without grammars, side by side."""
    for number, grammar in enumerate(GRAMMARS * 2):
        ring.structured(grammar, prompt=7 + 5 * number, max_tokens=40, seed=100 + number,
                        n=1 + number % 2)
        ring.submit(9, max_tokens=20, seed=number, rid=f"plain{number}")
        if number % 3 == 2:
            ring.run(dice)
    ring.run(dice)


def assert_follow(ring: MaskedRing) -> None:
    grammars = [h for h in ring.heard.values() if h.submit.grammar]
    assert grammars
    for heard in grammars:
        assert heard.reason in ("stop", "length"), heard.events
        assert follows(heard.submit.grammar, heard.tokens, heard.reason == "stop")
    assert any(heard.reason == "stop" for heard in grammars)
    ring.assert_at_rest()
    masking = ring.scheduler.masks
    assert not masking and not masking._planned and not masking._due and not masking._drafts


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """What is said without anything that could go wrong."""
    ring = MaskedRing(config(overlap=False, seqs=64))
    day(ring)
    assert_follow(ring)
    assert not ring.followed, "no plan has to wait for a result"
    return said(ring)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overlap": ({}, {}),
    "forced": ({"force_preempt": 4}, {}),
    "tight": ({"pool_tokens": 320, "chunk": 24}, {}),
    "drafts 1": ({"speculative": "mtp:1"}, {"acceptance": (0.9,)}),
    "drafts 2": ({"speculative": "mtp:2", "overlap": False}, {"acceptance": (0.9, 0.8)}),
    "forced tokens": ({"speculative": "grammar:4,fixed"}, {}),
    "forced tokens, one plan": ({"speculative": "grammar:3,fixed", "overlap": False}, {}),
    "forced tokens and drafts": ({"speculative": "mtp:2+grammar:4", "force_preempt": 5},
                                 {"acceptance": (0.9, 0.8)}),
    "drafts 3": ({"speculative": "mtp:3", "force_preempt": 5},
                 {"acceptance": (1.0, 0.9, 0.8)}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_are_those_of_a_request_alone(
        alone: dict[tuple[str, int], tuple[list[int], str | None]], kind: str, seed: int) -> None:
    settings, more = KINDS[kind]
    ring = MaskedRing(config(**settings), **more)
    day(ring, random.Random(seed))
    assert_follow(ring)
    assert said(ring) == alone
    assert bool(ring.followed) == settings.get("overlap", True)
    if "force_preempt" in settings:
        assert ring.scheduler.state.preemptions["forced"]


def test_drafts_are_accepted_under_masks() -> None:
    ring = MaskedRing(config(speculative="mtp:2"), acceptance=(1.0, 1.0))
    ring.structured(GRAMMARS[3], max_tokens=60)
    ring.run()
    (heard,) = ring.heard.values()
    end = heard.events[-1]
    assert end.draft_tokens and end.accepted_tokens, "a grammar that allows nearly everything"
    assert follows(GRAMMARS[3], heard.tokens, heard.reason == "stop")


def test_masks_follow_before_anything_else() -> None:
    ring = MaskedRing(config())
    ring.structured(GRAMMARS[0], max_tokens=30)
    ring.wake()
    first, second = ring.plans
    assert isinstance(first, StepPlan) and first.masks and not first.masks_follow
    assert isinstance(second, StepPlan) and second.masks_follow and not second.masks
    ring.work()
    ring.work()
    assert not ring.results or ring.results[0].step == 1, "the second waits for its masks"
    ring.deliver()
    masks, third = ring.plans
    assert isinstance(masks, Masks) and masks.step == second.step and masks.masks
    assert isinstance(third, StepPlan) and third.step == second.step + 1


def test_a_prompt_in_chunks_needs_no_masks_until_its_end() -> None:
    ring = MaskedRing(config(chunk=16))
    ring.structured(GRAMMARS[0], prompt=60, max_tokens=4)
    ring.run()
    plans = [plan for plan in ring.sent if isinstance(plan, StepPlan)]
    assert [bool(plan.masks or plan.masks_follow) for plan in plans[:5]] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("seed", range(4))
def test_ends_of_all_kinds_in_the_middle(seed: int) -> None:
    """Cancelled, stopped, overdue: nobody's masks are missed, nobody else's tokens change."""
    dice = random.Random(seed)
    ring = MaskedRing(config(speculative="mtp:2" if seed % 2 else "off"),
                      **({"acceptance": (0.9, 0.9)} if seed % 2 else {}))
    for number in range(12):
        grammar = dice.choice(GRAMMARS)
        deadline = ring.now + 0.5 if number % 4 == 3 else None
        rid = ring.structured(grammar, max_tokens=50, seed=number, deadline=deadline)
        for _ in range(dice.randrange(6)):
            ring.wake()
            ring.work()
            ring.deliver()
        ring.now += 0.1
        if number % 4 == 0:
            ring.cancel(rid)
        elif number % 4 == 1 and ring.of(rid):
            ring.stop(ring.of(rid)[0].opened.sid, 1)
    ring.now += 1
    ring.run(dice)
    assert {h.reason for h in ring.heard.values()} >= {"abort", "stop"}
    for heard in ring.heard.values():
        assert follows(heard.submit.grammar, heard.tokens, False)
    ring.assert_at_rest()


@pytest.mark.parametrize("speculative", ["off", "mtp:2"])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_a_worker_dies(speculative: str, steps: int) -> None:
    more = {} if speculative == "off" else {"acceptance": (0.9, 0.9)}

    def run(dies: bool) -> dict[Any, Any]:
        ring = MaskedRing(config(speculative=speculative), **more)
        for number, grammar in enumerate(GRAMMARS):
            ring.structured(grammar, max_tokens=40, seed=number)
        ring.wake()
        for _ in range(steps):
            ring.work()
            ring.deliver()
        if dies:
            ring.lose_worker()
        ring.run()
        assert_follow(ring)
        return said(ring)

    assert run(True) == run(False)


class Broken:
    """A vocabulary whose matchers cannot go on after so many tokens."""

    def __init__(self, inner: Any, after: int) -> None:
        self._inner, self._after = inner, after

    def matcher(self, grammar: str) -> Any:
        matcher, after = self._inner.matcher(grammar), self._after

        class Stops(type(matcher)):  # type: ignore[misc]
            @property
            def error(self) -> str:
                return "out of fuel\nand more" if self.consumed >= after else ""

        matcher.__class__ = Stops
        return matcher

    def masks(self, wanted: Any) -> Any:
        return self._inner.masks(wanted)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stuck_grammar_ends_only_its_request(overlap: bool) -> None:
    ring = MaskedRing(config(overlap=overlap))
    masking = ring.scheduler.masks
    good = masking._load()
    masking._words = Broken(good, 3)
    bad = ring.structured(GRAMMARS[3], max_tokens=40, n=2)
    masking._words = good
    fine = ring.structured(GRAMMARS[3], max_tokens=40)
    ring.run()
    for heard in ring.of(bad):
        assert heard.reason == "error" and heard.error_code == InvalidRequest.code
        assert heard.events[-1].error == "structured: the grammar cannot go on: out of fuel"
        assert len(heard.tokens) <= 4
    (heard,) = ring.of(fine)
    assert heard.reason in ("stop", "length")
    ring.assert_at_rest()


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    ring = MaskedRing(config())
    rid = ring.structured("no grammar", max_tokens=4)
    ring.run()
    (heard,) = ring.of(rid)
    assert heard.reason == "error" and heard.error_code == InvalidRequest.code
    ring.assert_at_rest()


def test_without_a_tokenizer_there_are_no_grammars() -> None:
    core = SchedulerCore(Context(config(), Path("/nowhere"), "scheduler", 3, 0))
    core.on_message(Submit(rid="r", client=CLIENT, prompt=column([1, 2]), n=1, seed=1,
                           params=ResolvedParams(max_tokens=3, masked=True), text=TextParams(),
                           grammar=GRAMMARS[0]), 1.0)
    told = [event for send in core.on_wake(1.0) for event in getattr(send.message, "events", [])]
    assert [event.error_code for event in told] == ["invalid_request"]
    assert not core.state.requests


def test_an_unreadable_vocabulary_is_reported() -> None:
    def fail() -> Any:
        raise OSError("the disk is gone")

    for starts in (True, False):
        loading = VocabularyLoader(fail)
        if starts:
            loading.start()
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="the disk is gone"):
                loading()
    with pytest.raises(InvalidRequest, match="skip_tokenizer"):
        VocabularyLoader(no_vocabulary)()


def test_the_null_worker_checks_the_protocol() -> None:
    ring = MaskedRing(config())
    ring.structured(GRAMMARS[0], max_tokens=30)
    ring.wake()
    ring.work()
    ring.work()
    plan = ring.sent[-1]
    with pytest.raises(BadPlan, match="before the masks"):
        ring.worker.on_message(msgspec.structs.replace(plan, step=3), ring.now)
    with pytest.raises(BadPlan, match="for which no plan waits"):
        ring.worker.on_message(Masks(plan.epoch, 9, []), ring.now)


def test_drafts_that_do_not_fit_the_plan_are_no_result() -> None:
    ring = MaskedRing(config(speculative="mtp:2"), acceptance=(0.9, 0.9))
    ring.structured(GRAMMARS[0], max_tokens=30)
    ring.wake()
    ring.work()
    (result,) = ring.results
    assert isinstance(result, StepResult) and len(result.drafts) == 8
    with pytest.raises(RuntimeError, match="4 bytes of drafts"):
        ring.tell(msgspec.structs.replace(result, drafts=result.drafts[:4]))


def test_a_choice_has_a_seed_of_its_own() -> None:
    ring = MaskedRing(config())
    rid = ring.structured(GRAMMARS[3], max_tokens=30, n=3)
    ring.run()
    tokens = [tuple(heard.tokens) for heard in ring.of(rid)]
    assert len(set(tokens)) == 3
    assert all(isinstance(h, Heard) for h in ring.of(rid))
    assert np.all([follows(GRAMMARS[3], list(t), False) for t in tokens])


class Taped(MaskedRing):
    """Recorded, and asked for its timer after each wake, as a shell does."""

    def __init__(self, where: Path, settings: Config, **more: Any) -> None:
        self.where: Path | None = where
        super().__init__(settings, **more)

    def start(self, **changes: Any) -> None:
        context = Context(self.settings, self.where or Path(), "scheduler", 3, 0)
        self.bare = self.scheduler
        self.scheduler = SchedulerActor(self.scheduler, context)  # type: ignore[assignment]
        super().start(**changes)

    def wake(self) -> None:
        super().wake()
        self.scheduler.next_timer()


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("speculative", ["off", "mtp:2", "grammar:4,fixed"])
def test_a_recording_replays(tmp_path: Path, prompts: bool, speculative: str) -> None:
    """Without the model, and without the grammars."""
    settings = config(speculative=speculative, force_preempt=11)
    settings = msgspec.structs.replace(settings, runtime=msgspec.structs.replace(
        settings.runtime, record_prompts=prompts, recorder_bytes=1 << 22))
    ring = Taped(tmp_path, settings,
                 **({"acceptance": (0.9, 0.9)} if speculative != "off" else {}))
    good = ring.bare.masks._load()
    ring.bare.masks._words = Broken(good, 6)
    bad = ring.structured(GRAMMARS[3], max_tokens=30)
    ring.bare.masks._words = good
    day(ring, random.Random(1))
    assert ring.of(bad)[0].reason == "error"
    sent = [plan_checksum(plan) for plan in ring.sent if isinstance(plan, StepPlan)]
    again = []
    for played in replay(load_recording(tmp_path / "scheduler.tape0")):
        assert played.same and not played.error
        again += [plan_checksum(plan) for plan in played.plans]
    assert again == sent
    text = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert (b"a-f" in text) == prompts, "a grammar is the user's words"
