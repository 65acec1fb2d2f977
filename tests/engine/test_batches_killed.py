"""A batch outlives the processes that work on it, and the engine: each line is answered once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from helpers_served import Served, serving
from helpers_speed import slowness

COUNT, SHORT = 40, 22
"""Lines of the batch, and those that are soon answered: the engine stops while others are not."""
CHAT = "/v1/chat/completions"


def body(number: int) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 60 if number < SHORT else 400, "temperature": 0,
            "ignore_eos": True, "messages": [
                {"role": "user", "content": f"What is {number} + 30?"}]}


def kill(served: Served, role: str) -> None:
    [pid] = [one.pid for one in served.engine.client.status().actors if one.role == role]
    os.kill(pid, signal.SIGKILL)


def until(client: openai.OpenAI, name: str, done: Callable[[Any], bool]) -> Any:
    limit = time.monotonic() + 60 * slowness()
    while not done(batch := client.batches.retrieve(name)):
        assert time.monotonic() < limit, batch
        time.sleep(0.05)
    return batch


def answered(count: int) -> Callable[[Any], bool]:
    return lambda batch: batch.request_counts.completed >= count


def test_a_batch_outlives_every_process_and_a_restart(tmp_path: Path) -> None:
    lines = [{"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": body(i)}
             for i in range(COUNT)]
    settings: dict[str, Any] = {"files_dir": str(tmp_path), "max_num_seqs": 4, "max_restarts": 50}
    with serving(**settings) as served, openai.OpenAI(base_url=f"{served.url}/v1",
                                                      api_key="-") as client:
        file = client.files.create(file=("in.jsonl", b"".join(
            json.dumps(one).encode() + b"\n" for one in lines)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT,
                                      completion_window="24h")
        for count, role in ((3, "gateway-0"), (8, "worker-0"), (14, "scheduler")):
            until(client, batch.id, answered(count))
            kill(served, role)
        until(client, batch.id, answered(20))
    with serving(**settings) as served, openai.OpenAI(base_url=f"{served.url}/v1",
                                                      api_key="-") as client:
        left = client.batches.retrieve(batch.id)
        assert left.status == "in_progress" and 20 <= left.request_counts.completed < COUNT
        ended = until(client, batch.id, lambda batch: batch.status != "in_progress"
                      and batch.output_file_id)
        assert ended.status == "completed" and ended.error_file_id is None
        results = [json.loads(line) for line in
                   client.files.content(ended.output_file_id).text.splitlines()]
        assert [one["custom_id"] for one in results] == [f"{i}" for i in range(COUNT)]
        for number in (0, 5, 11, 17, COUNT - 1):
            asked = body(number)
            more = {"ignore_eos": asked.pop("ignore_eos")}
            alone = client.chat.completions.create(**asked, extra_body=more)
            given = results[number]["response"]["body"]["choices"][0]["message"]["content"]
            assert given == alone.choices[0].message.content

