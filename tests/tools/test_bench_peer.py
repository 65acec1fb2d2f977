"""The transformers peer of the benchmark has the weights that the engine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from helpers_hybrid import DENSE, MOE, NEXT, SPARSE, HybridDriver, hybrid_config, hybrid_runner
from helpers_models import load, tiny_config
from helpers_pairs import pairs
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.gpu.weights.loader import Fused
from actorium.tools.bench import transformers_peer as peer
from actorium.tools.bench.workloads import (
    Workload,
    WorkloadRun,
    WorkloadRuns,
    measure,
    neighbour_ratio,
)

PROMPT = [3, 14, 159, 26, 5, 35, 89, 79, 32, 38, 46]
WORK = Workload("W", 2, 7, 3, "output_tok_s")


def cut(whole: Tensor) -> list[tuple[str, Tensor]]:
    """Rows by turns to two tensors, the second one transposed."""
    return [("a", whole[::2]), ("b", whole[1::2].T)]


def test_fusing_is_the_inverse_of_cutting() -> None:
    whole = torch.randn(6, 5)
    weights = {name: part.clone() for name, part in cut(whole)} | {"other": torch.ones(2)}
    lonely = {"a": torch.ones(3, 5)}
    for own in (weights, lonely):
        peer.fuse(own, [Fused("ab", (6, 5), cut)])
    assert set(weights) == {"ab", "other"} and torch.equal(weights["ab"], whole)
    assert set(lonely) == {"a"}, "half of it is not enough"


@pytest.mark.parametrize(("architecture", "config", "tied"), pairs([
    ("Qwen3ForCausalLM", tiny_config), ("Gemma3ForCausalLM", tiny_config),
    (NEXT, hybrid_config), (DENSE, hybrid_config), (SPARSE, hybrid_config), (MOE, hybrid_config)],
    [False, True]))
def test_the_peer_has_our_random_weights(architecture: str, config: Callable[..., Any],
                                         tied: bool, tmp_path: Path) -> None:
    config(architecture, tie_word_embeddings=tied, initializer_range=0.5).save_pretrained(tmp_path)
    model, device = peer._model(Config(
        model=ModelConfig(model=str(tmp_path), load_format="dummy", dtype="float32", seed=4),
        device=DeviceConfig(device="cpu")))
    assert device == "cpu" and model.config._attn_implementation == "sdpa"
    driver = HybridDriver(hybrid_runner(load(tmp_path, load_format="dummy", dtype="float32",
                                             seed=4)), 64)
    ours = driver.admit(PROMPT, len(PROMPT) + 9)
    driver.run()
    with torch.no_grad():
        theirs = model(torch.tensor([ours.tokens])).logits[0]
    for length, logits in ours.logits.items():
        torch.testing.assert_close(logits, theirs[length - 1], atol=1e-5, rtol=0)
        assert float(logits.std()) > 0.01, "logits that tell weights apart"
    ran = peer._run(model, device, peer.PeerRun(WORK, 0, 3), vocab=199)
    assert [len(tokens) for tokens in ran.tokens] == [3, 3] and ran.seconds > 0


def job(path: Path) -> peer.PeerModel:
    """A small model with random weights."""
    tiny_config("Qwen3ForCausalLM").save_pretrained(path)
    return peer.PeerModel(Config(model=ModelConfig(model=str(path), load_format="dummy"),
                           device=DeviceConfig(device="cpu")), vocab=199, threads=2)


def asleep(pid: int) -> bool:
    """Whether all threads of a process are."""
    states = [stat.read_text().rpartition(") ")[2][0]
              for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"S"}


@pytest.mark.slow
def test_the_peer_stays_and_sleeps_between_its_runs(tmp_path: Path) -> None:
    with peer.opened(job(tmp_path)) as theirs:
        first = theirs.run(WORK, 0, 3)
        other = theirs.run(WORK, 1, 3)
        again = theirs.run(WORK, 0, 3)
        assert first.tokens == again.tokens != other.tokens
        limit = monotonic() + 5
        while not asleep(theirs.process.pid):
            assert monotonic() < limit, "its threads spin"
        assert theirs.process.poll() is None
    assert theirs.process.poll() is not None, "it goes with the block"


def test_a_failing_peer_reports_its_error(tmp_path: Path) -> None:
    asked = job(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RuntimeError, match="^transformers: .*config.json"), peer.opened(asked):
        pass


class Scripted:
    """An engine whose runs take what they are told, and note whose turn it was."""

    def __init__(self, name: str, seconds: list[float], turns: list[tuple[str, int, int]]) -> None:
        self.name, self._seconds, self._turns = name, seconds, turns

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        self._turns.append((self.name, number, output))
        return WorkloadRun(self._seconds[number], [[number]])


def test_runs_take_turns() -> None:
    turns: list[tuple[str, int, int]] = []
    said: list[str] = []
    engines = [Scripted("ours", [1.0, 2.0, 9.0], turns), Scripted("theirs", [3.0, 4.0, 9.0], turns)]
    found = measure(engines, [WORK], 2, said.append, settle=0)
    assert turns == [("ours", -1, 3), ("theirs", -1, 3), ("ours", 0, 3), ("theirs", 0, 3),
                     ("ours", 1, 3), ("theirs", 1, 3)]
    assert found == {"ours": [WorkloadRuns("W", [1.0, 2.0], [[0]])],
                     "theirs": [WorkloadRuns("W", [3.0, 4.0], [[0]])]}
    assert len(said) == 4


def test_a_ratio_is_of_neighbours() -> None:
    """A machine that becomes three times slower in mid-run changes no ratio of neighbours but
    one."""
    slow = [1.0, 1.0, 3.0, 3.0, 3.0]
    assert neighbour_ratio(slow, [2 * seconds for seconds in slow]) == 2
    assert neighbour_ratio([1.0], [3.0]) == 3
    assert neighbour_ratio([1.0, 2.0], [2.0, 8.0]) == 2, "of 2, 4 and 1"
