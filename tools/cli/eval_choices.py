"""`actorium eval mmlu` and `actorium eval questions`: multiple-choice questions."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import msgspec

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.eval_model import (
    EvalModelOptions,
    on_model,
    progress,
    setting_of,
    write_reports,
)
from actorium.tools.evaluation import questions as own_questions
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

ABOUT = """Multiple-choice questions: scores by category and overall, with standard errors. Exit
code 1 if --min-score is not reached, or a question could not be asked. mmlu reads --data: MMLU's
own folders (dev/, val/, test/ with SUBJECT_test.csv), or JSON lines. questions has 400 of its own
that a small model can answer (the default model is smollm2, the default method cloze)."""
METHODS = tuple(method.value for method in ChoiceMethod)
OWN_QUESTIONS = Path(own_questions.__path__[0]) / "questions.jsonl"
OWN_MODEL = "smollm2"
"""Who is asked the questions that come with actorium, unless told otherwise."""


class EvalChoicesOptions(EvalModelOptions, frozen=True, kw_only=True):
    """What to ask, whom, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        **EvalModelOptions.ALIASES, "shots": ("num-shots", "num-fewshot", "ntrain", "nshots"),
        "method": ("eval-method",)}

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
    min_score: float = 0.0
    """Score (0..1) to reach."""


def run(kind: str, argv: list[str]) -> int:
    """Entry of the commands."""
    parsed = parse(f"actorium eval {kind} [MODEL]", argv, EvalChoicesOptions, ABOUT,
                   checks=[check_machine])
    options = parsed.options
    if kind == "questions":
        parsed = _for_own_questions(parsed)
        options = parsed.options
    _check(options, kind)
    asked = _questions(options, kind)
    method = ChoiceMethod(options.method or "logits")
    shots = _shots_wanted(options, asked, method)
    asker = QuestionAsker(method=method, chat=options.chat, per_char=options.per_char,
                  max_tokens=options.max_tokens)
    questions = drawn(asked.questions, options.count, options.seed, options.subjects)

    async def work(model: RatedModel) -> dict[str, Any]:
        async def ask(one: ChoiceQuestion) -> ChoiceResult:
            return await asker.ask(model, one, asked.shots.get(one.subject, [])[:shots])

        began = perf_counter()
        results = await side_by_side(questions, ask, options.parallel, progress(len(questions)))
        setting = {**setting_of(parsed, kind, model), "method": method.value, "shots": shots,
                   "data": options.data, "split": options.split if kind == "mmlu" else None}
        return result_object(results, setting, perf_counter() - began)

    result = on_model(parsed, work)
    print(choice_table(result))
    write_reports(options, result, choice_page)
    return 0 if result["score"] >= options.min_score and not result["errors"] else 1


def _for_own_questions(parsed: Parsed[EvalChoicesOptions]) -> Parsed[EvalChoicesOptions]:
    """With the defaults of `actorium eval questions`."""
    if "data" in parsed.written:
        raise BadConfig("--data: is for `actorium eval mmlu`", "data")
    config, options = parsed.config, parsed.options
    if not config.model.model and options.base_url is None and "name" not in parsed.written:
        config = msgspec.structs.replace(
            config, model=msgspec.structs.replace(config.model, model=OWN_MODEL))
    return parsed._replace(config=config, options=msgspec.structs.replace(
        options, method=options.method or ChoiceMethod.CLOZE.value))


def _check(options: EvalChoicesOptions, kind: str) -> None:
    options.check_common()
    if kind == "mmlu" and options.data is None:
        raise BadConfig("--data: MMLU's folder or a file of JSON lines is needed", "data")
    if options.method not in (None, *METHODS):
        raise BadConfig(f"--method: must be {', '.join(METHODS)}, got {options.method!r}", "method")
    if options.split not in SPLITS:
        raise BadConfig(f"--split: must be {', '.join(SPLITS)}, got {options.split!r}", "split")
    for name, least in (("count", 1), ("shots", 0), ("max_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise BadConfig(f"--{name.replace('_', '-')}: must be at least {least}, got {value}",
                            name)
    if not 0 <= options.min_score <= 1:
        raise BadConfig(f"--min-score: must be between 0 and 1, got {options.min_score}",
                        "min_score")


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
