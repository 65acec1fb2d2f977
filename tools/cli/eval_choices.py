"""`actorium eval mmlu` and `actorium eval questions`: multiple-choice questions."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from actorium.actors.errors import BadConfig
from actorium.tools.cli.command_line import Parsed
from actorium.tools.cli.eval_model import (
    EvalModelOptions,
    EvalScoreOptions,
    Work,
    nobody_named,
    progress,
    with_model,
)
from actorium.tools.evaluation import questions as own_questions
from actorium.tools.evaluation.choice_run import ChoiceMethod, QuestionAsker, side_by_side
from actorium.tools.evaluation.choice_scores import ChoiceResult, result_object
from actorium.tools.evaluation.multiple_choice import (
    SPLITS,
    ChoiceQuestion,
    QuestionSet,
    drawn,
    read_lines,
    read_mmlu,
)
from actorium.tools.evaluation.rated_model import RatedModel

ABOUT = """Multiple-choice questions: scores by category and overall, with standard errors. Exit
code 1 if --min-score is not reached, or a question could not be asked. mmlu reads --data: MMLU's
own folders (dev/, val/, test/ with SUBJECT_test.csv), or JSON lines. questions has 400 of its own
that a small model can answer (the default model is smollm2, the default method cloze)."""
METHODS = tuple(method.value for method in ChoiceMethod)
OWN_QUESTIONS = Path(own_questions.__path__[0]) / "questions.jsonl"
OWN_MODEL = "smollm2"
"""Who is asked the questions that come with actorium, unless told otherwise."""


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


def begin(parsed: Parsed[EvalChoicesOptions], kind: str) -> tuple[Parsed[Any], Work]:
    """What is asked. Raises `BadConfig`."""
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
