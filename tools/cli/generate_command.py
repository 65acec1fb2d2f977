"""`actorium generate`: an offline batch from flags or from a file of JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import msgspec

from actorium.actors.client.requests import Request
from actorium.actors.errors import ActoriumError, BadConfig
from actorium.actors.gateway.batch.json_lines import read_lines
from actorium.actors.gateway.batch.line_caller import requests_at_once
from actorium.actors.launcher.preflight import check_machine
from actorium.tools.cli import jsonl
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.sampling_flags import SamplingOptions, sampling_of

if TYPE_CHECKING:
    from actorium.actors.client.async_client import AsyncClient
    from actorium.actors.launcher.engine import Engine

ABOUT = """Run a batch of prompts and stop. With --input, one JSON object a line is read (prompt,
prompt_token_ids or messages, sampling parameters, tenant, priority, adapter) and one is written, in
the same order."""


class GenerateOptions(SamplingOptions, frozen=True, kw_only=True):
    """The batch, and the sampling parameters of the requests that name none."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "input": ("input-file",), "output": ("output-file",)}

    prompt: list[str] = []
    """Texts to go on from."""
    input: str | None = None
    """File of JSON lines; - = standard input."""
    adapter: str | None = None
    """Name of the LoRA adapter (--lora-modules) of requests that name none."""
    output: str | None = None
    """File to write JSON lines to; default: standard output."""


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium generate [MODEL]", argv, GenerateOptions, ABOUT,
                   checks=[check_machine])
    options = parsed.options
    if bool(options.prompt) == (options.input is not None):
        raise BadConfig("--prompt: one of --prompt TEXT and --input FILE is needed", "prompt")
    _check_order(parsed)
    sampling = sampling_of(parsed)
    with contextlib.ExitStack() as stack:
        source = _source(options, stack)
        sink = _sink(options, stack)
        engine = stack.enter_context(own_engine(for_batches(parsed.config)))
        failed = asyncio.run(_batch(parsed, engine, jobs(options, source, sampling), sink))
    return 1 if failed and source is None else 0


def _check_order(parsed: Parsed[GenerateOptions]) -> None:
    """Refuses `--prompt TEXT DIR`, which takes DIR for another text and would ask the demo model.
    """
    texts = parsed.options.prompt
    swallowed = len(texts) > 1 and "model" not in parsed.written
    if swallowed and os.path.isfile(os.path.join(texts[-1], "config.json")):
        raise BadConfig(f"--prompt: the model goes before it: generate {texts[-1]} --prompt ...",
                        "prompt")


def jobs(options: GenerateOptions, source: BinaryIO | None,
         sampling: dict[str, Any]) -> Iterator[jsonl.BatchJob | jsonl.BadLine]:
    if source is not None:
        for job in jsonl.parse_lines(read_lines(source), sampling):
            if isinstance(job, jsonl.BatchJob) and job.request.adapter is None:
                job = jsonl.BatchJob(job.index, msgspec.structs.replace(
                    job.request, adapter=options.adapter))
            yield job
        return
    for index, prompt in enumerate(options.prompt):
        yield jsonl.BatchJob(index, Request(prompt=prompt, params=jsonl.params(sampling),
                                            adapter=options.adapter))


def _source(options: GenerateOptions, stack: contextlib.ExitStack) -> BinaryIO | None:
    if options.input is None or options.input == "-":
        return None if options.input is None else sys.stdin.buffer
    try:
        return stack.enter_context(open(options.input, "rb"))
    except OSError as error:
        raise BadConfig(f"--input: cannot read {options.input}: {error.strerror}") from None


def _sink(options: GenerateOptions, stack: contextlib.ExitStack) -> BinaryIO:
    if options.output is None or options.output == "-":
        return sys.stdout.buffer
    try:
        return stack.enter_context(open(options.output, "wb"))
    except OSError as error:
        raise BadConfig(f"--output: cannot write {options.output}: {error.strerror}") from None


async def _batch(parsed: Parsed[GenerateOptions], engine: Engine,
                 items: Iterable[jsonl.BatchJob | jsonl.BadLine], sink: BinaryIO) -> int:
    """Run everything; returns how many failed."""
    from actorium.actors.client.async_client import AsyncClient

    options = parsed.options
    plain = options.input is None and options.output is None
    window = requests_at_once(parsed.config.scheduler)
    total, failed = _count(options), 0
    async with AsyncClient(engine.name, run_dir=parsed.config.runtime.run_dir) as client:
        records = jsonl.run_batch(items, lambda job: complete(client, job), window)
        async for record in _with_bar(records, total, sink is sys.stdout.buffer):
            failed += "error" in record
            if plain and "error" in record:
                print(f"actorium: prompt {record['index']}: {record['error']}", file=sys.stderr)
            else:
                sink.write(_text(record, total == 1) if plain
                           else msgspec.json.encode(record) + b"\n")
                sink.flush()
    return failed


async def complete(client: AsyncClient, job: jsonl.BatchJob) -> list[Any]:
    """Run one job; its completions, one a choice."""
    results = client.run([job.request])
    try:
        _, found = await anext(results)
    finally:
        await results.aclose()
    if isinstance(found, ActoriumError):
        raise found
    return found


def _count(options: GenerateOptions) -> int | None:
    """How many requests there will be; None for a pipe. Only looked up for a terminal's bar."""
    if options.input is None:
        return len(options.prompt)
    path = Path(options.input)
    if not sys.stderr.isatty() or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _text(record: dict[str, Any], alone: bool) -> bytes:
    """Prints only the text, numbered if there are several."""
    texts = [choice["text"] or str(choice["token_ids"]) for choice in record.get("choices", ())]
    texts = texts or [record.get("text") or str(record.get("token_ids", []))]
    if alone and len(texts) == 1:
        return texts[0].encode() + b"\n"
    return b"".join(f"[{record['index']}{f'.{i}' if len(texts) > 1 else ''}] {text}\n".encode()
                    for i, text in enumerate(texts))


async def _with_bar(records: AsyncIterator[dict[str, Any]], total: int | None,
                    printed: bool) -> AsyncIterator[dict[str, Any]]:
    """Yields the same records; shows a bar on a terminal that they are not printed to."""
    if not sys.stderr.isatty() or (printed and sys.stdout.isatty()):
        async for record in records:
            yield record
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        async for record in records:
            yield record
            bar.advance(task)
