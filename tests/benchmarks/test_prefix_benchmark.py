"""The prefix cache under a multi-turn workload: as good as can be, then falling gently."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers_benchmarks import benchmark

prefix = benchmark("scenarios.prefix")
CONVERSATIONS = 40


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = prefix.measure(CONVERSATIONS, 3, (1.0, 0.75, 0.5, 0.3), running=8)
    return result


def _rows(found: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["policy"] == policy]


def test_an_unlimited_cache_hits_what_is_counted_by_hand() -> None:
    """Two conversations, tokens counted on paper."""
    work = prefix.workload(2, 0)
    unlimited, hits = prefix.Unlimited(), []
    for asked in (work.asked[0][0], work.asked[0][1]):
        hits.append(unlimited.hit(work.system + asked))
        unlimited.add(work.system + asked)
    assert hits == [0, 992]  # 62 pages of the system prompt; the 63rd has tokens of the question
    answer = np.arange(200_000, 200_040, dtype="<i4").tobytes()
    said = work.system + work.asked[0][0] + answer
    unlimited.add(said[:-4])
    # 1,200 tokens are 75 pages, but nobody has computed the last token of the answer.
    assert unlimited.hit(said + work.asked[1][0]) == 74 * 16
    # A prompt that is cached to its end: its last page holds the token that must be computed.
    assert unlimited.hit(said[:4 * 1184]) == 73 * 16
    assert unlimited.hit(said[:4 * 1185]) == 74 * 16


@pytest.mark.slow
@pytest.mark.parametrize("policy", prefix.POLICIES)
def test_a_pool_that_holds_everything_hits_all_there_is(found: dict[str, Any],
                                                        policy: str) -> None:
    whole = _rows(found, policy)[0]
    assert whole["pool"] == 1.0
    assert whole["hit_ratio"] == found["best"] == found["ample"] > found["floor"] + 0.2
    assert whole["evicted_pages"] == whole["preemptions"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", prefix.POLICIES)
def test_a_smaller_pool_hits_less_but_never_falls_off_a_cliff(found: dict[str, Any],
                                                              policy: str) -> None:
    ratios = [row["hit_ratio"] for row in _rows(found, policy)]
    for larger, smaller in pairwise(ratios):
        assert smaller < larger
        assert larger - smaller < 0.5 * (found["best"] - found["floor"])
    assert ratios[-1] > found["floor"], "the shared system prompt at least is never lost"


@pytest.mark.slow
def test_priority_eviction_keeps_what_has_priority(found: dict[str, Any]) -> None:
    kept = [row["hit_ratio_privileged"] for row in _rows(found, "priority")]
    assert kept[:3] == [kept[0]] * 3
    halved = {policy: _rows(found, policy)[2]["hit_ratio_privileged"] for policy in prefix.POLICIES}
    assert halved["priority"] > halved["lru"] + 0.05


def test_the_reported_cache_content_is_right() -> None:
    """With the null worker's pages checked at every read, and all the books."""
    work = prefix.workload(16, 5)
    played = prefix.play(work, 500, "lru", running=4, debug=True)
    assert played.gauges["evicted_pages"] > 0
    assert played.hit > 15 * prefix.TURNS * 992
