"""Decode of the Llama-3.1-8B shape: steps from graphs, steps operation by operation, and steps that
hold a piece of a prompt as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorium.gpu.worker.device import OpenedDevice

from . import models, shapes
from .ceilings import Ceilings, of_this_run
from .child import Bench
from .models import STEPS, WARM
from .plan import BESIDE, CAPTURE
from .record import WRONG

COMPARED = 16
"""Steps."""


def run(bench: Bench, model: Mapping[str, Any] = models.NONE,
        memory: Mapping[str, Any] = models.NONE) -> None:
    """The group's rows. model, memory: fields of the configuration, see `models.settings`."""
    limits = of_this_run(bench)
    batches = {own.name: own for own in (*shapes.DECODED, *shapes.LONGER)}
    fitting = [own.batch for name, own in batches.items() for row in bench.group.rows
               if row.name.endswith(name) and bench.wants(row.name)]
    with models.opened(bench, shapes.LLAMA, bench.size(max([16, *fitting]), 8), "off", model,
                       memory) as (device, seconds):
        told(bench, device, seconds)
        for row in bench.group.rows:
            if row.name in batches:
                _decoded(bench, device, row.name, batches[row.name], limits)
            elif row.name.startswith(BESIDE):
                _compared(bench, device, row.name, batches[row.name.removeprefix(BESIDE)])
        _mixed(bench, device)


def told(bench: Bench, device: OpenedDevice, seconds: dict[str, float]) -> None:
    """How it went to open the model; of capture a row, where the group has one."""
    runner = device.runner
    bench.record.facts(seconds=seconds, bytes=device.footprint.measured,
                       planned=device.footprint.planned, floor=models.floor(device))
    if CAPTURE in bench.group.rows:
        with bench.row(CAPTURE.name) as go:
            if go:
                if runner.graphs is None:
                    raise RuntimeError("steps were not captured")
                bench.record.add(CAPTURE.name, seconds=seconds["graphs"],
                                 graphs=len(runner.graphs.shapes),
                                 segments=runner.segments.shapes if runner.segments else [])


def _compared(bench: Bench, device: OpenedDevice, name: str, own: shapes.Batch) -> None:
    """Tokens of steps from graphs, beside those of the same steps operation by operation."""
    with bench.row(name) as go:
        if go:
            runner, (batch, context) = device.runner, own.small() if bench.toy else own
            asked = (runner, batch, context, bench.size(COMPARED, 3), bench.toy)
            served = _replays(device)
            got = models.tokens(*asked)
            if _replays(device) == served:
                raise RuntimeError("no step came from a graph")
            with models.eager(runner):
                bench.same(name, got, models.tokens(*asked))


def _decoded(bench: Bench, device: OpenedDevice, name: str, own: shapes.Batch,
             limits: Ceilings) -> None:
    with bench.row(name) as go:
        if not go:
            return
        if bench.record.row(BESIDE + name).get("verdict") == WRONG:
            bench.record.skip(name, "its tokens are wrong, so it was not timed", WRONG)
            return
        batch, context = own.small() if bench.toy else own
        served = _replays(device)
        found = models.measured(device.runner, batch, context, 0, bench.toy)
        floor = models.floor(device).us(batch, context + (WARM + STEPS / 2), limits.copy_gbs)
        bench.record.add(name, batch=batch, context=context, replays=_replays(device) - served,
                         **found, floor_us=floor, share=floor / found["step_us"])


def _replays(device: OpenedDevice) -> int:
    """Steps that graphs have served so far."""
    return device.runner.graphs.replays if device.runner.graphs else 0


def _mixed(bench: Bench, device: OpenedDevice) -> None:
    """Steps of a piece of a prompt and some decodes: in segments, and operation by operation."""
    runner, (batch, context) = device.runner, shapes.DECODED[1]
    if bench.toy:
        batch, context = 2, 24
    warm, steps = (1, 2) if bench.toy else (3, 12)
    segments = runner.segments
    for row in bench.group.rows:
        if not row.name.startswith("mixed"):
            continue
        tokens, how = row.name.removeprefix("mixed ").split(", ")
        total = int(tokens) if not bench.toy else 4 + int(tokens) // 64
        with bench.row(row.name) as go:
            if go:
                if how == "segments" and segments is None:
                    raise RuntimeError("no segments were captured")
                runner.segments = segments if how == "segments" else None
                driver = models.Driver(runner, batch, context, warm + steps, 0,
                                       models.budget(bench.toy))
                try:
                    driver.prompt((total - batch) * (warm + steps) + 1)
                    driver.steps(warm, total - batch)
                    found = driver.steps(steps, total - batch)
                finally:
                    driver.close()
                bench.record.add(row.name, tokens=total, batch=batch, context=context, how=how,
                                 **{key: found[key] for key in ("step_us", "device_us",
                                                                "idle_ratio")})
    runner.segments = segments
