"""The tokenizer actor's core: validates requests, encodes them and sends them to the scheduler.

Each request gets one answer, `Accepted` or `Rejected`, and causes at most one `Submit`; a request
that is sent again is submitted again. Text never reaches the scheduler. The model's files are read
at the second wake, so that heartbeats can say "loading" meanwhile; requests that came before are
answered then. Slow work (a grammar, a long prompt) is done on threads, and its request is parked
until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from actorium.actors.config.adapter_settings import adapter_name_fault
from actorium.actors.config.cluster_settings import clustered
from actorium.actors.config.retention import KNOWN_REQUESTS
from actorium.actors.config.tree import Config
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.errors import Aborted, ActoriumError, EngineUnavailable, InvalidRequest
from actorium.actors.messages import (
    MAX_EMBEDS,
    Abort,
    AbortRequest,
    Accepted,
    AdapterCall,
    AdapterOrder,
    Control,
    ControlRequest,
    Detokenize,
    Detokenized,
    Flush,
    FlushCache,
    Generate,
    Info,
    Message,
    NamedAdapter,
    Rejected,
    Resume,
    ResumeRequest,
    ServerInfo,
    Submit,
    TensorCall,
    Tokenize,
    Tokenized,
    ToTokenizerFront,
    TraceContext,
    WeightsCall,
    WeightsOrder,
)
from actorium.actors.models.model_dir import served_name
from actorium.actors.params import Structured, for_choices
from actorium.actors.runtime.inflight_journal import InflightJournal, open_journal
from actorium.actors.runtime.offload import THREADS, Offload
from actorium.actors.tokenizer import defaults
from actorium.actors.tokenizer.chat_template import RenderBudgetExceeded
from actorium.actors.tokenizer.pooling_requests import (
    NOTHING_SAMPLED,
    check_task,
    resolve_pooling,
)
from actorium.actors.tokenizer.prompt_encoder import (
    SHORT_CHARS,
    EncodedPrompt,
    PromptEncoder,
    PromptRequest,
)
from actorium.actors.tokenizer.request_queue import PendingMessage, RequestQueue
from actorium.actors.tokenizer.text_model import TextModel
from actorium.actors.tokenizer.thought_rules import thought_rule
from actorium.actors.tracing.trace_context import new_trace

LOADING_BUDGET = 120.0
WORKING_BUDGET = 60.0
"""Seconds one burst may take: the longest prompt a client can send tokenizes in a few."""
BURST = 1 << 15
"""Characters of prompts handled in one go, at about a microsecond each, before the loop turns. Each
message counts as `EACH` more."""
EACH = 64
OPERATIONS = {"embed": "embeddings", "token_embed": "embeddings"}
"""What OpenTelemetry calls tasks of pooling."""
SUBMIT_AGAIN = 0.5
"""Seconds for which a resent Generate counts as one that had to queue. Later it is submitted anew,
since the scheduler may have died with it; the scheduler drops duplicates."""


class NoActorMessages(Message, frozen=True, tag="Nudge"):
    """The tokenizer's inbox type: actors send it nothing; this message only wakes it up."""


class TokenizerCore(Core):
    """The core of the tokenizer actor; see the module."""

    inbox: Any = NoActorMessages
    client_inbox: Any = ToTokenizerFront
    journal: InflightJournal

    def __init__(self, ctx: Context, journal: InflightJournal | None = None) -> None:
        self._ctx = ctx
        self.journal = journal or InflightJournal(actor="tokenizer")
        self._config = ctx.config
        if ctx.config.model.enable_prompt_embeds:
            self.client_inbox_bytes += MAX_EMBEDS
        self._model: TextModel | None = None
        self._announced = False
        self._seeds = defaults.Seeds(ctx.config.model.seed, ctx.entropy)
        self._prompts: PromptEncoder | None = None
        self._offload = Offload(self.journal)
        self._own_offload = Offload(self.journal, 1 + THREADS)
        """For templates that come with requests, so that they delay no others."""
        self._queue = RequestQueue(ctx.config.scheduler)
        self._left = 0
        """What is left of `BURST` in this wake."""
        self._known: dict[tuple[bytes, str], tuple[int, float]] = {}
        """Requests submitted: prompt tokens, and when they were submitted last."""
        self._post: Callable[[], None] | None = None
        self._out: list[Send] = []
        self._draining = False
        self._done_requests = 0

    # --- Core ---------------------------------------------------------------------------------

    def on_start(self, post: Callable[[], None]) -> None:
        """post: wakes the core, from any thread."""
        self._post = post

    def on_message(self, message: Any, now: float) -> None:
        """Does nothing: the message only wakes the actor up."""

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Queues a request, which `on_wake` answers, or refuses it. What concerns one that came
        before, or is answered at once, does not wait behind others."""
        entry = PendingMessage(client, message, now)
        if isinstance(message, Abort | Resume) or (
                self._model is not None
                and isinstance(message, ServerInfo | FlushCache | Control | AdapterCall
                               | WeightsCall | TensorCall)):
            self._answer(entry)
        elif (full := self._queue.add(entry)) is not None and entry.key not in self._known:
            self._reject(client, message.rid, full)  # else it is sent again, as if this got lost

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        """Rejects a frame that is no client message: its rid is unknown, so `rid` is "-"."""
        self._reject(client, "-", InvalidRequest(error_text))

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """Drops messages to a scheduler that does not read, until it does: clients resend every
        request that has had no effect."""
        return role == "scheduler"

    def on_wake(self, now: float) -> Sequence[Send]:
        """Answers all queued messages. The second wake loads the model: raises `BadModel`,
        `BadConfig`."""
        if not self._announced:  # let a heartbeat say "loading" before it blocks
            self._announced = True
            return []
        if self._model is None:
            self._model = TextModel(self._config, self._ctx.run_dir)
            self._prompts = PromptEncoder(self._model)
        self._queue.unpark(partial(self._still_waits, self._model))
        self._left = BURST
        while self._queue.waiting and self._left > 0:
            self._left -= EACH
            self._answer(self._queue.take())
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        """Asks to be woken at once until the model is loaded, and while messages are queued."""
        return 0.0 if self._model is None or self._queue.waiting else None

    def drain(self, now: float) -> None:
        """Refuses new requests from here on."""
        self._draining = True

    @property
    def done(self) -> bool:
        """True when no request waits for an answer."""
        return not self._queue

    def health(self) -> Health:
        """Reports phase "loading" until the files are read."""
        if self._model is None:
            return Health("loading", 0, LOADING_BUDGET, {}, "tokenizer files")
        phase = "draining" if self._draining else "ready"
        return Health(phase, self._done_requests, WORKING_BUDGET,
                      {"tokenizer_waiting": float(len(self._queue))})

    # --- requests -----------------------------------------------------------------------------

    def _answer(self, entry: PendingMessage) -> None:
        client, message = entry.client, entry.message
        self._done_requests += 1
        if isinstance(message, Abort):
            dropped = self._queue.drop(client, message.rid)
            if dropped is not None:  # no other actor knows it, or reports its end
                self._reject(client, message.rid, Aborted("the request was aborted"))
                wanted = _structured(dropped.message)
                if wanted is not None and self._model is not None:
                    self._model.grammars.forget(wanted)
            self._out.append(Send("scheduler", AbortRequest(message.rid, client)))
            return
        if isinstance(message, Resume):
            self._out.append(Send("scheduler", ResumeRequest(
                message.rid, client, message.adopt, message.tenant)))
            return
        journal, name = self.journal, entry.name
        if journal.convicted(name):
            self._reject(client, message.rid, journal.refusal(message.rid))
            return
        journal.put(name)
        try:
            if not self._park_suspect(entry, name):
                entry = self._checked(entry)
                if not (self._park_for_grammar(entry) or self._park_for_prompt(entry)):
                    self._handle(entry)
        except ActoriumError as error:
            self._reject(client, message.rid, error)
        except BaseException as error:
            self._reject(client, message.rid, journal.failed(error, message.rid))
        journal.clear()
        if not journal.quiet and entry.key not in self._queue.parked:
            journal.finished(name)

    def _reject(self, client: bytes, rid: str, error: ActoriumError) -> None:
        self._reply(client, Rejected(rid, error.code, error.message[:4096], error.param))

    def _reply(self, client: bytes, message: Any) -> None:
        self._out.append(Send(CLIENT, message, client))

    def _handle(self, entry: PendingMessage) -> None:
        client, message = entry.client, entry.message
        model, prompts = self._model, self._prompts
        assert model is not None and prompts is not None
        if isinstance(message, Generate):
            self._generate(entry, model)
        elif isinstance(message, Tokenize):
            prompt = self._prompt(entry)
            if prompt is not None:
                self._reply(client, Tokenized(message.rid, prompt.column))
        elif isinstance(message, Detokenize):
            text = prompts.text(message) if entry.job is None else entry.job.result()
            self._reply(client, Detokenized(message.rid, text))
        elif isinstance(message, ServerInfo):
            self._reply(client, Info(message.rid, msgspec.json.encode(model.info())))
        elif isinstance(message, FlushCache):
            self._out.append(Send("scheduler", Flush(message.rid, client)))
        elif isinstance(message, Control):
            check_control(message, self._config)
            self._out.append(Send("scheduler", ControlRequest(client, message)))
        elif isinstance(message, AdapterCall):
            check_adapter_call(message, self._config)
            self._out.append(Send("scheduler", AdapterOrder(client, message)))
        elif isinstance(message, WeightsCall | TensorCall):
            check_weights_call(message)
            self._out.append(Send("scheduler", WeightsOrder(client, message)))

    def _checked(self, entry: PendingMessage) -> PendingMessage:
        """Checks a request's parameters against the model, once. Raises `InvalidRequest`."""
        message, model = entry.message, self._model
        if entry.checked or not isinstance(message, Generate) or model is None:
            return entry
        if message.adapter and not self._config.adapters.enable_lora:
            raise InvalidRequest("adapter: this engine serves no LoRA adapters: start it with "
                                 "--enable-lora", "adapter")
        if not self._just_submitted(entry):
            check_task(message, model.facts)
            defaults.check_params(message.params, model.facts)
        return entry._replace(checked=True)

    # --- what takes long ----------------------------------------------------------------------

    def _park_suspect(self, entry: PendingMessage, name: bytes) -> bool:
        """Parks a suspect of an actor's death while other requests are worked on; True if it did.
        """
        busy = self._offload.busy or self._own_offload.busy
        if not (self.journal.suspected(name) and busy) or entry.job is not None:
            return False
        self._queue.park(entry)
        return True

    def _park_for_grammar(self, entry: PendingMessage) -> bool:
        """Parks a request whose grammar is not checked yet, and starts the check; True if it did.
        """
        message, model, post = entry.message, self._model, self._post
        wanted = _structured(message)
        if wanted is None or post is None or model is None:
            return False
        if model.grammars.knows(wanted):
            return False
        self._queue.park(entry)
        model.grammars.ask(wanted, post)
        return True

    def _park_for_prompt(self, entry: PendingMessage) -> bool:
        """Parks a request with a long prompt while a thread encodes it; True if it did."""
        message, prompts, model = entry.message, self._prompts, self._model
        if not isinstance(message, PromptRequest | Detokenize) or entry.job is not None \
                or prompts is None or model is None or self._post is None:
            return False
        size = prompts.size(message)
        if size <= SHORT_CHARS:
            self._left -= size
            return False
        if isinstance(message, Generate) and self._just_submitted(entry):
            return False
        self._hand_to_thread(entry)
        return True

    def _hand_to_thread(self, entry: PendingMessage) -> None:
        """Encodes on a thread."""
        message, prompts, post = entry.message, self._prompts, self._post
        assert prompts is not None and post is not None
        work = prompts.text if isinstance(message, Detokenize) else prompts.encode_slow
        own = getattr(message, "chat_template", None) is not None
        offload = self._own_offload if own else self._offload
        job = offload.submit(lambda: work(message), post, entry.name)
        self._queue.park(entry._replace(job=job))

    def _still_waits(self, model: TextModel, entry: PendingMessage) -> bool:
        """Returns whether the work for a parked request is not finished (one whose grammar has been
        evicted by others since asks again)."""
        wanted = _structured(entry.message)
        return (wanted is not None and model.grammars.waits(wanted)) \
            or (entry.job is not None and not entry.job.done)

    def _prompt(self, entry: PendingMessage) -> EncodedPrompt | None:
        """Returns the prompt; None if it takes longer than estimated and moves to a thread."""
        prompts = self._prompts
        assert prompts is not None
        if entry.job is not None:
            prompt: EncodedPrompt = entry.job.result()
            return prompt
        try:
            return prompts.encode_now(entry.message)
        except RenderBudgetExceeded:
            if self._post is None:
                return prompts.encode_slow(entry.message)
            self._hand_to_thread(entry)
            return None

    # --- completions --------------------------------------------------------------------------

    def _just_submitted(self, entry: PendingMessage) -> bool:
        """Returns whether the request was submitted just now."""
        known = self._known.get((entry.client, entry.message.rid))
        return known is not None and entry.now < known[1] + SUBMIT_AGAIN

    def _generate(self, entry: PendingMessage, model: TextModel) -> None:
        client, message, now = entry.client, entry.message, entry.now
        key = (client, message.rid)
        known = self._known.get(key)
        if known is not None and self._just_submitted(entry):
            self._reply(client, Accepted(message.rid, known[0]))
            return
        if self._draining and known is None:
            raise EngineUnavailable("the engine is stopping")
        prompt = self._prompt(entry)
        if prompt is None:
            return
        ids = prompt.ids
        pooling = resolve_pooling(message, model, ids, prompt.pair_start)
        resolved = NOTHING_SAMPLED if pooling is not None else defaults.resolve(
            message.params, model.facts, len(ids),
            model.processors.resolved(message.params.logits_processors))
        wanted, seed = message.params.structured, message.params.seed
        if seed is None:
            seed = 0 if message.params.deterministic else self._seeds.next()
        grammar = "" if wanted is None else for_choices(model.grammars.grammar(wanted),
                                                        message.params.n)
        timeout = message.timeout or self._config.scheduler.request_timeout
        self._out.append(Send("scheduler", Submit(
            rid=message.rid, client=client, prompt=prompt.column, n=message.params.n,
            params=resolved, text=defaults.text_params(message.params),
            seed=seed, deterministic=message.params.deterministic,
            deadline=now + timeout, arrival=now, tenant=message.tenant,
            priority=message.priority, grammar=grammar, resume_seconds=message.resume_seconds,
            rules=defaults.token_rules(message.params, model, thought_rule(
                message, ids, resolved.max_tokens, model)), cache_salt=message.cache_salt,
            media=prompt.media, created=message.created, trace=self._trace(entry),
            adapter=NamedAdapter(message.adapter) if message.adapter else None, pooling=pooling,
            embeds=prompt.embeds)))
        self._remember(key, len(ids), now)
        self._reply(client, Accepted(message.rid, len(ids)))

    def _trace(self, entry: PendingMessage) -> TraceContext | None:
        """Returns the trace that the request's spans belong to; None = there are none of it."""
        if self._config.runtime.otlp_traces_endpoint is None:
            return None
        message = entry.message
        trace = message.trace or new_trace(entry.client, message.rid.encode(),
                                           repr(entry.now).encode())
        if not trace.sampled:
            return None
        operation = "text_completion" if message.messages is None else "chat"
        if message.pooling is not None:
            operation = OPERATIONS.get(message.pooling.task, "classify")
        return msgspec.structs.replace(trace, operation=operation)

    def _remember(self, key: tuple[bytes, str], tokens: int, now: float) -> None:
        self._known[key] = tokens, now
        if len(self._known) > KNOWN_REQUESTS:
            del self._known[next(iter(self._known))]


def check_control(control: Control, config: Config) -> None:
    """Raises `InvalidRequest` where an engine cannot do what is ordered."""
    if clustered(config.cluster):
        raise InvalidRequest(f"{control.order}: a cluster's router cannot; ask each replica's "
                             "engine, or scale the cluster")
    if control.order == "sleep" and control.level == 2 and not config.recovery.restart:
        raise InvalidRequest("level: 2 ends the worker's process, and an engine with --no-restart "
                             "starts none again; use 1", "level")


def check_adapter_call(call: AdapterCall, config: Config) -> None:
    """Raises `InvalidRequest` where an engine cannot do what is ordered."""
    if not config.adapters.enable_lora:
        raise InvalidRequest("this engine serves no LoRA adapters: start it with --enable-lora")
    if call.order == "list":
        return
    if fault := adapter_name_fault(call.name):
        raise InvalidRequest(f"lora_name: {fault}", "lora_name")
    if call.order == "load" and not call.path.startswith("/"):
        raise InvalidRequest("lora_path: must be an absolute path", "lora_path")
    if call.name in (*config.model.served_model_name, served_name(config)):
        raise InvalidRequest(f"lora_name: {call.name!r} is the model itself", "lora_name")


def check_weights_call(call: WeightsCall | TensorCall) -> None:
    """Raises `InvalidRequest` where an engine cannot do what is ordered."""
    if isinstance(call, TensorCall):
        return
    for name, place in (("model_path", call.path), ("tensors", call.tensors)):
        if place and not place.startswith("/"):
            raise InvalidRequest(f"{name}: must be an absolute path", name)


def _structured(message: Any) -> Structured | None:
    return message.params.structured if isinstance(message, Generate) else None


def build(ctx: Context) -> TokenizerCore:
    """Returns the core of the role "tokenizer"."""
    budget = ctx.config.recovery.request_budget
    return TokenizerCore(ctx, open_journal(ctx.run_dir, ctx.role, budget))
