"""`actorium verify`: tries to make an engine, or a server, contradict itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import ClassVar

from actorium import __version__
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.models import model_dir
from actorium.actors.models.obtain import with_model_path
from actorium.gpu.families.architectures import read_shape
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.eval_model import EvalModelOptions, named_server, write_reports
from actorium.tools.output import show_progress
from actorium.tools.verify.conditions import VALUES, methods_of, over_ranks
from actorium.tools.verify.contradictions import CLOSE, EXACT, OFF, Strictness
from actorium.tools.verify.engine_readers import PATIENCE
from actorium.tools.verify.http_readers import ServerAsker, probed
from actorium.tools.verify.own_engines import OwnEngines, Start
from actorium.tools.verify.verify_cases import Vocabulary, drawn_cases
from actorium.tools.verify.verify_report import verify_page, verify_result, verify_table
from actorium.tools.verify.verify_run import VerifyAsker, VerifyOptions, VerifyRun, VerifyTally

ABOUT = """Ask for the same answers under many conditions, and hold each against that of the request
alone: in batches, in other orders, with its prompt cached, shared and evicted, in chunks, with
drafts, preempted, through the death of a worker, as a stream that is cut. What contradicts itself
is shrunk to the smallest pair of conditions that shows it. Exit code 1 where there is one."""
TIGHT = 4
"""A tight pool holds so many of the longest requests."""


class VerifyCommandOptions(EvalModelOptions, frozen=True, kw_only=True):
    """How much to try."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {}
    LEAST: ClassVar[dict[str, int]] = EvalModelOptions.LEAST | dict.fromkeys(
        ("comparisons", "engines", "cases", "prompt_tokens", "answer_tokens", "max_runs"), 1)

    comparisons: int = 1000
    """Answers to hold against those of the plain condition."""
    minutes: float | None = None
    """Stop trying after so many minutes; what was found is shrunk then. Default: no bound."""
    engines: int = 8
    """Engines with other flags that are started, the plain one among them."""
    axes: str | None = None
    """Conditions to vary, as cache,neighbours,drafts; default: all that can be."""
    cases: int = 64
    """Different requests, of which rounds are drawn."""
    prompt_tokens: int = 160
    """Tokens of a prompt, at the most."""
    answer_tokens: int = 24
    """Tokens of an answer, at the most."""
    logprobs: str = EXACT
    """exact (to the bit, as they are printed) | close (within --logprobs-within) | off."""
    logprobs_within: float = 0.001
    """Nats that two log-probabilities may be apart with --logprobs close."""
    patience: float = PATIENCE
    """Seconds that a request may take; one that takes longer has no answer, which is reported as a
    contradiction."""
    max_runs: int = 60
    """Runs in which one contradiction is shrunk, at the most."""
    shrink: int = 5
    """Contradictions that are shrunk."""

    def check(self) -> None:
        """Raises `BadConfig`."""
        super().check()
        if self.logprobs not in (EXACT, CLOSE, OFF):
            raise BadConfig(f"--logprobs: must be exact, close or off, got {self.logprobs!r}",
                            "logprobs")
        if not self.logprobs_within >= 0:
            raise BadConfig("--logprobs-within: must not be negative, got "
                            f"{self.logprobs_within}", "logprobs_within")
        for axis in self.only_axes():
            if axis not in VALUES:
                raise BadConfig(f"--axes: {axis!r} is none of {', '.join(VALUES)}", "axes")
        if self.minutes is not None and not self.minutes > 0:
            raise BadConfig(f"--minutes: must be positive, got {self.minutes}", "minutes")
        if self.shrink < 0:
            raise BadConfig(f"--shrink: must not be negative, got {self.shrink}", "shrink")


    def only_axes(self) -> list[str]:
        return list(VALUES) if self.axes is None else [
            axis.strip() for axis in self.axes.split(",")]


def run(_command: str, argv: list[str], start: Start = own_engine) -> int:
    parsed = parse("actorium verify [MODEL]", argv, VerifyCommandOptions, ABOUT,
                   checks=[check_machine])
    parsed.options.check()
    kept: list[VerifyRun] = []
    try:
        asyncio.run(_verify_own_engines(parsed, start, kept.append)
                    if parsed.options.base_url is None else _over_http(parsed, kept.append))
        tally = kept[0].tally
    except KeyboardInterrupt:
        if not kept:
            raise
        tally = kept[0].tally
        tally.interrupted = True
    return _report(parsed, tally, kept[0])


async def _verify_own_engines(parsed: Parsed[VerifyCommandOptions], start: Start,
               keep: Callable[[VerifyRun], None]) -> None:
    options = parsed.options
    config = with_model_path(for_batches(parsed.config))
    tight = TIGHT * (options.prompt_tokens + options.answer_tokens)
    shape = read_shape(Path(model_dir.resolve(config.model.model)), config)
    values, held = {axis: VALUES[axis] for axis in options.only_axes()}, ""
    if "ranks" in values:
        config, held = over_ranks(config, shape, parsed.written)
    asker = OwnEngines(config, parsed.written, methods_of(shape, config), start, tight, values,
                       options.patience, held,
                       partial(own_engine, watched=False) if start is own_engine else None)
    try:
        await asker.start()
        info = asker.info
        vocabulary = Vocabulary(tokens=info["vocab_size"], grammars=info["has_tokenizer"])
        await _all(parsed, asker, vocabulary, keep)
    finally:
        await asker.close()


async def _over_http(parsed: Parsed[VerifyCommandOptions], keep: Callable[[VerifyRun], None]
                     ) -> None:
    http, model, headers = await named_server(parsed)
    with contextlib.closing(http):
        can = await probed(http, model, headers, parsed.options.patience)
        asker = ServerAsker(http, model, headers, can, {
            axis: VALUES[axis] for axis in parsed.options.only_axes()}, parsed.options.patience)
        print(f"actorium: {http.url}{can.path}: takes {', '.join(sorted(can.options)) or 'nothing'}"
              f"; log-probabilities: {_yes(can.logprobs)}; keeps seeds: {_yes(can.seeds)}; keeps "
              f"prompts apart by salts: {_yes(can.salts)}", file=sys.stderr)
        await _all(parsed, asker, Vocabulary(
            seeds=can.seeds, grammars="response_format" in can.options,
            penalties="repetition_penalty" in can.options), keep)


def _yes(can: bool) -> str:
    return "yes" if can else "no"


async def _all(parsed: Parsed[VerifyCommandOptions], asker: VerifyAsker, vocabulary: Vocabulary,
               keep: Callable[[VerifyRun], None]) -> None:
    options = parsed.options
    cases = drawn_cases(options.seed, options.cases, vocabulary, options.prompt_tokens,
                        options.answer_tokens)
    begun, minutes = monotonic(), options.minutes
    run = VerifyRun(
        asker, cases, VerifyOptions(
            options.comparisons, options.engines, options.seed, options.max_runs, options.shrink,
            Strictness(options.logprobs, options.logprobs_within)),
        lambda share: minutes is not None and monotonic() - begun > 60 * minutes * share, _show)
    keep(run)
    await run.run()


def _show(tally: VerifyTally) -> None:
    show_progress(f"{tally.comparisons} comparisons, {len(tally.observed)} contradictions "
                  f"({tally.engines[-1]})")


def _report(parsed: Parsed[VerifyCommandOptions], tally: VerifyTally, run: VerifyRun) -> int:
    options = parsed.options
    with contextlib.suppress(OSError):
        show_progress("")
    result = {"task": "verify", "model": parsed.config.model.model, "server": options.base_url or
              "", "seed": options.seed, "logprobs": options.logprobs, "version": __version__,
              **verify_result(tally, run.plain, run.counts)}
    print(verify_table(result))
    write_reports(options, result, verify_page)
    return 1 if tally.observed else 0
