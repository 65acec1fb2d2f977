"""`actorium bench serve`: latency and throughput under load, of an engine or of any server."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime.process import raise_file_limit
from actorium.tools.bench import results, workloads
from actorium.tools.bench.datasets.load import load_dataset
from actorium.tools.bench.datasets.options import print_unused
from actorium.tools.bench.datasets.sample import SampleRequest, Tokens
from actorium.tools.bench.figures import acceptance, details, figures
from actorium.tools.bench.load_driver import RequestResult, arrivals, drive
from actorium.tools.bench.results import serving_table
from actorium.tools.bench.server_backends import CHAT, SDK, kind_of
from actorium.tools.cli.bench_command import BenchServeOptions, check_serve
from actorium.tools.cli.bench_session import (
    SELF,
    BenchTarget,
    Session,
    answers_models,
    session_of,
    target_of,
)
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import own_engine
from actorium.tools.output import show_progress, write_json

ABOUT = """Load on a serving engine: one of its own, with --name NAME one that runs already, or with
--base-url (or --host, --port) any server that speaks OpenAI's API or SGLang's. Flags, rows and the
result file are those of vLLM's and SGLang's benchmarks."""
PROG = "actorium bench serve [MODEL]"


def run(argv: list[str]) -> int:
    parsed = parse(PROG, argv, BenchServeOptions, ABOUT)
    options = parsed.options
    check_serve(options, parsed.written)
    print_unused(options, parsed.written)
    named = "name" in parsed.written and parsed.config.runtime.name != RuntimeConfig().name
    target = target_of(options, parsed.written, named, answers_models)
    if target.note:
        print(f"actorium: {target.note}", file=sys.stderr)
    raise_file_limit()
    if not target.starts_engine:
        return _report(asyncio.run(_run(parsed, target)), options)
    with tempfile.TemporaryDirectory(prefix="actorium-bench-") as folder:
        config = _config(parsed, target, Path(folder))
        with own_engine(config) as engine:
            runtime = msgspec.structs.replace(config.runtime, name=engine.name)
            mine = parsed._replace(config=msgspec.structs.replace(config, runtime=runtime))
            result = asyncio.run(_run(mine, target))
    return _report(result, options)


def _config(parsed: Parsed[BenchServeOptions], target: BenchTarget, folder: Path) -> Config:
    """Settings of an engine of our own. Token ids need no tokenizer; a shape means random
    weights."""
    config, options = parsed.config, parsed.options
    model, gateway = config.model, config.gateway
    ids = (options.name in ("random", "generated-shared-prefix") and options.tokenize_prompt
           and not _is_chat(target))
    if ids and (target.backend == SDK or options.shape is not None):
        model = msgspec.structs.replace(model, skip_tokenizer=True)
    if options.shape is not None:
        if "model" in parsed.written or not ids:
            raise BadConfig("--shape: goes with random prompts and without a model", "shape")
        path = workloads.shape_dir(options.shape, folder)
        model = msgspec.structs.replace(model, model=str(path), load_format="dummy")
    if target.backend != SDK:
        gateway = msgspec.structs.replace(gateway, port=0)
    return msgspec.structs.replace(config, model=model, gateway=gateway)


async def _run(parsed: Parsed[BenchServeOptions], target: BenchTarget) -> dict[str, Any]:
    async with session_of(parsed, target) as session:
        return await _measure(parsed.options, target, session)


async def _measure(options: BenchServeOptions, target: BenchTarget, session: Session) -> dict[str,
                                                                                              Any]:
    requests = _requests(options, target, session.tokens)
    await _warm_up(options, target, session)
    if options.flush_cache:
        await session.flush()
    times = arrivals(len(requests), options.request_rate, options.burstiness, options.seed,
                     options.ramp_up)
    before = await session.counters()
    found, seconds = await drive(
        session.stream, requests, times, options.max_concurrency or None,
        lambda n: None if options.disable_tqdm else show_progress(f"{n}/{len(requests)}"))
    show_progress("")
    after = await session.counters()
    _tell_errors(found)
    result = {**_setting(options, target, session),
              **figures(found, seconds, options.percentiles, options.goals), **details(found),
              **acceptance(before, after)}
    texts = [r.text for r in found if r.ok and r.text]
    if texts and session.tokens.tokenizer is not None:
        result["total_output_tokens_retokenized"] = sum(
            len(session.tokens.tokenizer.encode(text)) for text in texts)
    return result


def _requests(options: BenchServeOptions, target: BenchTarget,
              tokens: Tokens) -> list[SampleRequest]:
    style = options.dataset_style or ("sglang" if target.backend.startswith("sglang") else "vllm")
    return load_dataset(options, tokens, style, _is_chat(target))


def _is_chat(target: BenchTarget) -> bool:
    return bool(target.endpoint) and kind_of(target.endpoint) == CHAT


async def _warm_up(options: BenchServeOptions, target: BenchTarget, session: Session) -> None:
    """Requests of another seed, so that none of the run's prompts is in the prefix cache."""
    if not options.num_warmups:
        return
    other = msgspec.structs.replace(options, num_prompts=options.num_warmups,
                                    seed=options.seed + 1)
    requests = _requests(other, target, session.tokens)
    found, _ = await drive(session.stream, requests, [0.0] * len(requests),
                           options.max_concurrency or 1, lambda n: None)
    errors = [result.error for result in found if result.error is not None]
    if errors:
        raise EngineUnavailable(f"warm-up: {errors[0].partition(': ')[2]}")


def _setting(options: BenchServeOptions, target: BenchTarget, session: Session) -> dict[str, Any]:
    rate = options.request_rate
    head: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": target.backend,
        "backend": target.backend, "label": options.label, "model_id": session.model_id,
        "tokenizer_id": options.tokenizer or session.model_id,
        "dataset_name": options.name, "num_prompts": options.requests, "seed": options.seed,
        **options.pairs("metadata"),
        "request_rate": rate if rate < float("inf") else "inf", "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency or None,
        "base_url": target.url or (SELF if target.backend != SDK else None)}
    if options.ramp_up is not None:
        head |= {"ramp_up_strategy": options.ramp_up.strategy,
                 "ramp_up_start_rps": options.ramp_up.start,
                 "ramp_up_end_rps": options.ramp_up.end}
    return head


def _tell_errors(found: list[RequestResult]) -> None:
    kinds: dict[str, int] = {}
    for result in found:
        if not result.ok:
            reason = result.error or "no token came"
            kinds[reason] = kinds.get(reason, 0) + 1
    for reason, number in sorted(kinds.items(), key=lambda kind: -kind[1])[:5]:
        print(f"actorium: {number} failed: {reason}", file=sys.stderr)


def _report(result: dict[str, Any], options: BenchServeOptions) -> int:
    print(serving_table(result, options.metrics, options.percentile_names))
    kept = result if options.save_detailed else results.without_details(result)
    if options.json:
        write_json(options.json, kept)
    append = options.append_result or options.output_file is not None
    if options.save_result or append or options.result_filename:
        name = options.output_file or options.result_filename or results.default_name(result)
        path = Path(options.result_dir or ".") / name
        results.write_result(path, kept, append)
        print(f"actorium: wrote {path}", file=sys.stderr)
    return 0 if not result["failed"] else 1


