"""Rollouts under updates of the weights: how tokens are held against versions, and a short run."""

from __future__ import annotations

import pytest
from helpers_benchmarks import benchmark
from helpers_runtime import short_dir

from actorium.actors.models.model_dir import resolve

scenario = benchmark("scenarios.rollouts_updates")


def test_each_token_has_the_version_of_its_run() -> None:
    rollout = scenario.Rollout([1], [2] * 6, [0.0] * 6, [(0, 3), (4, 5)], 0.0)
    assert [rollout.version_of(i) for i in range(6)] == [3, 3, 3, 3, 5, 5]
    assert rollout._replace(versions=[(2, 1)]).version_of(1) == 0


@pytest.mark.slow
def test_streams_across_updates_are_of_the_versions_that_are_told(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with short_dir() as base:
        monkeypatch.setenv("ACTORIUM_RUN_DIR", str(base))
        streams, checked, *actors = scenario.updates(minutes=0.2, at_once=4, every=4.0, tokens=48,
                                                     checked=6)
    assert not streams["lost"] and streams["streams_across_updates"] and actors
    assert checked["largest_difference"] < 1e-4


@pytest.mark.slow
def test_a_wrong_version_is_seen() -> None:
    with short_dir() as base:
        path = scenario.write_checkpoint(resolve(""), base / "a", 1)
        one, other = (scenario.AutoModelForCausalLM.from_pretrained(
            own, dtype=scenario.torch.float32) for own in (resolve(""), path))
        text = scenario.torch.tensor([[5, 9, 33, 70, 8]])
        with scenario.torch.inference_mode():
            given = one(text[:, :-1]).logits[0].log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
        rollout = scenario.Rollout([5], [9, 33, 70, 8], given.tolist(), [(0, 1)], 0.0)
        assert max(scenario.differences(rollout, [one, other])) < 1e-5
        assert max(scenario.differences(rollout, [other, one])) > 1e-3
