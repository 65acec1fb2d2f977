"""Jobs on threads: those that nobody wants any more are not begun."""

from __future__ import annotations

import threading
from weakref import ref

from actorium.actors.runtime.offload import THREADS, Offload


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
