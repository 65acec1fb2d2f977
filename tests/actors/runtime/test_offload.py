"""Jobs on threads: those that nobody wants any more are not begun; and threads that actors need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from weakref import ref

import pytest

from actorium.actors.runtime.offload import THREADS, Offload, start_thread


def test_a_job_that_is_cancelled_before_a_thread_has_taken_it_never_runs() -> None:
    offload, ran, rests, posts = Offload(), list[int](), threading.Event(), threading.Semaphore(0)

    def work(number: int) -> int:
        rests.wait(30)
        ran.append(number)
        return number

    jobs = [offload.submit(lambda i=i: work(i), posts.release)  # type: ignore[misc]
            for i in range(THREADS + 4)]
    while len(offload._jobs) > 4:  # each thread takes one
        threading.Event().wait(0.001)
    assert [job.cancel() for job in jobs[1:THREADS + 3]] == [False] * (THREADS - 1) + [True] * 3
    assert not jobs[THREADS].cancel(), "once is enough"
    assert len(offload._jobs) == 1 and offload.busy
    gone = ref(jobs.pop(THREADS))
    assert gone() is None, "nor is it kept"
    rests.set()
    for _ in range(THREADS + 1):
        assert posts.acquire(timeout=30)
    assert sorted(ran) == [*range(THREADS), THREADS + 3]
    assert not offload.busy and jobs[-1].result() == THREADS + 3


def test_a_thread_that_an_actor_needs_ends_the_actor() -> None:
    """What it raises is raised again in the loop, where it is fatal, and nowhere else."""
    posted: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def fails() -> None:
        raise ImportError("no such module")

    start_thread("loading", fails, posted.put)
    with pytest.raises(ImportError, match="no such module"):
        posted.get(timeout=60)()
    assert posted.empty()


def test_actors_start_threads_by_nothing_else() -> None:
    """Those named here cannot end by an exception unseen, or may."""
    guarded = {"runtime/process.py", "runtime/heartbeat.py", "runtime/logs.py",
               "runtime/offload.py", "launcher/crash_reports.py", "cluster/ray/ray_actor.py",
               "scheduler/kv_event_publisher.py", "structured/structured_output.py"}
    root = Path(__file__).parents[3] / "actors"
    found = {str(file.relative_to(root)) for file in root.rglob("*.py")
             if "threading.Thread(" in file.read_text()}
    assert found == guarded
