"""Tokens that a grammar forces: what is certain behind a step, when their windows pay, and that a
worker puts them in the place of drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers_masking import EOS, MaskedRing, vocabulary
from helpers_scheduler import config
from helpers_worker import CPU

from actorium.actors.messages import RowDrafts, StepPlan
from actorium.actors.scheduler.draft_policy import DraftChoice, DraftPolicy
from actorium.actors.structured.forced_tokens import behind_emitted
from actorium.actors.structured.grammar import json_grammar
from actorium.gpu.step.drafts import DraftTables
from actorium.gpu.step.staging import DeviceArrays, HostArrays

KEYS = {"type": "object", "properties": {
    name: {"enum": [False, True]} for name in ("temperature_celsius", "wind_speed", "cloudy")},
    "required": ["temperature_celsius", "wind_speed", "cloudy"]}


@pytest.mark.parametrize(("drafts", "rest"), [
    ([], [2, 3]), ([1], [3]), ([1, 2], []), ([1, 2, 3, 4], []), ([9], [2, 3]), ([1, 9, 3], [3])])
def test_what_follows_on_tokens_that_are_sure_to_be_emitted(drafts: list[int], rest: list[int]
                                                            ) -> None:
    assert behind_emitted([1, 2, 3], drafts) == rest


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_save_steps(overlap: bool) -> None:
    """All of them are accepted but those past the end, and the tokens are the same."""
    said, steps = [], []
    for speculative in ("off", "grammar:4,fixed"):
        ring = MaskedRing(config(speculative=speculative, overlap=overlap))
        ring.structured(json_grammar(json.dumps(KEYS)), max_tokens=60)
        ring.run()
        (heard,) = ring.heard.values()
        assert heard.reason == "stop" and heard.tokens[-1] == EOS
        said.append(heard.tokens)
        steps.append(sum(isinstance(plan, StepPlan) for plan in ring.sent))
        gauges = ring.scheduler.health().gauges
    assert said[0] == said[1] and steps[1] <= 0.75 * steps[0], steps
    accepted = gauges["spec_decode_by_grammar_num_accepted_tokens"]
    assert accepted >= 8 and gauges["spec_decode_num_accepted_tokens"] == accepted


def test_a_grammar_says_what_is_forced() -> None:
    words = vocabulary()
    matcher = words.matcher(json_grammar(json.dumps(KEYS)))
    assert matcher.accept(words._tokens.tokenize_str('{"'))
    forced = matcher.forced()
    assert len(forced) > 1 and b"temperature_celsius".startswith(
        b"".join(map(words.bytes_of, forced)))
    assert matcher.forced() == forced, "asking moves nothing"
    assert matcher.accept(forced) and not matcher.error


# --- whether it pays -----------------------------------------------------------------------------

def learnt(row_us: float, batch: int) -> DraftPolicy:
    """A choice that has measured steps of a batch where a row of a window costs so much."""
    drafting = DraftPolicy({"grammar": 4})
    for _ in range(40):
        choice = drafting.next(batch)
        assert choice == ("", 0)
        drafting.timed(batch, choice, 1000 + int(row_us * batch))
        if longest := drafting.forced(batch, [4, 2]):
            drafting.timed(batch, DraftChoice("grammar", longest),
                           1000 + int(row_us * batch * (1 + longest)))
    return drafting


def test_a_window_is_made_where_it_pays() -> None:
    """By memory alone: as long as there are tokens. Where each row costs: with few rows only."""
    assert learnt(0.0, 8).forced(8, [4, 2]) == 4
    assert learnt(0.0, 8).forced(8, [2]) == 2
    dear = learnt(1000.0, 32)
    assert dear.forced(32, [4, 2]) == 0
    assert learnt(50.0, 2).forced(2, [4, 4]) == 4


def test_nothing_is_known_at_first_and_fixed_needs_not_to_know() -> None:
    assert DraftPolicy({"grammar": 4}).forced(8, [4]) == 0
    assert DraftPolicy({"grammar": 4}, fixed=True).forced(8, [9, 1]) == 4
    assert DraftPolicy({"grammar": 4}, fixed=True).forced(8, [2]) == 2
    both = DraftPolicy({"mtp": 2, "grammar": 4})
    assert all(choice.method != "grammar" for choice in (both.next(4) for _ in range(200)))


# --- in the worker -------------------------------------------------------------------------------

@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
def test_the_tables_take_forced_tokens(arrays: type[HostArrays] | type[DeviceArrays]) -> None:
    """In the place of drafts; behind these, and in other rows, there are zeros."""
    own = arrays(CPU)
    tables, decode = DraftTables(own, 5, 4), np.array([1, 2, 3], np.int32)
    tables.tokens[...] = 7
    tables.plan(decode, 1)
    up = own.upload()
    tables.force([RowDrafts(2, np.array([8, 9, 10], np.int32).tobytes())], decode, up)
    up.send()
    found = np.asarray(tables.tokens).tolist()
    assert found[1:4] == [[7, 0, 0, 7], [8, 9, 10, 0], [7, 0, 0, 7]] and found[4] == [7] * 4
    most, made = tables.window(decode)
    assert most == 3
    assert made is None if arrays is DeviceArrays else made.tolist() == [1, 3, 1]


def test_forced_tokens_that_do_not_fit_are_refused() -> None:
    own = HostArrays(CPU)
    tables, decode = DraftTables(own, 5, 2), np.array([1, 2], np.int32)
    for slot, count in ((3, 1), (1, 3)):
        with pytest.raises(ValueError, match="forced"):
            tables.force([RowDrafts(slot, bytes(4 * count))], decode, own.upload())
