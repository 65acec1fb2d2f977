"""`client.files` and `client.batches` of the openai package, and vLLM's `run-batch` files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import serving
from wire import CHAT, Server

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.conformance
NAME = "meta-llama/Meta-Llama-3-8B-Instruct"
"""The model of vLLM's example."""


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": f"What is {number} + 30?"}]
    return {"custom_id": f"request-{number}", "method": "POST", "url": url,
            "body": {"model": NAME, "messages": said, "max_completion_tokens": 20} | body}


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", "--served-model-name", NAME, "--files-dir",
                 str(tmp_path_factory.mktemp("files"))) as served:
        yield served


@pytest.fixture
def client(batch_server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key="-", max_retries=0) as found:
        yield found


def ended(client: Any, name: str) -> Any:
    limit = time.monotonic() + 60
    while (batch := client.batches.retrieve(name)).status in ("validating", "in_progress",
                                                              "finalizing"):
        assert time.monotonic() < limit, batch
        time.sleep(0.1)
    return batch


def test_upload_create_poll_download(client: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "batch.jsonl", [*map(line, range(9)), line(9, model="gpt-4o")])
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    assert (uploaded.filename, uploaded.bytes) == ("batch.jsonl", path.stat().st_size)
    made = client.batches.create(input_file_id=uploaded.id, endpoint=CHAT,
                                 completion_window="24h", metadata={"description": "nightly"})
    batch = ended(client, made.id)
    assert (batch.status, batch.metadata) == ("completed", {"description": "nightly"})
    assert batch.request_counts.to_dict() == {"total": 10, "completed": 9, "failed": 1}
    results = [json.loads(one) for one in
               client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in results] == [f"request-{i}" for i in range(9)]
    for one in results:
        body = openai.types.chat.ChatCompletion.model_validate(one["response"]["body"])
        assert body.choices[0].message.content and body.usage.completion_tokens <= 20
    [failed] = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["body"]["error"]["code"] == "model_not_found"
    assert made.id in [one.id for one in client.batches.list(limit=1)]
    assert {uploaded.id, batch.output_file_id} <= {one.id for one in client.files.list(limit=1)}
    assert client.files.delete(uploaded.id).deleted


def test_cancel(client: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "batch.jsonl", [line(i, max_completion_tokens=400, ignore_eos=True)
                                              for i in range(400)])
    uploaded = client.files.create(file=path, purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint=CHAT,
                                 completion_window="24h")
    while client.batches.retrieve(made.id).status == "validating":
        time.sleep(0.05)
    assert client.batches.cancel(made.id).status == "cancelling"
    while (batch := client.batches.retrieve(made.id)).status == "cancelling":
        time.sleep(0.05)
    assert batch.status == "cancelled"


def test_vllms_run_batch(batch_server: Server, tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", [line(1), line(2), line(3, "/v1/audio")])
    out = tmp_path / "out.jsonl"
    subprocess.run([sys.executable, "-m", "actorium.tools.cli", "run-batch", "-i", str(path),
                    "-o", str(out), "--base-url", batch_server.url], check=True, timeout=60)
    good, other, refused = map(json.loads, out.read_text().splitlines())
    assert good["response"]["status_code"] == other["response"]["status_code"] == 200
    assert refused["response"] is None and "/v1/audio" in refused["error"]["message"]
