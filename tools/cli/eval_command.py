"""`actorium eval`: what a model gets right. One runner for all kinds of evaluation, which are data;
multiple choice is in `eval_choices`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.params import SamplingParams
from actorium.tools.cli import eval_choices
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.cli.eval_model import (
    EvalModelOptions,
    EvalScoreOptions,
    Page,
    Work,
    nobody_named,
    on_model,
    progress,
    setting_of,
    with_model,
    write_reports,
)
from actorium.tools.cli.flags import check_least
from actorium.tools.evaluation import demo_scores
from actorium.tools.evaluation import needle_test as needle
from actorium.tools.evaluation import perplexity as text_test
from actorium.tools.evaluation import picture_scores as pictures
from actorium.tools.evaluation.choice_scores import choice_table
from actorium.tools.evaluation.rated_model import RatedModel
from actorium.tools.evaluation.report_pages import choice_page
from actorium.tools.pictures import PICTURE_MODEL
from actorium.tools.pictures.picture_questions import COUNT, held_out

# --- needles --------------------------------------------------------------------------------------

NEEDLE = """A needle in a haystack: a sentence with a number at each depth of texts of each length,
and a question after it. Exit code 1 if --min-score is not reached, or a prompt could not be
answered."""


class EvalNeedleOptions(EvalScoreOptions, frozen=True, kw_only=True):
    """The grid, whom to ask, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "parallel": EvalModelOptions.ALIASES["parallel"]}
    LEAST: ClassVar[dict[str, int]] = {**EvalModelOptions.LEAST, "lengths": 1, "trials": 1}

    lengths: list[int] = []
    """Tokens of the prompts, about. Default: 256 512 1024; of pairs 100 300 500."""
    depths: list[float] = []
    """Where the sentence is: 0 = at the beginning, 1 = at the end. Default: 0 0.25 0.5 0.75 1."""
    trials: int = 3
    """Prompts for each depth and length."""
    style: str | None = None
    """text: filler text to go on from | chat: the same as a conversation | pairs: the demo model's
    own task, up to some 530 tokens. Default: pairs for the demo model, else text."""


def _needle(parsed: Parsed[EvalNeedleOptions], _kind: str) -> tuple[Parsed[Any], Work]:
    options = parsed.options
    style = options.style or ("pairs" if nobody_named(parsed) else "text")
    if style not in needle.CASES:
        raise BadConfig(f"--style: must be {', '.join(needle.CASES)}, got {style!r}", "style")
    lengths = options.lengths or ([100, 300, 500] if style == "pairs" else [256, 512, 1024])
    depths = options.depths or [0.0, 0.25, 0.5, 0.75, 1.0]
    if not all(0 <= depth <= 1 for depth in depths):
        raise BadConfig("--depths: must be between 0 and 1", "depths")

    async def work(model: RatedModel, setting: dict[str, Any]) -> dict[str, Any]:
        results, seconds = await needle.run_needle(
            model, style, lengths, depths, options.trials, options.seed, options.parallel,
            progress(len(lengths) * len(depths) * options.trials))
        return needle.needle_object(results, {**setting, "style": style,
                                              "trials": options.trials}, seconds)

    return parsed, work


# --- perplexity -----------------------------------------------------------------------------------

PERPLEXITY = """How well a model predicts a text: perplexity of its tokens, and bits per byte. A
server at --base-url needs /tokenize, and /v1/completions with echo and logprobs (vLLM and this
engine have both). Exit code 1 above --max-perplexity."""


class EvalPerplexityOptions(EvalModelOptions, frozen=True, kw_only=True):
    """The text, whom to ask, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "parallel": EvalModelOptions.ALIASES["parallel"], "window": ("ctx-size",)}
    LEAST: ClassVar[dict[str, int]] = {**EvalModelOptions.LEAST, "window": 2, "max_tokens": 2}

    data: str | None = None
    """A file of text, in UTF-8."""
    window: int = 512
    """Tokens that are read at once."""
    stride: int | None = None
    """New tokens of each window. Default: half a window."""
    max_tokens: int | None = None
    """Read so many tokens of the file; default: all."""
    max_perplexity: float | None = None
    """What it may be at the most."""

    def reached(self, result: Mapping[str, Any]) -> bool:
        return self.max_perplexity is None or result["perplexity"] <= self.max_perplexity


def _perplexity(parsed: Parsed[EvalPerplexityOptions], _kind: str) -> tuple[Parsed[Any], Work]:
    options = parsed.options
    stride = options.window // 2 if options.stride is None else options.stride
    if not 1 <= stride < options.window:
        raise BadConfig(f"--stride: must be between 1 and {options.window - 1}, got {stride}",
                        "stride")
    text = _text(options.data)

    async def work(model: RatedModel, setting: dict[str, Any]) -> dict[str, Any]:
        found = await text_test.run_perplexity(model, text, options.window, stride,
                                               options.max_tokens, options.parallel,
                                               progress(len(text)))
        return {**setting, "data": options.data, "window": options.window, "stride": stride,
                **found}

    return parsed, work


def _text(file: str | None) -> str:
    """Raises `BadConfig`."""
    if file is None:
        raise BadConfig("--data: a file of text is needed", "data")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"--data: cannot read {file}: {error.strerror}", "data") from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"--data: {file} is not UTF-8: {error.reason}", "data") from None
    if len(text.split()) < 2:
        raise BadConfig(f"--data: {file} holds no text", "data")
    return text


# --- pictures -------------------------------------------------------------------------------------

PICTURES = """Small drawn pictures with questions after colours, counts and places, each with an
answer of one word. Patches in a wrong order, a wrong axis of rope, exchanged channels, a wrong
normalisation, pictures in a wrong order or rows in wrong places cost many answers. Exit code 1 if
--min-score is not reached, or a question could not be asked."""


class EvalPicturesOptions(EvalScoreOptions, frozen=True, kw_only=True):
    """How many to ask, whom, and where the report goes."""

    LEAST: ClassVar[dict[str, int]] = {**EvalModelOptions.LEAST, "count": 1}

    count: int = COUNT
    """Pictures (or pairs of them) with a question each; the first ones are the same whatever the
    count."""


def _pictures(parsed: Parsed[EvalPicturesOptions], _kind: str) -> tuple[Parsed[Any], Work]:
    options = parsed.options
    items = held_out(options.count, options.seed)

    async def work(model: RatedModel, setting: dict[str, Any]) -> dict[str, Any]:
        results, seconds = await pictures.ask_pictures(model, items, options.parallel,
                                                       progress(len(items)))
        return pictures.picture_object(results, setting, seconds)

    return (with_model(parsed, str(PICTURE_MODEL)) if nobody_named(parsed) else parsed), work


# --- the runner -----------------------------------------------------------------------------------

class Evaluation(NamedTuple):
    """A kind of evaluation of any model."""

    about: str
    options: type[EvalModelOptions]
    begin: Callable[[Any, str], tuple[Parsed[Any], Work]]
    """From what was parsed and the kind, to what is asked of the model. Raises `BadConfig`."""
    table: Callable[[Any], str]
    page: Page


_CHOICES = (eval_choices.ABOUT, eval_choices.EvalChoicesOptions, eval_choices.begin, choice_table,
            choice_page)
EVALUATIONS = {
    "mmlu": Evaluation(*_CHOICES),
    "questions": Evaluation(*_CHOICES),
    "needle": Evaluation(NEEDLE, EvalNeedleOptions, _needle, needle.needle_table,
                         needle.needle_page),
    "perplexity": Evaluation(PERPLEXITY, EvalPerplexityOptions, _perplexity,
                             text_test.perplexity_table, text_test.perplexity_page),
    "pictures": Evaluation(PICTURES, EvalPicturesOptions, _pictures, pictures.picture_table,
                           pictures.picture_page),
}
KINDS = {
    "mmlu": "[MODEL] --data DIR: MMLU, or any multiple-choice questions",
    "questions": "[MODEL]: the 400 questions that come with actorium, for small models",
    "needle": "[MODEL]: finds a sentence in a long text, by depth and length",
    "perplexity": "[MODEL] --data FILE: how well it predicts a text",
    "demo": "[MODEL]: exact match on the demo model's tasks",
    "pictures": "[MODEL]: questions about small drawn pictures",
}


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    kind = argv[0] if argv else ""
    if kind == "demo":
        return _demo(argv[1:])
    if kind in EVALUATIONS:
        return _evaluate(kind, EVALUATIONS[kind], argv[1:])
    if {"-h", "--help"} & set(argv):
        print("\n".join(f"actorium eval {name} {about}" for name, about in KINDS.items()))
        return 0
    raise BadConfig(f"eval: which evaluation? {', '.join(KINDS)}", "eval")


def _evaluate(kind: str, own: Evaluation, argv: list[str]) -> int:
    parsed = parse(f"actorium eval {kind} [MODEL]", argv, own.options, own.about,
                   checks=[check_machine])
    options = parsed.options
    options.check()
    parsed, work = own.begin(parsed, kind)
    result = on_model(parsed, lambda model: work(model, setting_of(parsed, kind, model)))
    print(own.table(result))
    write_reports(options, result, own.page)
    return 0 if options.reached(result) else 1


class EvalDemoOptions(Struct, frozen=True, kw_only=True):
    """What to ask."""

    count: int = 50
    """Items of each task."""
    max_tokens: int = 256
    """Tokens of an answer, at the most."""
    temperature: float = 0.0
    """0 = greedy."""
    least: float = 0.0
    """Share (0..1) of right answers to reach."""
    json: bool = False
    """Print an object instead of a table."""


def _demo(argv: list[str]) -> int:
    """Held-out items of the demo tasks, through an engine of its own."""
    parsed = parse("actorium eval demo [MODEL]", argv, EvalDemoOptions, "Score held-out items of "
                   "the demo tasks by exact match, through the engine. Exit code 1 when --least is "
                   "not reached.", checks=[check_machine])
    options = parsed.options
    check_least(options, {"count": 1})
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        params.check()
    except ValueError as error:
        name, _, what = str(error).partition(": ")
        raise BadConfig(f"{parsed.written.get(name, name)}: {what}", name) from None
    with own_engine(for_batches(parsed.config)) as engine:
        result = demo_scores.evaluate(engine.client, options.count, params)
    print(json.dumps(demo_scores.as_dict(result)) if options.json
          else demo_scores.score_table(result))
    return 0 if result.share >= options.least else 1
