"""What the ends of the dependencies' ranges are tried with."""

from __future__ import annotations

import pytest

from actorium.tools import dependencies


def test_every_name_has_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dependencies.files_of_tests()
    assert len(found) == len(set(found)) > len(dependencies.TESTS)
    monkeypatch.setattr(dependencies, "TESTS", ("cli", "no_such_thing"))
    with pytest.raises(LookupError, match="no_such_thing"):
        dependencies.files_of_tests()


def test_every_library_has_both_bounds() -> None:
    assert len(dependencies.pins("oldest")) == len(dependencies.LIBRARIES)
    assert all("==" in pin for pin in dependencies.pins("oldest"))
    assert all(">=" in pin and ",<" in pin for pin in dependencies.pins("newest"))


def test_an_extra_is_what_the_project_says() -> None:
    assert dependencies.extra("cluster")[0].startswith("ray>=")
    with pytest.raises(KeyError):
        dependencies.extra("no_such_extra")
