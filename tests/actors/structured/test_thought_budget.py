"""The budget of a thought: behind so many tokens its end is written, and the model goes on freely.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers_masking import EOS, SCHEMA, SIZE, MaskedRing, vocabulary
from helpers_scheduler import config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masking import KINDS, Taped, said

from actorium.actors.config.reasoning_formats import HARMONY, REASONING_FORMATS
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import StepPlan, ThoughtRule, TokenRules
from actorium.actors.params import ResolvedParams, SamplingParams, Structured
from actorium.actors.recorder.recorder import plan_checksum
from actorium.actors.recorder.replay import load_recording, replay
from actorium.actors.structured.grammar import grammar_of
from actorium.actors.structured.guides import SequenceGuide, ThoughtGuide, TokenRuleFilter
from actorium.actors.structured.thought_state import (
    AFTER,
    BEFORE,
    INSIDE,
    ThoughtBudget,
    ThoughtMarks,
    ThoughtState,
)
from actorium.actors.tokenizer.defaults import ModelFacts, check_params, resolve

THINK = REASONING_FORMATS["qwen3"]
WORDS = vocabulary()
BUDGETS = (0, 1, 7)


def spelt(text: str) -> list[int]:
    return [int(token) for token in WORDS._tokens.tokenize_str(text)]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(map(WORDS.bytes_of, tokens)).decode(errors="replace")


def allowed(bits: Any) -> list[int]:
    if bits is None:
        return list(range(SIZE))
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


# --- where a text is in a thought ---

PIECES = ("<think>", "</think>", "<", "think>", "</", " ", "\n", "a", "Here is my thought process:",
          "Here is", " my response:", "Here's my response:", "[THINK]", "[/THINK]", "é",
          "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>")


@settings(max_examples=60)
@given(st.sampled_from(list(REASONING_FORMATS)), st.lists(st.sampled_from(PIECES), max_size=10),
       st.booleans(), st.data())
def test_however_a_text_is_cut(name: str, pieces: list[str], opened: bool, data: st.DataObject
                               ) -> None:
    text, marks = "".join(pieces).encode(), ThoughtMarks.of(REASONING_FORMATS[name])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    begin = ThoughtState(INSIDE if opened else BEFORE)
    whole, rest = begin.after(text, marks)
    state, found = begin, b""
    for first, last in zip([0, *places], [*places, len(text)], strict=True):
        state, more = state.after(text[first:last], marks)
        found += more
    assert (state.phase, state.held, found) == (whole.phase, whole.held, rest)
    assert len(state.held) <= max(map(len, (*marks.begin, *marks.end))) + len(text)


@pytest.mark.parametrize(("name", "text", "phases"), [
    ("qwen3", ["\n<thi", "nk>", "a</", "think>", "b<think>"],
     [BEFORE, INSIDE, INSIDE, AFTER, AFTER]),
    ("qwen3", ["Hello", "<think>"], [AFTER, AFTER]),
    ("mistral", ["[THINK]", "a", "[/THINK]"], [INSIDE, INSIDE, AFTER]),
    ("granite", ["Here's my thought process:", "a", "Here is my response:"],
     [INSIDE, INSIDE, AFTER]),
    (HARMONY, ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>assistant",
               "<|channel|>analysis<|message|>"],
     [BEFORE, BEFORE, INSIDE, INSIDE, BEFORE, BEFORE, INSIDE])])
def test_phases(name: str, text: list[str], phases: list[int]) -> None:
    state, found = ThoughtState(), []
    for part in text:
        state, _ = state.after(part.encode(), ThoughtMarks.of(REASONING_FORMATS[name]))
        found.append(state.phase)
    assert found == phases


def test_the_end_of_a_harmony_thought_leads_to_another_channel() -> None:
    budget = ThoughtBudget(REASONING_FORMATS[HARMONY], 2, opened=False)
    state = budget.start
    for text in (b"<|channel|>", b"analysis", b"<|message|>", b"a"):
        assert not budget.due(state) and not budget.barred(state)
        state = budget.after(state, text)
    state = budget.after(state, b" b")
    for text in (b"<|end|>", b"<|start|>", b"assistant", b"<|channel|>"):
        assert budget.due(state) == text and budget.may_act(state, 0)
        state = budget.after(state, text)
    assert not budget.due(state) and budget.barred(state) == b"analysis"
    ended = budget.after(state, b"final")
    assert not budget.due(ended) and not budget.barred(ended)
    for text in (b"analysis", b"<|message|>"):  # in other tokens, say
        state = budget.after(state, text)
    assert budget.due(state) == b"<|end|>", "its tokens are those of all thoughts"


# --- what may be sampled ---

def guide(budget: int, opened: bool = True, name: str = "qwen3", matcher: Any = None,
          rules: TokenRuleFilter | None = None) -> SequenceGuide:
    return SequenceGuide(matcher, rules, ThoughtGuide(ThoughtRule(name, budget, opened), WORDS))


def walk(one: SequenceGuide, seed: int, most: int = 60, begin: Sequence[int] = ()) -> list[int]:
    """Draws tokens of those that are allowed, as many at a time as drafts might be accepted."""
    draw, taken = random.Random(seed), list(begin)
    assert one.accept(taken)
    while len(taken) < most:
        drafts = [draw.randrange(3, SIZE) for _ in range(draw.randrange(4))]
        bits = None if one.matcher is None else one.matcher.masks(drafts)  # type: ignore[attr-defined]
        rows, step = one.rows(bits, drafts), []
        for place, row in enumerate(rows):
            choices = allowed(row)
            right = place < len(drafts) and drafts[place] in choices
            step.append(drafts[place] if right else int(draw.choice(choices)))
            if not right:
                break
        if EOS in step:
            break
        assert one.accept(step), one.error
        taken += step
    return taken


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_thought_ends_with_its_budget(budget: int) -> None:
    for seed in range(12):
        taken = walk(guide(budget), seed)
        assert text_of(taken[budget:]).startswith("</think>") or "</think>" in text_of(taken)
        before = next(size for size in range(len(taken)) if "</think>" in text_of(taken[:size]))
        assert before <= budget + len(spelt("</think>"))
        assert len(taken) >= 60, "the answer goes on"


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_thought_that_the_model_begins(budget: int) -> None:
    begin = spelt("\n<think>")
    taken = walk(guide(budget, opened=False), 1, begin=begin)
    assert "</think>" in text_of(taken[:len(begin) + budget + len(spelt("</think>"))])
    other = guide(budget, opened=False)
    assert "</think>" not in text_of(walk(other, 1, begin=spelt("Well, <think>")))
    assert not other.decides(10**6), "nothing is to be decided behind a thought"


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_format_follows_the_thought(budget: int) -> None:
    parts = [{"type": "thought", "open": True}, {"type": "json_schema", "json_schema": SCHEMA}]
    grammar = grammar_of(Structured(structural_tag=json.dumps(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}})))
    for seed in range(6):
        taken = walk(guide(budget, matcher=WORDS.matcher(grammar)), seed, most=400)
        thought, mark, answer = text_of(taken).partition("</think>")
        assert mark and json.loads(answer).keys() == {"a", "b"}
        assert len(spelt(thought)) <= 4 * budget + 4


def test_the_end_is_forced_against_other_rules() -> None:
    end = spelt("</think>")
    rules = TokenRuleFilter(TokenRules(SIZE, np.array([80, 81], np.int32).tobytes()),
                            ResolvedParams(max_tokens=99), False)
    one = guide(2, rules=rules)
    taken = walk(one, 3, most=2 + len(end) + 5)
    assert taken[2:2 + len(end)] == end and set(taken[:2] + taken[2 + len(end):]) <= {80, 81}
    assert not one.accept([90]) and one.error.startswith("bad_words")


def test_an_end_that_is_half_written_is_completed() -> None:
    one = guide(3)
    parts = [spelt(text) for text in ("x", "<", "/th")]
    tokens = [token for part in parts for token in part]
    one = guide(len(tokens))
    assert one.accept(tokens)
    for _ in range(12):
        [row] = one.rows(None, [])
        if row is None:
            break
        [token] = allowed(row)
        assert one.accept([token])
        tokens.append(token)
    assert text_of(tokens) == "x</think>"


def test_nothing_is_decided_before_the_budget_can_be_spent() -> None:
    one = guide(10)
    x = spelt("x")[0]
    assert not one.decides(9) and one.decides(10)
    assert one.accept([x] * 4) and not one.decides(9) and one.decides(10)
    assert one.rows(None, [x] * 5) == [None] * 6
    last = one.rows(None, [x] * 6)
    assert last[:6] == [None] * 6 and allowed(last[6]) == spelt("</think>")[:1]
    assert one.accept(spelt("</think>")) and not one.decides(10**6)


def test_a_budget_that_limits_nothing() -> None:
    params = SamplingParams(thinking_token_budget=9)
    assert params.thought_limit(10) == 9 and params.thought_limit(9) is None
    assert SamplingParams().thought_limit(10) is None
    with pytest.raises(ValueError, match="thinking_token_budget: must be between"):
        SamplingParams(thinking_token_budget=-1).check()


def test_a_tag_with_free_text_limits_nothing_but_the_thought() -> None:
    parts = [{"type": "thought", "open": True, "max_tokens": 5}, {"type": "any_text"}]
    grammar = grammar_of(Structured(structural_tag=json.dumps(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}})))
    ring, end = MaskedRing(config()), len(spelt("</think>"))
    by_tag = ring.structured(grammar, max_tokens=40, seed=3)
    by_rule = ring.structured("", max_tokens=40, seed=3, rules=TokenRules(
        SIZE, thought=ThoughtRule("qwen3", 5, True)))
    ring.run()
    assert ring.of(by_tag)[0].tokens == ring.of(by_rule)[0].tokens
    assert text_of(ring.of(by_tag)[0].tokens[5:5 + end]) == "</think>"


def test_a_model_that_does_not_reason_refuses_it() -> None:
    facts = ModelFacts(SIZE, 64, (EOS,), {}, has_tokenizer=True)
    asked = SamplingParams(thinking_token_budget=4)
    with pytest.raises(InvalidRequest, match="^thinking_token_budget: the model does not") as no:
        check_params(asked, facts)
    assert no.value.param == "thinking_token_budget"
    check_params(asked, msgspec.structs.replace(facts, reasoning="qwen3"))


@pytest.mark.parametrize(("limit", "masked"), [(None, False), (4, True), (9, False), (64, False)])
def test_only_what_may_act_asks_for_masks(limit: int | None, masked: bool) -> None:
    facts = ModelFacts(SIZE, 64, (EOS,), {}, has_tokenizer=True, reasoning="qwen3")
    params = SamplingParams(max_tokens=9, thinking_token_budget=limit)
    assert resolve(params, facts, 5).masked is masked


# --- in the scheduler ---

def day(ring: MaskedRing, dice: random.Random | None = None) -> None:
    for number in range(10):
        opened = number % 3 < 2
        ring.structured("", prompt=7 + 5 * number, max_tokens=40, seed=number, n=1 + number % 2,
                        rules=TokenRules(SIZE, thought=ThoughtRule("qwen3", 3 * (number % 6),
                                                                   opened)))
        ring.submit(9, max_tokens=20, seed=number, rid=f"plain{number}")
        if number % 3 == 2:
            ring.run(dice)
    ring.run(dice)
    ring.assert_at_rest()


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[list[int], str | None]]:
    ring, end = MaskedRing(config(overlap=False, seqs=64)), len(spelt("</think>"))
    day(ring)
    for heard in ring.heard.values():
        if heard.submit.rules is None:
            continue
        rule = heard.submit.rules.thought
        assert rule is not None
        if rule.opened:
            text = text_of(heard.tokens[rule.budget:rule.budget + end])
            assert text == "</think>" or "</think>" in text_of(heard.tokens[:rule.budget])
        else:
            assert "</think>" not in text_of(heard.tokens)
    assert ring.scheduler.masks.made < 60 * end, "only where an end is near"
    return said(ring)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_a_request_alone(
        alone: dict[tuple[str, int], tuple[list[int], str | None]], kind: str) -> None:
    changes, more = KINDS[kind]
    ring = MaskedRing(config(**changes), **more)
    day(ring, random.Random(kind))
    assert said(ring) == alone


@pytest.mark.parametrize("speculative", ["off", "mtp:2"])
def test_a_worker_dies(speculative: str) -> None:
    """Before, within and behind the ends of the thoughts."""
    more = {} if speculative == "off" else {"acceptance": (0.9, 0.9)}

    def run(steps: int) -> dict[Any, Any]:
        ring = MaskedRing(config(speculative=speculative), **more)
        for number in range(4):
            ring.structured("", max_tokens=40, seed=number, rules=TokenRules(
                SIZE, thought=ThoughtRule("qwen3", 3 * number, True)))
        ring.wake()
        for _ in range(steps):
            ring.work()
            ring.deliver()
        if steps:
            ring.lose_worker()
        ring.run()
        return said(ring)

    whole = run(0)
    assert all(run(steps) == whole for steps in (1, 3, 6, 9, 13))


@pytest.mark.parametrize("prompts", [True, False])
def test_a_recording_replays(tmp_path: Path, prompts: bool) -> None:
    """Without the texts of tokens."""
    tree = config(speculative="mtp:2")
    tree = msgspec.structs.replace(tree, runtime=msgspec.structs.replace(
        tree.runtime, record_prompts=prompts, recorder_bytes=1 << 22))
    ring = Taped(tmp_path, tree, acceptance=(0.9, 0.9))
    day(ring, random.Random(1))
    sent = [plan_checksum(plan) for plan in ring.sent if isinstance(plan, StepPlan)]
    again = []
    for played in replay(load_recording(tmp_path / "scheduler.tape0")):
        assert played.same and not played.error
        again += [plan_checksum(plan) for plan in played.plans]
    assert again == sent
