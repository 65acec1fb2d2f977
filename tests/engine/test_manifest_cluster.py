"""The words and the file of the manifest for several machines, run on one: head, two nodes, keys as
its init containers leave them. Workers have no model."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_cli import Cli, cli, eventually
from helpers_keys import free_ports

from actorium.tools.cli.cluster_nodes import make_keys

__all__ = ["cli"]
MANIFEST = Path(__file__).parents[2] / "tools/deploy/kubernetes-cluster.yaml"
pytestmark = [pytest.mark.slow]


def get(port: int, path: str) -> int:
    """The status; 0 = nobody listens."""
    try:
        return int(urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_its_words_make_a_cluster(cli: Cli, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    of = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    joins, serves = free_ports(), free_ports()
    text = of["ConfigMap", "actorium-cluster"]["data"]["cluster.toml"]
    for here, there in (('"tcp://0.0.0.0:7400"', f'"tcp://127.0.0.1:{joins}"'),
                        ('"/keys"', f'"{tmp_path}/keys"'), ("port = 8000", f"port = {serves}"),
                        ('model = "/model"', 'null-worker = true\nskip-tokenizer = true\n'
                                             'device = "cpu"')):
        assert text.count(here) == 1
        text = text.replace(here, there)
    (tmp_path / "cluster.toml").write_text(text)
    names = [f"actorium-node-{i}" for i in range(2)]
    make_keys(tmp_path / "keys", names)

    def start(stack: contextlib.ExitStack, base: str, words: list[str]) -> subprocess.Popen[bytes]:
        with open(tmp_path / f"{base}.log", "wb") as log:
            process = subprocess.Popen(cli.argv(*words), stderr=log, stdin=subprocess.DEVNULL,
                                       env=cli.env | {"ACTORIUM_RUN_DIR": f"{cli.run_dir}/{base}"})
        stack.callback(process.kill)
        return process

    def words_of(kind: str, name: str) -> list[str]:
        found: dict[str, Any] = of[kind, name]["spec"]["template"]["spec"]["containers"][0]
        return list(found["args"])

    with contextlib.ExitStack() as stack:
        up = words_of("Deployment", "actorium-head")
        head = start(stack, "head", [*up[:2], str(tmp_path / "cluster.toml")])
        assert eventually(lambda: get(serves, "/livez") == 200, 60)
        assert get(serves, "/startupz") == get(serves, "/readyz") == 503, "no node is there"
        nodes = []
        for name in names:
            key = tmp_path / name / "node.key"
            key.parent.mkdir()
            key.write_bytes((tmp_path / "keys" / f"{name}.key").read_bytes())
            key.chmod(0o600)
            swapped = {"tcp://actorium-head:7400": f"tcp://127.0.0.1:{joins}",
                       "/keys/node.key": str(key), "$(POD_NAME)": name}
            nodes.append(start(stack, name, [swapped.get(word, word) for word in
                                             words_of("StatefulSet", "actorium-node")]))
        assert eventually(lambda: get(serves, "/readyz") == get(serves, "/startupz") == 200, 90)
        own = Cli(f"{cli.run_dir}/head")

        def rows() -> dict[str, str]:
            done = own.run("cluster", "status", "actorium", "--json")
            return {row["node"]: row["phase"] for row in json.loads(done.stdout)["replicas"]}

        assert eventually(lambda: rows() == dict.fromkeys(names, "ready"), 60)
        ask = urllib.request.Request(
            f"http://127.0.0.1:{serves}/v1/completions",
            headers={"Content-Type": "application/json"},
            data=json.dumps({"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True}).encode())
        assert json.load(urllib.request.urlopen(ask))["usage"]["completion_tokens"] == 4
        nodes[1].terminate()
        assert nodes[1].wait(60) == 0 and get(serves, "/readyz") == 200
        assert json.load(urllib.request.urlopen(ask))["usage"]["completion_tokens"] == 4
        for process in (head, nodes[0]):
            process.terminate()
            assert process.wait(60) == 0
