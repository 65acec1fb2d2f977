"""Streams and events as those of `torch.cuda`, over a CPU, whose queues run as late, or as far
ahead of one another, as events let them: a wait that is missing shows up as wrong bytes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ToyEvent:
    def __init__(self, streams: ToyStreams) -> None:
        self._streams, self.stream = streams, streams.main
        self.done = True

    def come(self) -> None:
        self.done = True

    def synchronize(self) -> None:
        if self._streams.deaf != f"host of {self.stream.name}":
            self._streams.run(lambda: self.done)


class ToyStream:
    def __init__(self, streams: ToyStreams, name: str) -> None:
        self._streams, self.name = streams, name
        self.queue: deque[tuple[Callable[[], Any], ToyEvent | None]] = deque()
        """What is run when its turn comes and the event is over."""

    def put(self, work: Callable[[], Any], event: ToyEvent | None = None) -> None:
        self.queue.append((work, event))
        if self.name == "main" and self._streams.eager:
            self._streams.run(lambda: not self.queue)

    def record_event(self, event: ToyEvent) -> ToyEvent:
        event.done, event.stream = False, self
        self.put(event.come)
        return event

    def wait_event(self, event: ToyEvent) -> None:
        if self._streams.deaf != self.name:
            self.put(lambda: None, event)


class ToyStreams(TorchDispatchMode):
    """What writes to a tensor is put into the queue of the current stream, by whoever is within
    this context. Others than `main` are named by number, as they are made."""

    def __init__(self, seed: int | None, deaf: str = "") -> None:
        """seed: which streams are ahead of others; None: `main` is ahead of all and never waits for
        its turn, the others are as late as can be, and the context need not be entered. deaf: the
        stream that waits for no event, or `host of` it: the host does not wait for its events."""
        super().__init__()
        self.eager, self.deaf, self._dice = seed is None, deaf, random.Random(seed)
        self.main = ToyStream(self, "main")
        self._streams, self._current = [self.main], self.main
        self._running = False
        self.operations: list[str] = []
        """What the device was given to do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._running or not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.operations.append(str(func))
        self._current.put(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])

    def run(self, over: Callable[[], bool] | None = None) -> None:
        """Until `over`; None: until nothing is left."""
        before, self._running = self._running, True
        first = self._dice.sample(self._streams, len(self._streams))
        if self.eager:
            first.sort(key=lambda stream: stream is not self.main)
        while any(own.queue for own in self._streams) if over is None else not over():
            ready = (own for own in first if own.queue and (
                (event := own.queue[0][1]) is None or event.done))
            next(ready).queue.popleft()[0]()
        self._running = before

    # --- as torch.cuda's -------------------------------------------------------------------------

    def Stream(self, device: Any) -> ToyStream:
        self._streams.append(ToyStream(self, str(len(self._streams))))
        return self._streams[-1]

    def Event(self, blocking: bool) -> ToyEvent:
        return ToyEvent(self)

    def current_stream(self, device: Any) -> ToyStream:
        return self._current

    @contextmanager
    def stream(self, stream: ToyStream) -> Iterator[None]:
        before, self._current = self._current, stream
        inside: AbstractContextManager[Any] = self if self.eager else nullcontext()
        with inside:
            yield
        self._current = before
