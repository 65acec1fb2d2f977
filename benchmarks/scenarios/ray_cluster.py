"""A cluster on Ray, on this machine: `make cluster`.

Two raylets stand for machines, with a replica of two ranks of the demo model on each; one dies
under streams, another comes, replicas are made fewer and more, and at last Ray's head dies. Each
round has the same streams as the undisturbed first one, and must have the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

from harness import Row, Rows, scenario

from actorium import Client, SamplingParams
from actorium.tools.chaos.cluster_rows import free_port

NAME = "c"
RANKS = 2
PROMPTS = ("Once upon a time", "12 + 30 =", "The fox", "A story about a boat:", "Count: 1 2 3")
FILE = """
name = "c"
listen = "tcp://127.0.0.1:{port}"

[ray]
replicas = 2
most = 3

[flags]
tensor-parallel-size = {ranks}
device = "cpu"
dtype = "float32"
http = false
"""
PATIENCE_OF_RAYLETS = "RAY_gcs_rpc_server_reconnect_timeout_s"
ALONE = 8.0
"""Seconds without its head after which a raylet ends itself: Ray's default is 60."""
STORE = 80 << 20
"""Bytes of each raylet's object store, which we do not use: about the least that Ray takes."""


class LocalCluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, str(folder / "run")
        os.environ["ACTORIUM_RUN_DIR"] = self.run_dir
        os.environ["RAY_TMPDIR"] = str(folder)
        os.environ[PATIENCE_OF_RAYLETS] = f"{ALONE:g}"
        self._clusters: list[Any] = []
        self.log = folder / "head.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start_head(self, port: int) -> None:
        """A Ray of its own; port: of its head, 0 = any."""
        from ray.cluster_utils import Cluster

        self.ray = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False,
            **({"gcs_server_port": port} if port else {})})
        self._clusters.append(self.ray)

    def add_machine(self) -> Any:
        return self.ray.add_node(num_cpus=RANKS, object_store_memory=STORE)

    def up(self) -> None:
        """`actorium cluster up`; comes back at once."""
        (self.folder / "c.toml").write_text(FILE.format(port=min(free_port(), 65000), ranks=RANKS))
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                self.argv("cluster", "up", str(self.folder / "c.toml"), "--ray-address",
                          self.ray.address), stdin=subprocess.DEVNULL, stderr=log)

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "actorium.tools.cli", *words]

    def status(self) -> dict[str, Any]:
        """What `cluster status --json` says; nothing while there is no cluster."""
        done = subprocess.run(self.argv("cluster", "status", NAME, "--json"), capture_output=True)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {
            "replicas": [], "placement": ""}

    def moved(self) -> int:
        """Requests that went on at one of the replicas, which they had begun at another."""
        return sum(row["migrated_in"] for row in self.status()["replicas"])

    def ready(self) -> int:
        return sum(row["phase"] == "ready" for row in self.status()["replicas"])

    def agents(self) -> dict[str, int]:
        """Node -> process id of its agent, of those that run."""
        found = {path.parent.name: int(path.read_text())
                 for path in Path(f"{self.run_dir}-ray").glob(f"*/ray-*/{NAME}.pid")}
        return {node: pid for node, pid in found.items() if alive(pid)}

    def kill_machine_of(self, agent: int) -> None:
        """SIGKILL to the agent, whose replica dies with it, and to all of its machine's raylet."""
        environ = Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
        own = next(line for line in environ if line.startswith(b"RAY_RAYLET_PID="))
        raylet = int(own.partition(b"=")[2])
        node = next(node for node in self.ray.list_all_nodes() if raylet in pids(node, "raylet"))
        os.kill(agent, signal.SIGKILL)
        self.ray.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """SIGKILL to what Ray's whole cluster depends on."""
        for pid in pids(self.ray.head_node, "gcs_server"):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> int | None:
        """Ends our cluster; returns its exit code. None = it had to be killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None

    def down(self) -> None:
        if self._process is not None:
            self.stop()
        for ray in self._clusters:
            for node in ray.list_all_nodes():
                node.kill_all_processes(check_alive=False, allow_graceful=False)
        for pid in self._left():  # helpers of raylets, and agents if it has come to that
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Processes that have files of this cluster's own folder open."""
        own, found = str(self.folder), set()
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                if os.readlink(link).startswith(f"{own}/"):
                    found.add(int(link.parts[2]))
        return sorted(found - {os.getpid()})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(node: Any, kind: str) -> list[int]:
    return [info.process.pid for info in node.all_processes.get(kind, [])]


def eventually(check: Callable[[], bool], patience: float) -> bool:
    until = time.monotonic() + patience
    while not check():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


class Streams:
    """Streams at once, each in a thread, with all tokens that came."""

    def __init__(self, run_dir: str, count: int, tokens: int) -> None:
        self.found: list[list[int]] = [[] for _ in range(count)]
        self.faults: list[str] = []
        self._run_dir, self._tokens = run_dir, tokens

    def _follow(self, number: int) -> None:
        params = SamplingParams(max_tokens=self._tokens, ignore_eos=True, seed=number)
        try:
            with Client(NAME, self._run_dir, resume_timeout=120.0) as client:
                for delta in client.stream(PROMPTS[number % len(PROMPTS)], params):
                    self.found[number].extend(delta.token_ids)
        except Exception as error:
            self.faults.append(str(error))

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> int:
        """Runs the streams to their ends; `meanwhile` is called once all have begun. Returns how
        many had not ended by then."""
        threads = [threading.Thread(target=self._follow, args=(number,))
                   for number in range(len(self.found))]
        for thread in threads:
            thread.start()
        eventually(lambda: bool(self.faults) or all(len(f) > 8 for f in self.found), 120)
        under_way = sum(len(found) < self._tokens for found in self.found)
        meanwhile()
        for thread in threads:
            thread.join(300)
        return under_way


def rounds(cluster: LocalCluster, count: int, tokens: int) -> Rows:
    began = time.monotonic()

    def row(what: str, ok: bool, note: str = "") -> Row:
        nonlocal began
        before, began = began, time.monotonic()
        return {"ok": "ok" if ok else "FAIL", "what": what, "s": round(began - before, 1),
                "note": note}

    for _ in range(2):
        cluster.add_machine()
    cluster.up()
    ok = eventually(lambda: cluster.ready() == 2, 180)
    yield row("two replicas of two ranks are placed", ok, cluster.status()["placement"])
    if not ok:
        return
    first = Streams(cluster.run_dir, count, tokens)
    first.run()
    whole = all(len(found) == tokens for found in first.found)
    yield row(f"{count} streams, undisturbed", whole and not first.faults, "; ".join(first.faults))

    def again(what: str, act: Callable[[], object] | None = None, moves: bool = False) -> Row:
        """The same streams. act: done when all are under way; moves: some must go on elsewhere."""
        streams, before = Streams(cluster.run_dir, count, tokens), cluster.moved()
        under_way = streams.run(act or (lambda: None))
        equal = sum(a == b for a, b in zip(streams.found, first.found, strict=True))
        moved = cluster.moved() - before
        notes = [f"{equal} of {count} streams have equal tokens"]
        notes += [f"{under_way} were under way, {moved} went on elsewhere"] if act else []
        return row(what, equal == count and not streams.faults and (under_way > 0 or act is None)
                   and (moved > 0 or not moves), "; ".join([*notes, *streams.faults]))

    agents = cluster.agents()
    yield again("a machine is killed under streams",
                lambda: cluster.kill_machine_of(agents["ray-1"]), moves=True)
    waits = eventually(lambda: "ray-1 wait for room" in cluster.status()["placement"], 60)
    yield row("its group is asked for again, and waits", waits, cluster.status()["placement"])
    cluster.add_machine()
    ok = eventually(lambda: cluster.ready() == 2, 120)
    yield row("another machine comes, and gets it", ok, cluster.status()["placement"])
    yield again(f"{count} streams on both")
    subprocess.run(cluster.argv("cluster", "scale", NAME, "1"), capture_output=True, check=True)
    ok = eventually(lambda: len(cluster.agents()) == 1
                    and cluster.status()["placement"].startswith("ray: 1 of 1"), 60)
    yield row("scale 1 gives a group back", ok, cluster.status()["placement"])
    done = subprocess.run(cluster.argv("cluster", "scale", NAME, "2"), capture_output=True)
    yield row("scale 2 asks for one", done.returncode == 0 and cluster.ready() == 2,
              cluster.status()["placement"])
    yield again("Ray's head is killed under streams", cluster.kill_head)
    said = eventually(lambda: "ray is away" in cluster.status()["placement"], 60)
    yield row("status says so", said and cluster.ready() == 2, cluster.status()["placement"])
    raylets = [pid for node in cluster.ray.worker_nodes for pid in pids(node, "raylet")]
    agents = cluster.agents()
    ended = eventually(lambda: not any(map(alive, raylets)), 60 + ALONE)
    yield row("its raylets end, our agents do not", ended and cluster.agents() == agents,
              f"{len(raylets)} raylets, {len(agents)} agents")
    yield again(f"{count} streams without any Ray")
    cluster.start_head(int(cluster.ray.address.rpartition(":")[2]))
    for _ in range(2):
        cluster.add_machine()
    found = eventually(lambda: cluster.status()["placement"].startswith("ray: 2 of 2"), 90)
    yield row("Ray is back, and finds the agents",
              found and cluster.agents() == agents and cluster.ready() == 2,
              cluster.status()["placement"])
    code = cluster.stop()
    yield row("at the end groups and agents are gone", code == 0 and not cluster.agents(),
              f"exit code {code}")


@contextmanager
def local_cluster() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ar", dir=os.environ.get("RAY_TMPDIR", "/tmp")))
    cluster = LocalCluster(folder)
    try:
        cluster.start_head(0)
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@scenario
def deaths(streams: int = 4, tokens: int = 120) -> Rows:
    """Streams while machines of a Ray cluster and its head die: a row for what is promised."""
    try:
        import ray
    except ImportError:
        raise SystemExit("Ray is not installed; from a checkout: pip install -e '.[cluster]'"
                         ) from None
    failed = False
    with local_cluster() as cluster:
        yield {"ray": ray.__version__}
        for each in rounds(cluster, streams, tokens):
            failed = failed or each["ok"] != "ok"
            yield each
        if failed:
            print("".join(cluster.log.read_text(errors="replace").splitlines(True)[-40:]),
                  file=sys.stderr)
            raise SystemExit("not as it is promised")
