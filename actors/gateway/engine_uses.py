"""A gateway's uses of models: it asks the model manager for a model's engine, and keeps the engine
while a request needs it.

Uses are leases (`model_manager/manager_messages.py`): all of them are sent again every
`KEEP_USES_SECONDS`, from which a manager that was started again learns of them. So nothing here
depends on what a dead manager may have received.

An engine that ends while it is used is started again, in the same run directory and with the same
ledger. Its client waits for that and goes on with its requests (`client/session.py`), so its uses
stay granted; they end only when the manager refuses them after all.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq
from msgspec.structs import replace

from actorium.actors.config.models_settings import parse_keep_alive
from actorium.actors.config.tree import Config, load
from actorium.actors.errors import ActoriumError, EngineUnavailable
from actorium.actors.gateway.http.http_errors import INVALID, LIMIT, SERVER, HttpError, bad_field
from actorium.actors.gateway.served_engine import STATUS_SECONDS, ServedEngine
from actorium.actors.health import SLEEPING, activity_of
from actorium.actors.messages import MAX_MESSAGE_BYTES, Message
from actorium.actors.model_manager.manager_messages import (
    KEEP_USES_SECONDS,
    FromManagerFront,
    KeepUses,
    ListModels,
    ModelList,
    ModelUnloaded,
    ModelUse,
    PullModel,
    PullProgress,
    ReleaseModel,
    ServedModelInfo,
    UnloadModel,
    UseModel,
    UseProgress,
    UseReady,
    UseRefused,
)
from actorium.actors.runtime import rundir
from actorium.actors.runtime.roles import MANAGER_ROLE
from actorium.actors.runtime.security import private_paths

LOG = logging.getLogger("actorium.gateway")
REPORT_SECONDS = 3.0
"""Between two reports to a request that waits for its engine."""
ANSWER_SECONDS = 10.0
"""How long the manager may take for an answer. One that has died is back within these."""
LINGER_MS = 200
"""How long closing may take to send the last releases."""
_STATUS: dict[str, tuple[int, str]] = {
    "model_not_found": (404, INVALID), "model_required": (400, INVALID),
    "model_failed": (500, SERVER), "does_not_fit": (500, SERVER), "queue_full": (429, LIMIT),
    "deadline": (504, SERVER)}
"""Status and type of the error for a refusal; any other is a 503."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromManagerFront).decode
Answer = TypeVar("Answer", bound=Message)
Report = Callable[[UseProgress | None], Awaitable[None]]
"""Is given, now and then, the state of what a request waits for; None = not known."""


class EngineUse:
    """A granted use of an engine. It ends when all who hold it have released it."""

    def __init__(self, engine: ServedEngine, end: Callable[[], None]) -> None:
        self.engine, self._end, self._holders = engine, end, 1

    def hold(self) -> EngineUse:
        """Adds a holder, and returns the use."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Removes a holder."""
        self._holders -= 1
        if not self._holders:
            self._end()


class PendingUse:
    """A use, granted or waiting."""

    def __init__(self, use: ModelUse) -> None:
        self.use = use
        self.progress: UseProgress | None = None
        self.answer: UseReady | UseRefused | None = None
        self.answered = asyncio.Event()


class PendingQuestion(NamedTuple):
    """A question that the manager answers with one message, or with several."""

    question: Message
    answers: asyncio.Queue[Any]


class KnownEngine:
    """An engine that has been used, and the stamp of its configuration's file."""

    def __init__(self, stamp: tuple[int, int], engine: ServedEngine) -> None:
        self.stamp, self.engine = stamp, engine
        self.uses = 0
        """Granted uses. While there are any, the next engine in its run directory is the same one,
        started again."""


class EngineUses:
    """One gateway's uses, and its questions to the manager. Closed by `close`."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """run_dir, config: the server's."""
        self._address = rundir.address(run_dir, f"{MANAGER_ROLE}.front")
        self._wait = config.models.models_wait
        self._patience = config.gateway.recovery_patience
        self._socket: zmq.Socket[Any] | None = None
        self._prefix, self._count = os.urandom(6).hex(), 0
        self._uses: dict[str, PendingUse] = {}
        self._questions: dict[str, PendingQuestion] = {}
        self._engines: dict[str, KnownEngine] = {}
        """By their run directories."""
        self._loading: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.TimerHandle | None = None

    # --- uses ---

    async def use(self, name: str, keep_alive: float | None = None, wait: float | None = None,
                  report: Report | None = None) -> EngineUse:
        """Returns a use of the engine of a model, which is started unless it runs.

        name: a served one, empty = the default model; keep_alive: seconds for which the engine
        stays after its last use, -1 = for good, None = as the model's settings say; wait: the most
        seconds that this may take, None = as --models-wait says. Raises `HttpError` where the
        manager refuses.
        """
        pending = PendingUse(ModelUse(self._new_id(), name[:1024], keep_alive))
        use_id = pending.use.id
        self._uses[use_id] = pending
        granted = False
        try:
            self._send(UseModel(pending.use, wait))
            await self._answered(pending, self._wait if wait is None else wait, report)
            if isinstance(pending.answer, UseRefused):
                raise refusal(pending.answer)
            assert pending.answer is not None
            known = await self._engine(pending.answer)
            known.uses, granted = known.uses + 1, True
            return EngineUse(known.engine, lambda: self._end_use(use_id, known))
        finally:
            if not granted:
                self._release(use_id)

    async def _answered(self, pending: PendingUse, wait: float, report: Report | None) -> None:
        late = monotonic() + wait + ANSWER_SECONDS
        while not pending.answered.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    await pending.answered.wait()
                return
            if monotonic() > late:
                raise _unavailable("does not answer")
            if report is not None:
                await report(pending.progress)

    def _end_use(self, use_id: str, known: KnownEngine) -> None:
        known.uses -= 1
        self._release(use_id)

    def _release(self, use_id: str) -> None:
        if self._uses.pop(use_id, None) is not None and self._socket is not None:
            self._send(ReleaseModel(use_id))

    async def _engine(self, ready: UseReady) -> KnownEngine:
        """Returns the engine in a run directory: another one, if its launcher is another one and
        nobody uses the one before."""
        path = Path(ready.run_dir)
        try:
            stat = (path / "config.json").stat()
            stamp = stat.st_ino, stat.st_mtime_ns
            known = self._engines.get(ready.run_dir)
            if known is not None and (known.uses or known.stamp == stamp):
                return known
            config = load(private_paths.read_file(path / "config.json"))
        except (OSError, private_paths.UnsafePath) as error:
            raise EngineUnavailable(f"the engine of {ready.model!r} has ended: {error}") from None
        engine = KnownEngine(stamp, ServedEngine(config, path, self._patience, self._wait))
        self._engines[ready.run_dir] = engine
        if known is not None:
            await known.engine.close()
        return engine

    def load(self, name: str, keep_alive: float | None) -> None:
        """Begins to load a model, for nobody yet."""
        async def use() -> None:
            try:
                (await self.use(name, keep_alive)).release()
            except (HttpError, ActoriumError) as error:  # the list of models says that as well
                LOG.warning("%s was not loaded: %s", name, error)

        task = asyncio.ensure_future(use())
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    # --- questions ---

    async def models(self) -> ModelList:
        """Returns the served models. Raises `HttpError`."""
        listed = await self._ask(ListModels(self._new_id()), ModelList)
        return replace(listed, models=await asyncio.gather(*map(self._with_sleep, listed.models)))

    async def _with_sleep(self, info: ServedModelInfo) -> ServedModelInfo:
        """Returns a model with what its engine's watchdog says: the manager knows of no sleep."""
        if info.state != "ready":
            return info
        try:
            known = await self._engine(UseReady("", info.name, info.run_dir))
            status = await known.engine.client.status(STATUS_SECONDS)
        except ActoriumError:  # it ends, or recovers
            return info
        sleeps = activity_of(status.actors) == SLEEPING
        return replace(info, state="sleeping") if sleeps else info

    async def unload(self, name: str) -> ModelUnloaded:
        """Ends a model's engine once nobody uses it. Raises `HttpError`."""
        return await self._ask(UnloadModel(self._new_id(), name[:1024]), ModelUnloaded)

    async def _ask(self, question: ListModels | UnloadModel, kind: type[Answer]) -> Answer:
        answers = self._put_question(question)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await answers.get()
        except TimeoutError:
            raise _unavailable("does not answer") from None
        finally:
            del self._questions[question.rid]
        if not isinstance(answer, kind):
            raise refusal(answer)
        return answer

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Fetches a model by its name, and yields how far that is, the last with `done`. Raises
        `HttpError`."""
        question = PullModel(self._new_id(), name[:1024])
        answers = self._put_question(question)
        try:
            while True:
                answer = await answers.get()
                if not isinstance(answer, PullProgress):
                    raise refusal(answer)
                yield answer
                if answer.done:
                    return
        finally:
            del self._questions[question.rid]

    def _put_question(self, question: ListModels | UnloadModel | PullModel) -> asyncio.Queue[Any]:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._questions[question.rid] = PendingQuestion(question, answers)
        self._send(question)
        return answers

    # --- the socket ---

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def _send(self, message: Message) -> None:
        socket = self._socket if self._socket is not None else self._connect()
        with suppress(zmq.Again):  # uses and questions are sent again
            socket.send(_encode(message), zmq.NOBLOCK)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._on_readable)  # ZMQ's descriptor reports no edge that a send has taken
        if self._keeping is None:
            self._keeping = loop.call_later(KEEP_USES_SECONDS, self._keep)

    def _connect(self) -> zmq.Socket[Any]:
        socket = self._socket = zmq.Context(io_threads=1).socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"g" + os.urandom(12))
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(self._address)
        asyncio.get_running_loop().add_reader(int(socket.getsockopt(zmq.FD)), self._on_readable)
        return socket

    def _keep(self) -> None:
        """Renews the leases, and asks again what was not answered."""
        self._keeping = None
        for path, known in list(self._engines.items()):
            if not known.uses and not rundir.is_running(Path(path)):
                del self._engines[path]
                asyncio.ensure_future(known.engine.close())
        if self._uses:
            self._send(KeepUses([pending.use for pending in self._uses.values()]))
        for pending in self._questions.values():
            if not isinstance(pending.question, PullModel):
                self._send(pending.question)

    def _on_readable(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(_decode(frame))
            except msgspec.MsgspecError as error:
                LOG.error("a message of the model manager was not understood: %s", error)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, UseProgress | UseReady | UseRefused) \
                and (pending := self._uses.get(message.id)) is not None:
            if isinstance(message, UseProgress):
                pending.progress = message
            elif not pending.answered.is_set():
                pending.answer = message
                pending.answered.set()
            elif isinstance(message, UseRefused):
                self._on_lost(pending, message)
            return
        name = message.id if isinstance(message, UseRefused) else getattr(message, "rid", "")
        if (question := self._questions.get(name)) is not None:
            question.answers.put_nowait(message)

    def _on_lost(self, pending: PendingUse, refused: UseRefused) -> None:
        """A use that was granted has ended, as its engine has, which is not started again."""
        del self._uses[pending.use.id]
        assert isinstance(pending.answer, UseReady)
        path = pending.answer.run_dir
        if refused.code == "engine_failed" or not rundir.is_running(Path(path)):
            known = self._engines.pop(path, None)
            if known is not None:  # else another use of it has ended before
                known.engine.give_up(refused.message)

    async def close(self) -> None:
        """Disconnects: the manager forgets the uses. Aborts what the engines work on."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        for known in self._engines.values():
            await known.engine.close()
        self._engines.clear()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(int(self._socket.getsockopt(zmq.FD)))
            socket, self._socket = self._socket, None
            context = socket.context
            socket.close()
            await asyncio.to_thread(context.term)


def checked_keep_alive(value: object) -> float:
    """Returns the seconds of a body's `keep_alive`, -1 = for good. Raises `HttpError` 400."""
    try:
        return parse_keep_alive(value)
    except ValueError as error:
        raise bad_field("keep_alive", str(error)) from None


def refusal(refused: UseRefused) -> HttpError:
    """Returns the HTTP error for a refusal of the manager's."""
    status, kind = _STATUS.get(refused.code, (503, SERVER))
    param = "model" if status in (400, 404) else None
    return HttpError(status, refused.message, param, kind, refused.code)


def _unavailable(why: str) -> HttpError:
    return HttpError(503, f"the model manager {why}", None, SERVER, "unavailable")
