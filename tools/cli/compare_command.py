"""`actorium compare`: two configurations, or servers, on the same prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from actorium.actors.errors import BadConfig
from actorium.actors.gateway.actor import where
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.http_client import Http
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.eval_model import EvalModelOptions, first_model, progress, write_reports
from actorium.tools.compare.comparison import (
    Bars,
    ModelAnswer,
    compared,
    comparison_page,
    comparison_table,
)
from actorium.tools.compare.default_prompts import PROMPTS
from actorium.tools.compare.listener import Listener, names_ids
from actorium.tools.evaluation.http_model import HttpModel

ABOUT = """Ask two ways to serve a model for greedy answers to the same prompts, and compare tokens
and log-probabilities, position by position. A and B: flags in quotes, which come on top of those
that follow ("--attention-backend torch", or "" for none), or the URL of a server with OpenAI's API,
whose model is the first that it lists. Of each position the 20 likeliest tokens are known, so KL is
a lower bound. Exit code 1 where --max-kl or --min-agreement does not hold."""


class CompareOptions(EvalModelOptions, frozen=True, kw_only=True):
    """What to ask, and what must hold."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "parallel": EvalModelOptions.ALIASES["parallel"]}
    LEAST: ClassVar[dict[str, int]] = {**EvalModelOptions.LEAST, "answer_tokens": 1}

    prompts: str | None = None
    """A file of prompts: one a line, or JSON lines with `prompt`. Default: ten that come along."""
    answer_tokens: int = 48
    """Tokens of an answer, at the most."""
    max_kl: float | None = None
    """Nats that the mean KL may reach in decodes, in prompts and behind cached prefixes."""
    min_agreement: float | None = None
    """Share (0..1) of positions at which the likeliest token must be the same, in each of them."""

    def check(self) -> None:
        """Raises `BadConfig`."""
        super().check()
        if self.base_url is not None:
            raise BadConfig("--base-url: a server is named as A or B", "base_url")
        if self.max_kl is not None and not self.max_kl >= 0:
            raise BadConfig(f"--max-kl: must not be negative, got {self.max_kl}", "max_kl")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise BadConfig(f"--min-agreement: must be between 0 and 1, got {self.min_agreement}",
                            "min_agreement")


def run(_command: str, argv: list[str]) -> int:
    usage = "actorium compare A B [MODEL]"
    if {"-h", "--help"} & set(argv):
        parse(usage, ["--help"], CompareOptions, ABOUT)
    if len(argv) < 2:
        raise BadConfig('compare: two configurations are needed, as "--attention-backend torch" '
                        "or a URL", "compare")
    sides, common = argv[:2], argv[2:]
    asked = [parse(usage, [*common, *([] if _is_url(side) else _words(side))], CompareOptions,
                   checks=[check_machine]) for side in sides]
    options = asked[0].options
    options.check()
    prompts = _prompts(options.prompts)
    one, other = zip(sides, asked, strict=True)
    first = _side_answers(*one, prompts, None)
    texts = [own.text for own in first]
    second = _side_answers(*other, prompts, texts)
    if names_ids(first) and not names_ids(second):
        first = _side_answers(*one, prompts, texts, by_id=False)
    elif names_ids(second) and not names_ids(first):
        second = _side_answers(*other, prompts, texts, by_id=False)
    bars = Bars(options.max_kl, options.min_agreement)
    result = {"a": sides[0], "b": sides[1], "common": shlex.join(common),
              **compared(first, second, bars)}
    print(comparison_table(result))
    write_reports(options, result, comparison_page)
    return 1 if result["faults"] else 0


def _is_url(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def _words(side: str) -> list[str]:
    try:
        return shlex.split(side)
    except ValueError as error:
        raise BadConfig(f"compare: {side!r} is neither flags nor a URL: {error}", "compare"
                        ) from None


def _prompts(file: str | None) -> list[str]:
    if file is None:
        return list(PROMPTS)
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines()
                 if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--prompts: cannot read {file}: {error}", "prompts") from None
    try:
        found = [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
    except (ValueError, KeyError):
        raise BadConfig(f"--prompts: {file}: a line of JSON without a prompt", "prompts") from None
    if not found or not all(isinstance(one, str) and one for one in found):
        raise BadConfig(f"--prompts: {file} holds no prompts", "prompts")
    return found


@contextlib.contextmanager
def served_side(side: str, parsed: Parsed[Any]) -> Iterator[str]:
    """Where the side answers: its own engine on a port of this machine's loopback, or the server
    that it names."""
    if _is_url(side):
        yield side
        return
    config = for_batches(parsed.config)
    gateway = msgspec.structs.replace(config.gateway, port=0, host="127.0.0.1", access_log=False)
    with own_engine(msgspec.structs.replace(config, gateway=gateway)) as engine:
        found = where(engine_dir(engine.name, config.runtime.run_dir))
        assert found is not None
        yield found.url


def _side_answers(side: str, parsed: Parsed[Any], prompts: list[str], texts: list[str] | None,
              by_id: bool = True) -> list[ModelAnswer]:
    with served_side(side, parsed) as url:
        return asyncio.run(model_answers(url, parsed, prompts, texts, by_id))


async def model_answers(url: str, parsed: Parsed[Any], prompts: Sequence[str],
                     texts: list[str] | None, by_id: bool = True) -> list[ModelAnswer]:
    """Returns the model's answers to these prompts; texts: see `Listener.hear`."""
    key, options = parsed.config.gateway.api_key, parsed.options
    headers = "" if key is None else f"Authorization: Bearer {key}\r\n"
    with contextlib.closing(Http(url)) as http:
        model = HttpModel(http, await first_model(http, headers), headers)
        return await Listener(model, by_id).hear(prompts, texts, options.answer_tokens,
                                                 options.parallel, progress(len(prompts)))
