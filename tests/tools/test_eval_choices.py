"""Multiple-choice questions: their files, prompts, scores, and those that come with actorium."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from actorium.actors.errors import BadConfig
from actorium.tools.cli.eval_command import OWN_QUESTIONS
from actorium.tools.evaluation.choice_scores import (
    ChoiceResult,
    Share,
    asking_messages,
    choice_table,
    cloze_prompt,
    letters_prompt,
    likeliest,
    parsed_letter,
    result_object,
)
from actorium.tools.evaluation.multiple_choice import (
    CATEGORIES,
    ChoiceQuestion,
    drawn,
    read_lines,
    read_mmlu,
)
from actorium.tools.evaluation.report_pages import choice_page

ONE = ChoiceQuestion(id="a/1", question="What is 1 + 1?", choices=("1", "2", "3", "4"), answer=1,
                     subject="abstract_algebra", category="STEM")


def mmlu_folder(root: Path) -> Path:
    for split, rows in (("test", ['"Two, or ""2""?",1,2,3,4,B', "Line\u2014dash,a,b,c,d,D"]),
                        ("dev", [f"Example {i},w,x,y,z,C" for i in range(5)])):
        (root / split).mkdir(parents=True)
        for subject in ("virology", "astronomy"):
            (root / split / f"{subject}_{split}.csv").write_text("\n".join(rows) + "\n")
    return root


# --- files ----------------------------------------------------------------------------------------

def test_mmlus_own_layout_is_read(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "packed"):
        mmlu_folder(root if root == tmp_path else root / "data")
        found = read_mmlu(root)
        assert [(one.subject, one.category, one.letter) for one in found.questions] == [
            ("astronomy", "STEM", "B"), ("astronomy", "STEM", "D"),
            ("virology", "other", "B"), ("virology", "other", "D")]
        assert found.questions[0].question == 'Two, or "2"?'
        assert found.questions[1].question == "Line\u2014dash"
        assert [one.question for one in found.shots["virology"]][:2] == ["Example 0", "Example 1"]


@pytest.mark.parametrize(("row", "message"), [
    ("q,a,b,c,A", "row 1: 6 columns are needed, got 5"),
    ("q,a,b,c,d,E", "row 1: answer: must be one of A, B, C, D, got 'E'")])
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    (folder / "virology_test.csv").write_text(row)
    with pytest.raises(BadConfig, match=message):
        read_mmlu(tmp_path)
    with pytest.raises(BadConfig, match="has no val/SUBJECT_val.csv"):
        read_mmlu(tmp_path, "val")


def test_json_lines_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "q", "choices": ["a", "b", "c"], "answer": 2}\n\n'
                    '{"question": "r", "choices": ["a", "b"], "answer": "b", "subject": "s"}\n')
    first, second = read_lines(file)
    assert (first.id, first.letter, first.letters) == ("own/1", "C", "ABC")
    assert (second.id, second.letter, second.category) == ("own/3", "B", "s")
    for line, message in (('{"question": "q", "choices": ["a", "b"], "answer": "C"}', "of A, B"),
                          ('{"question": "q", "choices": ["a"], "answer": 0}', "choices: 2 to 10"),
                          ('{"choices": ["a", "b"], "answer": 0}', "question, choices and answer"),
                          ("{", "line 1: question, choices")):
        file.write_text(line)
        with pytest.raises(BadConfig, match=message):
            read_lines(file)


def test_questions_are_drawn_by_seed() -> None:
    asked = read_lines(OWN_QUESTIONS)
    some = drawn(asked, 20, 3)
    assert len({one.id for one in some}) == 20 and some == drawn(asked, 20, 3)
    assert some != drawn(asked, 20, 4)
    assert {one.category for one in drawn(asked, None, 0, ["reading", "science"])} == {
        "reading", "knowledge"}


def test_the_subjects_are_57_in_four_groups() -> None:
    assert Counter(CATEGORIES.values()) == {"STEM": 18, "humanities": 13, "social sciences": 12,
                                            "other": 14}


# --- prompts and answers --------------------------------------------------------------------------

def test_prompts() -> None:
    assert letters_prompt(ONE, [ONE]) == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "What is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
        "What is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:")
    assert cloze_prompt(ONE, [ONE]) == ("Question: What is 1 + 1?\nAnswer: 2\n\n"
                                        "Question: What is 1 + 1?\nAnswer:")
    read = ChoiceQuestion(id="r", question="q?", choices=("a", "b"), answer=0, context="Read this.",
                          stem="It is")
    assert cloze_prompt(read) == "Read this.\nIt is"
    turns = asking_messages(ONE, [ONE])
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"] == "Answer: B" and "\nD) 4" in turns[2]["content"]


@pytest.mark.parametrize(("text", "letter"), [
    ("Answer: B", "B"), ("It is 2, so the answer is **(C)**.", "C"), ("B", "B"), ("B. 2", "B"),
    ("(D)", "D"), ("Answer: A is wrong.\nAnswer: D", "D"), ("answer: c", "C"),
    ("Because two is even.", None), ("Answer: none of them", None), ("Answer: E", None),
    ("", None), ("Answer: $B$", "B")])
def test_the_letter_of_an_answer_in_words(text: str, letter: str | None) -> None:
    assert parsed_letter(text, "ABCD") == letter


def test_the_likeliest_option() -> None:
    assert likeliest([-3.0, -1.0, None, -1.0]) == 1  # the first of equals
    assert likeliest([None, -9.0]) == 1
    assert likeliest([None, None]) is None
    assert likeliest([-1.0, math.nan]) is None


# --- scores ---------------------------------------------------------------------------------------

def test_shares_and_their_errors() -> None:
    share = Share(8, 64)  # what source logs of a broken backend show: 0.125 of 64
    assert share.score == 0.125
    assert share.standard_error == pytest.approx(math.sqrt(0.125 * 0.875 / 64))
    low, high = share.interval()
    assert (low, high) == pytest.approx((0.0647, 0.2275), abs=1e-3)
    assert Share(0, 0).score == 0 and Share(0, 10).interval()[1] == pytest.approx(0.2775, abs=1e-3)


def test_the_report_counts_what_was_not_answered() -> None:
    other = ChoiceQuestion(id="v/1", question="<b>?", choices=("x", "y"), answer=0,
                           subject="virology", category="other")
    results = [ChoiceResult(question=ONE, chosen=1, values=[-2.0, -1.0, None, -math.inf]),
               ChoiceResult(question=ONE, chosen=0), ChoiceResult(question=other, text="<i>"),
               ChoiceResult(question=other, error="the server broke")]
    found = result_object(results, {"task": "mmlu", "model": "m"}, 1.5)
    assert (found["score"], found["unanswered"], found["errors"]) == (0.25, 1, 1)
    assert found["chance"] == pytest.approx(0.375)
    assert found["categories"]["STEM"] == {"score": 0.5, "standard_error": 0.35355, "right": 1,
                                           "count": 2}
    assert found["items"][0]["logprobs"] == [-2.0, -1.0, None, None]
    table = choice_table(found)
    assert "1 unanswered, 1 errors" in table
    assert re.search(r"STEM +1 +2 +50\.0%  35\.4%", table)
    page = choice_page(found)
    assert "&lt;b&gt;?" in page and "<b>?" not in page and "<svg" in page
    assert not re.search(r"(?:src|href|url)\s*[=(]|https?://", page)  # nothing from elsewhere


# --- the questions that come with actorium --------------------------------------------------------

def test_questions_are_well_formed_and_balanced() -> None:
    asked = read_lines(OWN_QUESTIONS)
    assert Counter(one.category for one in asked) == {"knowledge": 250, "arithmetic": 75,
                                                      "reading": 75}
    assert set(Counter(one.answer for one in asked).values()) == {100}
    assert len({(one.context, one.question) for one in asked}) == len(asked)
    for one in asked:
        assert len(set(one.choices)) == 4 and all(map(str.strip, one.choices)), one.id
        assert one.source, one.id


def test_computed_answers_are_right() -> None:
    for one in read_lines(OWN_QUESTIONS):
        right = one.choices[one.answer]
        if one.category == "arithmetic":
            left, sign, other = re.findall(r"(\d+) (\+|-|times) (\d+)", one.source)[0]
            a, b = int(left), int(other)
            assert int(right) == {"+": a + b, "-": a - b, "times": a * b}[sign], one.id
            if one.subject != "sequences":
                assert one.question == f"What is {left} {sign} {other}?"
        if one.subject == "sequences":
            shown = [int(x) for x in re.findall(r"\d+", one.question)]
            assert len({b - a for a, b in zip(shown, shown[1:], strict=False)}) == 1
            assert int(right) == 2 * shown[-1] - shown[-2], one.id
        if one.category == "reading":
            sentences = one.context.removesuffix(".").split(". ")
            place = int(one.source.rpartition(" ")[2]) - 1
            assert right in sentences[place], one.id
            key = one.stem.rpartition(". ")[2].split()
            assert sentences[place].split()[:len(key)] == key, one.id
            assert not any(wrong in sentences[place] for i, wrong in enumerate(one.choices)
                           if i != one.answer), one.id
