"""Works on the batches of a store, in a gateway: each by one gateway at a time, which holds the
lock of its results (`ResultFile`). Whoever dies is followed by any gateway: it goes on behind the
last result that was written, and adopts what the engine still works on.

Statuses: validating -> in_progress -> finalizing -> completed; or failed (the file is no batch),
cancelling -> cancelled, expired. A batch that is cancelled or late has the answers so far as its
output.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from actorium.actors.gateway.batch.batch_lines import (
    BatchLine,
    LineContext,
    LineError,
    parse_line,
    result_line,
    succeeded,
)
from actorium.actors.gateway.batch.file_store import (
    OUTPUT,
    BatchObject,
    FileStore,
    Owned,
)
from actorium.actors.gateway.batch.json_lines import ResultFile, in_order, read_lines
from actorium.actors.gateway.batch.line_caller import Ask, answered

LOG = logging.getLogger("actorium.batches")
MAX_REQUESTS = 50_000
"""Lines of a batch, as in OpenAI's API."""
MAX_ERRORS = 100
"""Invalid lines that are listed."""
AT_ONCE = 4
"""Batches, of different tenants, that one gateway works on."""
POLL_SECONDS = 1.0
"""Between looks for batches that were created, or whose gateway has died, elsewhere; and at the
status and the time of a batch that runs."""
SWEEP_SECONDS = 60.0
EXPIRED = LineError("batch_expired", "the batch's completion window ended before this request")


class BatchWorker:
    """One gateway's work on batches. `stop` ends it; another one may go on at once."""

    def __init__(self, store: FileStore, ask: Ask, abort: Callable[[str, str], Awaitable[Any]],
                 changed: asyncio.Event, window: int) -> None:
        """abort: ends the request of a line, by its key and tenant; changed: set when a batch was
        created or cancelled; window: requests under way at once, of all batches."""
        self._store, self._ask, self._abort, self._changed = store, ask, abort, changed
        self._window = window
        self._places = asyncio.Semaphore(window)
        self._running: dict[str, asyncio.Task[None]] = {}
        """By tenant."""
        self._looking = asyncio.ensure_future(self._look())

    def __len__(self) -> int:
        """The batches that it works on."""
        return len(self._running)

    async def stop(self) -> None:
        """Leaves what is under way to the next one."""
        tasks = [self._looking, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        next_sweep = 0.0
        while True:
            self._changed.clear()
            try:
                if self._store.clock() >= next_sweep:
                    next_sweep = self._store.clock() + SWEEP_SECONDS
                    await self._store.sweep()
                await self._start_batches()
            except (OSError, sqlite3.Error) as error:
                LOG.error("batches cannot be read: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()

    async def _start_batches(self) -> None:
        for owned in await self._store.unfinished():
            if owned.tenant not in self._running and len(self._running) < AT_ONCE:
                try:
                    results = ResultFile(self._store.work_path(owned.batch.id))
                except BlockingIOError:  # another gateway works on it
                    continue
                task = asyncio.ensure_future(self._run(owned, results))
                self._running[owned.tenant] = task
                task.add_done_callback(partial(self._ended, owned.tenant))

    def _ended(self, tenant: str, _: object) -> None:
        del self._running[tenant]
        self._changed.set()

    async def _run(self, owned: Owned, results: ResultFile) -> None:
        batch = BatchRun(self._store, owned, results, self._ask, self._abort, self._places,
                         self._window)
        try:
            await batch.run()
        except (OSError, sqlite3.Error) as error:  # as on a full disk
            LOG.error("batch %s waits: %s", owned.batch.id, error)
            await asyncio.sleep(POLL_SECONDS)
        except Exception as error:
            LOG.exception("batch %s failed", owned.batch.id)
            await batch.fail("internal", f"{type(error).__name__}: {error}")
        finally:
            results.close()


class BatchRun:
    """One batch, from wherever it is to its end."""

    def __init__(self, store: FileStore, owned: Owned, results: ResultFile, ask: Ask,
                 abort: Callable[[str, str], Awaitable[Any]], places: asyncio.Semaphore,
                 window: int) -> None:
        """results: locked; places: for requests under way."""
        self._store, self._results, self._ask, self._abort = store, results, ask, abort
        self._tenant, self._batch = owned.tenant, owned.batch
        self._places, self._window = places, window
        self._counts: Counter[bool] = Counter()
        """Results by whether they have an answer."""
        self._asking: dict[str, asyncio.Task[bytes]] = {}
        """Requests under way, by their keys."""
        self._over = ""
        """The status that the batch is to end with early: cancelled, expired, failed."""

    async def run(self) -> None:
        """Raises `OSError`, `sqlite3.Error`; then it is to be run again."""
        path = self._store.path_of(self._batch.input_file_id)
        self._batch = await self._change(lambda batch: None)  # it may have ended meanwhile
        if self._batch.status == "validating":
            await self._validate(path)
        if self._batch.status == "in_progress":
            await asyncio.to_thread(self._resume)
            await self._answer_lines(path)
        if self._batch.status == "cancelling":
            self._over = "cancelled"
        if self._batch.status in ("finalizing", "cancelling") or self._over:
            await self._finalize()
        self._store.work_path(self._batch.id).unlink(missing_ok=True)

    async def _change(self, change: Callable[[BatchObject], None]) -> BatchObject:
        self._batch = await self._store.change_batch(self._batch.id, change, self._results.bytes)
        return self._batch

    # --- validating ---

    async def _validate(self, path: Path) -> None:
        total, errors = await asyncio.to_thread(self._check, path)

        def started(batch: BatchObject) -> None:
            if batch.status == "validating":
                batch.request_counts.total = total
                batch.errors = {"object": "list", "data": errors} if errors else None
                batch.move("failed" if errors else "in_progress", self._store.clock())

        await self._change(started)

    def _check(self, path: Path) -> tuple[int, list[dict[str, Any]]]:
        """Returns the number of lines, and what is wrong with the first wrong ones."""
        errors: list[dict[str, Any]] = []
        known: set[str] = set()
        number = 0

        def wrong(code: str, message: str, line: int | None) -> None:
            field = message.partition(":")[0] if ":" in message else None
            errors.append({"code": code, "message": message, "param": field, "line": line})

        with path.open("rb") as file:
            for line in lines_of(read_lines(file)):
                number = line.number
                if line.wrong:
                    wrong("invalid_line", line.wrong, number)
                elif line.url != self._batch.endpoint:
                    wrong("mismatched_endpoint", f"url: {line.url!r} is not the batch's endpoint "
                          f"{self._batch.endpoint!r}", number)
                elif line.custom_id in known:
                    wrong("duplicate_custom_id", f"custom_id: {line.custom_id!r} was there before",
                          number)
                known.add(line.custom_id)
                if len(errors) >= MAX_ERRORS or number > MAX_REQUESTS:
                    break
        if number > MAX_REQUESTS:
            wrong("too_many_requests", f"more than {MAX_REQUESTS} lines", None)
        if not number:
            wrong("empty_file", "there are no lines", None)
        return number, errors

    # --- answering ---

    def _resume(self) -> None:
        self._results.resume()
        for line in self._results.read():
            self._counts[succeeded(line)] += 1
        if self._results.lines:
            LOG.info("batch %s goes on behind line %d", self._batch.id, self._results.lines)

    async def _answer_lines(self, path: Path) -> None:
        if self._store.clock() >= self._batch.expires_at:
            self._over = "expired"
        watching = asyncio.ensure_future(self._watch())
        try:
            with path.open("rb") as file:
                rest = islice(lines_of(read_lines(file)), self._results.lines, None)
                answers = in_order(rest, self._answer, self._window, lambda line: len(line.body))
                async for result in answers:
                    if result and self._over != "failed":
                        self._results.append(result)
                        self._counts[succeeded(result)] += 1
                    if watching.done():
                        watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(self._results.sync)

        def ended(batch: BatchObject) -> None:
            self._count(batch)
            if not self._over and batch.status == "in_progress":
                batch.move("finalizing", self._store.clock())

        await self._change(ended)

    async def _answer(self, line: BatchLine) -> bytes:
        """Returns a line's result; empty = it has none."""
        async with self._places:
            if not self._over:
                key = f"{self._batch.id}-{line.number}"
                context = LineContext(self._tenant, max(
                    self._batch.expires_at - self._store.clock(), 1.0), key)
                task = self._asking[key] = asyncio.ensure_future(
                    answered(line, context, self._batch.id, self._ask))
                try:
                    return await task
                except asyncio.CancelledError:
                    task.cancel()
                    if not self._over:
                        raise
                finally:
                    del self._asking[key]
        expired = self._over == "expired"
        return result_line(line, self._batch.id, None, EXPIRED) if expired else b""

    async def _watch(self) -> None:
        """Publishes the counts, and ends the batch early where it must."""
        while not self._over:
            await asyncio.sleep(POLL_SECONDS)
            batch = await self._change(self._count)
            if batch.status != "in_progress":
                self._over = "cancelled"
            elif self._store.clock() >= batch.expires_at:
                self._over = "expired"
            elif await self._store.room() < 0:
                self._over = "failed"
        asking = dict(self._asking)
        for key in asking:
            await self._abort(key, self._tenant)
        for task in asking.values():
            task.cancel()

    def _count(self, batch: BatchObject) -> None:
        batch.request_counts.completed = self._counts[True]
        batch.request_counts.failed = self._counts[False]

    # --- finalizing ---

    async def _finalize(self) -> None:
        """Sorts the results into the two files that the owner sees, and ends the batch. Done again
        from the start where a gateway dies in between: the files it has made are then not named by
        the batch, and expire."""
        given = self._batch.output_expires_after
        seconds = None if given is None else float(given["seconds"])
        paths = self._store.new_path(), self._store.new_path()
        names: list[str | None] = []
        try:
            await asyncio.to_thread(self._sort, *paths)
            for path, kind in zip(paths, ("output", "error"), strict=True):
                names.append(None if not path.stat().st_size else (await self._store.add_file(
                    self._tenant, path, f"{self._batch.id}_{kind}.jsonl", OUTPUT, seconds)).id)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        status = self._over or "completed"

        def end(batch: BatchObject) -> None:
            batch.output_file_id, batch.error_file_id = names
            if status == "failed":
                batch.errors = errors_of("storage_full", "the store of files is full")
            batch.move(status, self._store.clock())

        self._batch = await self._store.change_batch(self._batch.id, end, 0)
        LOG.info("batch %s is %s: %d answered, %d not", self._batch.id, status,
                 self._batch.request_counts.completed, self._batch.request_counts.failed)

    async def fail(self, code: str, message: str) -> None:
        """Ends the batch without its results."""
        def end(batch: BatchObject) -> None:
            batch.errors = errors_of(code, message)
            batch.move("failed", self._store.clock())

        await self._store.change_batch(self._batch.id, end, 0)

    def _sort(self, output: Path, error: Path) -> None:
        self._results.resume()
        with output.open("xb") as good, error.open("xb") as bad:
            for line in self._results.read():
                (good if succeeded(line) else bad).write(line)


def errors_of(code: str, message: str) -> dict[str, Any]:
    """Returns a batch's errors: one, of no line."""
    return {"object": "list",
            "data": [{"code": code, "message": message, "param": None, "line": None}]}


def lines_of(lines: Iterator[bytes]) -> Iterator[BatchLine]:
    """Yields the lines of an input, parsed."""
    for number, data in enumerate(lines, 1):
        yield parse_line(number, data)
