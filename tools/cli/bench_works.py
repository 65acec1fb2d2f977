"""`actorium bench offline` without a dataset: W1, W2 and W3 on any shape, beside transformers if
asked."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.bench import offline, peer, report, works
from actorium.tools.cli.engines import own_engine

PEERS = ("transformers",)
BUSY_SHARE = 0.4
"""Load, for each core, above which a warning is printed."""


class Plan(NamedTuple):
    """What to measure, and where the figures go (see `bench_offline.OfflineOptions`)."""

    shape: str | None
    works: str
    runs: int
    peer: str | None
    json: str | None
    plot: str | None


def run(given: Config, plan: Plan) -> int:
    """Measure and report. Raises `BadConfig`."""
    chosen = _check(plan)
    with tempfile.TemporaryDirectory(prefix="actorium-bench-") as folder:
        config = _config(given, plan, Path(folder))
        rows, extra = _measure(config, chosen, plan)
    judged = {work.name: work.figure for work in chosen}
    if plan.peer:
        report.add_ratios(rows, plan.peer)
    _say("")
    title = f"{plan.shape or config.model.model or 'demo model'}, {extra['machine']}"
    print(f"{title}\n{report.table(rows)}")
    for name, share in extra.get("agreement", {}).items():
        print(f"{name}: {100 * share:.1f} % of the tokens equal up to the first difference")
    if plan.json:
        report.write_json(plan.json, {"title": title, "rows": rows, **extra})
    if plan.plot:
        report.plot(plan.plot, title, rows, judged)
    return 0


def _check(plan: Plan) -> list[works.Workload]:
    known = {work.name: work for work in works.WORKS}
    names = [name.strip().upper() for name in plan.works.split(",")]
    for name in names:
        if name not in known:
            raise BadConfig(f"--works: must be some of {', '.join(known)}, got {name!r}", "works")
    if plan.runs < 1:
        raise BadConfig(f"--runs: must be at least 1, got {plan.runs}", "runs")
    if plan.peer is not None and plan.peer not in PEERS:
        raise BadConfig(f"--peer: must be {', '.join(PEERS)}, got {plan.peer!r}", "peer")
    return [known[name] for name in names]


def _config(config: Config, plan: Plan, folder: Path) -> Config:
    """Token ids only; random weights when a shape is asked for."""
    model = msgspec.structs.replace(config.model, skip_tokenizer=True)
    if plan.shape is not None:
        path = offline.shape_dir(plan.shape, folder)
        model = msgspec.structs.replace(model, model=str(path), load_format="dummy")
    return msgspec.structs.replace(config, model=model)


def _measure(config: Config, chosen: list[works.Workload],
             plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    vocab, load = offline.vocabulary(config), _others()
    extra: dict[str, Any] = {"machine": machine(config), "runs": plan.runs,
                             "load_before": load, "config": msgspec.to_builtins(config)}
    with own_engine(config) as engine, contextlib.ExitStack() as beside:
        engines: list[offline.MeasuredEngine] = [offline.ClientEngine(engine.client, vocab)]
        if plan.peer:
            threads = config.device.threads or len(os.sched_getaffinity(0))
            engines.append(beside.enter_context(peer.opened(peer.PeerModel(config, vocab,
                                                                           threads))))
        found = offline.measure(engines, chosen, plan.runs, _say)
    if plan.peer:
        extra["agreement"] = {a.work: works.agreement(a.tokens, b.tokens)
                              for a, b in zip(*found.values(), strict=True)}
    by_name = {work.name: work for work in chosen}
    rows = [works.row(name, by_name[m.work], m) for name, each in found.items() for m in each]
    return rows, extra


def machine(config: Config) -> str:
    """The device and the processor, in words."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        cpu = model.partition(":")[2].strip()
        return f"{config.device.device} device, {len(os.sched_getaffinity(0))} cores of {cpu}"
    return f"{config.device.device} device"


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text.rstrip(), file=sys.stderr, flush=True)


def _others() -> float:
    """Processors that others keep busy, by the load of the last minute."""
    load = os.getloadavg()[0]
    if load > BUSY_SHARE * len(os.sched_getaffinity(0)):
        _say(f"actorium: the machine is busy (load {load:.1f}): figures and ratios will be off\n")
    return load
