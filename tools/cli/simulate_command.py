"""`actorium simulate`: what a cluster would have done, on a virtual clock."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.config.cluster_settings import MOST_REPLICAS, ROUTINGS
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.plan_report import check_plot
from actorium.tools.output import aligned, show_progress, write_file, write_json
from actorium.tools.simulate.cell_run import cell_jobs, cell_sizes, run_cells
from actorium.tools.simulate.outcome import (
    Arrays,
    comparison,
    comparison_html,
    comparison_plot,
    joined,
    simulation_figures,
)
from actorium.tools.simulate.step_model import StepSeconds, parse_step_model
from actorium.tools.simulate.virtual_cluster import ReplicaDeath
from actorium.tools.simulate.workload import (
    WORKLOADS,
    SimulatedLoad,
    drawn_workload,
    read_trace,
    with_burst,
)

ABOUT = """What replicas behind a router would do with a load: the real router, schedulers, page
pools and prefix trees, on a virtual clock; of the workers, the time that their steps take. Several
routings and numbers of replicas are shown side by side, for the same requests. Flags of `serve`
(--max-num-seqs, --schedule-policy, --max-total-tokens, --page-size, ...) mean what they mean there.
"""
_FAULT = re.compile(r"([0-9.]+):(\d+):([0-9.]+)")
MOST = 1 << 16
"""Replicas."""


class SimulateOptions(Struct, frozen=True, kw_only=True):
    """Which cluster, which load, and where the figures go."""

    step_model: str | None = None
    """Seconds of a worker's step: base,prompt,sequence,context[,pair[,inward[,outward]]], or a JSON
    file of them: base + prompt x prompt tokens + sequence x decoding sequences + context x tokens
    that these attend to + pair x (prompt token, earlier token) pairs; inward and outward are what a
    request and its tokens take between client and scheduler."""
    measure: bool = False
    """Start MODEL on this machine and measure its step model first, which is printed and written to
    the file that --step-model names; a load is simulated then if --requests or --trace is given."""
    replicas: str = "4"
    """Replicas, or several numbers with commas, compared; more than 64 are several clusters of at
    most 64, among which conversations are dealt out."""
    routing: str = "prefix"
    """prefix | round_robin | random, or several with commas, compared."""
    workload: str = "chat"
    """chat (conversations of people, lengths as in ShareGPT) | agent (long shared beginnings, many
    short turns) | batch (all at once)."""
    trace: str | None = None
    """File of requests instead, JSON lines: arrival (s), prompt, output (tokens), group, prefix."""
    requests: int = 1000
    """Requests, all turns of conversations counted."""
    rate: float = 4.0
    """Requests a second, for all replicas together."""
    faults: str | None = None
    """Deaths of replicas, T:REPLICA:S with commas: at T seconds, back after S."""
    burst: str | None = None
    """AT:SECONDS:TIMES: from AT seconds on conversations begin so many times as often, for SECONDS.
    """
    replica_start: float = 60.0
    """Seconds that a replica takes to start which --max-replicas has come."""
    seed: int = 0
    """Of the load and of random placing."""
    cost_per_hour: float | None = None
    """Of one replica: adds the cost of a million tokens."""
    processes: int = 0
    """At once; 0 = one for each processor."""
    json: str | None = None
    """File for all figures."""
    html: str | None = None
    """File for a page with the table."""
    plot: str | None = None
    """File (.png, .svg, .pdf) for a picture of the distributions."""


class Comparison(NamedTuple):
    replicas: list[int]
    routings: list[str]
    faults: list[ReplicaDeath]

    def title(self, replicas: int, routing: str) -> str:
        number = f"{replicas} replica{'s' * (replicas > 1)}"
        if len(self.replicas) == 1:
            return routing
        return f"{routing}, {number}" if len(self.routings) > 1 else number


class Simulated(NamedTuple):
    replicas: int
    routing: str
    figures: dict[str, Any]
    columns: Arrays


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium simulate", argv, SimulateOptions, ABOUT)
    options = parsed.options
    compared = check_options(options)
    check_bounds(parsed.config, compared.replicas)
    if options.measure:
        model = measured(parsed.config, options)
        if not {"requests", "trace"} & parsed.written.keys():
            return 0
    else:
        model = given(options)
    work = read_trace(Path(options.trace).expanduser(), options.seed) if options.trace else \
        drawn_workload(options.workload, options.requests, options.rate, options.seed)
    if options.burst is not None:
        work = with_burst(work, *parse_burst(options.burst))
    began = time.perf_counter()
    found = {compared.title(replicas, routing): simulate(
        parsed.config, options, model, work, replicas, routing, compared.faults)
        for replicas in compared.replicas for routing in compared.routings}
    rows = comparison({name: each.figures for name, each in found.items()})
    title = f"{options.replicas} replicas, {options.trace or options.workload}"
    notes = [f"Step model: {describe(model)}",
             f"Seed {options.seed}; simulated in {time.perf_counter() - began:.1f} s."]
    print(*aligned(rows, range(1, len(rows[0]))), *notes, sep="\n")
    if options.json is not None:
        write_json(options.json, {
            "workload": options.trace or options.workload, "rate": options.rate,
            "seed": options.seed, "faults": options.faults,
            "step_model": msgspec.to_builtins(model),
            "clusters": [{"replicas": each.replicas, "routing": each.routing, **each.figures}
                         for each in found.values()]})
    if options.html is not None:
        write_file(options.html, comparison_html(title, notes, rows), "html")
    if options.plot is not None:
        comparison_plot(Path(options.plot), title,
                        {name: each.columns for name, each in found.items()},
                        [(each.replicas, each.routing, each.figures) for each in found.values()])
    return 0


def check_options(options: SimulateOptions) -> Comparison:
    """What is to be compared. Raises `BadConfig`, naming the flag."""
    words = options.replicas.split(",")
    replicas = sorted({int(word) for word in words if re.fullmatch("[0-9]{1,9}", word)})
    checks = [
        ("replicas", len(replicas) == len(words) and 1 <= replicas[0] <= replicas[-1] <= MOST,
         f"must be from 1 to {MOST}, or several such numbers with commas"),
        ("requests", 1 <= options.requests <= 1 << 26, f"must be from 1 to {1 << 26}"),
        ("rate", 0 < options.rate < 1e9, "must be above 0"),
        ("workload", options.workload in WORKLOADS, f"must be one of {', '.join(WORKLOADS)}"),
        ("seed", 0 <= options.seed < 1 << 31, "must be from 0 on, below 2^31"),
        ("cost_per_hour", options.cost_per_hour is None or options.cost_per_hour >= 0,
         "must not be negative"),
        ("processes", options.processes >= 0, "must not be negative"),
        ("replica_start", 0 <= options.replica_start <= 86400, "must be from 0 to 86400"),
    ]
    for name, fine, rule in checks:
        if not fine:
            raise BadConfig(f"--{name.replace('_', '-')}: {rule}, got {getattr(options, name)!r}",
                            name)
    routings = list(dict.fromkeys(options.routing.split(",")))
    for name in routings:
        if name not in ROUTINGS:
            raise BadConfig(f"--routing: must be of {', '.join(ROUTINGS)}, got {name!r}", "routing")
    if options.plot is not None:
        check_plot(options.plot)
    return Comparison(replicas, routings, parse_faults(options.faults or "", replicas[0]))


def check_bounds(config: Config, replicas: Sequence[int]) -> None:
    """Parses `--max-replicas`. Raises `BadConfig`."""
    least, most = config.cluster.min_replicas, config.cluster.max_replicas
    for count in replicas if most else ():
        if not least <= count <= most:
            raise BadConfig("--replicas: must be between --min-replicas and --max-replicas "
                            f"({least} and {most}), got {count}", "replicas")


def parse_burst(text: str) -> tuple[float, float, float]:
    """Parses `--burst`. Raises `BadConfig`."""
    try:
        at, seconds, times = map(float, text.split(":"))
        if not (at >= 0 and seconds > 0 and 1 <= times < 1e6):
            raise ValueError(text)
    except ValueError:
        raise BadConfig("--burst: must be AT:SECONDS:TIMES (seconds, and 1 or more times as "
                        f"often), got {text!r}", "burst") from None
    return at, seconds, times


def parse_faults(text: str, replicas: int) -> list[ReplicaDeath]:
    """Parses `--faults`. Raises `BadConfig`."""
    found = []
    for word in text.split(",") if text else ():
        match = _FAULT.fullmatch(word)
        try:
            if match is None:
                raise ValueError(word)
            fault = ReplicaDeath(float(match[1]), int(match[2]), float(match[3]))
        except ValueError:
            raise BadConfig("--faults: must be T:REPLICA:S (at T seconds, back after S), "
                            f"got {word!r}", "faults") from None
        if fault.replica >= replicas:
            raise BadConfig(f"--faults: replicas are 0 to {replicas - 1}, got {word!r}", "faults")
        found.append(fault)
    return found


def given(options: SimulateOptions) -> StepSeconds:
    """The model of --step-model. Raises `BadConfig`."""
    if options.step_model is None:
        raise BadConfig("--step-model: say how long a step takes: base,prompt,sequence,context in "
                        "seconds, or a file; --measure makes one (docs/simulate.md)", "step_model")
    return parse_step_model(options.step_model)


def measured(config: Config, options: SimulateOptions) -> StepSeconds:
    """The model of an engine of the command's own; --step-model names the file that it goes to.
    Raises what `Engine` does."""
    from actorium.tools.cli.engines import for_batches, own_engine
    from actorium.tools.simulate.calibration import StepCalibration, engine_delays

    plain = for_batches(config)
    plain = msgspec.structs.replace(plain, speculation=msgspec.structs.replace(
        plain.speculation, speculative="off"))
    with own_engine(plain) as engine:
        name = config.model.model or "demo model"
        settle = 2 * config.runtime.heartbeat + 0.1  # the last counters come with a heartbeat
        model, error = StepCalibration(engine.client, settle).measure(name)
        delays = asyncio.run(engine_delays(engine.name, plain.runtime.run_dir))
    model = msgspec.structs.replace(model, inward=delays.inward, outward=delays.outward)
    print(f"Step model: {describe(model)}",
          f"Its mean error for the loads that it was fitted to: {error:.1%}", sep="\n")
    if options.step_model is not None:
        write_file(options.step_model, msgspec.json.encode(model).decode() + "\n", "step_model")
    return model


def describe(model: StepSeconds) -> str:
    beside = f" + {model.pair:.3g} x pairs" if model.pair else ""
    return (f"{model.base:.3g} s + {model.prompt:.3g} x prompt tokens + {model.sequence:.3g} x "
            f"decoding sequences + {model.context:.3g} x context tokens{beside}"
            + (f"; {model.inward:.3g} s to the scheduler, {model.outward:.3g} s back"
               if model.inward + model.outward else "")
            + (f" ({model.about})" if model.about else ""))


def simulate(config: Config, options: SimulateOptions, model: StepSeconds, work: SimulatedLoad,
             replicas: int, routing: str, faults: list[ReplicaDeath]) -> Simulated:
    """A cluster of so many replicas with that routing."""
    sizes = cell_sizes(replicas, MOST_REPLICAS)
    jobs = cell_jobs(config, model, sizes, routing, options.seed, faults, options.replica_start)
    works = [work.part(i, len(sizes)) for i in range(len(sizes))]
    ended = 0

    def done() -> None:
        nonlocal ended
        ended += 1
        if len(sizes) > 1:
            show_progress(f"{routing}: {ended} of {len(sizes)} cells")

    began = time.perf_counter()
    answers = run_cells(jobs, works, options.processes or len(os.sched_getaffinity(0)), done)
    columns = joined([answer.columns for answer in answers])
    counts = {name: sum(answer.counts[name] for answer in answers) for name in answers[0].counts}
    figures = simulation_figures(columns, counts, replicas, options.cost_per_hour)
    figures["simulation"] = {
        "wall_s": round(time.perf_counter() - began, 2), "cells": len(sizes),
        "processor_s": round(sum(answer.seconds for answer in answers), 2),
        "most_megabytes_of_a_process": round(max(answer.megabytes for answer in answers))}
    return Simulated(replicas, routing, figures, columns)
