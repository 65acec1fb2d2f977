"""`actorium bench offline`: W1, W2 and W3 on any shape, beside transformers if asked.
(`actorium bench serve` is in `bench_serve`.)"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config import Config
from actorium.actors.errors import BadConfig
from actorium.tools.bench import offline, peer, report, works
from actorium.tools.cli import bench_serve
from actorium.tools.cli.engines import own_engine
from actorium.tools.cli.flags import Parsed, parse

ABOUT = """Offline throughput through the real engine. W1: one request, 128 tokens in, 128 out.
W2: 32 requests, 128 in, 64 out. W3: one prompt of 2,048 tokens. Greedy, random token-id prompts,
end of sequence ignored, medians. With --peer both models stay loaded and their runs take turns; the
ratio is the median of those of runs next to each other, since machines change their speed."""
PEERS = ("transformers",)
BUSY_SHARE = 0.4
"""Load, for each core, above which a warning is printed."""


class BenchOptions(Struct, frozen=True, kw_only=True):
    """What to measure, and where the figures go."""

    shape: str | None = None
    """Random weights of this shape: S06, TINY, HYB, a config.json (implies --load-format dummy)."""
    works: str = "W1,W2,W3"
    """Which of the works."""
    runs: int = 3
    """Measured runs of each work."""
    peer: str | None = None
    """transformers: the same work and weights through it, by turns, one asleep while the other
    runs."""
    json: str | None = None
    """File for the figures."""
    plot: str | None = None
    """File (.png, .svg) for a plot."""


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    if argv and argv[0] == "serve":
        return bench_serve.run(argv[1:])
    if not argv or argv[0] != "offline":
        if {"-h", "--help"} & set(argv):
            parse("actorium bench offline [MODEL]", ["--help"], BenchOptions, ABOUT)
        raise BadConfig("bench: `actorium bench offline` and `actorium bench serve` are the "
                        "benchmarks there are", "bench")
    parsed = parse("actorium bench offline [MODEL]", argv[1:], BenchOptions, ABOUT)
    chosen = _check(parsed)
    with tempfile.TemporaryDirectory(prefix="actorium-bench-") as folder:
        config = _config(parsed, Path(folder))
        rows, extra = _measure(config, chosen, parsed.options)
    judged = {work.name: work.figure for work in chosen}
    if parsed.options.peer:
        report.add_ratios(rows, parsed.options.peer)
    _say("")
    title = f"{parsed.options.shape or config.model.model or 'demo model'}, {extra['machine']}"
    print(f"{title}\n{report.table(rows)}")
    for name, share in extra.get("agreement", {}).items():
        print(f"{name}: {100 * share:.1f} % of the tokens equal up to the first difference")
    if parsed.options.json:
        report.write_json(parsed.options.json, {"title": title, "rows": rows, **extra})
    if parsed.options.plot:
        report.plot(parsed.options.plot, title, rows, judged)
    return 0


def _check(parsed: Parsed[BenchOptions]) -> list[works.Work]:
    options = parsed.options
    known = {work.name: work for work in works.WORKS}
    names = [name.strip().upper() for name in options.works.split(",")]
    for name in names:
        if name not in known:
            raise BadConfig(f"--works: must be some of {', '.join(known)}, got {name!r}", "works")
    if options.runs < 1:
        raise BadConfig(f"--runs: must be at least 1, got {options.runs}", "runs")
    if options.peer is not None and options.peer not in PEERS:
        raise BadConfig(f"--peer: must be {', '.join(PEERS)}, got {options.peer!r}", "peer")
    if options.shape is not None and "model" in parsed.written:
        raise BadConfig("--shape: cannot be combined with a model", "shape")
    return [known[name] for name in names]


def _config(parsed: Parsed[BenchOptions], folder: Path) -> Config:
    """Token ids only; random weights when a shape is asked for."""
    config = parsed.config
    model = msgspec.structs.replace(config.model, skip_tokenizer=True)
    if parsed.options.shape is not None:
        path = offline.shape_dir(parsed.options.shape, folder)
        model = msgspec.structs.replace(model, model=str(path), load_format="dummy")
    return msgspec.structs.replace(config, model=model)


def _measure(config: Config, chosen: list[works.Work],
             options: BenchOptions) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    vocab, load = offline.vocabulary(config), _others()
    extra: dict[str, Any] = {"machine": _machine(config), "runs": options.runs,
                             "load_before": load, "config": msgspec.to_builtins(config)}
    with own_engine(config) as engine, contextlib.ExitStack() as beside:
        engines: list[offline.Engine] = [offline.Ours(engine.client, vocab)]
        if options.peer:
            threads = config.device.threads or len(os.sched_getaffinity(0))
            engines.append(beside.enter_context(peer.opened(peer.Job(config, vocab, threads))))
        found = offline.measure(engines, chosen, options.runs, _say)
    if options.peer:
        extra["agreement"] = {a.work: works.agreement(a.tokens, b.tokens)
                              for a, b in zip(*found.values(), strict=True)}
    by_name = {work.name: work for work in chosen}
    rows = [works.row(name, by_name[m.work], m) for name, each in found.items() for m in each]
    return rows, extra


def _machine(config: Config) -> str:
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
