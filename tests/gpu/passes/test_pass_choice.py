"""Which passes are kept: found by timing once, remembered, and the same for all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers_configs import CONFIGS, SMALL
from helpers_models import CPU
from helpers_ranks import run_ranks, whole

from actorium.actors.config.parsed_values import PASSES, chooses_passes
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.passes import pass_choice
from actorium.gpu.passes.pass_choice import (
    BUDGET_S,
    LOSSES,
    LayerTimer,
    Loss,
    PassChoice,
    choice_key,
    keep_winners,
    losses,
    remembered_choice,
)
from actorium.gpu.plan.choice_files import read_choice
from actorium.gpu.worker.device import open_device
from actorium.kernels.cpu.native_library import library

QWEN3 = next(raw for raw in CONFIGS if raw["architectures"] == ["Qwen3ForCausalLM"])
MOST = 16


def loaded(path: Path, **config: Any) -> Decoder:
    (path / "config.json").write_text(json.dumps({**SMALL, **QWEN3, **config}))
    return load_model(path, Config(model=ModelConfig(load_format="dummy")), CPU, lambda *_: None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of its own; the library is built already."""
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "actorium"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(pass_choice, "BUDGET_S", 1e9)


def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> float:
        raise AssertionError("something was measured")

    monkeypatch.setattr(LayerTimer, "seconds", refused)


# --- what is left out -----------------------------------------------------------------------------

class Clock:
    """Time passes where something is timed, and nowhere else."""

    def __init__(self, seconds: Callable[[str, int], float]) -> None:
        self.time, self.seconds, self.asked = 0.0, seconds, list[tuple[str, int]]()

    def __call__(self) -> float:
        return self.time

    def timed(self, tokens: int) -> Callable[[str], float]:
        def run(name: str) -> float:
            self.asked.append((name, tokens))
            took = self.seconds(name, tokens)
            self.time += took
            return took
        return run


def judged(seconds: Callable[[str, int], float], names: str = "a b",
           sizes: tuple[int, ...] = (1, 8, 64)) -> tuple[dict[str, Loss], list[int], Clock]:
    clock = Clock(seconds)
    return *losses(names.split(), sizes, clock.timed, clock), clock


def test_a_pass_that_loses_somewhere_is_left_out_everywhere() -> None:
    lost, measured, clock = judged(lambda name, n: 1e-3 * (0.9 if (name, n) == ("b", 8) else 1))
    assert lost == {"b": Loss(8, pytest.approx(900), pytest.approx(1000))}
    assert measured == [1, 8, 64]
    assert ("b", 64) not in clock.asked, "that is known"
    assert clock.asked.count(("b", 8)) == LOSSES + 1
    assert clock.asked.count(("a", 64)) == 2, "one turn to fill caches, and one that it wins"


def test_a_turn_that_is_won_ends_the_question() -> None:
    """However much else the machine does meanwhile."""
    turns = iter(range(10**6))
    lost, _, clock = judged(
        lambda name, n: 1e-3 * (5 if next(turns) % 20 < 18 and not name else 1), "a", (1,))
    assert not lost and len(clock.asked) <= 2 * (LOSSES + 1)


def test_a_little_slower_is_no_loss() -> None:
    assert judged(lambda name, n: 1.0e-3 if name else 1.015e-3)[0] == {}
    assert set(judged(lambda name, n: 1.0e-3 if name else 1.03e-3)[0]) == {"a", "b"}


def test_sizes_that_do_not_fit_are_not_measured() -> None:
    lost, measured, clock = judged(lambda name, n: 0.01 * n, "a b", (1, 8, 64, 256))
    assert not lost and measured == [1, 8] and clock.time < BUDGET_S
    lost, measured, clock = judged(lambda name, n: 0.05 * n if name else 0.1 * n, "a", (8, 64))
    assert not lost and measured == [] and clock.time < 2 * BUDGET_S, "what is not known is kept"


# --- what is remembered ---------------------------------------------------------------------------

@pytest.mark.usefixtures("patient")
def test_a_second_start_measures_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(
        model=ModelConfig(model=str(tmp_path), load_format="dummy"),
        memory=MemoryConfig(max_total_tokens=256), device=DeviceConfig(device="cpu", threads=1),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=MOST))
    loaded(tmp_path)
    open_device(config, 1, lambda *_: None, {})
    (file,) = cache.glob("passes-*.json")
    found = msgspec.json.decode(file.read_bytes(), type=PassChoice)
    assert found.measured == [1, 8] and set(found.lost) <= set(PASSES)
    no_timing(monkeypatch)
    open_device(config, 1, lambda *_: None, {})
    assert list(cache.glob("passes-*")) == [file]
    # A start goes by what is there, unless all are asked for.
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(
        found, lost={"qk_rope_kv": Loss(1, 1.0, 2.0)})))

    def turns(passes: str) -> bool:
        own = msgspec.structs.replace(config.device, passes=passes)
        runner = open_device(msgspec.structs.replace(config, device=own), 1, lambda *_: None,
                             {}).runner
        return "rotate_write" in runner.model.runs[0].whole.__code__.co_names  # type: ignore[attr-defined]

    assert not turns("auto") and turns("all")


def test_another_machine_or_model_is_measured_by_itself(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded(tmp_path)
    key = choice_key(model, PASSES, MOST)
    assert key == choice_key(loaded(tmp_path, max_position_embeddings=256), PASSES, MOST)
    others = [choice_key(loaded(tmp_path, intermediate_size=128), PASSES, MOST),
              choice_key(model, PASSES[1:], MOST), choice_key(model, PASSES, 4)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(choice_key(model, PASSES, MOST))
    assert len({str(own) for own in (key, *others)}) == 5


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"key": {}, "lost": {}}',
                                  b'{"key": {}, "lost": {}, "measured": []}'])
def test_a_file_that_is_none_is_measured_again(text: bytes, tmp_path: Path) -> None:
    model = loaded(tmp_path)
    first = remembered_choice(model, PASSES, 1, tmp_path / "c")
    assert not first.remembered and first.choice.measured == [1]
    assert remembered_choice(model, PASSES, 1, tmp_path / "c").remembered
    first.path.write_bytes(text)
    again = remembered_choice(model, PASSES, 1, tmp_path / "c")
    assert not again.remembered
    assert read_choice(first.path, again.choice.key, PassChoice) == again.choice
    assert [path.name for path in (tmp_path / "c").iterdir()] == [first.path.name]


@pytest.mark.usefixtures("patient")
def test_the_first_of_two_engines_decides(tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Both start at once, both measure: they must not go by different passes."""
    model, measured = loaded(tmp_path), pass_choice._measured
    theirs = {"gated_product": Loss(1, 1.0, 2.0)}

    def meanwhile(model: Decoder, on: tuple[str, ...], most: int) -> Any:
        monkeypatch.setattr(pass_choice, "_measured", lambda *_: (theirs, [1]))
        remembered_choice(model, on, most, tmp_path / "c")
        return measured(model, on, most)

    monkeypatch.setattr(pass_choice, "_measured", meanwhile)
    assert remembered_choice(model, PASSES, 1, tmp_path / "c").choice.lost == theirs


@pytest.mark.usefixtures("patient")
def test_a_successor_goes_by_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has become of the cache: what it computes again must have the same bits."""
    model, theirs = loaded(tmp_path), {"gated_product": Loss(1, 1.0, 2.0)}
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(pass_choice, "_measured", lambda *_: (theirs, [1]))
    remembered_choice(model, PASSES, 1, tmp_path / "c", tmp_path / "run")
    monkeypatch.setattr(pass_choice, "_measured", lambda *_: ({}, [1]))
    again = remembered_choice(model, PASSES, 1, tmp_path / "another", tmp_path / "run")
    assert again.remembered and again.choice.lost == theirs
    assert not remembered_choice(model, PASSES, 1, tmp_path / "another").choice.lost


def test_a_folder_that_cannot_be_written_ends_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "c").write_text("a file")
    assert not remembered_choice(loaded(tmp_path), PASSES, 1, tmp_path / "c").remembered
    assert "could not be remembered" in caplog.text


def test_ranks_go_by_the_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **QWEN3}))
    config = Config(model=ModelConfig(load_format="dummy"))
    monkeypatch.setattr(pass_choice, "_measured",
                        lambda *_: ({"product_add": Loss(1, 1.0, 2.0)}, [1]))

    def body(group: RankGroup) -> tuple[str, ...]:
        model = load_model(tmp_path, config, CPU, lambda *_: None, group)
        return keep_winners(model, PASSES, MOST)

    one, other = whole(run_ranks(tmp_path / "group", 2, body))
    assert one == other == tuple(name for name in PASSES if name != "product_add")


@pytest.mark.parametrize(("text", "measures"), [
    ("auto", True), ("auto,-add_norm", True), ("-add_norm", True), ("all", False),
    ("all,-add_norm", False), ("none", False), ("add_norm,norm_add", False)])
def test_when_it_is_chosen(text: str, measures: bool) -> None:
    assert chooses_passes(text) == measures
