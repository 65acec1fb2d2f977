"""`actorium embed`: its lines in and out, and an engine of its own."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from actorium.actors.params import PoolingParams
from actorium.tools.cli import jsonl, main
from actorium.tools.cli.embed_command import EmbedOptions, jobs

PARAMS = PoolingParams(task="embed")
LINES = [b'{"text": "a fox"}', b'{"prompt_token_ids": [5, 6]}', b'{"text": 5}', b"{}",
         b'{"text": "a", "prompt_token_ids": [1]}', b'{"prompt_token_ids": "x"}', b"no"]


def test_lines_become_requests_or_say_what_is_wrong() -> None:
    source = io.BytesIO(b"\n".join(LINES) + b"\n")
    first, second, *bad = jobs(EmbedOptions(), source, PARAMS)
    assert isinstance(first, jsonl.BatchJob) and isinstance(second, jsonl.BatchJob)
    assert (first.request.prompt, second.request.prompt) == ("a fox", [5, 6])
    assert first.request.pooling == PARAMS
    errors = [one.error for one in bad if isinstance(one, jsonl.BadLine)]
    assert [error.split(":")[0] for error in errors] == [
        "text", *["exactly one of text and prompt_token_ids is needed"] * 2, "prompt_token_ids",
        "the line is not JSON"]


@pytest.mark.parametrize(("argv", "error"), [
    ([], "--text: one of --text TEXT and --input FILE is needed"),
    (["--text", "a", "--input", "b"], "--text: one of"),
    (["--text", "a", "--dimensions", "0"], "--dimensions: must be between 1 and"),
    (["--input", "/nowhere"], "--input: cannot read /nowhere")])
def test_wrong_flags_are_named(argv: list[str], error: str,
                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", *argv]) == 2
    assert capsys.readouterr().err.removeprefix("actorium: error: ").startswith(error)


def test_a_file_is_embedded_in_its_order(tmp_path: Path) -> None:
    texts = ["a fox", "a dog", "a fox"]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{}\n")
    assert main(["embed", "--input", str(given), "--output", str(out), "--device", "cpu",
                 "--dimensions", "16", "--log-level", "error"]) == 0
    *rows, bad = map(json.loads, out.read_text().splitlines())
    assert [row["index"] for row in (*rows, bad)] == [0, 1, 2, 3]
    assert rows[0]["embedding"] == pytest.approx(rows[2]["embedding"], abs=1e-2)
    assert rows[0]["embedding"] != pytest.approx(rows[1]["embedding"], abs=1e-2)
    for row in rows:
        assert len(row["embedding"]) == 16 and row["prompt_tokens"] > 0
        assert math.hypot(*row["embedding"]) == pytest.approx(1, abs=1e-3)
    assert bad["error"].startswith("exactly one of text")
