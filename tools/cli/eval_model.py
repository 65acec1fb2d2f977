"""The model that an evaluation asks: of an engine of its own, of a running one, or of any server;
and where its report goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from actorium import __version__
from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench.http_client import Http
from actorium.tools.cli.command_line import Parsed
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.flags import check_least
from actorium.tools.cli.status import announced_wait, running_dir
from actorium.tools.evaluation.http_model import HttpModel
from actorium.tools.evaluation.rated_model import RatedModel, SdkModel
from actorium.tools.output import show_progress, write_file

Result = TypeVar("Result")
Work = Callable[[RatedModel, dict[str, Any]], Awaitable[dict[str, Any]]]
"""What is made of a model; under a setting, which heads the result."""
Page = Callable[[Mapping[str, Any]], str]


class EvalModelOptions(Struct, frozen=True, kw_only=True):
    """Whom to ask, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "parallel": ("num-threads", "num-concurrent"), "count": ("num-examples", "limit")}
    LEAST: ClassVar[dict[str, int]] = {"parallel": 1}
    """Option -> its least value."""

    base_url: str | None = None
    """A running server with OpenAI's API, whoever made it: http://HOST:PORT. MODEL is then the
    model's name there (default: the first that it lists), --api-key its key. Default: an engine of
    its own; with --name NAME one that runs already."""
    parallel: int = 32
    """Requests under way at once."""
    patience: float = 600.0
    """Seconds that a server may take to answer a request."""
    seed: int = 0
    """Of what is drawn."""
    json: str | None = None
    """File for the result as JSON."""
    html: str | None = None
    """File for the result as a page, with a picture."""

    def check(self) -> None:
        """Raises `BadConfig`."""
        check_least(self, self.LEAST)
        if not self.patience > 0:
            raise BadConfig(f"--patience: must be positive, got {self.patience}", "patience")
        for flag, file in (("json", self.json), ("html", self.html)):
            if file is not None and not Path(file).absolute().parent.is_dir():
                raise BadConfig(f"--{flag}: no such directory: {Path(file).parent}", flag)

    def reached(self, _result: Mapping[str, Any]) -> bool:
        """Whether a result is what was asked for."""
        return True


class EvalScoreOptions(EvalModelOptions, frozen=True, kw_only=True):
    """The same, where answers are right or wrong."""

    min_score: float = 0.0
    """Share (0..1) of right answers to reach."""

    def check(self) -> None:
        """Raises `BadConfig`."""
        super().check()
        if not 0 <= self.min_score <= 1:
            raise BadConfig(f"--min-score: must be between 0 and 1, got {self.min_score}",
                            "min_score")

    def reached(self, result: Mapping[str, Any]) -> bool:
        return bool(result["score"] >= self.min_score and not result["errors"])


def nobody_named(parsed: Parsed[Any]) -> bool:
    """Whether no model, no server and no engine is named."""
    return not (parsed.config.model.model or parsed.options.base_url is not None
                or "name" in parsed.written)


def with_model(parsed: Parsed[Any], model: str) -> Parsed[Any]:
    config = parsed.config
    return parsed._replace(config=msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=model)))


def on_model(parsed: Parsed[Any], work: Callable[[RatedModel], Awaitable[Result]]) -> Result:
    own = parsed.config
    if parsed.options.base_url is not None:
        return asyncio.run(_over_http(parsed, work))
    name = own.runtime.name
    if "name" in parsed.written and name != RuntimeConfig().name:
        running_dir(own.runtime)
        return asyncio.run(_by_client(name, own, work))
    with own_engine(for_batches(own)) as engine:
        return asyncio.run(_by_client(engine.name, own, work))


async def _by_client(name: str, config: Config, work: Callable[[RatedModel], Awaitable[Result]]
                     ) -> Result:
    async with AsyncClient(name, config.runtime.run_dir) as client:
        limit = config.runtime.start_timeout
        with announced_wait(f"the engine {name!r} to be ready", limit):
            await client.wait_ready(limit)
        info = await client.server_info()
        if not info["has_tokenizer"]:
            raise BadConfig("--skip-tokenizer: an evaluation needs texts", "skip_tokenizer")
        return await work(SdkModel(client, str(info["model"])))


async def _over_http(parsed: Parsed[Any], work: Callable[[RatedModel], Awaitable[Result]]
                     ) -> Result:
    http, model, headers = await named_server(parsed)
    with contextlib.closing(http):
        return await work(HttpModel(http, model, headers, parsed.options.patience))


async def named_server(parsed: Parsed[Any]) -> tuple[Http, str, str]:
    """The server of `--base-url`, the model's name there, and headers that say its key. Raises
    `EngineUnavailable`, `BadConfig`."""
    key = parsed.config.gateway.api_key
    headers = "" if key is None else f"Authorization: Bearer {key}\r\n"
    http = Http(parsed.options.base_url)
    try:
        given = parsed.config.model.model if "model" in parsed.written else ""
        return http, given or await first_model(http, headers), headers
    except BaseException:
        http.close()
        raise


async def first_model(http: Http, headers: str) -> str:
    """Raises `EngineUnavailable`, `BadConfig`."""
    try:
        listed = msgspec.json.decode(await http.get("/v1/models", headers), type=dict[str, Any])
        return str(listed["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        raise BadConfig(f"--base-url: {http.url} lists no model at /v1/models: name one as MODEL",
                        "base_url") from None
    except EngineUnavailable as error:
        if error.param is not None or "/v1/models" not in error.message:
            raise
        raise BadConfig(f"--base-url: {error.message}: name the model as MODEL",
                        "base_url") from None


def setting_of(parsed: Parsed[Any], task: str, model: RatedModel) -> dict[str, Any]:
    """The head of a result: what was run."""
    options = parsed.options
    return {"task": task, "model": model.name, "server": options.base_url or "",
            "seed": options.seed, "parallel": options.parallel, "version": __version__}


def write_reports(options: EvalModelOptions, result: Mapping[str, Any],
                  page: Page) -> None:
    for field, file, text in (
            ("json", options.json, lambda: json.dumps(result, indent=1) + "\n"),
            ("html", options.html, lambda: page(result))):
        if file is not None:
            write_file(file, text(), field)
            print(f"actorium: wrote {file}", file=sys.stderr)


def progress(total: int) -> Callable[[int], None]:
    """Shows how many are done, to a terminal."""
    def show(done: int) -> None:
        show_progress("" if done == total else f"{done}/{total}")

    return show
