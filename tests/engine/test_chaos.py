"""A slice of the chaos battery (`make chaos` runs all of it), and that it has teeth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.errors import EngineUnavailable
from actorium.actors.messages import TokenLogprob
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.params import SamplingParams
from actorium.tools.chaos import (
    client_rows,
    cluster_rows,
    drawn_faults,
    drawn_rows,
    hostile_rows,
    load_rows,
    model_rows,
    models_rows,
    stop_rows,
)
from actorium.tools.chaos.__main__ import run
from actorium.tools.chaos.checked_streams import Gaps, RequestMaker, Traffic, quantile
from actorium.tools.chaos.drawn_faults import BY_NAME, KINDS, TOKENS, DrawnFault, draw, skipped
from actorium.tools.chaos.drawn_rows import DrawnPlayer
from actorium.tools.chaos.fault_injection import UNFENCED, no_dedup
from actorium.tools.chaos.faults import PAIRS, ROLES, Fault, plan
from actorium.tools.chaos.kill_rows import chaos, disks, kills, numbers

pytestmark = pytest.mark.chaos
KILLED_SCHEDULER = [Fault(1.0, "kill", ("scheduler",))]
KILLED_DETOKENIZER = [Fault(1.0, "kill", ("detokenizer",))]


def sound(row: dict[str, Any]) -> None:
    assert row["wrong"] == []


# --- the harness itself --------------------------------------------------------------------------

def test_a_plan_follows_its_seed_and_kills_every_role() -> None:
    faults = plan(5, 400.0, 8, 2, PAIRS, 3)
    assert faults == plan(5, 400.0, 8, 2, PAIRS, 3) != plan(6, 400.0, 8, 2, PAIRS, 3)
    alone = [fault.roles[0] for fault in faults if fault.kind == "kill" and len(fault.roles) == 1]
    assert {role: alone.count(role) for role in ROLES} == dict.fromkeys(ROLES, 8)
    assert {fault.roles for fault in faults if len(fault.roles) == 2} == set(PAIRS)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert sum(fault.kind == "stop" for fault in faults) == 8
    assert sum(fault.kind == "full" for fault in faults) == 3


def test_a_row_that_fails_as_a_whole_is_reported_and_the_others_run() -> None:
    def fails(seed: int) -> dict[str, Any]:
        raise EngineUnavailable(f"of seed {seed}")

    rows: dict[str, list[str]] = {}
    run(["a", "b"], 7, lambda name, row: rows.update({name: row["wrong"]}),
        {"a": fails, "b": lambda seed: {"wrong": []}})
    assert rows == {"a": ["EngineUnavailable: of seed 7"], "b": []}


def test_a_seed_draws_the_same_faults_however_long_a_run_is(monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:
    few, many = [*islice(draw(7), 10)], [*islice(draw(7), 100)]
    assert few == many[:10] and few != [*islice(draw(8), 10)]
    assert [fault.number for fault in many] == list(range(1, 101))
    for part in range(0, 95, len(KINDS)):  # each kind, before any comes again
        kinds = [fault.kind for fault in many[part:part + len(KINDS)]]
        assert len({*kinds}) == len(kinds)
    for fault in many:
        assert fault.roles in BY_NAME[fault.kind].who
        assert TOKENS[0] <= fault.after <= TOKENS[1]
        assert str(fault).startswith(f"{fault.number}: {fault.kind} ")
    monkeypatch.setattr(drawn_faults, "faketime", lambda: None)
    monkeypatch.setattr(drawn_faults.os, "geteuid", lambda: 1000)
    assert skipped().keys() >= {"clock", "disk-filled", "disk-slow", "network"}
    assert all(skipped().values()), "with a reason"
    assert [*islice(draw(7), 100)] == many, "what is skipped does not move the others"


def test_faults_strike_in_their_order_at_their_points() -> None:
    """On whatever load; what the machine does not allow is reported by name, and is not applied."""
    struck: list[tuple[str, int]] = []

    class Player(DrawnPlayer):
        async def _strike(self, fault: DrawnFault) -> None:
            struck.append((fault.kind, self._tokens()))

        async def _until(self, holds: Callable[[], bool], what: str) -> None:
            while "actors" not in what and not holds():
                self._traffic.tally.tokens += 1

    player = Player(None, Traffic(RequestMaker(1, (1, 2))), Path(), Path())  # type: ignore[arg-type]
    faults = [fault for fault in islice(draw(3), 30) if not BY_NAME[fault.kind].why_not()]
    for fault in faults:
        asyncio.run(player.run(fault))
    points = [*accumulate(fault.after for fault in faults)]
    assert struck == [(fault.kind, at) for fault, at in zip(faults, points, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kind_of_fault_is_survived() -> None:
    lines: list[str] = []
    row = drawn_rows.drawn(11, 25.0, lines.append, most=len(KINDS))
    sound(row)
    assert row["kinds"].keys() | row["skipped"].keys() == {kind.name for kind in KINDS}
    assert len(lines) == len(KINDS) and sum("skipped" in line for line in lines) == len(
        row["skipped"])
    assert row["complete"] > 100 and row["http"]["complete"] > 10


def test_gaps_go_to_the_last_fault() -> None:
    gaps = Gaps()
    gaps.record(1, 0.0, 0.0, 9.0)
    gaps.fault("a", 10.0)
    gaps.record(1, 0.0, 9.0, 10.5)
    gaps.record(1, 0.0, 10.5, 12.0)
    gaps.record(2, 13.5, 13.5, 19.0)
    gaps.fault("b", 20.0)
    gaps.record(1, 0.0, 12.0, 20.25)
    found = gaps.summary()
    assert found["a"] == {"streams": 1, "p50": 1.5, "p99": 1.5, "max": 1.5}
    assert found["b"]["max"] == 0.25 and found["all"]["streams"] == 2


def test_quantiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50, 99, 100)
    assert quantile([], 0.5) == 0.0


def test_a_stream_is_checked_token_by_token() -> None:
    from actorium.actors.client.requests import StreamDelta
    from actorium.actors.messages import Usage

    def fed(*deltas: StreamDelta) -> list[str]:
        want = RequestMaker(1, (4, 4)).make()
        for delta in deltas:
            want.apply(delta)
        return want.wrong

    right = RequestMaker(1, (4, 4)).make()._expected[0]
    usage = Usage(1, 0, 4)
    end = StreamDelta(text="", token_ids=right[2:], finish_reason="length", usage=usage)
    assert fed(StreamDelta(text="", token_ids=right[:2]), end) == []
    assert fed(end), "lost"
    assert fed(StreamDelta(text="", token_ids=right[:3]), end), "duplicated"
    assert fed(StreamDelta(text="", token_ids=right, finish_reason="stop", usage=usage)) == [
        "ended with stop after 4 of 4 tokens"], "all its tokens, but another end"
    assert fed(StreamDelta(text="", token_ids=[right[0], right[1] ^ 1]), end), "changed"


# --- rows ----------------------------------------------------------------------------------------

def test_every_stream_goes_on_through_every_fault() -> None:
    row = kills(seed=1, seconds=11.0, streams=40, rounds=1, stops=1, pairs=PAIRS[:1], full=1)
    sound(row)
    assert row["complete"] > 20 and row["ghost_messages"] > 0
    assert all(row["struck"][role] for role in ROLES)
    assert row["gaps"]["all"]["p99"] < 5.0  # the machine may be busy; figures are `make chaos`'s


@pytest.mark.slow
def test_streams_wait_for_a_full_ledger_as_long_as_they_shall() -> None:
    row = disks(seed=1, times=1, streams=8)
    sound(row)
    assert row["faults"] == {"full": 1} and row["complete"] > 8


@pytest.mark.slow
def test_numbers_of_sequences_go_past_32_bits() -> None:
    row = numbers(seed=1, streams=20)
    sound(row)
    assert row["faults"] == {"kill": len(ROLES)} and row["requests"] > 2 * 20


def test_poison_is_found_and_other_requests_complete() -> None:
    row = hostile_rows.poison(seed=1, requests=12, poisoned=2, latest=60.0)
    sound(row)
    assert (row["quarantined"], row["complete"]) == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("actor", hostile_rows.FAILING)
def test_no_request_kills(actor: str) -> None:
    """One that kills, one that raises, one that hangs."""
    row = hostile_rows.quarantine(actor, seed=1, requests=24, poisoned=3, latest=60.0)
    sound(row)
    assert (row["quarantined"], row["complete"]) == (3, 21)
    assert row["deaths"] == 3 and all(row["modes"].values())


@pytest.mark.slow
def test_bad_frames_kill_no_actor() -> None:
    row = hostile_rows.fuzz(seed=1, count=1000)
    sound(row)
    assert row["frames"] >= 1000 and row["deaths"] == 0


@pytest.mark.slow
def test_a_crowd_is_served_or_refused_at_once() -> None:
    row = load_rows.crowd(seed=1, seconds=2.0, readers=5, vanishing=20)
    sound(row)
    assert row["complete"] + row["refused"] == row["sent"] and row["refused"] > 0
    assert row["pages_back_s"] < 5.0 and row["detokenizer_grew_mb"] < 20


@pytest.mark.slow
def test_streams_go_on_through_a_cluster_s_deaths() -> None:
    row = cluster_rows.cluster(seed=1, count=12, streams=20, replicas=3)
    sound(row)
    assert row["faults"] == {"kill": 8, "stop": 2, "drain": 1, "scale": 1}
    assert row["router"]["migrated_requests"] > 0
    assert row["complete"] > 40 and row["router"]["routed_blind"] <= 0.01 * row["requests"]


@pytest.mark.slow
def test_streams_go_on_where_networks_part() -> None:
    row = cluster_rows.nodes(seed=5, count=8, streams=20)
    sound(row)
    assert row["faults"] == {"partition": 3, "kill agent": 1, "kill replica": 1, "kill": 2,
                             "drain": 1}
    assert row["router"]["migrated_requests"] > 0 and row["complete"] > 40


@pytest.mark.slow
def test_streams_outlive_the_whole_engine() -> None:
    row = stop_rows.reboot(seed=1, times=1)
    sound(row)
    assert row["complete"] == row["requests"] > 0


@pytest.mark.slow
def test_unread_answers_outlive_an_engine_that_gives_up() -> None:
    sound(stop_rows.unread(times=1))


@pytest.mark.slow
def test_a_stopped_engine_finishes_its_streams() -> None:
    sound(stop_rows.stops(seed=1, times=1))


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing() -> None:
    sound(stop_rows.orphans(times=1))


@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(),
                    reason="the demo model is not there")
@pytest.mark.slow
def test_a_real_model_s_streams_are_what_they_are_undisturbed() -> None:
    faults = ("kill worker-0", "kill scheduler", "kill detokenizer")
    row = model_rows.model(seed=1, streams=20, faults=faults)
    sound(row)
    assert row["faults"] == dict.fromkeys(faults, 1) and row["tokens"] > 1200


@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(),
                    reason="the demo model is not there")
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_plain_clients_get_whole_answers_while_actors_are_killed(replicas: int) -> None:
    """A part of `make kills`."""
    row = client_rows.clients(seed=3, count=40, kills=14, replicas=replicas)
    sound(row)
    assert row["complete"] == 40 * row["rounds"] and sum(row["kills"].values()) == 14


def test_the_kills_of_plain_clients_follow_their_seed() -> None:
    kills = client_rows.draw_kills(5, 60, client_rows.KILLED)
    assert kills == client_rows.draw_kills(5, 60, client_rows.KILLED)
    assert kills != client_rows.draw_kills(6, 60, client_rows.KILLED)
    counts = [[kill.role for kill in kills].count(role) for role in client_rows.KILLED]
    assert min(counts) == 8 and kills[-1].at < 1.0, "before the answers end"
    calls = client_rows.draw_calls(5, 200)
    assert calls == client_rows.draw_calls(5, 200) != client_rows.draw_calls(6, 200)


def test_plain_clients_answers_are_held_against_each_other() -> None:
    """Each part of an answer, changed alone, is seen, and a stream says what a whole answer does.
    """
    def received(*chunks: dict[str, Any], error: str = "") -> client_rows.ReceivedAnswer:
        answer = client_rows.ReceivedAnswer(error=error)
        for chunk in chunks:
            answer.add(chunk)
        return answer

    def choice(text: str, logprob: float, reason: str | None, key: str) -> dict[str, Any]:
        return {"index": 0, key: {"content": text}, "finish_reason": reason,
                "logprobs": {"content": [{"token": text, "logprob": logprob}]}}

    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    first = {"choices": [choice("a", -1.0, None, "delta")], "usage": None}
    last = {"choices": [choice("b", -0.5, "length", "delta")], "usage": usage}
    whole = received(first, last)
    assert received({"choices": [choice("ab", 0.0, "length", "message") | {
        "logprobs": {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -0.5}]}}
    ], "usage": usage}).differs(whole) == ""
    for other in ([first], [first, last | {"usage": usage | {"completion_tokens": 3}}], [],
                  [first, {"choices": [choice("b", -0.5000001, "length", "delta")],
                           "usage": usage}],
                  [first, {"choices": [choice("b", -0.5, "stop", "delta")], "usage": usage}],
                  [first, {"choices": [choice("c", -0.5, "length", "delta")], "usage": usage}],
                  [first, last, last]):
        assert received(*other).differs(whole), other
    assert received(first, last, error="503").differs(whole) == "503"


@pytest.mark.slow
def test_probes_report_a_hang_and_its_end() -> None:
    """A stopped worker is unready, killed and replaced; figures are `make chaos`'s."""
    row = stop_rows.probes(seed=1, stops=1, streams=40, times=10)
    slow = ("a probe takes", "a stopped worker")
    assert [text for text in row["wrong"] if not text.startswith(slow)] == []
    assert row["answer_p50_s"] < 0.25 and row["unready_after_s"][0] < 5.0
    assert row["ready_again_s"][0] < stop_rows.PATIENCE


def test_slopes() -> None:
    assert load_rows.slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == 2.0
    assert load_rows.slope([(1.0, 1.0)]) == 0.0


# --- teeth ---------------------------------------------------------------------------------------

def test_streams_of_a_model_are_held_against_each_other_to_the_bit() -> None:
    """Each of what a client is told, changed alone, is seen."""
    def heard(**changes: Any) -> model_rows.ReceivedStream:
        told: dict[str, Any] = {
            "tokens": [5, 7], "text": "ab", "reason": "length", "prompt_logprobs": [None],
            "logprobs": [TokenLogprob(5, -0.5, 1, []), TokenLogprob(7, -1.5, 2, [])]}
        return {0: model_rows.ReceivedChoice(**{**told, **changes})}

    params = SamplingParams(max_tokens=2, logprobs=0)
    nearly = [TokenLogprob(5, -0.5, 1, []), TokenLogprob(7, -1.5000001, 2, [])]
    assert model_rows.differs(heard(), heard()) is model_rows.amiss(heard(), params) is None
    for changes in ({"tokens": [5, 8]}, {"tokens": [5]}, {"logprobs": nearly}, {"text": "abc"},
                    {"prompt_logprobs": []}, {"reason": "stop"}):
        assert model_rows.differs(heard(**changes), heard()), changes
    assert "choices" in str(model_rows.differs({}, heard()))
    for changes in ({"tokens": [5]}, {"logprobs": nearly[:1]}, {"reason": "internal"}):
        assert model_rows.amiss(heard(**changes), params), changes
    assert model_rows.amiss({}, params) == "0 of 1 choices"


@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(),
                    reason="the demo model is not there")
@pytest.mark.slow
def test_without_exactness_it_fails() -> None:
    row = model_rows.model(seed=1, streams=20, faults=("kill worker-0",), exact="off")
    assert any("log-probabilities equal for" in text for text in row["wrong"])


def test_the_unfenced_detokenizer_removes_the_fencing() -> None:
    """What `build_unfenced` replaces is there."""
    assert "_is_stale" in vars(DetokenizerCore)


@pytest.mark.slow
def test_without_fencing_it_fails() -> None:
    row = chaos(KILLED_SCHEDULER, seed=2, streams=20, roles=UNFENCED)
    assert row["ghost_messages"] > 0
    assert any("instead of" in text for text in row["wrong"])


@pytest.mark.slow
def test_without_dedup_it_fails() -> None:
    with no_dedup():
        row = chaos(KILLED_DETOKENIZER, seed=3, streams=20)
    assert any("instead of" in text for text in row["wrong"])


@pytest.mark.slow
def test_answers_about_images_are_the_same_while_what_decodes_them_dies() -> None:
    row = model_rows.images(3, kills=3, others=1, items=12, apart=0.5)
    sound(row)
    assert row["faults"] == {"media": 3, "worker-0": 1} and row["right_undisturbed"] >= 10
    assert row["compared"] > row["questions"] // 2


@pytest.mark.slow
def test_answers_about_images_are_the_same_while_replicas_die() -> None:
    row = model_rows.images(3, kills=2, others=4, items=12, apart=0.5, replicas=2)
    sound(row)
    assert row["faults"] == {"media": 2, "replica-0": 1, "scheduler": 1, "1/worker-0": 1,
                             "0/scheduler": 1}
    assert row["right_undisturbed"] >= 10 and row["compared"] > row["questions"] // 2


def test_streams_to_three_models_outlive_the_server_s_actors_and_whole_engines() -> None:
    row = models_rows.models(3, count=3, engines=3, requests=12, clients=6, kills=5, cold=0)
    sound(row)
    assert row["answered"] == 12 and row["most_engines"] == 3
    assert row["kills"] == dict.fromkeys(models_rows.KILLED, 1)
