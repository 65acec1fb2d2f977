"""What the tower has made, within its bytes; and the plan, which counts them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers_media import image, question
from helpers_memory import most_held
from helpers_models import CPU, load
from helpers_vision import write_vl

from actorium.actors.config.tree import Config, DeviceConfig, MediaConfig, ModelConfig
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.non_cache_memory import encoder_cache_bytes, encoder_rows, encoder_work_bytes
from actorium.gpu.vision.media_steps import EncoderPool, make_images
from actorium.gpu.worker.device import open_device
from actorium.tools.cli.plan_command import PlanOptions, make_report
from actorium.tools.cli.plan_report import plan_text


def test_a_pool_keeps_what_was_asked_for_last() -> None:
    pool, rng = EncoderPool(20, 3, torch.float32, CPU), random.Random(4)
    want: dict[tuple[bytes, int], torch.Tensor] = {}
    for _ in range(300):
        name = bytes([rng.randrange(9)]), rng.randrange(2)
        rows = torch.full((1 + name[0][0], 3), float(name[0][0] * 2 + name[1]))
        if rng.random() < 0.1:
            rows = torch.zeros(21, 3)
        if pool.holds(name):
            assert pool.rows_of(name, 0, 99).equal(want[name])
        else:
            pool.keep(name, rows)
            assert pool.holds(name) == (len(rows) <= 20)
            want[name] = rows
        held = {own for own in want if pool.holds(own)}
        assert pool.used == sum(len(want[own]) for own in held) <= 20
    empty = EncoderPool(0, 3, torch.float32, CPU)
    empty.keep((b"", 0), torch.zeros(1, 3))
    assert not empty.holds((b"", 0)) and empty.table.nbytes == 0


@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_the_plan_counts_them_to_the_byte(kind: str, tmp_path: Path) -> None:
    write_vl(tmp_path, kind)
    model = load(tmp_path)
    for kept in (0, 1000, 100_001):
        demand = Demand(4, encoder_cache=kept, encoder_tokens=64)
        images = make_images(model.vision, model.shape, demand)
        assert images is not None and images.kept.nbytes == encoder_cache_bytes(model.shape, demand)
        row = 64 * 4 * (1 if kind == "2.5" else 3)
        assert encoder_rows(model.shape, demand) == kept // row == images.pool.rows
    assert make_images(None, model.shape, demand) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["2.5", "3"])
def test_temporaries_are_not_above_the_plan(kind: str, dtype: str, tmp_path: Path) -> None:
    """Of an image of as many tokens as are allowed, as torch allocates them; in bf16 where heads
    have zeros behind them."""
    write_vl(tmp_path, kind, tower={"hidden_size": 144, "num_heads": 2}
             if dtype == "bfloat16" else None)
    model = load(tmp_path, dtype=dtype)
    demand = Demand(4, chunk=64, encoder_tokens=256)
    (picture,) = question(model, image(32, 32)).pictures
    pixels = torch.from_numpy(picture.pixels())
    assert model.vision is not None
    model.vision.forward(pixels, [picture.medium.grid])
    tower, grid = model.vision, [picture.medium.grid]
    most = most_held(lambda: tower.forward(pixels, grid))
    planned = encoder_work_bytes(model.shape, demand)
    assert planned / 4 < most < planned, (most, planned)


def test_the_worker_and_the_command_tell_both(tmp_path: Path) -> None:
    write_vl(tmp_path, "3")
    config = Config(model=ModelConfig(model=str(tmp_path)), device=DeviceConfig(device="cpu"),
                    media=MediaConfig(encoder_cache_bytes=70_000, max_encoder_tokens=100))
    text = plan_text(make_report(config, PlanOptions()))
    assert "encoder cache" in text and f"{70_000 // 768 * 768:,}" in text and "100 tokens" in text
    footprint = open_device(config, 1, lambda *_: None, {}).footprint
    assert footprint.planned["encoder_cache"] == footprint.measured["encoder_cache"] == 69_888
    assert footprint.planned["encoder_workspace"] > 0
    only = Config(model=ModelConfig(model=str(tmp_path), language_model_only=True))
    assert "encoder" not in plan_text(make_report(only, PlanOptions()))
