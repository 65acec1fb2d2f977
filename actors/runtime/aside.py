"""Work that would keep everybody else waiting, done on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from actorium.actors.errors import ActoriumError

THREADS = 2
"""So that one long prompt does not wait for another one."""
Post = Callable[[], None]
T = TypeVar("T")


class Job(Generic[T]):
    """One piece of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: ActoriumError | None = None
        self.done = False

    def run(self) -> None:
        """On a thread."""
        try:
            self._found.append(self._work())
        except ActoriumError as error:
            self._error = error
        except Exception as error:  # one request's trouble stays that request's
            self._error = ActoriumError(f"tokenizer: {type(error).__name__}: {error}")
        self.done = True

    def result(self) -> T:
        """Once it is done. Raises what the work has raised."""
        if self._error is not None:
            raise self._error
        return self._found[0]


class Aside:
    """The threads, which are started when there is something for them to do."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Job[object], Post]] = SimpleQueue()
        self._started = False

    def do(self, work: Callable[[], T], post: Post) -> Job[T]:
        """Work that releases the interpreter while it takes long; `post` is called on the thread
        when it is done."""
        if not self._started:
            self._started = True
            for number in range(THREADS):
                threading.Thread(target=self._run, name=f"aside-{number}", daemon=True).start()
        job = Job(work)
        self._jobs.put((job, post))  # type: ignore[arg-type]
        return job

    def _run(self) -> None:
        while True:
            job, post = self._jobs.get()
            job.run()
            post()
            del job, post  # may be large, and the next one may be long in coming
