"""Every call of a client, written once: `AsyncClient` inherits them, `Client` runs them to their
end (client.py)."""

from __future__ import annotations

import os
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from actorium.actors.client.media import is_loaded, load_media
from actorium.actors.client.pending import TOKENIZER, WATCHDOG, PendingRequest, RequestProgress
from actorium.actors.client.relevance import (
    PairScorer,
    ScoringOptions,
    numbers_of,
    pooled_of,
)
from actorium.actors.client.request_batch import WINDOW, RequestBatch
from actorium.actors.client.requests import (
    Completion,
    Request,
    StreamDelta,
    check_messages,
    check_template,
    check_timeout,
    encode_raw,
    pack_token_ids,
)
from actorium.actors.client.session import POLL, ClientSession
from actorium.actors.client.target import LocalTarget
from actorium.actors.client.tensor_file import write_tensors
from actorium.actors.errors import (
    Aborted,
    ActoriumError,
    BadModel,
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    MediaExpired,
    from_code,
)
from actorium.actors.health import ENDED, memory_of, speculation_of
from actorium.actors.messages import (
    MAX_VALUES,
    Abort,
    AdapterCall,
    Control,
    Detokenize,
    FlushCache,
    GetStatus,
    Order,
    PromptEmbeds,
    RunningMode,
    ServerInfo,
    Status,
    TensorCall,
    Tokenize,
    WeightsCall,
)
from actorium.actors.params import PoolingParams, SamplingParams
from actorium.actors.prompt_embeds import of_array

Prompt: TypeAlias = str | list[int] | PromptEmbeds
Prompts: TypeAlias = str | list[int] | list[str] | list[list[int]] | list[str | list[int]]

READY_TIMEOUT = 600.0
STATUS_TIMEOUT = 10.0


class AsyncDeltaStream(AsyncIterator[StreamDelta]):
    """Deltas of one request, which is sent at the first `anext`."""

    def __init__(self, client: ClientCalls, request: Request) -> None:
        self._session = client._session
        self._request = request
        self._pending: PendingRequest | None = None
        self._signal = self._session.signal()
        self._again = False
        """The request has been sent again, with media loaded anew."""

    @property
    def rid(self) -> str:
        """Returns the request's id (for `abort`); "" until it was sent."""
        return "" if self._pending is None else self._pending.rid

    @property
    def progress(self) -> RequestProgress | None:
        """Returns None until the request was sent."""
        return None if self._pending is None else self._pending.progress

    @property
    def prompt_tokens(self) -> int | None:
        """None until the request was accepted; known with its first delta."""
        return None if self._pending is None else self._pending.prompt_tokens

    @property
    def created(self) -> int:
        """When the request was first made (`Resumable.created`), known with its first delta; else
        0."""
        return 0 if self._pending is None else self._pending.created

    async def accepted(self) -> int:
        """Sends the request, if it was not, and waits for `prompt_tokens`. 0 if it ends before, the
        reason of which the next `anext` gives."""
        pending = await self.start()
        await self._wait(lambda: pending.prompt_tokens is not None or pending.done)
        return pending.prompt_tokens or 0

    def more(self) -> list[StreamDelta]:
        """Returns the deltas that have come already, without waiting."""
        if self._pending is None:
            return []
        deltas = list(self._pending.deltas)
        self._pending.deltas.clear()
        return deltas

    async def start(self) -> PendingRequest:
        """Sends the request, if it was not. Raises `InvalidRequest` or `EngineUnavailable`."""
        if self._pending is None:
            session = self._session
            await session.ready()
            request = self._request
            if not is_loaded(request):
                request = await load_media(session, request)
            if self._pending is None:  # else another task that waits for the stream has sent it
                self._submit(request)
        assert self._pending is not None
        return self._pending

    def _submit(self, request: Request) -> None:
        session = self._session
        pending, frame = session.core.submit(request, monotonic(), streaming=True)
        pending.notify = self._signal.set
        self._pending = pending
        session.send(TOKENIZER, frame)

    async def _reloaded(self, pending: PendingRequest) -> bool:
        """Returns whether the request was sent again, once, since its images were evicted."""
        if not isinstance(pending.error, MediaExpired) or self._again or is_loaded(self._request):
            return False
        self._again = True
        self._submit(await load_media(self._session, self._request))
        return True

    async def _wait(self, until: Callable[[], bool]) -> None:
        try:
            await self._signal.wait(until)
        except self._session.cancelled:
            await self.aclose()
            raise

    async def __anext__(self) -> StreamDelta:
        pending = self._pending or await self.start()
        if not pending.deltas:
            await self._wait(lambda: bool(pending.deltas) or pending.done)
        if pending.deltas:
            return pending.deltas.popleft()
        if await self._reloaded(pending):
            return await self.__anext__()
        if pending.error is not None:
            error, pending.error = pending.error, None
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Aborts the request unless it has ended."""
        pending = self._pending
        if pending is not None and not pending.done and self._session.core.forget(pending.rid):
            pending.done = True
            self._session.abort([Abort(pending.rid)])

    async def __aenter__(self) -> AsyncDeltaStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class ClientCalls:
    """The calls of one engine. All errors are those of `actors/errors.py`."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    # --- completions --------------------------------------------------------------------------

    async def generate(self, prompt: Prompts | None = None,
                       params: SamplingParams | Sequence[SamplingParams] | None = None,
                       timeout: float | None = None, return_errors: bool = False,
                       priority: int = 0, truncate_prompt_tokens: int | None = None,
                       cache_salt: str | None = None, adapter: str | None = None,
                       prompt_embeds: Any = None) -> Any:
        """Completes one prompt or many, and waits for all of them.

        `prompt` is text, a list of token ids, or a list of either. What comes back:
        one prompt: a `Completion`; with n > 1 a list of n. Several prompts: a list in their order
        of `Completion` (n == 1) or of lists of n. `params` may be a list, one for each prompt.
        `timeout` (seconds) counts for each request from when it is sent. A higher `priority` goes
        first where the engine schedules by priority. `truncate_prompt_tokens`, `cache_salt` and
        `adapter` are those of `Request`. `prompt_embeds`, in the place of `prompt`, is an array of
        numpy or a tensor of torch, [tokens, hidden], or a list of those. The first error is raised
        and the rest aborted, unless `return_errors`: then errors stand in the list of results.
        """
        single, prompts = _prompts(prompt) if prompt_embeds is None \
            else _embeds(prompt, prompt_embeds)
        each = params if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(f"params: {len(each)} for {len(prompts)} prompts", "params")
        completions: list[Any] = [None] * len(prompts)
        results = self.run([
            Request(prompt=text, params=how, timeout=timeout, priority=priority,
                    truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt,
                    adapter=adapter)
            for text, how in zip(prompts, each, strict=True)])
        try:
            async for index, result in results:
                if isinstance(result, ActoriumError) and not return_errors:
                    raise result
                completions[index] = result
        finally:
            await results.aclose()
        if all(not isinstance(entry, SamplingParams) or entry.n == 1 for entry in each):
            completions = [choices[0] if isinstance(choices, list) else choices
                           for choices in completions]
        return completions[0] if single else completions

    async def run(self, requests: Iterable[Request], window: int = WINDOW
                  ) -> AsyncGenerator[tuple[int, list[Completion] | ActoriumError], None]:
        """Runs any number of requests, at most `window` at once.

        Yields (number of the request, its choices or its error) as they finish. Closing the
        iterator aborts what is left.
        """
        session = self._session
        batch, signal = RequestBatch(session.core, requests, window), session.signal()
        batch.notify = signal.set
        await session.ready()
        try:
            while not batch.done:
                for frame in batch.submit(monotonic()):
                    session.send(TOKENIZER, frame)
                if batch.unloaded:
                    await self._load_next(batch)
                else:
                    await signal.wait(batch.settled)
                while batch.ready:
                    yield batch.ready.popleft()
        finally:
            session.abort(batch.cancel())

    async def _load_next(self, batch: RequestBatch) -> None:
        number, request = batch.unloaded[0]
        try:
            result: Request | ActoriumError = await load_media(self._session, request)
        except ActoriumError as error:
            result = error
        batch.loaded(number, result)

    def stream(self, prompt: Prompt | None = None, params: SamplingParams | None = None,
               timeout: float | None = None, priority: int = 0,
               truncate_prompt_tokens: int | None = None,
               cache_salt: str | None = None, adapter: str | None = None,
               prompt_embeds: Any = None) -> AsyncDeltaStream:
        """Iterates over the new deltas one by one, of one prompt (all its n choices), which may be
        an array as in `generate`.

        `aclose` the iterator when leaving early: unlike a `for` loop, `async for` does not close an
        abandoned one at once.
        """
        if prompt_embeds is not None:
            _, (prompt,) = _embeds(prompt, [prompt_embeds])
        return AsyncDeltaStream(self, Request(
            prompt=prompt, params=params, timeout=timeout, priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt,
            adapter=adapter))

    async def chat(self, messages: list[Any], params: SamplingParams | None = None,
                   stream: bool = False, timeout: float | None = None,
                   template_args: dict[str, Any] | None = None, priority: int = 0,
                   chat_template: str | None = None, add_generation_prompt: bool = True,
                   continue_final_message: bool = False,
                   truncate_prompt_tokens: int | None = None,
                   cache_salt: str | None = None,
                   mm_processor_kwargs: dict[str, Any] | None = None,
                   adapter: str | None = None) -> Any:
        """Answers a conversation: `generate` of the model's chat template over `messages`.

        `messages` are `{"role": ..., "content": ...}`, with contents of text, or lists of texts,
        `Image` and `Video`; what follows `priority` is as in `Request`.
        Returns a `Completion` (a list for n > 1), or with `stream` what `stream` returns.
        """
        request = Request(messages=messages, params=params, timeout=timeout,
                          mm_processor_kwargs=mm_processor_kwargs or {},
                          template_args=template_args or {}, priority=priority,
                          chat_template=chat_template, cache_salt=cache_salt,
                          add_generation_prompt=add_generation_prompt,
                          continue_final_message=continue_final_message,
                          truncate_prompt_tokens=truncate_prompt_tokens, adapter=adapter)
        if stream:
            return AsyncDeltaStream(self, request)
        results = self.run([request])
        try:
            _, result = await anext(results)
        finally:
            await results.aclose()
        if isinstance(result, ActoriumError):
            raise result
        return result[0] if len(result) == 1 else result

    # --- vectors and scores -------------------------------------------------------------------

    async def embed(self, texts: Prompts, dimensions: int | None = None,
                    normalize: bool | None = None, timeout: float | None = None,
                    priority: int = 0, truncate_prompt_tokens: int | None = None) -> Any:
        """Returns the vectors of texts, or of lists of token ids, as `array.array("f")`: of one its
        vector, of several a list in their order.

        `dimensions` keeps so many leading numbers, of models that were trained for it. `normalize`:
        whether vectors get the length 1; None = as the model says. The others are as in `generate`.
        The first error is raised.
        """
        single, prompts = _prompts(texts, "texts")
        params = PoolingParams(task="embed", dimensions=dimensions, use_activation=normalize)
        vectors = [array("f", pooled_of(completion).data) for completion in await self._complete([
            Request(prompt=text, pooling=params, timeout=timeout, priority=priority,
                    truncate_prompt_tokens=truncate_prompt_tokens) for text in prompts])]
        return vectors[0] if single else vectors

    async def classify(self, texts: Prompts, timeout: float | None = None, priority: int = 0,
                       truncate_prompt_tokens: int | None = None) -> Any:
        """Returns the probabilities of a text's classes by their names, as a dict; of several texts
        a list in their order. The parameters are as in `generate`."""
        single, prompts = _prompts(texts, "texts")
        labels = ((await self.server_info()).get("pooling") or {}).get("labels") or []
        params = PoolingParams(task="classify")
        classes = [
            dict(zip(labels, numbers_of(completion), strict=True))
            for completion in await self._complete([
                Request(prompt=text, pooling=params, timeout=timeout, priority=priority,
                        truncate_prompt_tokens=truncate_prompt_tokens) for text in prompts])]
        return classes[0] if single else classes

    async def score(self, query: str, documents: Sequence[str], instruct: str | None = None,
                    timeout: float | None = None, priority: int = 0,
                    truncate_prompt_tokens: int | None = None) -> list[float]:
        """Returns how well each document answers the query: by the score of a cross-encoder, the
        cosine of two vectors, or the probability that a model that generates says yes.

        `instruct` is the query's purpose, of the last of these, or of a model whose chat template
        has pairs (roles query and document). The others are as in
        `generate`.
        """
        scorer = PairScorer(await self.server_info(), self._complete, self.tokenize,
                            timeout=timeout, priority=priority,
                            truncate_prompt_tokens=truncate_prompt_tokens)
        scores = await scorer.score([(query, document) for document in documents],
                                    ScoringOptions(instruct=instruct))
        return scores.scores

    async def _complete(self, requests: list[Request]) -> list[Completion]:
        """Returns the completions of requests of one choice each, in order. Raises the first error.
        """
        completions: list[Any] = [None] * len(requests)
        results = self.run(requests)
        try:
            async for index, result in results:
                if isinstance(result, ActoriumError):
                    raise result
                completions[index], = result
        finally:
            await results.aclose()
        return completions

    async def abort(self, rid: str) -> None:
        """End a request of this client (its stream's `rid`) now."""
        self._session.abort([Abort(rid)])

    # --- questions ----------------------------------------------------------------------------

    async def tokenize(self, text: str, add_special_tokens: bool = True,
                       timeout: float | None = None, parse_special: bool = True) -> list[int]:
        """Returns the token ids of `text`. parse_special: False = special tokens that it writes are
        text like any other."""
        if not isinstance(text, str):
            raise InvalidRequest(f"text: must be a string, got {type(text).__name__}", "text")
        answer = await self._session.call(
            TOKENIZER, lambda rid: Tokenize(rid, text, add_special_tokens,
                                            parse_special=parse_special), timeout)
        return array("i", answer.tokens).tolist()

    async def tokenize_chat(self, messages: list[Any], template_args: dict[str, Any] | None = None,
                            tools: list[dict[str, Any]] | None = None,
                            timeout: float | None = None, chat_template: str | None = None,
                            add_generation_prompt: bool = True,
                            continue_final_message: bool = False, media: Sequence[Any] = (),
                            mm_processor_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Returns the token ids of the prompt that the chat template makes of `messages`.
        media: as of `Request`."""
        loaded = await load_media(self._session, Request(
            messages=messages, media=list(media), timeout=timeout,
            mm_processor_kwargs=mm_processor_kwargs or {}))
        turns, template = check_messages(loaded.messages), check_template(chat_template)
        args = encode_raw(template_args or {}, dict, "template_args")
        shown = encode_raw(tools or [], list, "tools")
        answer = await self._session.call(TOKENIZER, lambda rid: Tokenize(
            rid, "", False, turns, args, shown, chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, media=loaded.media), timeout)
        return array("i", answer.tokens).tolist()

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False,
                         timeout: float | None = None) -> str:
        """Returns the text of token ids."""
        tokens = pack_token_ids(token_ids, "token_ids") if len(token_ids) else b""
        answer = await self._session.call(
            TOKENIZER, lambda rid: Detokenize(rid, tokens, skip_special_tokens), timeout)
        return str(answer.text)

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        """Model, limits, defaults and configuration of the engine; `memory`: its pages, prefix
        cache and preemptions as of its last heartbeat, and as `bytes` what the worker holds,
        measured beside planned (`health.memory_of`); `speculation`: drafts and how many were
        accepted (`health.speculation_of`)."""
        answer = await self._session.call(TOKENIZER, ServerInfo, timeout)
        info = msgspec.json.decode(answer.json, type=dict[str, Any])
        status = await self.status(timeout or STATUS_TIMEOUT)
        return info | {"memory": memory_of(status), "speculation": speculation_of(status)}

    async def flush_cache(self, timeout: float | None = 30.0) -> dict[str, int]:
        """Makes the engine forget every cached prefix that no running sequence holds.

        Returns {"pages": number of pages freed, "kept": cached pages still held}.
        """
        await self._session.ready()
        answer = await self._session.call(TOKENIZER, FlushCache, timeout)
        return msgspec.json.decode(answer.json, type=dict[str, int])

    # --- sleep and pause ----------------------------------------------------------------------

    async def sleep(self, level: int = 1, mode: RunningMode = "wait",
                    timeout: float | None = None) -> dict[str, Any]:
        """Has the engine give back the memory of weights and pages, and returns when it has.

        level: 1 = the worker's process stays, which wakes sooner; 2 = it ends. mode: requests that
        run end before ("wait"), go on after the wake with the same tokens ("keep"), or are aborted
        ("abort"). Requests that come meanwhile wait for `wake_up`. timeout: seconds, None = as long
        as it takes. Returns {"sleeping": level, "paused": bool, "cache_kept": whether cached
        prefixes are kept in the host's memory}. Raises `Aborted` if the engine is woken before.
        """
        if level not in (1, 2):
            raise InvalidRequest(f"level: must be 1 or 2, got {level!r}", "level")
        state = await self._control("sleep", timeout, level=level, mode=mode)
        if not state["sleeping"]:
            raise Aborted("sleep: the engine was woken before it slept")
        while state["sleeping"] == 2 and any(
                actor.role.startswith("worker-") and actor.phase not in ENDED
                for actor in (await self.status()).actors):
            await self._session.pause(POLL)
        return state

    async def wake_up(self, timeout: float | None = READY_TIMEOUT) -> None:
        """Has an engine that sleeps load its model again, and returns when requests run. Raises
        `Aborted` if it is sent to sleep again before."""
        if (await self._control("wake", timeout))["sleeping"]:
            raise Aborted("wake_up: the engine was sent to sleep again")

    async def is_sleeping(self, timeout: float | None = 30.0) -> bool:
        """Returns whether the engine sleeps, at any level."""
        return bool((await self._control("state", timeout))["sleeping"])

    async def pause(self, mode: RunningMode = "wait", clear_cache: bool = False,
                    timeout: float | None = None) -> None:
        """Holds requests back until `resume`, and returns when none is computed any more. Weights
        and pages stay.

        mode: requests that run end before ("wait"), stop where they are ("keep"), also give up
        their pages and are computed again later ("retract"), or are aborted ("abort").
        clear_cache: the prefix cache is emptied, too; what is kept is then computed again. timeout:
        seconds, None = as long as it takes.
        """
        await self._control("pause", timeout, mode=mode, clear_cache=clear_cache)

    async def resume(self, timeout: float | None = 30.0) -> None:
        """Ends a pause."""
        await self._control("resume", timeout)

    async def is_paused(self, timeout: float | None = 30.0) -> bool:
        """Returns whether the engine is paused."""
        return bool((await self._control("state", timeout))["paused"])

    async def _control(self, order: Order, timeout: float | None, level: int = 1,
                       mode: RunningMode = "wait", clear_cache: bool = False) -> dict[str, Any]:
        self._check_mode(mode)
        await self._session.ready()
        answer = await self._session.call(
            TOKENIZER, lambda rid: Control(rid, order, level, mode, clear_cache), timeout)
        return msgspec.json.decode(answer.json, type=dict[str, Any])

    def _check_mode(self, mode: RunningMode) -> None:
        if mode not in get_args(RunningMode):
            raise InvalidRequest(f"mode: must be one of {', '.join(get_args(RunningMode))}", "mode")

    # --- adapters -----------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str | os.PathLike[str], replace: bool = False,
                           timeout: float | None = READY_TIMEOUT) -> dict[str, Any]:
        """Has the engine serve a LoRA adapter, and returns what it knows of it (as `adapters`) once
        requests can name it. The engine must have been started with enable_lora.

        path: a folder in PEFT's format or a .gguf file, on the engine's machine. replace: if there
        is an adapter of that name, requests that come from now on get the new one, and those that
        run end with the old one; without it that is an `InvalidRequest`. Raises `BadModel` where
        the adapter cannot be served.
        """
        place = os.path.abspath(os.path.expanduser(path))
        listed = await self._adapter_call(timeout, "load", name, place, replace)
        return next((each for each in listed if each["name"] == name), {})

    async def unload_adapter(self, name: str, timeout: float | None = 30.0) -> None:
        """Takes an adapter's name away. Requests that were accepted before end with it. Raises
        `UnknownAdapter`."""
        await self._adapter_call(timeout, "unload", name)

    async def adapters(self, timeout: float | None = 30.0) -> list[dict[str, Any]]:
        """Returns the adapters that requests may name: `name`, `path`, `rank`, `base` (what it was
        trained on), `digest` (SHA-256 of its files), `loaded` (the worker has it in its memory),
        and its `running` and `waiting` sequences."""
        return await self._adapter_call(timeout, "list")

    async def _adapter_call(self, timeout: float | None,
                            order: Literal["load", "unload", "list"], name: str = "",
                            path: str = "", replace: bool = False) -> list[dict[str, Any]]:
        await self._session.ready()
        answer = await self._session.call(
            TOKENIZER, lambda rid: AdapterCall(rid, order, name, path, replace), timeout)
        content = msgspec.json.decode(answer.json, type=dict[str, Any])
        if (error := content.get("error")) is not None:
            raise from_code(error["code"], error["message"])
        listed: list[dict[str, Any]] = content["adapters"]
        return listed

    # --- weights ------------------------------------------------------------------------------

    async def update_weights(
            self, weights: str | os.PathLike[str] | Mapping[str, Any] | bytes,
            mode: RunningMode = "wait", clear_cache: bool = True, version: int = 0,
            timeout: float | None = None) -> dict[str, Any]:
        """Gives the engine other weights of the same model, while it serves, and returns
        {"version": their number, "path", "seconds": that the engine computed nothing,
        "read_seconds": that it read them beside running requests}.

        weights: a directory with a checkpoint; or tensors by name (torch's or numpy's), of all the
        model or of a part of it, or the bytes of a safetensors file of them, for an engine on this
        machine. mode: requests that run end before ("wait"), go on with the new weights over what
        the old ones have computed ("keep"), are computed again by the new ones and then go on
        ("retract"), or are aborted ("abort"); requests that come meanwhile wait. version: above the
        present one, which begins at 0; 0 = the next. clear_cache: the prefix cache is emptied, too;
        it is never used across versions. timeout: seconds, None = as long as it takes. Raises
        `BadModel` where the model has no such tensors; the engine goes on with what it had.
        """
        self._check_mode(mode)
        if not 0 <= version < 2**31:
            raise InvalidRequest(f"version: must be from 1 to {2**31 - 1}, got {version!r}",
                                 "version")
        path, file = "", None
        if isinstance(weights, Mapping | bytes):
            if not isinstance(self._session.target, LocalTarget):
                raise InvalidRequest("weights: tensors go to an engine on the same machine; give "
                                     "one on another a directory of its own", "weights")
            self._session.target.check_running()
            file = write_tensors(self._session.target.directory, weights)
        else:
            path = os.path.abspath(os.path.expanduser(weights))
        try:
            return await self._weights_call(timeout, lambda rid: WeightsCall(
                rid, "update", path, str(file or ""), mode, version, clear_cache))
        except BadModel:
            if file is not None:
                file.unlink(missing_ok=True)
            raise

    async def weight_version(self, timeout: float | None = 30.0) -> int:
        """Returns the version of the engine's weights; 0 = those of its start."""
        state = await self._weights_call(timeout, lambda rid: WeightsCall(rid, "state"))
        return int(state["version"])

    async def get_weights(self, name: str, most: int = 100,
                          timeout: float | None = 60.0) -> dict[str, Any]:
        """Returns a tensor of the weights that are served, as their files have it: {"shape",
        "dtype", "values": its first `most` rows, of a vector numbers}. Raises `BadModel` where
        there is none."""
        if not 0 < most <= MAX_VALUES:
            raise InvalidRequest(f"most: must be from 1 to {MAX_VALUES}, got {most!r}", "most")
        return await self._weights_call(timeout, lambda rid: TensorCall(rid, name, most))

    async def _weights_call(self, timeout: float | None,
                            call: Callable[[str], WeightsCall | TensorCall]) -> dict[str, Any]:
        await self._session.ready()
        answer = await self._session.call(TOKENIZER, call, timeout)
        content = msgspec.json.decode(answer.json, type=dict[str, Any])
        if (error := content.get("error")) is not None:
            raise from_code(error["code"], error["message"])
        return content

    async def status(self, timeout: float | None = STATUS_TIMEOUT) -> Status:
        """Returns the state of each actor, at once."""
        return await self._status(False, timeout)

    async def _status(self, wait: bool, timeout: float | None) -> Status:
        answer: Status = await self._session.call(
            WATCHDOG, lambda rid: GetStatus(rid, wait), timeout)
        return answer

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the engine can serve; it need not have been started yet.

        Raises `EngineFailed` with the reason if it never will, `DeadlineExceeded` (it is not ready
        in time) or `EngineUnavailable` (it is not even there in time, or it went away).
        """
        check_timeout(timeout)
        seconds = READY_TIMEOUT if timeout is None else timeout
        deadline, session = monotonic() + seconds, self._session
        while not session.target.may_run():
            if monotonic() >= deadline:
                session.target.check_running()
            await session.pause(POLL)
        while (left := deadline - monotonic()) > 0:
            try:
                status = await self._status(True, left)
            except DeadlineExceeded:
                break
            if status.error is not None:
                raise EngineFailed(status.error)
            if status.ready:
                return
            await session.pause(POLL)
        raise DeadlineExceeded(f"the engine is not ready after {seconds:g} s")

    # --- life ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Aborts what is under way and disconnects. The client may be used again."""
        self._session.abort(self._session.core.live_requests())
        self._session.drop(EngineUnavailable("the client was closed"))


def _prompts(prompt: Any, field: str = "prompt") -> tuple[bool, list[Any]]:
    """Returns (whether there is only one, all prompts). Raises `InvalidRequest` naming `field`."""
    if not hasattr(prompt, "__len__") or isinstance(prompt, bytes | dict | set):
        raise InvalidRequest(f"{field}: must be text, a list of token ids, or a list of either, "
                             f"got {type(prompt).__name__}", field)
    if not len(prompt):
        raise InvalidRequest(f"{field}: must not be empty", field)
    single = isinstance(prompt, str) or not (isinstance(prompt[0], str)
                                             or hasattr(prompt[0], "__len__"))
    return single, [prompt] if single else list(prompt)


def _embeds(prompt: Any, rows: Any) -> tuple[bool, list[Any]]:
    """Returns the same of prompts given as embeddings. Raises `InvalidRequest`."""
    if prompt is not None:
        raise InvalidRequest("prompt_embeds: not together with prompt", "prompt_embeds")
    single = not isinstance(rows, list | tuple)
    return single, [of_array(one) for one in ([rows] if single else rows)]
