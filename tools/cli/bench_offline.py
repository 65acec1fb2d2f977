"""`actorium bench offline`: the throughput of a batch, through the client of an engine of its own.

With a dataset it is SGLang's benchmark of that name; without one, the workloads W1, W2 and W3 on
any shape, beside transformers if asked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.models.obtain import with_model_path
from actorium.actors.params import SamplingParams
from actorium.tools.bench import results, workloads
from actorium.tools.bench import transformers_peer as peer
from actorium.tools.bench.datasets.load import load_dataset
from actorium.tools.bench.datasets.options import DatasetOptions, check_dataset, print_unused
from actorium.tools.bench.datasets.sample import SampleRequest, Tokens, TokenVocabulary
from actorium.tools.bench.results import offline_table
from actorium.tools.bench.throughput import Watch, run_batch, throughput
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.flags import check_least
from actorium.tools.output import show_progress, write_json

ABOUT = """Offline throughput through the real engine. With a dataset (--num-prompts,
--dataset-name, --random-input-len, ...): its requests all at once, with the rows of SGLang's
offline benchmark. Without: W1, one request, 128 tokens in, 128 out; W2, 32 requests, 128 in, 64
out; W3, one prompt of 2,048 tokens; greedy, random token-id prompts, end of sequence ignored,
medians. With --peer both models stay loaded and their runs take turns; the ratio is the median of
those of runs next to each other, since machines change their speed."""
PROG = "actorium bench offline [MODEL]"
WARM_REQUESTS, WARM_INPUT, WARM_OUTPUT = 16, 256, 16
"""Requests before the clock starts, and their tokens: at most so many."""
SETTLE = 0.5
"""Seconds after them."""


class OfflineOptions(DatasetOptions, frozen=True, kw_only=True):
    """What to measure, and where the figures go."""

    backend: str = "engine"
    """engine: the client of an engine, without HTTP."""
    ignore_eos: bool = True
    """Go on past the end of sequence, to the length asked for; demo's answers do not."""
    extra_request_body: str | None = None
    """A JSON object: sampling parameters (default: greedy)."""
    skip_warmup: bool = False
    """No requests before the clock starts."""
    result_filename: str | None = None
    """File that the figures are added to, one JSON object a line, under SGLang's names."""
    profile: bool = False
    """Refused: --trace DIR says where the time goes."""
    shape: str | None = None
    """Random weights of this shape: S06, TINY, HYB, a config.json (implies --load-format dummy)."""
    works: str = "W1,W2,W3"
    """Without a dataset: which of the works."""
    runs: int = 3
    """Without a dataset: measured runs of each work."""
    peer: str | None = None
    """Without a dataset: transformers: the same work and weights through it, by turns, one asleep
    while the other runs."""
    json: str | None = None
    """File for the figures, and how they came about."""
    plot: str | None = None
    """Without a dataset: file (.png, .svg) for a plot."""


WORKS = ("works", "runs", "peer", "plot")
"""Options of the works alone."""
BATCH = (*(name for name in DatasetOptions.__struct_fields__ if name != "seed"), "backend",
         "ignore_eos", "extra_request_body", "skip_warmup", "result_filename")
"""Options of a dataset alone, any of which asks for one."""


def run(argv: list[str]) -> int:
    parsed = parse(PROG, argv, OfflineOptions, ABOUT)
    options = parsed.options
    if options.profile:
        raise BadConfig("--profile: there is no profiler here; --trace DIR tells when the device "
                        "idled and why", "profile")
    if options.shape is not None and "model" in parsed.written:
        raise BadConfig("--shape: cannot be combined with a model", "shape")
    parsed = parsed._replace(config=with_model_path(parsed.config))
    if not is_batch(parsed.written):
        return run_workloads(parsed.config, options)
    sampling = _sampling(options)
    print_unused(options, parsed.written)
    with tempfile.TemporaryDirectory(prefix="actorium-bench-") as folder:
        config = _config(parsed, Path(folder))
        result = _measure(config, options, sampling)
    print(offline_table(result))
    if options.result_filename:
        results.write_result(Path(options.result_filename), result, append=True)
    if options.json:
        write_json(options.json, {**result, **_setting(config, options)})
    return 1 if result["failed_requests"] else 0


def is_batch(written: Collection[str]) -> bool:
    """Whether a dataset is measured, by the flags written. Raises `BadConfig` if some are of the
    works."""
    batch = [name for name in BATCH if name in written]
    works = [name for name in WORKS if name in written]
    if batch and works:
        raise BadConfig(f"--{works[0].replace('_', '-')}: goes without a dataset, but "
                        f"--{batch[0].replace('_', '-')} asks for one", works[0])
    if "seed" in written and not batch:
        raise BadConfig("--seed: is the load's, and the works' prompts are always the same: name a "
                        "dataset (--dataset-name random)", "seed")
    return bool(batch)


def _sampling(options: OfflineOptions) -> SamplingParams:
    """Checked before anything is started. Raises `BadConfig`."""
    check_dataset(options)
    if options.backend not in ("engine", "actorium"):
        raise BadConfig("--backend: must be engine; `actorium bench serve` measures over HTTP, got "
                        f"{options.backend!r}", "backend")
    try:
        given = msgspec.json.decode(options.extra_request_body or "{}", type=dict[str, Any])
        ignore = options.ignore_eos and options.name != "demo"
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": ignore, **given})
        params.check()
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadConfig(f"--extra-request-body: {error}", "extra_request_body") from None
    return params


def _config(parsed: Parsed[OfflineOptions], folder: Path) -> Config:
    config, options = parsed.config, parsed.options
    if options.name in ("random", "generated-shared-prefix") and options.tokenize_prompt:
        return _with_ids(config, options.shape, folder)
    if options.shape is not None:
        raise BadConfig("--shape: goes with random token ids", "shape")
    return config


def _with_ids(config: Config, shape: str | None, folder: Path) -> Config:
    """Token ids need no tokenizer; a shape means random weights."""
    model = msgspec.structs.replace(config.model, skip_tokenizer=True)
    if shape is not None:
        model = msgspec.structs.replace(
            model, model=str(workloads.shape_dir(shape, folder)), load_format="dummy")
    return msgspec.structs.replace(config, model=model)


def _measure(config: Config, options: OfflineOptions, sampling: SamplingParams) -> dict[str, Any]:
    style = options.dataset_style or "sglang"
    model = None if options.shape is not None else config.model.model
    tokens = Tokens(model, TokenVocabulary(workloads.vocabulary(config)))
    samples = load_dataset(options, tokens, style, chat=False)
    if (options.name == "random" and options.random_range_ratio is not None
            and options.dataset_style is None):
        print("actorium: --random-range-ratio has SGLang's meaning here, from len x ratio to len "
              "(--dataset-style vllm: len x (1 -+ ratio))", file=sys.stderr)
    with own_engine(for_batches(config)) as engine:
        if not options.skip_warmup:
            run_batch(engine.client, _warm(samples, tokens, options.seed + 1), sampling)
            sleep(SETTLE)
        with Watch(engine.name, config.runtime.run_dir) as watch:
            counted = run_batch(engine.client, samples, sampling)
    for reason in sorted(set(counted.errors))[:5]:
        print(f"actorium: {counted.errors.count(reason)} failed: {reason}", file=sys.stderr)
    return throughput(options.backend, counted, len(samples), watch.rate)


def _warm(samples: list[SampleRequest], tokens: Tokens, seed: int) -> list[SampleRequest]:
    """Random prompts no longer than the longest one of the run, of another seed."""
    longest = max(sample.prompt_len for sample in samples)
    made = DatasetOptions(num_prompts=min(len(samples), WARM_REQUESTS), seed=seed,
                          random_input_len=min(WARM_INPUT, longest or WARM_INPUT),
                          random_output_len=min(WARM_OUTPUT,
                                                max(sample.output_len for sample in samples)))
    return load_dataset(made, tokens, "vllm", chat=False)


def _setting(config: Config, options: OfflineOptions) -> dict[str, Any]:
    return {"dataset_name": options.name, "num_prompts": options.requests, "seed": options.seed,
            "machine": machine(config), "config": msgspec.to_builtins(config)}


# --- without a dataset ----------------------------------------------------------------------------

PEERS = ("transformers",)
BUSY_SHARE = 0.4
"""Load, for each core, above which a warning is printed."""


def run_workloads(given: Config, plan: OfflineOptions) -> int:
    chosen = _chosen_workloads(plan)
    with tempfile.TemporaryDirectory(prefix="actorium-bench-") as folder:
        config = _with_ids(given, plan.shape, Path(folder))
        rows, extra = _measure_workloads(config, chosen, plan)
    judged = {work.name: work.figure for work in chosen}
    if plan.peer:
        workloads.add_ratios(rows, plan.peer)
    _show_progress("")
    named = next(iter(given.model.served_model_name), given.model.model)
    title = f"{plan.shape or named or 'demo model'}, {extra['machine']}"
    print(f"{title}\n{workloads.workload_table(rows)}")
    for name, share in extra.get("agreement", {}).items():
        print(f"{name}: {100 * share:.1f} % of the tokens equal up to the first difference")
    if plan.json:
        write_json(plan.json, {"title": title, "rows": rows, **extra})
    if plan.plot:
        workloads.workload_plot(plan.plot, title, rows, judged)
    return 0


def _chosen_workloads(plan: OfflineOptions) -> list[workloads.Workload]:
    known = {work.name: work for work in workloads.WORKLOADS}
    names = [name.strip().upper() for name in plan.works.split(",")]
    for name in names:
        if name not in known:
            raise BadConfig(f"--works: must be some of {', '.join(known)}, got {name!r}", "works")
    check_least(plan, {"runs": 1})
    if plan.peer is not None and plan.peer not in PEERS:
        raise BadConfig(f"--peer: must be {', '.join(PEERS)}, got {plan.peer!r}", "peer")
    return [known[name] for name in names]


def _measure_workloads(config: Config, chosen: list[workloads.Workload], plan: OfflineOptions
                       ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    vocab, load = workloads.vocabulary(config), _load_before()
    extra: dict[str, Any] = {"machine": machine(config), "runs": plan.runs,
                             "load_before": load, "config": msgspec.to_builtins(config)}
    with own_engine(for_batches(config)) as engine, contextlib.ExitStack() as beside:
        engines: list[workloads.MeasuredEngine] = [workloads.ClientEngine(engine.client, vocab)]
        if plan.peer:
            threads = config.device.threads or len(os.sched_getaffinity(0))
            engines.append(beside.enter_context(peer.opened(peer.PeerModel(config, vocab,
                                                                           threads))))
        found = workloads.measure(engines, chosen, plan.runs, _show_progress)
    if plan.peer:
        extra["agreement"] = {a.work: workloads.agreement(a.tokens, b.tokens)
                              for a, b in zip(*found.values(), strict=True)}
    by_name = {work.name: work for work in chosen}
    rows = [workloads.figures_row(name, by_name[m.work], m) for name,
            each in found.items() for m in each]
    return rows, extra


def machine(config: Config) -> str:
    ranks = config.device.tensor_parallel_size
    device = f"{f'{ranks} ranks, ' if ranks > 1 else ''}{config.device.device} device"
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        cpu = model.partition(":")[2].strip()
        return f"{device}, {len(os.sched_getaffinity(0))} cores of {cpu}"
    return device


def _show_progress(text: str) -> None:
    show_progress(text)
    if text and not sys.stderr.isatty():
        print(text.rstrip(), file=sys.stderr, flush=True)


def _load_before() -> float:
    """Processors that others keep busy, by the load of the last minute."""
    load = os.getloadavg()[0]
    if load > BUSY_SHARE * len(os.sched_getaffinity(0)):
        _show_progress(f"actorium: the machine is busy (load {load:.1f}): figures and ratios will "
                       "be off\n")
    return load
