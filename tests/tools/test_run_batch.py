"""`actorium run-batch`: what it reads, writes and refuses, and that it goes on."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.gateway.batch import json_lines, line_caller
from actorium.actors.gateway.batch.batch_lines import BatchLine, LineContext, parse_line
from actorium.actors.gateway.batch.json_lines import ResultFile, in_order
from actorium.actors.gateway.batch.line_caller import LineAnswer
from actorium.tools.cli import main
from actorium.tools.cli.run_batch_command import BatchFiles, RunBatchOptions


def lines(count: int) -> bytes:
    return b"\n".join(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
                                  "body": {"prompt": "x" * i}}).encode() for i in range(count))


def run(source: bytes, out: Path, ask: Any) -> list[dict[str, Any]]:
    """The whole output after a run."""
    results = ResultFile(out)
    try:
        results.resume()
        files = BatchFiles(io.BytesIO(source), results, RunBatchOptions(
            input_file="in", output_file=str(out)))
        asyncio.run(files.run(ask, 4))
    finally:
        results.close()
    return [json.loads(line) for line in out.read_text().splitlines()]


class Model:
    """Answers with the prompt's length, the longer the sooner; ends at line `last`."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.asked = last, list[str]()

    async def __call__(self, line: BatchLine, context: LineContext) -> LineAnswer:
        if self.last is not None and line.number > self.last:
            raise EngineUnavailable("the engine has ended")
        self.asked.append(line.custom_id)
        size = len(json.loads(line.body)["prompt"])
        await asyncio.sleep(0.02 / (1 + size))
        return LineAnswer(200, "req", json.dumps({"size": size}).encode(), True)


def test_results_have_the_order_of_the_input(tmp_path: Path) -> None:
    found = run(lines(20), tmp_path / "out", Model())
    assert [one["custom_id"] for one in found] == [f"r{i}" for i in range(20)]
    assert [one["response"]["body"]["size"] for one in found] == list(range(20))
    assert set(found[0]) == {"id", "custom_id", "response", "error"}
    assert len({one["id"] for one in found}) == 20


@pytest.mark.parametrize("half", [b"", b'{"id": "batch_req', b"x" * 70_000])
def test_an_interrupted_run_goes_on_without_a_line_twice_or_lost(tmp_path: Path, half: bytes
                                                                 ) -> None:
    out, first, second = tmp_path / "out", Model(last=7), Model()
    with pytest.raises(EngineUnavailable):
        run(lines(20), out, first)
    written = out.read_bytes().count(b"\n")
    assert 0 < written <= 7
    with out.open("ab") as file:
        file.write(half)
    found = run(lines(20), out, second)
    assert [one["custom_id"] for one in found] == [f"r{i}" for i in range(20)]
    assert sorted(second.asked) == sorted(f"r{i}" for i in range(written, 20))
    third = Model()
    assert run(lines(20), out, third) == found and not third.asked


@pytest.mark.parametrize("content", [b"hello\n", b'{"id": "a", "custom_id": "r5"}\n',
                                     b'{"id": "a", "custom_id": "r0"}\n' * 30])
def test_the_output_of_another_input_is_not_continued(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(BadConfig, match="--output-file: .* not the answers"):
        run(lines(20), tmp_path / "out", Model())
    assert (tmp_path / "out").read_bytes() == content


def test_one_process_writes_an_output(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "out")
    with pytest.raises(BlockingIOError):
        ResultFile(tmp_path / "out")
    results.close()
    ResultFile(tmp_path / "out").close()


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20),
       st.data())
def test_a_results_file_keeps_whole_lines_however_it_was_cut(
        tmp_path_factory: pytest.TempPathFactory, written: list[bytes], draw: st.DataObject
        ) -> None:
    path = tmp_path_factory.mktemp("r") / "out"
    results = ResultFile(path)
    for line in written:
        results.append(line)
    results.close()
    data = path.read_bytes()
    assert data == b"".join(line + b"\n" for line in written)
    cut = draw.draw(st.integers(0, len(data)))
    path.write_bytes(data[:cut])
    again = ResultFile(path)
    again.resume()
    assert again.lines == data[:cut].count(b"\n")
    again.append(b"next")
    assert [*again.read()] == [*(line + b"\n" for line in written[:again.lines - 1]), b"next\n"]
    again.close()


def test_large_lines_are_not_all_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_HELD_BYTES", 100)
    running = most = 0

    async def work(size: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return size

    async def all_of(sizes: list[int]) -> list[int]:
        return [size async for size in in_order(sizes, work, 50, lambda size: size)]

    assert asyncio.run(all_of([40] * 12)) == [40] * 12 and most == 3
    most = 0
    assert asyncio.run(all_of([1] * 12 + [500])) == [1] * 12 + [500] and most == 13


def test_a_line_is_asked_again_only_where_the_answer_says_nothing_of_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_caller, "FIRST_PAUSE", 0.001)
    line, context = parse_line(1, lines(1)), LineContext("", 60.0, "k")
    for statuses, last in (([429, 503, 200], 200), ([400], 400), ([500], 500), ([429, 404], 404)):
        left = list(statuses)

        async def ask(_: BatchLine, given: LineContext, left: list[int] = left) -> LineAnswer:
            assert given.key == "k" and given.seconds <= 60.0
            return LineAnswer(left.pop(0), "", b"{}", True)

        found = json.loads(asyncio.run(line_caller.answered(line, context, "batch_x", ask)))
        assert (found["response"]["status_code"], left) == (last, [])


@pytest.mark.parametrize(("words", "message"), [
    ([], "--input-file: a file is needed"), (["-i", "x"], "--output-file: a file is needed"),
    (["-i", "https://a/b", "-o", "x"], "--input-file: must be a file"),
    (["-i", "x", "-o", "http://a/b"], "--output-file: must be a file"),
    (["-i", "/nowhere.jsonl", "-o", "x"], "--input-file: cannot read /nowhere.jsonl"),
    (["-i", __file__, "-o", "/nowhere/x"], "--output-file: cannot write /nowhere/x"),
    (["-i", __file__, "-o", "x", "--parallel", "0"], "--parallel: must be at least 1")])
def test_wrong_flags_are_named(words: list[str], message: str, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run-batch", *words]) == 2
    assert message in capsys.readouterr().err
