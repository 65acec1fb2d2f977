"""`--exact auto`: measured once, and one choice for all workers of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_hybrid import DENSE, write_hybrid
from helpers_models import write_checkpoint
from helpers_ranks import run_ranks, whole

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.messages import StepPlan
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.worker import exact_choice
from actorium.gpu.worker.device import OpenedDevice, open_device
from actorium.gpu.worker.exact_choice import (
    LIMIT,
    Cost,
    ExactChoice,
    by_cost,
    exact_files,
    measured_costs,
)
from actorium.kernels.cpu.attention_native import NativeDecode
from actorium.kernels.cpu.native_library import library

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache of its own; the library is built already."""
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "actorium"  # type: ignore[return-value]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a model whose kernels are all exact."""
    write_checkpoint(tmp_path / "model", dtype=BF16, head_dim=32)
    return tmp_path / "model"


def opened(path: Path, epoch: int = 1, run_dir: Path | None = None, **device: Any) -> OpenedDevice:
    config = Config(
        model=ModelConfig(model=str(path)), memory=MemoryConfig(max_total_tokens=512),
        device=DeviceConfig(**{"device": "cpu", "threads": 1, "passes": "all"} | device),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))
    return open_device(config, epoch, lambda *_: None, {}, run_dir=run_dir)


def test_most_turns_must_say_that_a_step_takes_too_long() -> None:
    some = [Cost("decodes of 1", 1.24, 1.0), Cost("decodes of 32", -2.0, -2.1)]
    choice = by_cost({}, some)
    assert choice == ExactChoice({}, True, 1.24, "decodes of 1")
    assert choice.text == "on, costs 1.2 % (decodes of 1)"
    assert by_cost({}, [Cost("decodes of 1", 9.0, LIMIT - 0.1)]).on, "a quarter disagrees"
    dear = by_cost({}, [*some, Cost("a prompt of 256", 7.03, 6.5)])
    assert not dear.on
    assert dear.text == "off here, would cost 7 % (a prompt of 256): --exact on"
    assert by_cost({}, []).text == "on, costs nothing"


def test_what_exact_kernels_take_more_is_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers' decodes take a millisecond each, and those of one way 0.2 more, of a step of
    ten: by a clock that nothing else moves."""
    runner, run, now = opened(path, exact="on").runner, NativeDecode._run, [0.0]
    step, slow = runner.run, list[bool]()

    def decode(kernel: Any, *args: Any) -> None:
        now[0] += 1.2e-3 if kernel.exact in slow else 1e-3
        run(kernel, *args)

    def taking_ten(plan: StepPlan) -> Any:
        began = now[0]
        result = step(plan)
        now[0] = began + 10e-3
        return result

    monkeypatch.setattr(exact_choice, "perf_counter", lambda: now[0])
    monkeypatch.setattr(NativeDecode, "_run", decode)
    monkeypatch.setattr(runner, "run", taking_ten)
    served, programs = dict(runner.served), runner.segments
    for way, percent in ((True, 100 * 0.6 / 9.4), (False, -100 * 0.6 / 10.6)):
        slow[:] = [way]
        costs = measured_costs(runner, 64)
        assert [cost.step for cost in costs] == ["decodes of 1", "decodes of 4"]
        assert all(cost[1:] == pytest.approx((percent, percent)) for cost in costs)
        assert by_cost({}, costs).on == (percent < LIMIT)
    assert not runner.tables.sequences and dict(runner.served) == served
    assert runner.segments is programs and runner.model.attention.decode.exact  # type: ignore


@pytest.mark.parametrize(("costs", "text", "inexact"), [
    ("1.2,9", "on, costs 1.2 % (as forced)", ""),
    ("7,1", "off here, would cost 7 % (as forced): --exact on", "exact is off here, --exact on")])
def test_a_successor_goes_by_the_first_worker(
    path: Path, tmp_path: Path, cache: Path, costs: str, text: str, inexact: str,
) -> None:
    """Whatever it would measure, and whatever has become of the cache."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    first = opened(path, 1, run_dir, exact_costs=costs)
    assert (first.info.exact, first.info.inexact, first.ready.inexact) == (text, inexact, inexact)
    assert first.runner.model.attention.decode.exact == (not inexact)  # type: ignore
    for file in cache.glob("exact-*"):
        file.unlink()
    again = opened(path, 2, run_dir, exact_costs=costs)
    assert (again.info.exact, again.info.inexact) == (text, inexact)
    assert again.runner.model.attention.decode.exact == (not inexact)  # type: ignore
    assert opened(path, 2, exact_costs=costs).info.inexact != inexact, "else it measures"


def test_two_engines_of_a_machine_choose_the_same(
    path: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_choice, "measured_costs", lambda *_: [Cost("a prompt", 8.0, 7.0)])
    text = opened(path).info.exact
    monkeypatch.setattr(exact_choice, "measured_costs", lambda *_: pytest.fail("known"))
    assert opened(path).info.exact == text and text.startswith("off here, would cost 8 %")
    assert opened(path, exact="on").info.exact == "on"
    assert opened(path, exact="off").info.exact == "off"
    (file,) = cache.glob("exact-*.json")
    for broken in (b"", b"{", b"\xff"):
        file.write_bytes(broken)
        monkeypatch.setattr(exact_choice, "measured_costs", lambda *_: [])
        assert opened(path).info.exact == "on, costs nothing"


def test_what_cannot_be_kept_for_successors_is_not_promised(path: Path, tmp_path: Path) -> None:
    missing = tmp_path / "file" / "run"
    (tmp_path / "file").write_text("no folder")
    info = opened(path, 1, missing, exact_costs="1").info
    assert info.exact.startswith("off here: its choice cannot be kept") and info.inexact


def test_what_cannot_be_exact_is_off(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)  # float32
    info = opened(tmp_path).info
    assert info.inexact == "products and attention in torch.float32 are torch's here" or \
        "float32" in info.inexact
    assert info.exact == f"off here: {info.inexact}"


def test_prompts_of_hybrids_are_measured_too(tmp_path: Path) -> None:
    write_hybrid(tmp_path, DENSE, 3, BF16, head_dim=32, num_hidden_layers=2,
                 layer_types=["linear_attention", "full_attention"])
    runner = opened(tmp_path, exact="on").runner
    assert [cost.step for cost in measured_costs(runner, 64)] == [
        "decodes of 1", "decodes of 4", "a prompt of 64"]
    mixer: Any = runner.model.layers[0].mixer  # type: ignore[attr-defined]
    assert opened(tmp_path, exact="on").info.inexact == "" and mixer.native is not None
    off: Any = opened(tmp_path, exact_costs="9").runner.model
    assert not off.layers[0].mixer.native.exact and not off.attention.decode.exact


def test_ranks_go_by_the_first(path: Path, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: RankGroup) -> tuple[bool, float] | None:
        config = Config(model=ModelConfig(model=str(path)))
        files = exact_files(config, "shape", 1, group, None)  # type: ignore[arg-type]
        mine = ExactChoice(files.files.key, not group.place.rank, 1.5)  # type: ignore[union-attr]
        shared = exact_choice._shared(mine if not group.place.rank else None, files.files,  # type: ignore[arg-type]
                                      group)
        return None if shared is None else (shared.on, shared.percent)

    monkeypatch.setattr(exact_choice, "replace", lambda shape, **_: shape)
    assert whole(run_ranks(tmp_path / "group", 2, body)) == [(True, 1.5), (True, 1.5)]
