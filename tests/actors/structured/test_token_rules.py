"""Allowed tokens and bad words in the ring: what is sampled keeps to them, and does not depend on
overlap, preemption, drafts, or how the day went."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_masking import EOS, GRAMMARS, SIZE, MaskedRing, follows
from helpers_scheduler import column, config
from test_masking import KINDS, Taped, said

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import StepPlan, TokenRules
from actorium.actors.params import ResolvedParams, SamplingParams
from actorium.actors.recorder.recorder import plan_checksum
from actorium.actors.recorder.replay import load_recording, replay
from actorium.actors.structured.guides import (
    FORBIDDEN,
    NONE_LEFT,
    SequenceGuide,
    TokenRuleFilter,
    bits_of,
)
from actorium.actors.tokenizer.defaults import ModelFacts, check_params, resolve, token_rules

ALLOWED = [*range(3, 40), *range(200, 230)]
FEW = [60, 180, 300, 430]
"""Far apart: the worker without a model takes the next one from a number below 512 on."""
WORDS = [[60, 180], [180, 180, 300], [430, 430], [430, 60, 60]]


NOWHERE = [[9, 9], [9, 250], [250, 9], [250, 250, 250]]
"""Of 9 and 250 nothing can follow on two 250, or on a 9."""


def rules(allowed: list[int] | None = None, words: list[list[int]] | None = None) -> TokenRules:
    return TokenRules(SIZE, column(allowed or []), [column(word) for word in words or []])


def day(ring: MaskedRing, dice: random.Random | None = None) -> None:
    for number in range(8):
        ring.structured("", prompt=7 + 5 * number, max_tokens=40, seed=number,
                        n=1 + number % 2,
                        rules=rules(ALLOWED) if number % 2 else rules(FEW, WORDS))
        ring.structured(GRAMMARS[3], max_tokens=20, seed=number,
                        rules=rules(None, [[100 + number]]))
        ring.submit(9, max_tokens=20, seed=number, rid=f"plain{number}")
        if number % 3 == 2:
            ring.run(dice)
    ring.run(dice)
    ring.assert_at_rest()


def holds(words: list[bytes], tokens: list[int]) -> bool:
    """None of the words is among the tokens."""
    text = array("i", tokens).tobytes()
    return not any(text[at:at + len(word)] == word for word in words
                   for at in range(0, len(text), 4))


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[list[int], str | None]]:
    ring = MaskedRing(config(overlap=False, seqs=64))
    day(ring)
    ruled = [heard for heard in ring.heard.values() if heard.submit.rules is not None]
    for heard in ruled:
        assert heard.reason in ("stop", "length"), heard.events
        allowed = np.frombuffer(heard.submit.rules.allowed, np.int32)
        assert not len(allowed) or np.isin(heard.tokens, allowed).all()
        assert holds(heard.submit.rules.bad_words, heard.tokens)
        if heard.submit.grammar:
            assert follows(heard.submit.grammar, heard.tokens, heard.reason == "stop")
        else:
            assert len(heard.tokens) == 40, "the end token is not allowed"
    assert set(FEW) <= {token for heard in ruled for token in heard.tokens}
    return said(ring)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_a_request_alone(
        alone: dict[tuple[str, int], tuple[list[int], str | None]], kind: str) -> None:
    settings, more = KINDS[kind]
    ring = MaskedRing(config(**settings), **more)
    day(ring, random.Random(kind))
    assert said(ring) == alone
    if "force_preempt" in settings:
        assert ring.scheduler.state.preemptions["forced"]


@pytest.mark.parametrize("speculative", ["off", "mtp:2"])
def test_where_nothing_is_left_the_request_ends_alone(speculative: str) -> None:
    more = {"acceptance": (0.9, 0.9)} if speculative != "off" else {}
    ring = MaskedRing(config(speculative=speculative), **more)
    bad = ring.structured("", max_tokens=40, rules=rules([9, 250], NOWHERE))
    none = ring.structured("", max_tokens=40, rules=rules([5], [[5]]))
    fine = ring.structured("", max_tokens=40, rules=rules([5]))
    ring.run()
    (end,) = ring.of(none)
    assert not end.tokens and end.error_code == InvalidRequest.code
    assert end.events[-1].error == NONE_LEFT
    (end,) = ring.of(bad)
    assert end.events[-1].error in (NONE_LEFT, FORBIDDEN) and len(end.tokens) < 40
    (heard,) = ring.of(fine)
    assert heard.tokens == [5] * 40
    ring.assert_at_rest()
    assert not ring.scheduler.masks


def test_min_tokens_holds_end_tokens_back_that_are_allowed() -> None:
    ring = MaskedRing(config(speculative="mtp:2"), acceptance=(0.9, 0.9))
    rid = ring.structured("", max_tokens=40, min_tokens=10, rules=rules([EOS, 250]))
    worse = ring.structured("", max_tokens=40, min_tokens=10, rules=rules([EOS, 250], [[250, 250]]))
    ring.run()
    (heard,) = ring.of(rid)
    assert heard.tokens[:10] == [250] * 10 and heard.reason == "stop"
    (heard,) = ring.of(worse)
    assert heard.error_code == InvalidRequest.code


def test_tokens_of_a_resumed_sequence_count() -> None:
    """After a preemption or a new life all that was emitted is taken at once."""
    params = ResolvedParams(max_tokens=9, masked=True)
    whole, parts = (SequenceGuide(None, TokenRuleFilter(rules([5, 6, 7],
                                                              [[5, 6, 5], [6, 6, 7], [7]]), params,
                                                        False)) for _ in range(2))
    assert whole.accept([5, 5, 6, 6])
    for token in (5, 5, 6, 6):
        assert parts.accept([token])
    (row,), (other,) = whole.rows(None, ()), parts.rows(None, ())
    assert row.tolist() == other.tolist() == bits_of(np.array([5, 6]), SIZE).tolist()
    assert not whole.accept([7]) and whole.error == FORBIDDEN


def test_each_draft_counts_for_the_rows_behind_it() -> None:
    guide = SequenceGuide(None, TokenRuleFilter(rules([5, 6, 7], [[5, 6], [6, 7, 5]]),
                                                ResolvedParams(max_tokens=9), False))
    found = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
             for row in guide.rows(None, [6, 7, 5])]
    assert found == [[5, 6, 7], [5, 6, 7], [6, 7], [5, 7]]


def test_no_bad_word_hides_another() -> None:
    """Not a shorter one a longer, in whatever order they come, nor one of two with the same
    beginning or the same end: what is barred is what each bars by itself."""
    dice = random.Random(4)
    hidden = 0
    for _ in range(150):
        words = [[dice.choice([5, 6, 7]) for _ in range(dice.randint(1, 4))]
                 for _ in range(dice.randint(1, 6))]
        dice.shuffle(words)
        given = TokenRuleFilter(rules(None, words), ResolvedParams(max_tokens=99), False)
        tokens = [dice.choice([5, 6, 7, 8]) for _ in range(12)]
        guide = SequenceGuide(None, given)
        for at, token in enumerate(tokens):
            barred = {word[-1] for word in words
                      if word[:-1] == tokens[at - len(word) + 1:at] and len(word) <= at + 1}
            row = guide.rows(None, ())[0]
            found = {t for t in (5, 6, 7, 8) if not row[t // 32] >> np.uint32(t % 32) & 1}
            assert found == barred, (words, tokens[:at])
            guide.accept([token])  # a forbidden one ends the request, but it is not asked here
            hidden += len(barred) > 1
    assert hidden > 100, "several words bar something at once"


@pytest.mark.parametrize("prompts", [True, False])
def test_a_recording_replays(tmp_path: Path, prompts: bool) -> None:
    settings = config(speculative="mtp:2", force_preempt=11)
    settings = msgspec.structs.replace(settings, runtime=msgspec.structs.replace(
        settings.runtime, record_prompts=prompts, recorder_bytes=1 << 22))
    ring = Taped(tmp_path, settings, acceptance=(0.9, 0.9))
    bad = ring.structured("", max_tokens=30, rules=rules([9, 250], NOWHERE))
    day(ring, random.Random(1))
    assert ring.of(bad)[0].reason == "error"
    sent = [plan_checksum(plan) for plan in ring.sent if isinstance(plan, StepPlan)]
    again: list[Any] = []
    for played in replay(load_recording(tmp_path / "scheduler.tape0")):
        assert played.same and not played.error
        again += [plan_checksum(plan) for plan in played.plans]
    assert again == sent


# --- at the tokenizer -----------------------------------------------------------------------------

class Spelling:
    """Letters are tokens; " x" is one token of its own."""

    facts = ModelFacts(vocab_size=300, max_model_len=64, eos_ids=(2,), generation={},
                       has_tokenizer=True)

    def encode_all(self, texts: list[str], field: str) -> list[list[int]]:
        assert field == "bad_words"
        return [[256 + ord(c) % 32 if c == "x" and t[0] == " " else ord(c) for c in t.lstrip()]
                for t in texts]


def test_a_bad_word_counts_with_and_without_a_space_before_it() -> None:
    found = token_rules(SamplingParams(bad_words=["x", " ab", "ab"]), Spelling())
    assert found is not None and not found.allowed
    assert found.bad_words == [column([120]), column([97, 98]), column([280])]
    assert token_rules(SamplingParams(), Spelling()) is None
    found = token_rules(SamplingParams(allowed_token_ids=[4, 3]), Spelling())
    assert found is not None and found.allowed == column([4, 3]) and not found.bad_words


def test_only_what_has_rules_asks_for_masks() -> None:
    def masked(**given: Any) -> bool:
        return resolve(SamplingParams(max_tokens=1, **given), Spelling.facts, 1).masked

    assert masked(allowed_token_ids=[1]) and masked(bad_words=["a"])
    assert not masked() and not masked(bad_words=[])
    with pytest.raises(InvalidRequest, match="allowed_token_ids: nothing but end tokens"):
        check_params(SamplingParams(allowed_token_ids=[2], min_tokens=1), Spelling.facts)
