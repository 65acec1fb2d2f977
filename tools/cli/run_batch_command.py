"""`actorium run-batch`: a file of requests in OpenAI's batch format, answered into another file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import BinaryIO, ClassVar

import msgspec
from msgspec import Struct

from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.gateway.batch.batch_lines import (
    BatchLine,
    LineContext,
    decode_result,
    parse_line,
    succeeded,
)
from actorium.actors.gateway.batch.json_lines import ResultFile, in_order, read_lines
from actorium.actors.gateway.batch.line_caller import (
    Ask,
    LineAnswer,
    answered,
    asking,
    requests_at_once,
)
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.runtime.rundir import engine_dir, is_running
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.flags import check_least
from actorium.tools.cli.status import announced_wait, running_dir
from actorium.tools.output import show_progress

ABOUT = """Answer a file of requests in OpenAI's batch format, one JSON object a line (custom_id,
method, url, body), by an engine of its own, a running one (--name) or any server (--base-url).
There is a line of output for each line of input, in the same order. Interrupted, it goes on where
it was when it is called again with the same files."""
SECONDS = 30 * 86400.0
"""For one line, unless its body names a timeout."""


class RunBatchOptions(Struct, frozen=True, kw_only=True):
    """The files, and whom to ask."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "input_file": ("input",), "output_file": ("output",)}

    input_file: str | None = None
    """File of requests (-i)."""
    output_file: str | None = None
    """File of answers (-o); if it has lines, those behind them are answered."""
    base_url: str | None = None
    """A running server, whoever made it: http://HOST:PORT, with --api-key its key."""
    parallel: int | None = None
    """Requests under way at once; default: twice --max-num-seqs."""

    def check(self) -> None:
        """Raises `BadConfig`."""
        check_least(self, {"parallel": 1})
        for flag, name in (("--input-file", self.input_file), ("--output-file", self.output_file)):
            if name is None or name == "-":
                raise BadConfig(f"{flag}: a file is needed", flag[2:].replace("-", "_"))
            if name.startswith(("http://", "https://")):
                raise BadConfig(f"{flag}: must be a file: URLs are not read or written",
                                flag[2:].replace("-", "_"))


class BatchFiles:
    """The two files of a run, and how far it is."""

    def __init__(self, source: BinaryIO, results: ResultFile, options: RunBatchOptions) -> None:
        """Raises `BadConfig` if the output is that of another input."""
        self._source, self.results = source, results
        names = f"{options.input_file}\0{os.path.abspath(options.output_file or '')}"
        self.batch = f"batch_{sha256(names.encode()).hexdigest()[:24]}"
        self._key = secrets.token_hex(12)
        if results.lines:
            done = list(islice(self._lines(), results.lines))
            try:
                last = decode_result(results.last).custom_id
            except msgspec.MsgspecError:
                last = ""
            if len(done) < results.lines or done[-1].custom_id != last:
                raise BadConfig(f"--output-file: {options.output_file} has {results.lines} lines "
                                "that are not the answers to the first ones of --input-file",
                                "output_file")
            self._rest = self._lines(results.lines)
            print(f"actorium: goes on behind line {results.lines}", file=sys.stderr)
        else:
            self._rest = self._lines()

    def _lines(self, done: int = 0) -> Iterator[BatchLine]:
        """Yields the lines of the input that come next. done: number of those before."""
        for number, data in enumerate(read_lines(self._source), done + 1):
            yield parse_line(number, data)

    async def run(self, ask: Ask, window: int) -> None:
        """Answers the rest of the lines. Raises `OSError`, and what `ask` raises."""
        counts = [0, 0]

        async def answer(line: BatchLine) -> bytes:
            context = LineContext("", SECONDS, f"{self._key}-{line.number}")
            return await answered(line, context, self.batch, ask)

        answers = in_order(self._rest, answer, window, lambda line: len(line.body))
        async with contextlib.aclosing(answers):
            async for result in answers:
                self.results.append(result)
                counts[succeeded(result)] += 1
                show_progress(f"{self.results.lines} lines")
        show_progress("")
        print(f"actorium: {self.results.lines} lines; of this run {counts[True]} answered, "
              f"{counts[False]} failed", file=sys.stderr)


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium run-batch [MODEL]", argv, RunBatchOptions, ABOUT)
    parsed.options.check()
    with contextlib.ExitStack() as stack:
        files = _opened(parsed.options, stack)
        try:
            _on_engine(parsed, files)
        except OSError as error:
            raise BadConfig(f"--output-file: cannot write {parsed.options.output_file}: "
                            f"{error.strerror}", "output_file") from None
    return 0


def _opened(options: RunBatchOptions, stack: contextlib.ExitStack) -> BatchFiles:
    source, target = _source(str(options.input_file), stack), str(options.output_file)
    try:
        results = ResultFile(Path(target))
        stack.callback(results.close)
        results.resume()
    except BlockingIOError:
        raise BadConfig(f"--output-file: another process writes {target}", "output_file") from None
    except OSError as error:
        raise BadConfig(f"--output-file: cannot write {target}: {error.strerror}",
                        "output_file") from None
    return BatchFiles(source, results, options)


def _source(path: str, stack: contextlib.ExitStack) -> BinaryIO:
    try:
        return stack.enter_context(open(path, "rb"))
    except OSError as error:
        raise BadConfig(f"--input-file: cannot read {path}: {error.strerror}",
                        "input_file") from None


def _on_engine(parsed: Parsed[RunBatchOptions], files: BatchFiles) -> None:
    config, options = parsed.config, parsed.options
    if options.base_url is not None:
        asyncio.run(_over_http(parsed, files))
    elif "name" in parsed.written and config.runtime.name != RuntimeConfig().name:
        asyncio.run(_in_process(running_dir(config.runtime), config, options, files))
    else:
        check_machine(config)
        with own_engine(for_batches(config)) as engine:
            run_dir = engine_dir(engine.name, config.runtime.run_dir)
            asyncio.run(_in_process(run_dir, config, options, files))


async def _in_process(run_dir: Path, config: Config, options: RunBatchOptions,
                      files: BatchFiles) -> None:
    """Answers by a gateway's application in this process, over the engine of `run_dir`."""
    from actorium.actors.gateway.app import build_app
    from actorium.actors.gateway.gateway_state import GatewayState

    gateway = GatewayState(_settings(run_dir), run_dir, role=f"batch-{os.getpid()}")
    try:
        limit = config.runtime.start_timeout
        with announced_wait("the engine to be ready", limit):
            await gateway.engine.client.wait_ready(limit)
        await files.run(partial(_ask_while_running, run_dir, asking(build_app(gateway))),
                        options.parallel or requests_at_once(gateway.config.scheduler))
    finally:
        await gateway.close()


def _settings(run_dir: Path) -> Config:
    """Returns the engine's configuration, without what is its gateways' alone."""
    config = configs.load((run_dir / "config.json").read_bytes())
    return msgspec.structs.replace(config, gateway=msgspec.structs.replace(
        config.gateway, access_log=False, files_dir=None, responses_store=None,
        responses_max_bytes=0, api_keys_file=None))


async def _ask_while_running(run_dir: Path, ask: Ask, line: BatchLine, context: LineContext
                             ) -> LineAnswer:
    answer = await ask(line, context)
    if answer.status == 503 and not is_running(run_dir):
        raise EngineUnavailable("the engine has ended")
    return answer


async def _over_http(parsed: Parsed[RunBatchOptions], files: BatchFiles) -> None:
    from actorium.tools.bench.http_client import Http

    key = parsed.config.gateway.api_key
    headers = "" if key is None else f"Authorization: Bearer {key}\r\n"
    http = Http(str(parsed.options.base_url))

    async def ask(line: BatchLine, _: LineContext) -> LineAnswer:
        status, fields, body = await http.post(line.url, line.body, headers)
        return LineAnswer(status, fields.get(b"x-request-id", b"").decode("latin-1"), body,
                      b"json" in fields.get(b"content-type", b""))

    with contextlib.closing(http):
        await files.run(ask, parsed.options.parallel
                        or requests_at_once(parsed.config.scheduler))
