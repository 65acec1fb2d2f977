"""What scenarios of benchmarks/ have in common: their options, their turns, their figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_benchmarks import BENCHMARKS, benchmark

harness = benchmark("harness")
run = benchmark("run")
SCENARIOS = harness.all_scenarios()
LIST = [1, 2]


def counted(name: str, counts: list[int] = LIST, share: float = 0.5, loud: bool = False,
            where: Path | None = None) -> Iterator[dict[str, Any]]:
    """Rows of two kinds."""
    for count in counts:
        yield {"name": name, "count": count, "share": share, "loud": loud, "where": where}
    if loud:
        raise SystemExit("too loud")


def passed_on(name: str, *more: str, rounds: int = 1) -> Iterator[dict[str, Any]]:
    yield {"name": name, "more": list(more), "rounds": rounds}


def asked(how: Any, words: str, file: Path) -> list[dict[str, Any]]:
    try:
        harness.run_scenario(how, "it", [*words.split(), "--json", str(file)])
    finally:
        found = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def test_what_a_scenario_takes_are_its_options(tmp_path: Path) -> None:
    (first, second) = asked(counted, "x", tmp_path / "a.json")
    assert first == {"name": "x", "count": 1, "share": 0.5, "loud": False, "where": None}
    assert second["count"] == 2
    (one,) = asked(counted, "x --counts 7 --share 2 --where y", tmp_path / "b.json")
    assert one == {"name": "x", "count": 7, "share": 2.0, "loud": False, "where": "y"}


def test_flags_of_another_command_are_passed_on(tmp_path: Path) -> None:
    (row,) = asked(passed_on, "x --rounds 2 --num-prompts 3 --stream", tmp_path / "a.json")
    assert row == {"name": "x", "more": ["--num-prompts", "3", "--stream"], "rounds": 2}


def test_an_unknown_flag_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked(counted, "x --cuonts 7", tmp_path / "a.json")
    assert "--cuonts" in capsys.readouterr().err


def test_a_scenario_that_fails_has_written_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.json"
    with pytest.raises(SystemExit, match="too loud"):
        asked(counted, "x --loud", file)
    found = json.loads(file.read_text())
    assert [row["count"] for row in found["rows"]] == [1, 2]
    assert found["options"][:2] == ["x", "--loud"] and found["machine"]["processor"]


def test_figures_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    asked(counted, f"x --where {tmp_path}/y", tmp_path / "a.json")
    found = (tmp_path / "a.json").read_text()
    assert json.loads(found)["options"] == ["x", "--where", "y", "--json", "a.json"]


def test_contenders_take_turns_and_another_goes_first_each_time() -> None:
    order: list[str] = []

    def call(name: str) -> int:
        order.append(name)
        return len(order)

    found = harness.take_turns({name: lambda name=name: call(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_turns_go_on_until_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(now))
    found = harness.take_turns({"a": lambda: 0, "b": lambda: 0}, 1, 4)
    assert len(found["a"]) == len(found["b"]) > 2


def test_ratios_are_of_neighbours() -> None:
    assert harness.ratios([1.0, 2.0], [3.0, 8.0]) == [3.0, 4.0, 1.5]
    assert harness.middle([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert harness.middle([1.0, 2.0, 3.0])["median"] == 2.0
    assert harness.p99([1.0] * 99 + [5.0]) == 5.0


def test_figures_are_short() -> None:
    assert harness.as_text({"what": "it", "n": 12345, "x": 0.123456, "y": 1234.5, "z": {"a": [1.5]}}
                        ) == "it  n 12,345  x 0.1235  y 1,234  z (a (1.5))"
    assert harness.markdown(["a", "b"], [[1, 2]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_list_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    told = capsys.readouterr().out
    assert len(SCENARIOS) >= 18 and all(f"\n{name} " in told for name in SCENARIOS)
    assert run.main(["no such"]) == 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_options_of_a_file_that_is_read_are_those_of_one_that_is_run(name: str) -> None:
    module = benchmark(f"scenarios.{name}")
    about, parts = SCENARIOS[name]
    assert about.endswith((".", ":")) and parts
    for part in parts:
        parser = harness.parser_of(getattr(module, part.name), name)
        taken = set(parser._option_string_actions) - {"-h", "--help"}
        assert set(part.flags) | {"--json"} == {
            flag for flag in taken if not flag.startswith("--no-")}, part.name
        assert part.about.endswith("."), part.name


def test_there_are_200_different_prompts() -> None:
    prompts = (BENCHMARKS / "quality_prompts.txt").read_text().splitlines()
    assert len(prompts) == len(set(prompts)) == 200 and all(prompts)
