"""guidellm: a small benchmark of chats, run to completion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wire import Server

pytest.importorskip("guidellm")
pytestmark = pytest.mark.conformance
REQUESTS, OUTPUT = 24, 16


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark(server: Server, tmp_path: Path, path: str) -> None:
    report = tmp_path / "report.json"
    program = Path(sys.executable).parent / "guidellm"
    done = subprocess.run(
        [str(program), "run", "--disable-console-interactive",
         "--backend", f"kind=openai_http,target={server.url},model={server.model},"
                      f"request_format={path}",
         "--profile", "kind=concurrent,streams=4",
         "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--tokenizer", f"kind=hf_auto,model={server.directory}",
         "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT}",
         "--output", f"kind=json,path={report}"],
        capture_output=True, text=True, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    tokens = found["metrics"]["output_token_count"]["successful"]
    assert tokens["mean"] == tokens["max"] == OUTPUT
