"""`actorium eval`: what a model gets right. One runner for all kinds of evaluation, which are
data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.params import SamplingParams
from actorium.tools import evaluation
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
from actorium.tools.evaluation.choice_run import ChoiceMethod, QuestionAsker, side_by_side
from actorium.tools.evaluation.choice_scores import ChoiceResult, choice_table, result_object
from actorium.tools.evaluation.multiple_choice import (
    SPLITS,
    ChoiceQuestion,
    QuestionSet,
    drawn,
    read_lines,
    read_mmlu,
)
from actorium.tools.evaluation.rated_model import RatedModel
from actorium.tools.evaluation.report_pages import choice_page
from actorium.tools.pictures import PICTURE_MODEL
from actorium.tools.pictures.picture_questions import COUNT, held_out

CHOICES = """Multiple-choice questions: scores by category and overall, with standard errors. Exit
code 1 if --min-score is not reached, or a question could not be asked. mmlu reads --data: MMLU's
own folders (dev/, val/, test/ with SUBJECT_test.csv), or JSON lines. questions has 400 of its own
that a small model can answer (the default model is smollm2, the default method cloze)."""
METHODS = tuple(method.value for method in ChoiceMethod)
OWN_QUESTIONS = Path(evaluation.__path__[0]) / "questions.jsonl"
OWN_MODEL = "smollm2"
"""The default model for the packaged questions."""


class EvalChoicesOptions(EvalScoreOptions, frozen=True, kw_only=True):
    """What to ask, whom, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        **EvalModelOptions.ALIASES, "shots": ("num-shots", "num-fewshot", "ntrain", "nshots"),
        "method": ("eval-method",)}
    LEAST: ClassVar[dict[str, int]] = {**EvalModelOptions.LEAST, "count": 1, "shots": 0,
                                       "max_tokens": 1}

    data: str | None = None
    """MMLU's folder, or a file of JSON lines: question, choices, answer (letter or number from 0),
    and if wanted subject, category, context."""
    shots_data: str | None = None
    """JSON lines of the examples for --shots; MMLU has its own."""
    split: str = "test"
    """test | val | dev: which of MMLU's folders."""
    subjects: list[str] = []
    """Subjects or categories to ask about; default: all."""
    count: int | None = None
    """So many questions, drawn with --seed; default: all."""
    shots: int | None = None
    """Examples with answers before each question. Default: 5 of MMLU's by logits and cloze, none of
    the others."""
    method: str | None = None
    """logits: the likeliest letter as the next token | generate: the letter in a generated answer |
    cloze: the option whose own words are likeliest, for models of few parameters. Default: logits,
    for actorium's own questions cloze."""
    chat: bool = False
    """By logits: as a conversation, for servers that know no other."""
    per_char: bool = False
    """By cloze: compare log-probabilities per character."""
    max_tokens: int = 512
    """By generate: tokens of an answer, at the most."""


def _choices(parsed: Parsed[EvalChoicesOptions], kind: str) -> tuple[Parsed[Any], Work]:
    options, own = parsed.options, kind == "questions"
    if own and "data" in parsed.written:
        raise BadConfig("--data: is for `actorium eval mmlu`", "data")
    if own and nobody_named(parsed):
        parsed = with_model(parsed, OWN_MODEL)
    if not own and options.data is None:
        raise BadConfig("--data: MMLU's folder or a file of JSON lines is needed", "data")
    wanted = options.method or ("cloze" if own else "logits")
    for name, value, known in (("method", wanted, METHODS), ("split", options.split, SPLITS)):
        if value not in known:
            raise BadConfig(f"--{name}: must be {', '.join(known)}, got {value!r}", name)
    asked, method = _questions(options, kind), ChoiceMethod(wanted)
    shots = _shots_wanted(options, asked, method)
    asker = QuestionAsker(method=method, chat=options.chat, per_char=options.per_char,
                          max_tokens=options.max_tokens)
    questions = drawn(asked.questions, options.count, options.seed, options.subjects)

    async def work(model: RatedModel, setting: dict[str, Any]) -> dict[str, Any]:
        async def ask(one: ChoiceQuestion) -> ChoiceResult:
            return await asker.ask(model, one, asked.shots.get(one.subject, [])[:shots])

        began = perf_counter()
        results = await side_by_side(questions, ask, options.parallel, progress(len(questions)))
        setting = {**setting, "method": method.value, "shots": shots, "data": options.data,
                   "split": None if own else options.split}
        return result_object(results, setting, perf_counter() - began)

    return parsed, work


def _questions(options: EvalChoicesOptions, kind: str) -> QuestionSet:
    if kind == "questions":
        return QuestionSet(read_lines(OWN_QUESTIONS), {})
    path = Path(options.data or "")
    if path.is_dir():
        return read_mmlu(path, options.split)
    given = options.shots_data
    shots: dict[str, list[ChoiceQuestion]] = {}
    for one in [] if given is None else read_lines(Path(given), "--shots-data"):
        shots.setdefault(one.subject, []).append(one)
    return QuestionSet(read_lines(path), shots)


def _shots_wanted(options: EvalChoicesOptions, asked: QuestionSet, method: ChoiceMethod) -> int:
    """Raises `BadConfig` where there are not so many."""
    wanted = options.shots
    if wanted is None:
        return 5 if asked.shots and method is not ChoiceMethod.GENERATE else 0
    if wanted and not asked.shots:
        raise BadConfig("--shots: no examples are there: --shots-data FILE", "shots")
    fewest = min((len(asked.shots.get(one.subject, [])) for one in asked.questions), default=0)
    if wanted > fewest:
        raise BadConfig(f"--shots: a subject has {fewest} examples, not {wanted}", "shots")
    return wanted


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
    about: str
    options: type[EvalModelOptions]
    begin: Callable[[Any, str], tuple[Parsed[Any], Work]]
    """From the parsed options and the kind to a run over the model. Raises `BadConfig`."""
    table: Callable[[Any], str]
    page: Page


MULTIPLE_CHOICE = Evaluation(CHOICES, EvalChoicesOptions, _choices, choice_table, choice_page)
EVALUATIONS = {
    "mmlu": MULTIPLE_CHOICE,
    "questions": MULTIPLE_CHOICE,
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
