"""Threads for work that would keep all other requests waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from actorium.actors.errors import ActoriumError
from actorium.actors.runtime.inflight_journal import (
    NOBODY,
    PROCESS_FAULTS,
    InflightJournal,
)

THREADS = 2
"""Two, so that one long prompt does not wait for another."""
Post = Callable[[], None]
T = TypeVar("T")


def start_thread(name: str, body: Callable[[], None],
                 post: Callable[[Callable[[], None]], None]) -> None:
    """Starts a thread that the actor cannot do without: what it raises ends the actor, which is
    then started again. An exception by itself ends a thread alone, and the actor would live on
    without it. post: calls a function on the loop's thread."""
    def run() -> None:
        try:
            body()
        except BaseException as error:
            post(partial(_raise, error))

    threading.Thread(target=run, name=name, daemon=True).start()


def _raise(error: BaseException) -> None:
    raise error


class OffloadJob(Generic[T]):
    """One piece of work."""

    def __init__(self, work: Callable[[], T], journal: InflightJournal,
                 name: bytes = NOBODY, cancel: Callable[[OffloadJob[T]], bool] | None = None
                 ) -> None:
        """name: the request's name in the journal; cancel: takes it back from the threads."""
        self._work, self._journal, self._cancel = work, journal, cancel
        self.name = name
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """On a thread."""
        try:
            self._result.append(self._work())
        except (ActoriumError, *PROCESS_FAULTS) as error:
            self._error = error
        except BaseException as error:
            self._error = self._journal.failed(error)
        self.done = True

    @property
    def ends_process(self) -> bool:
        """Whether `result` raises what ends the process."""
        return isinstance(self._error, PROCESS_FAULTS)

    def cancel(self) -> bool:
        """Nobody wants the result. False if a thread has begun: then it goes on."""
        return self._cancel is not None and self._cancel(self)

    def result(self) -> T:
        """The result, once it is done. Raises what the work has raised; that is not the request's
        fault, it ends the process from here, not the thread."""
        if self._error is not None:
            raise self._error
        return self._result[0]


class Offload:
    """The threads, started with the first job.

    What a thread works on is in the journal, at a place of the thread's own. A suspect is worked
    on while all other threads rest."""

    def __init__(self, journal: InflightJournal | None = None, place: int = 1) -> None:
        """place: the first thread's place in the journal."""
        self._place = place
        self._jobs: dict[OffloadJob[object], Post] = {}
        """Those that no thread has taken, the oldest first."""
        self._journal = journal or InflightJournal()
        self._started = False
        self._turn = threading.Condition()
        """Holds its lock: who touches the jobs, or what is below."""
        self._waiting = self._running = 0
        """Numbers of jobs that are not done, and that run."""
        self._alone = False
        """A suspect is worked on, or waits for the other threads."""

    @property
    def busy(self) -> bool:
        """Whether there are jobs that are not done."""
        return self._waiting > 0

    def submit(self, work: Callable[[], T], post: Post,
               name: bytes = NOBODY) -> OffloadJob[T]:
        """Have a thread do work, which should release the interpreter if it takes long; `post` is
        called on the thread when it is done. name: of the request, in the journal."""
        if not self._started:
            self._started = True
            for place in range(self._place, self._place + THREADS):
                threading.Thread(target=self._run, args=(place,), name=f"offload-{place}",
                                 daemon=True).start()
        job: OffloadJob[T] = OffloadJob(work, self._journal, name, self._take_back)
        with self._turn:
            self._waiting += 1
            self._jobs[job] = post  # type: ignore[index]
            self._turn.notify_all()
        return job

    def _take_back(self, job: OffloadJob[T]) -> bool:
        with self._turn:
            post = self._jobs.pop(job, None)  # type: ignore[arg-type]
            self._waiting -= post is not None
        return post is not None

    def _next(self) -> tuple[OffloadJob[object], Post]:
        with self._turn:
            self._turn.wait_for(lambda: bool(self._jobs))
            job = next(iter(self._jobs))
            return job, self._jobs.pop(job)

    def _run(self, place: int) -> None:
        while True:
            job, post = self._next()
            self._run_job(job, place)
            post()
            del job, post  # may be large, and the next one may be long in coming

    def _run_job(self, job: OffloadJob[object], place: int) -> None:
        alone = self._journal.suspected(job.name)
        with self._turn:
            self._turn.wait_for(lambda: not self._alone)
            self._alone = alone
            if alone:
                self._turn.wait_for(lambda: not self._running)
            self._running += 1
        self._journal.put(job.name, place)
        job.run()
        if not job.ends_process:  # then its name stays, as at any other death
            self._journal.clear(place)
        with self._turn:
            self._running -= 1
            self._waiting -= 1
            if alone:
                self._alone = False
            self._turn.notify_all()
