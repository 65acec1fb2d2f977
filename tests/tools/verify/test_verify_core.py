"""The core of `actorium verify`: what it visits, finds and makes smaller, with an engine that is
simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace

import msgspec
import pytest
from helpers_simulated import FAULTS, VOCAB, SimulatedEngine, mixed

from actorium.actors.config.parsed_values import DRAFTS, parse_speculative
from actorium.actors.config.tree import Config, SpeculationConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import EngineFailed
from actorium.tools.verify.conditions import (
    AXES,
    ENGINE_AXES,
    PLAIN,
    VALUES,
    Condition,
    described,
    differing,
    engine_part,
    made_by,
    methods_of,
    varied,
)
from actorium.tools.verify.contradictions import CaseAnswer, NoAnswer, Strictness, difference
from actorium.tools.verify.shrinking import shrunk
from actorium.tools.verify.verify_cases import (
    Trial,
    VerifyCase,
    Visits,
    Vocabulary,
    drawn_cases,
    drawn_engines,
    rounds_of,
)
from actorium.tools.verify.verify_report import verify_page, verify_result, verify_table
from actorium.tools.verify.verify_run import (
    EngineCounts,
    EngineNotStartedError,
    Received,
    VerifyOptions,
    VerifyRun,
    VerifyTally,
)

CASES = drawn_cases(1, 40, Vocabulary(tokens=VOCAB))


def tally_of(engine: SimulatedEngine, **options: int) -> VerifyTally:
    run = VerifyRun(engine, CASES, VerifyOptions(**{"comparisons": 900, "shrink": 1, "engines": 14,
                                                    "max_runs": 400, **options}))
    return asyncio.run(run.run())


def test_an_engine_without_faults() -> None:
    tally = tally_of(SimulatedEngine(), comparisons=4000, engines=16)
    assert tally.comparisons >= 4000 and not tally.observed and not tally.unanswered
    visited = {axis for axis, _ in tally.by_axis}
    assert visited == set(AXES)
    together = {frozenset(pair) for pair in tally.pairs}
    pairs = set(map(frozenset, combinations(AXES, 2)))
    assert together == pairs


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=[pytest.mark.slow] * (at % 2))
                                   for at, fault in enumerate(FAULTS)])
def test_a_planted_fault_is_found_and_shrunk_to_its_cause(fault: str) -> None:
    tally = tally_of(SimulatedEngine(fault))
    assert tally.observed
    [own] = tally.shrunk
    assert own.difference is not None and (own.seen, own.tries) == (3, 3)
    assert set(differing(own.condition)) - {"order"} == FAULTS[fault]
    if fault.startswith("batches"):
        assert own.condition.neighbours == 15 and own.difference.kind == "logprob"
        assert own.difference.nats == pytest.approx(1e-7, rel=1e-3)
    elif "neighbours" in FAULTS[fault]:
        assert own.condition.neighbours == 1
    if fault.startswith("drafts behind"):
        assert own.condition.drafts == "mtp:2"
    result = {"model": "m", **verify_result(tally)}
    assert described(own.condition) in verify_table(result)
    assert "<svg" in verify_page(result)


def test_a_death_that_met_no_answer_is_no_comparison_of_that_axis() -> None:
    """In the simulation those with one seed in sixteen are over by then."""
    engine = SimulatedEngine()
    engine.values = {"worker": ("killed",), "neighbours": (1,)}
    run = VerifyRun(engine, CASES, VerifyOptions(comparisons=1000, engines=1))
    tally = asyncio.run(run.run())
    killed, together = tally.by_axis["worker", "killed"], tally.by_axis["neighbours", "1"]
    assert 0 < killed < together
    known = {case for case in CASES if not case.seed % 16}
    assert 0 < len(known) < len(CASES), "there are both kinds"
    engine.counts = EngineCounts(deaths=3, deaths_met=2, drafts=8, accepted=6)
    table = verify_table(verify_result(tally, counts=run.counts))
    assert "workers killed: 3, 2 of them with answers under way" in table
    assert "tokens drafted: 8, 6 of them accepted (75%)" in table


def test_what_comes_and_goes_is_said_to() -> None:
    tally = tally_of(SimulatedEngine("a rank sums its share twice", flaky=3), shrink=2, max_runs=60)
    assert any(own.difference is not None and 0 < own.seen < own.tries for own in tally.shrunk)
    assert "it comes and goes" in verify_table(verify_result(tally))


def test_an_engine_that_does_not_start_is_left_out() -> None:
    tally = tally_of(SimulatedEngine(refuses="ranks"))
    assert tally.comparisons >= 300 and not tally.observed
    assert tally.not_started == {"ranks=2": "not with ranks"}, "once, and with nothing else"
    assert len(tally.engines) == 14 and not any("ranks" in own for own in tally.engines)
    assert {axis for axis, _ in tally.by_axis} == set(AXES) - {"ranks"}
    assert "not tried: " in verify_table(verify_result(tally))


class SlowEngines(SimulatedEngine):
    """Two are asked at once."""

    def __init__(self, **options: str) -> None:
        super().__init__(**options)
        self.lanes = 2
        self.asked: set[Condition] = set()
        self.most = 0

    async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
        engine = engine_part(condition)
        assert engine not in self.asked, "something else ran beside a round"
        self.asked.add(engine)
        self.most = max(self.most, len(self.asked))
        try:
            for _ in range(3 if engine == PLAIN else 1 + mixed(engine) % 3):
                await asyncio.sleep(0)
            return await super().ask(cases, condition)
        finally:
            self.asked.remove(engine)


def test_engines_are_asked_side_by_side() -> None:
    engine = SlowEngines(refuses="ranks")
    tally = tally_of(engine)
    assert engine.most == 2 and not tally.observed and 900 <= tally.comparisons < 2000
    assert len(tally.engines) == len(set(tally.engines)) == 14
    assert tally.not_started == {"ranks=2": "not with ranks"}
    alone = tally_of(SlowEngines(), engines=1)
    assert alone.engines == ["plain"] and alone.comparisons >= 900


def test_a_lane_that_fails_ends_the_others() -> None:
    class Failing(SlowEngines):
        async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
            if engine_part(condition) != PLAIN:
                raise EngineFailed("it is gone")
            return await super().ask(cases, condition)

    with pytest.raises(EngineFailed, match="it is gone"):
        tally_of(Failing())


def test_two_flags_that_do_not_start_together() -> None:
    class Refusing(SimulatedEngine):
        async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
            if condition.ranks == 2 and not condition.graphs:
                raise EngineNotStartedError("not both")
            return await super().ask(cases, condition)

    tally = tally_of(Refusing())
    assert set(tally.not_started.values()) == {"not both"} and not tally.observed
    assert all("ranks=2" in own and "graphs=False" in own for own in tally.not_started)
    assert {"ranks", "graphs"} <= {axis for axis, _ in tally.by_axis}


def test_an_axis_alone_has_no_more_engines_than_values() -> None:
    engine = SimulatedEngine()
    engine.values = {"ranks": (2,), "neighbours": (1,)}
    assert tally_of(engine).engines == ["plain", "ranks=2"]


def test_a_plain_request_that_never_ends() -> None:
    class Silent(SimulatedEngine):
        async def ask(self, cases: Sequence[VerifyCase], condition: Condition) -> list[Received]:
            return [NoAnswer(7.0) if case == CASES[3] and len(cases) == 1 else heard
                    for case, heard in zip(cases, await super().ask(cases, condition),
                                           strict=True)]

    tally = tally_of(Silent(), engines=1)
    assert {(own.condition, own.case, own.difference.kind) for own in tally.observed} == {
        (PLAIN, CASES[3], "silence")}
    assert "no answer within 7 s" in verify_table(verify_result(tally))


def test_runs_are_bounded() -> None:
    asked = 0

    async def seen(_trial: Trial, _condition: Condition) -> object:
        nonlocal asked
        asked += 1
        return difference([CaseAnswer(tokens=(1,))], [CaseAnswer(tokens=(2,))], False,
                          Strictness())

    condition = msgspec.structs.replace(PLAIN, ranks=2, drafts="mtp:4", neighbours=32)
    trial = Trial(CASES[0], tuple(CASES[1:17]), tuple(CASES[17:33]))
    own = asyncio.run(shrunk(trial, condition, seen, max_runs=7))  # type: ignore[arg-type]
    assert asked == own.runs == 7 and own.difference is not None
    whole = asyncio.run(shrunk(trial, condition, seen, max_runs=500))  # type: ignore[arg-type]
    assert whole.condition == PLAIN and whole.case.max_tokens == 1 and len(whole.case.prompt) == 1


def test_what_is_never_seen_again() -> None:
    async def seen(_trial: Trial, _condition: Condition) -> None:
        return None

    own = asyncio.run(shrunk(Trial(CASES[0]), PLAIN, seen))
    assert (own.difference, own.seen, own.tries) == (None, 0, 3)


def answer(tokens: Sequence[int], logprobs: Sequence[float] | None = None, finish: str = "length",
           top: dict[int | str, float] | None = None) -> CaseAnswer:
    return CaseAnswer(tokens=tuple(tokens), finish=finish,
                      logprobs=None if logprobs is None else tuple(logprobs),
                      tops=() if top is None else (top,) * len(tokens))


def test_differences_by_hand() -> None:
    exact, close, off = Strictness(), Strictness("close", 0.01), Strictness("off")
    a = answer([1, 2, 3], [-1.0, -2.0, -3.0])
    assert difference([a], [a, answer([9])], False, exact) is None
    found = difference([a], [a, answer([1, 2], finish="stop")], True, exact)
    assert found is not None and (found.kind, found.choice, found.at) == ("end", 1, 2)
    assert found.other == "the end (stop)" and found.plain_logprobs == {"3": -3.0}
    b = answer([1, 2, 3], [-1.0, -2.0005, -3.0])
    uneven = difference([a], [b], False, exact)
    assert uneven is not None and (uneven.kind, uneven.at) == ("logprob", 1)
    assert difference([a], [b], False, close) is difference([a], [b], False, off) is None
    assert difference([a], [answer([1, 2, 3])], False, exact) is None
    tops = [answer([1], [-1.0], top={1: -1.0, 2: value}) for value in (-2.0, -2.5)]
    uneven = difference([tops[0]], [tops[1]], False, exact)
    assert uneven is not None and uneven.nats == 0.5
    for same in ({"tokens": (1, 2, 3), "text": "abc"}, {"text": "abc"}, {}):  # nothing but the end
        ends = [CaseAnswer(finish=why, **same) for why in ("length", "stop")]
        told = difference([ends[0]], [ends[1]], False, exact)
        assert told is not None and told.kind == "end", same
        assert (told.plain, told.other) == ("the end (length)", "the end (stop)")
        assert difference([ends[0]], [ends[0]], False, exact) is None
    text = difference([CaseAnswer(text="abc")], [CaseAnswer(text="abd")], False, exact)
    assert text is not None and (text.kind, text.at, text.plain) == ("text", 2, "c")
    cut = [CaseAnswer(tokens=(1, 2), text=told, finish="stop") for told in ("ab", "abe")]
    text = difference([cut[0]], [cut[1]], False, exact)
    assert text is not None and (text.kind, text.at, text.other) == ("text", 2, "e")


def test_the_same_seed_draws_the_same() -> None:
    values = {axis: several for axis, several in VALUES.items() if axis != "drafts"}
    assert drawn_engines(3, 6, values) == drawn_engines(3, 6, values)
    assert all(engine.drafts == "off" for engine in drawn_engines(3, 6, values))
    first, again = (rounds_of(5, PLAIN, CASES, VALUES, Visits()) for _ in range(2))
    for _ in range(20):
        own = next(first)
        assert own == next(again) and len(own.cases) == own.condition.neighbours + 1
        assert set(differing(own.condition)).isdisjoint(ENGINE_AXES)


def test_drafts_are_made_by_what_the_engine_has() -> None:
    """Without a layer for them there are those of texts, and of a second model that is named."""
    plain, named = Config(), Config(speculation=SpeculationConfig(speculative_model="heads"))
    layer, none = (SimpleNamespace(mtp_layers=layers) for layers in (1, 0))
    every = VALUES["drafts"]
    assert {value.partition(":")[0] for value in every} == set(DRAFTS)
    assert set(made_by(every, methods_of(none, plain))) == {"ngram:3", "suffix:6", "grammar:4"}  # type: ignore[arg-type]
    assert set(made_by(every, methods_of(layer, named))) == set(every)  # type: ignore[arg-type]
    config = varied(plain, Condition(drafts="suffix:6"), 1024)
    assert config.speculation.speculative == "suffix:6,fixed"
    assert parse_speculative(config.speculation.speculative).methods == {"suffix": 6}
    for value in every:  # other methods are refused beside a model
        validate(varied(named, Condition(drafts=value), 1024))


def test_whose_texts_are_known_is_asked_for_texts() -> None:
    cases = drawn_cases(1, 200, Vocabulary(tokens=VOCAB, grammars=True))
    known = [sum(map(bool, found)) for found in (
        [case.schema for case in cases], [case.stop for case in cases],
        [isinstance(case.prompt, str) for case in cases], [case.allowed for case in cases])]
    assert all(10 < count < 60 for count in known), known
    assert not any(case.stop for case in CASES)


def test_texts_for_servers_with_ids_of_their_own() -> None:
    cases = drawn_cases(1, 30, Vocabulary(seeds=False, penalties=False))
    assert all(isinstance(case.prompt, str) and case.greedy and not case.allowed
               and case.repetition_penalty == 1.0 for case in cases)
    assert len({case.prompt for case in cases}) > 25
    assert cases[0] != VerifyCase(prompt="", max_tokens=1)
