"""A part of a simulated cluster, in a process of its own.

    python -m actorium.tools.simulate.cell_run < JOB.json > COLUMNS.npz

One router leads at most `MOST_REPLICAS` replicas, so a larger cluster is made of cells:
conversations are dealt out to them, each has a router and replicas of its own, and none knows of
another. That is how such a cluster would be run, and it is why as many cells as there are
processors run at once.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from actorium.actors.config.tree import Config, dump, load
from actorium.actors.errors import EngineUnavailable
from actorium.tools.simulate.step_model import StepSeconds
from actorium.tools.simulate.virtual_cluster import (
    ReplicaDeath,
    RequestColumns,
    VirtualCluster,
    cluster_config,
)
from actorium.tools.simulate.workload import SimulatedLoad

NAMES = ("arrival", "first", "end", "prompt", "cached", "tokens", "failed")
"""Columns of an answer."""


class CellJob(Struct, frozen=True):
    """What a cell is to run; its workload comes after it."""

    config: msgspec.Raw
    model: StepSeconds
    replicas: int
    routing: str
    seed: int
    faults: list[ReplicaDeath]
    start: float = 0.0
    """See `VirtualCluster`."""


class CellAnswer(NamedTuple):
    columns: dict[str, np.ndarray[Any, Any]]
    counts: dict[str, int]
    seconds: float
    """It took, of a processor."""
    megabytes: float
    """Peak memory."""


def cell_sizes(replicas: int, most: int) -> list[int]:
    """Replicas of each cell, as equal as can be."""
    cells = -(-replicas // most)
    return [replicas // cells + (i < replicas % cells) for i in range(cells)]


def cell_jobs(config: Config, model: StepSeconds, sizes: Sequence[int], routing: str, seed: int,
              faults: Sequence[ReplicaDeath], start: float = 0.0) -> list[CellJob]:
    """Returns the jobs of one cluster. Faults number replicas over all cells, the first cell's
    first."""
    jobs, first = [], 0
    for index, size in enumerate(sizes):
        own = [msgspec.structs.replace(fault, replica=fault.replica - first) for fault in faults
               if first <= fault.replica < first + size]
        jobs.append(CellJob(msgspec.Raw(dump(config)), model, size, routing, seed + index, own,
                            start))
        first += size
    return jobs


def run_cell(job: CellJob, work: SimulatedLoad) -> tuple[RequestColumns, dict[str, int]]:
    config = cluster_config(load(bytes(job.config)), job.replicas, job.routing)
    cluster = VirtualCluster(config, job.model, work, job.seed, start=job.start)
    return cluster.run(job.faults), cluster.counts()


def run_cells(jobs: Sequence[CellJob], works: Sequence[SimulatedLoad], processes: int,
              done: Callable[[], None]) -> list[CellAnswer]:
    """Each in a process of its own, so many at a time. `done` is called as each ends.

    Raises `EngineUnavailable` where one fails.
    """
    def simulated(pair: tuple[CellJob, SimulatedLoad]) -> CellAnswer:
        answer = _in_process(*pair)
        done()
        return answer

    with ThreadPoolExecutor(processes) as threads:
        return list(threads.map(simulated, zip(jobs, works, strict=True)))


def _in_process(job: CellJob, work: SimulatedLoad) -> CellAnswer:
    sent = io.BytesIO()
    columns = {name: np.asarray(value) for name, value in work._asdict().items()}
    _write_arrays(sent, {"job": np.frombuffer(msgspec.json.encode(job), np.uint8), **columns})
    ran = subprocess.run([sys.executable, "-m", "actorium.tools.simulate.cell_run"],
                         input=sent.getvalue(), capture_output=True, check=False)
    if ran.returncode:
        raise EngineUnavailable("a part of the simulation has failed: "
                                + ran.stderr.decode(errors="replace")[-1500:])
    with np.load(io.BytesIO(ran.stdout), allow_pickle=False) as found:
        about = json.loads(bytes(found["about"]))
        return CellAnswer({name: found[name] for name in NAMES}, about["counts"],
                          about["seconds"], about["megabytes"])


def _write_arrays(out: io.BytesIO, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    np.savez(out, allow_pickle=False, **arrays)


def main() -> None:
    """Job and workload on stdin, columns on stdout."""
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as given:
        job = msgspec.json.decode(bytes(given["job"]), type=CellJob)
        columns = {name: given[name] for name in SimulatedLoad._fields if name != "seed"}
        work = SimulatedLoad(**columns, seed=int(given["seed"]))
    began = time.process_time()
    found, counts = run_cell(job, work)
    about = {"counts": counts, "seconds": time.process_time() - began,
             "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    out = io.BytesIO()
    _write_arrays(out, {"about": np.frombuffer(json.dumps(about).encode(), np.uint8),
                        **{name: getattr(found, name) for name in NAMES}})
    sys.stdout.buffer.write(out.getvalue())


if __name__ == "__main__":
    main()
