"""Clusters whose weights change, and that lose replicas meanwhile: no stream is lost, and a replica
that comes back has the newest weights."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_cli import NULL, Cli, cli, eventually
from helpers_models import write_checkpoint

from actorium.actors.client.client import Client
from actorium.actors.client.requests import Completion
from actorium.actors.errors import ActoriumError, BadModel
from actorium.actors.params import SamplingParams

__all__ = ["cli"]
NEW = 150
PROMPTS = [[(7 * i + n) % 199 for i in range(n)] for n in (3, 40, 131)]
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0, temperature=0)
CLUSTER = ("--name", "c", "--replicas", "2")


def told(completion: Completion) -> Any:
    assert completion.logprobs is not None
    return completion.token_ids, [own.logprob for own in completion.logprobs]


def kill_replica(cli: Cli, index: int) -> int:
    """Ends a replica with all its actors; returns how often it had been started."""
    row = next(row for row in cli.actors() if (row["name"], row["role"]) == (
        "c", f"replica-{index}"))
    os.kill(row["pid"], signal.SIGKILL)
    return int(row["epoch"])


def is_back(cli: Cli, index: int, epoch: int) -> bool:
    shown = cli.run("cluster", "status", "c", "--json")
    rows = json.loads(shown.stdout)["replicas"] if shown.returncode == 0 else []
    return any(row["replica"] == index and row["phase"] == "ready" for row in rows) and any(
        (row["name"], row["role"]) == ("c", f"replica-{index}") and row["epoch"] > epoch
        for row in cli.actors())


def test_weights_change_over_http(cli: Cli, tmp_path: Path) -> None:
    """Workers without a model: the routes, the versions in answers, and those of a replica that was
    started since."""
    (tmp_path / "b").mkdir()
    with cli.serve(*CLUSTER, *NULL, "--port", "0", "--weights-dir", str(tmp_path)):
        port = json.loads((Path(cli.run_dir) / "c" / "gateway.json").read_bytes())["port"]

        def ask(path: str, **body: Any) -> dict[str, Any]:
            call = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", json.dumps(body).encode() if body else None,
                {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.load(urllib.request.urlopen(call))
            return answer

        def versions() -> list[Any]:
            return [ask("/v1/completions", prompt=[n, 2], max_tokens=4, ignore_eos=True)["usage"]
                    .get("weight_version") for n in range(1, 5)]

        assert versions() == [None] * 4
        assert ask("/update_weights_from_disk", model_path="b")["weight_version"] == "1"
        assert versions() == [1] * 4
        epoch = kill_replica(cli, 1)
        assert eventually(lambda: is_back(cli, 1, epoch), 30)
        assert versions() == [1] * 4
        assert ask("/get_weight_version") == {"weight_version": "1"}


@pytest.mark.slow
def test_all_replicas_of_a_model_change_under_streams(cli: Cli, tmp_path: Path) -> None:
    """By a directory and by tensors; also a replica that dies meanwhile, or later."""
    import torch

    for seed, name in enumerate("ab"):
        write_checkpoint(tmp_path / name, "Qwen3ForCausalLM", seed=seed, dtype=torch.bfloat16,
                         head_dim=32)
    found: list[Completion] = []
    done = threading.Event()

    def stream() -> None:
        with Client("c", cli.run_dir, resume_timeout=60.0) as own:
            while not done.is_set():
                found.extend(own.generate(PROMPTS, GREEDY))

    with cli.serve(*CLUSTER, str(tmp_path / "a"), "--skip-tokenizer", "--device", "cpu",
                   "--threads", "2", "--exact", "on", "--max-num-seqs", "8"), \
            Client("c", cli.run_dir) as client:

        def ask() -> list[Any]:
            """From both replicas."""
            both = client.generate(PROMPTS * 4, GREEDY)
            whole = [told(own) for own in both]
            assert whole == whole[:3] * 4
            return whole[:3]

        of_a = ask()
        threads = [threading.Thread(target=stream) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        assert client.update_weights(tmp_path / "b", "retract")["version"] == 1
        of_b = ask()
        assert of_b != of_a
        with pytest.raises(BadModel, match="replica [01]: .*has shape"):
            client.update_weights({"model.norm.weight": np.zeros(3, np.float32)})
        assert ask() == of_b
        epoch = kill_replica(cli, 0)
        assert client.update_weights(tmp_path / "a", "keep")["version"] == 2
        assert eventually(lambda: is_back(cli, 0, epoch), 120)
        assert ask() == of_a and client.weight_version() == 2
        norm = client.get_weights("model.norm.weight")["values"]
        assert client.update_weights({"model.norm.weight": 2 * np.array(norm, np.float32)},
                                     "retract")["version"] == 3
        doubled = ask()
        assert doubled != of_a
        epoch = kill_replica(cli, 1)
        assert eventually(lambda: is_back(cli, 1, epoch), 120)
        assert ask() == doubled
        timer = threading.Timer(0.3, kill_replica, (cli, 1))
        timer.start()
        try:
            version = client.update_weights(tmp_path / "b")["version"]
        except ActoriumError:
            version = 3
        timer.join()
        assert ask() == (of_b if version == 4 else doubled)
        assert client.weight_version() == version
        done.set()
        for thread in threads:
            thread.join(120)
    assert len(found) >= 12 and all(len(own.token_ids) == NEW for own in found)
    for own in found:
        firsts, versions = zip(*[(-1, 0), *own.weight_versions], strict=True)
        assert [*firsts] == sorted(set(firsts)) and [*versions] == sorted(set(versions))
