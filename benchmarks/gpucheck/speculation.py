"""Two drafts a step by the model's own MTP layer, accepted with fixed probabilities; and none."""

from __future__ import annotations

from . import models, shapes
from .ceilings import of_this_run
from .child import Bench

CONTEXT = 1024


def run(bench: Bench) -> None:
    """Rows of no drafts, then of two; the ratio is left out where the first one failed."""
    for drafts, speculative in ((0, "off"), (2, "mtp:2,fixed")):
        if bench.wants(*(_name(drafts, batch) for batch in shapes.DRAFTING)):
            _drafting(bench, drafts, speculative)
            bench.machine.release()


def _drafting(bench: Bench, drafts: int, speculative: str) -> None:
    """One model; a function of its own, so that it is gone before the next one is loaded."""
    copy_gbs, context = of_this_run(bench).copy_gbs, bench.size(CONTEXT, 20)
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
