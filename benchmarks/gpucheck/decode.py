"""Decode of whole models. Of the Llama-3.1-8B shape: steps from graphs, steps operation by
operation, and steps that hold a piece of a prompt as well; transformers on the same shape. The
packaged model in fp32 beside the CPU's reference kernels. Two drafts a step by a model's own MTP
layer, accepted with fixed probabilities; and none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import actorium
from actorium.gpu.worker.device import OpenedDevice, open_device

from . import models, shapes
from .ceilings import Ceilings, of_this_run
from .child import Bench
from .models import STEPS, WARM
from .plan import BESIDE, CAPTURE, TINY
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
        record_opening(bench, device, seconds)
        for row in bench.group.rows:
            if row.name in batches:
                _decoded(bench, device, row.name, batches[row.name], limits)
            elif row.name.startswith(BESIDE):
                _compared(bench, device, row.name, batches[row.name.removeprefix(BESIDE)])
        _mixed(bench, device)


def record_opening(bench: Bench, device: OpenedDevice, seconds: dict[str, float]) -> None:
    """Records how opening the model went; capture as a row, where the group has one."""
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


MODEL = Path(actorium.__file__).parent / "tools/demo/demo_model"
TINY_BATCH, TINY_CONTEXT, TINY_STEPS = 4, 40, 24


def equal(bench: Bench) -> None:
    """The one row. Prompts go through segments where they fit, decodes through graphs."""
    with bench.row(TINY.name) as go:
        if not go:
            return
        said = {"load_format": "auto", "dtype": "float32"}
        there, here = (models.settings(toy, MODEL, TINY_BATCH, "off", said)
                       for toy in (bench.toy, True))
        device, _ = models.loaded(bench, there)
        reference = open_device(here, 1, lambda phase, detail: None, {})
        got, want = (models.tokens(own.runner, TINY_BATCH, TINY_CONTEXT,
                                   bench.size(TINY_STEPS, 4), True)
                     for own in (device, reference))
        bench.same(TINY.name, got, want)


DRAFTED_CONTEXT = 1024


def speculation(bench: Bench) -> None:
    """Rows of no drafts, then of two; the ratio is left out where the first one failed."""
    for drafts, speculative in ((0, "off"), (2, "mtp:2,fixed")):
        if bench.wants(*(_name(drafts, batch) for batch in shapes.DRAFTING)):
            _drafting(bench, drafts, speculative)
            bench.machine.release()


def _drafting(bench: Bench, drafts: int, speculative: str) -> None:
    """Measures one model; its own function, so that the model is freed before the next is
    loaded."""
    copy_gbs, context = of_this_run(bench).copy_gbs, bench.size(DRAFTED_CONTEXT, 20)
    with models.opened(bench, shapes.HYBRID, max(shapes.DRAFTING), speculative) as (device, _):
        for batch in shapes.DRAFTING:
            name = _name(drafts, batch)
            with bench.row(name) as go:
                if not go:
                    continue
                batch = min(batch, bench.size(batch, 2))
                found = models.measured(device.runner, batch, context, drafts, bench.toy)
                more = {}
                if not drafts:
                    floor = models.floor(device).us(batch, context, copy_gbs)
                    more = {"floor_us": floor, "share": floor / found["step_us"]}
                base = {row["name"]: row for row in bench.record.group()["rows"]}.get(
                    _name(0, int(name.rpartition(" ")[2])))
                if drafts and base:
                    more = {"ratio": found["tokens_s"] / base["tokens_s"],
                            "step_ratio": found["step_us"] / base["step_us"]}
                bench.record.add(name, batch=batch, context=context, drafts=drafts, **found, **more)


def _name(drafts: int, batch: int) -> str:
    return f"{drafts} drafts, batch {batch}"


def transformers(bench: Bench) -> None:
    """Tokens a second while decoding; beside ours where this call has measured them."""
    import transformers as theirs

    theirs.logging.set_verbosity_error()
    raw = {k: v for k, v in models.shape_of(shapes.LLAMA, bench.toy).items()
           if k not in ("architectures", "model_type", "torch_dtype")}
    with torch.device(bench.device):
        model = theirs.AutoModelForCausalLM.from_config(
            theirs.LlamaConfig(**raw), dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    new = bench.size(32, 24)
    for own in shapes.DECODED:
        if own.name not in {row.name for row in bench.group.rows}:
            continue
        with bench.row(own.name) as go:
            if go:
                batch, context = own.small() if bench.toy else own
                spent = [_generate(bench, model, batch, context, count)
                         for count in (2, 2, new + 2)]
                step = (spent[2] - spent[1]) / new
                if step <= 0:
                    raise RuntimeError(f"{new} tokens more took no longer: {spent}")
                row: dict[str, Any] = {"batch": batch, "context": context, "step_us": step * 1e6,
                                       "tokens_s": batch / step}
                ours = {row["name"]: row for row in bench.record.group("longer and mixed")["rows"]}
                if own.name in ours:
                    row["ours_x"] = ours[own.name]["tokens_s"] * step / batch
                bench.record.add(own.name, **row)


def _generate(bench: Bench, model: Any, batch: int, context: int, count: int) -> float:
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=bench.device)
    start = perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                             eos_token_id=None)
        out[0, -1].item()
    return perf_counter() - start
