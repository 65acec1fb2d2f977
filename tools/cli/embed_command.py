"""`actorium embed`: vectors of texts from flags or from a file of JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, ClassVar

import msgspec
from msgspec import Struct

from actorium.actors.client.requests import Request
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.batch.json_lines import read_lines
from actorium.actors.gateway.batch.line_caller import requests_at_once
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.params import PoolingParams
from actorium.tools.cli import jsonl
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.generate_command import (
    complete,
    count_lines,
    open_sink,
    open_source,
    with_bar,
)

if TYPE_CHECKING:
    from actorium.actors.launcher.engine import Engine

ABOUT = """Embed texts and stop. With --input, one JSON object a line is read (text or
prompt_token_ids); a JSON object a line is written (index, embedding, prompt_tokens), in the same
order."""


class EmbedOptions(Struct, frozen=True, kw_only=True):
    """The texts, and what becomes of their vectors."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "input": ("input-file",), "output": ("output-file",)}

    text: list[str] = []
    """Texts to embed."""
    input: str | None = None
    """File of JSON lines; - = standard input."""
    output: str | None = None
    """File to write JSON lines to; default: standard output."""
    dimensions: int | None = None
    """Keep so many leading numbers of each vector, of models that were trained for it."""
    normalize: bool | None = None
    """Give vectors the length 1; default: as the model says."""


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium embed [MODEL]", argv, EmbedOptions, ABOUT, checks=[check_machine])
    options = parsed.options
    if bool(options.text) == (options.input is not None):
        raise BadConfig("--text: one of --text TEXT and --input FILE is needed", "text")
    params = PoolingParams(task="embed", dimensions=options.dimensions,
                           use_activation=options.normalize)
    try:
        params.check()
    except ValueError as error:
        raise BadConfig(f"--{error}", str(error).partition(":")[0]) from None
    with contextlib.ExitStack() as stack:
        source = open_source(options.input, stack)
        sink = open_sink(options.output, stack)
        engine = stack.enter_context(own_engine(for_batches(parsed.config)))
        failed = asyncio.run(_batch(parsed, engine, jobs(options, source, params), sink))
    return 1 if failed and source is None else 0


def jobs(options: EmbedOptions, source: BinaryIO | None,
         params: PoolingParams) -> Iterator[jsonl.BatchJob | jsonl.BadLine]:
    """Yields a request for each text or line, or what is wrong with the line."""
    if source is None:
        for index, text in enumerate(options.text):
            yield jsonl.BatchJob(index, Request(prompt=text, pooling=params))
        return
    for index, line in enumerate(read_lines(source)):
        try:
            yield jsonl.BatchJob(index, Request(prompt=_prompt(line), pooling=params))
        except ValueError as error:
            yield jsonl.BadLine(index, str(error))


def _prompt(line: bytes) -> str | list[int]:
    """Raises `ValueError`, naming the field at fault."""
    body = jsonl.decode_object(line)
    text, tokens = body.get("text"), jsonl.token_ids(body.get("prompt_token_ids"))
    if (text is None) == (tokens is None):
        raise ValueError("exactly one of text and prompt_token_ids is needed")
    if tokens is not None:
        return tokens
    if not isinstance(text, str):
        raise ValueError(f"text: must be a string, got {type(text).__name__}")
    return text


async def _batch(parsed: Parsed[EmbedOptions], engine: Engine,
                 items: Iterable[jsonl.BatchJob | jsonl.BadLine], sink: BinaryIO) -> int:
    """Embeds everything; returns how many texts failed."""
    from actorium.actors.client.async_client import AsyncClient

    options, failed = parsed.options, 0
    async with AsyncClient(engine.name, run_dir=parsed.config.runtime.run_dir) as client:
        records = jsonl.run_batch(items, lambda job: complete(client, job),
                                  requests_at_once(parsed.config.scheduler))
        async for record in with_bar(records, count_lines(options.input, options.text),
                                     sink is sys.stdout.buffer):
            failed += "error" in record
            sink.write(msgspec.json.encode(record) + b"\n")
            sink.flush()
    return failed
