"""Multiple-choice questions, and the files that they come from.

MMLU's own layout is read as its authors pack it (Hendrycks et al., "Measuring massive multitask
language understanding", 2021): folders dev/, val/ and test/ with a `SUBJECT_SPLIT.csv` for each
subject, rows of question, four options and the right letter, no header. JSON lines hold one object
each: `question`, `choices`, `answer` (number from 0, or letter), and if wanted `subject`,
`category`, `context`, `stem`, `id`, `source`.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadConfig

LETTERS = "ABCDEFGHIJ"
COLUMNS = 6
"""Column names of MMLU's files."""
SPLITS = ("test", "val", "dev")


class ChoiceQuestion(Struct, frozen=True, kw_only=True):
    """One question, of whose options exactly one is right."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    """Number of the right option, from 0."""
    subject: str = ""
    category: str = ""
    """Group of subjects."""
    context: str = ""
    """What is to be read before."""
    stem: str = ""
    """For cloze: the beginning of a sentence that the right option ends, instead of the question.
    """
    source: str = ""
    """Why the answer is right."""

    @property
    def letter(self) -> str:
        return LETTERS[self.answer]

    @property
    def letters(self) -> str:
        return LETTERS[:len(self.choices)]


class QuestionSet(Struct, frozen=True):
    """What is asked, and examples with answers that may be shown before."""

    questions: list[ChoiceQuestion]
    shots: dict[str, list[ChoiceQuestion]]
    """Example questions by subject."""


def read_mmlu(folder: Path, split: str = "test") -> QuestionSet:
    """All subjects of a folder in MMLU's layout, with those of dev/ as examples. Raises `BadConfig`
    naming the file and the row."""
    inner = folder / "data"  # as the archive is packed
    root = inner if not (folder / split).is_dir() and (inner / split).is_dir() else folder
    files = sorted((root / split).glob(f"*_{split}.csv"))
    if not files:
        raise BadConfig(f"--data: {folder} has no {split}/SUBJECT_{split}.csv", "data")
    asked = [one for file in files for one in _read_csv(file, split)]
    shots = {subject: _read_csv(file, "dev") for file in sorted((root / "dev").glob("*_dev.csv"))
             for subject in [file.stem.removesuffix("_dev")]}
    return QuestionSet(asked, shots)


def _read_csv(file: Path, split: str) -> list[ChoiceQuestion]:
    subject = file.stem.removesuffix(f"_{split}")
    found = []
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            for number, row in enumerate(csv.reader(lines), 1):
                if not row:
                    continue
                place = f"--data: {file}, row {number}"
                if len(row) != COLUMNS:
                    raise BadConfig(f"{place}: {COLUMNS} columns are needed, got {len(row)}",
                                    "data")
                found.append(ChoiceQuestion(
                    id=f"{subject}/{split}/{number}", question=row[0], choices=tuple(row[1:5]),
                    answer=_answer(row[5], 4, place), subject=subject,
                    category=category_of(subject)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadConfig(f"--data: cannot read {file}: {error}", "data") from None
    return found


def read_lines(file: Path, flag: str = "--data") -> list[ChoiceQuestion]:
    """The questions of a file of JSON lines. Raises `BadConfig` naming the line and the field."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise BadConfig(f"{flag}: cannot read {file}: {error.strerror}", "data") from None
    found = [question_of(line, f"{flag}: {file}, line {number}", f"{file.stem}/{number}")
             for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadConfig(f"{flag}: {file} holds no question", "data")
    return found


def question_of(line: bytes, place: str, number: str) -> ChoiceQuestion:
    """One line. place: how errors begin. number: the name of a question that has none."""
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
        choices = msgspec.convert(row.get("choices"), tuple[str, ...])
        subject = str(row.get("subject") or "")
        return ChoiceQuestion(
            id=str(row.get("id") or number), question=msgspec.convert(row.get("question"), str),
            choices=choices, answer=_answer(row.get("answer"), len(choices), place),
            subject=subject, category=str(row.get("category") or category_of(subject)),
            context=str(row.get("context") or ""), stem=str(row.get("stem") or ""),
            source=str(row.get("source") or ""))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadConfig(f"{place}: question, choices and answer are needed: {error}",
                        "data") from None


def _answer(value: Any, count: int, place: str) -> int:
    if not 2 <= count <= len(LETTERS):
        raise BadConfig(f"{place}: choices: 2 to {len(LETTERS)}, got {count}", "data")
    text = str(value).strip().upper()
    letters = LETTERS[:count]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count:
        return value
    if len(text) == 1 and text in letters:
        return letters.index(text)
    raise BadConfig(f"{place}: answer: must be one of {', '.join(letters)}, got "
                    f"{str(value)[:40]!r}", "data")


def drawn(questions: Sequence[ChoiceQuestion], count: int | None, seed: int,
          subjects: Iterable[str] = ()) -> list[ChoiceQuestion]:
    """`count` of them (None = all), in the order of the files; the same for the same seed.
    subjects: only those, if any. Raises `BadConfig`."""
    names = set(subjects)
    known = {one.subject for one in questions} | {one.category for one in questions}
    if unknown := sorted(names - known):
        raise BadConfig(f"--subjects: {unknown[0]!r} is none of {', '.join(sorted(known)[:80])}",
                        "subjects")
    found = [one for one in questions if not names or {one.subject, one.category} & names]
    if count is None or count >= len(found):
        return found
    chosen = sorted(random.Random(seed).sample(range(len(found)), count))
    return [found[i] for i in chosen]


# --- MMLU's subjects ------------------------------------------------------------------------------

_GROUPS = {
    "STEM": """abstract_algebra astronomy college_biology college_chemistry college_computer_science
        college_mathematics college_physics computer_security conceptual_physics
        electrical_engineering elementary_mathematics high_school_biology high_school_chemistry
        high_school_computer_science high_school_mathematics high_school_physics
        high_school_statistics machine_learning""",
    "humanities": """formal_logic high_school_european_history high_school_us_history
        high_school_world_history international_law jurisprudence logical_fallacies moral_disputes
        moral_scenarios philosophy prehistory professional_law world_religions""",
    "social sciences": """econometrics high_school_geography high_school_government_and_politics
        high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality
        professional_psychology public_relations security_studies sociology us_foreign_policy""",
    "other": """anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging
        management marketing medical_genetics miscellaneous nutrition professional_accounting
        professional_medicine virology""",
}
CATEGORIES = {subject: group for group, subjects in _GROUPS.items()
              for subject in subjects.split()}
"""Subject -> its group of four, as in `categories.py` of github.com/hendrycks/test."""


def category_of(subject: str) -> str:
    """The group of a subject; of one that is not MMLU's, the subject."""
    return CATEGORIES.get(subject, subject)
