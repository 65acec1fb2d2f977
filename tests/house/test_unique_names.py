"""A name stands for one thing: of classes, and of modules, in the packages that are shipped."""

from __future__ import annotations

from helpers_code_facts import class_names, module_names


def test_no_class_name_stands_in_two_files() -> None:
    assert class_names() == {}


def test_no_module_name_stands_in_two_rooms() -> None:
    assert module_names() == {}
