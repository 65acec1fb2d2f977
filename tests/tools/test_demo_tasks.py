"""The generated tasks: determinism, the held-out split, scoring."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from actorium.tools.demo.demo_stories import is_story
from actorium.tools.demo.demo_tasks import (
    TASKS,
    TaskItem,
    generate,
    held_out,
    is_held_out,
    score,
    small_talk,
    tell,
)


def test_equal_seeds_give_equal_items() -> None:
    assert generate(7, 200) == generate(7, 200)
    assert generate(7, 200) != generate(8, 200)


def test_a_longer_draw_starts_like_a_shorter_one() -> None:
    assert generate(3, 50) == generate(3, 80)[:50]
    assert held_out("sort", 20) == held_out("sort", 40)[:20]


def test_generate_keeps_to_the_tasks_asked_for() -> None:
    assert {item.task for item in generate(1, 60, ["add", "json"])} == {"add", "json"}
    assert {item.task for item in generate(1, 300)} == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_held_out_items_are_never_generated(task: str) -> None:
    held = held_out(task, 60)
    prompts = {item.prompt for item in held}
    assert len(prompts) == 60
    assert all(item.task == task and is_held_out(item) for item in held)
    train = generate(5, 300, [task])
    assert not any(is_held_out(item) for item in train)
    assert prompts.isdisjoint(item.prompt for item in train)


@pytest.mark.slow
def test_asking_for_too_many_held_out_items_ends() -> None:
    assert len(held_out("story", 300)) == 300
    with pytest.raises(ValueError, match="fewer than"):
        held_out("story", 600)


def test_the_split_ignores_the_wording() -> None:
    first = next(item for item in held_out("add", 10) if "What is" in item.prompt)
    a, b = first.prompt.removeprefix("What is ").removesuffix("?").split(" + ")
    assert is_held_out(TaskItem("add", f"{b} + {a} =", first.answer))
    assert is_held_out(TaskItem("add", f"Add {a} and {b}.", first.answer))
    pairs = held_out("recall", 1)[0]
    head = pairs.prompt.rsplit("Find", 1)[0]
    key = head.removeprefix("Remember: ").split()[0]
    assert is_held_out(TaskItem("recall", f"{head}Find {key}.", "?"))


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_score_and_wrong_ones_do_not(task: str) -> None:
    for item in held_out(task, 20) + generate(2, 20, [task]):
        assert score(item, item.answer)
        assert score(item, f"  {item.answer}\n")
        assert not score(item, "")
        assert not score(item, item.answer + " 1")
        assert not score(item, item.answer[:-1])


def test_answers_are_right() -> None:
    for item in generate(11, 400):
        content = item.prompt.split(": ", 1)[-1]
        if item.task == "copy":
            assert item.answer == content
        elif item.task == "reverse":
            assert item.answer.split() == content.split()[::-1]
        elif item.task == "sort":
            key = int if "numbers" in item.prompt else str
            assert item.answer.split() == sorted(content.split(), key=key)
        elif item.task == "json":
            listed = dict(part.split("=") for part in content.split(", "))
            assert {k: str(v) for k, v in json.loads(item.answer).items()} == listed
        elif item.task == "recall":
            listed_pairs, question = content.split(". Find ")
            table = dict(part.split() for part in listed_pairs.split(", "))
            key = question.rstrip(".")
            assert item.answer == f"Found: {key} {table[key]}"


def test_every_kind_of_sum() -> None:
    for item in generate(4, 100, ["add"]):
        numbers = [int(t) for t in item.prompt.strip("?.").split() if t.isdigit()]
        assert sum(numbers) == int(item.answer)


def test_stories_are_recognised() -> None:
    rng = random.Random(0)
    for _ in range(30):
        text = tell(rng, "owl", "shy", "barn")
        assert is_story(text, "owl", "shy", "barn")
        assert not is_story(text, "fox")
        assert not is_story(text.replace("barn", "garden"), "owl", "shy", "barn")
        assert not is_story(text.removesuffix("The end."), "owl")
        assert " a owl" not in text
        name = text.split(" named ")[1].split()[0]
        assert not is_story(text.replace(name, "Bob"))


def test_small_talk_has_one_answer_for_each_question() -> None:
    questions = [question for question, _ in small_talk()]
    assert len(questions) == len(set(questions))
    assert {"hello", "Who are you?"} <= set(questions)


def test_the_tasks_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, actorium.tools.demo.demo_tasks\n"
        "assert not {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
