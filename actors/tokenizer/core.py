"""The tokenizer actor's core: checks requests, turns them into token ids, puts them on the ring.

One request gives one answer to its client, `Accepted` or `Rejected`, and at most one `Submit`; a
request that is sent again is submitted again. Text never reaches the scheduler. The model's files
are read at the second wake, so that heartbeats can say "loading" meanwhile; what came before is
answered then. What takes long (a grammar, a long prompt) is done on threads, and its request is
parked until then.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from actorium.actors.config.retention import KNOWN_REQUESTS
from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.errors import ActoriumError, EngineUnavailable, InvalidRequest
from actorium.actors.messages import (
    Abort,
    Accepted,
    Cancel,
    Detokenize,
    Detokenized,
    Flush,
    FlushCache,
    Generate,
    Info,
    Message,
    Recall,
    Rejected,
    Resume,
    ServerInfo,
    Submit,
    Tokenize,
    Tokenized,
    ToTokenizerFront,
)
from actorium.actors.params import for_choices
from actorium.actors.runtime.inflight_journal import InflightJournal, name_of, open_journal
from actorium.actors.runtime.offload import THREADS, Offload, OffloadJob
from actorium.actors.tokenizer import defaults
from actorium.actors.tokenizer.chat_template import RenderBudgetExceeded
from actorium.actors.tokenizer.prompt_encoder import SHORT_CHARS, PromptEncoder, PromptRequest
from actorium.actors.tokenizer.text_model import TextModel

LOADING_BUDGET = 120.0
WORKING_BUDGET = 60.0
"""Seconds one burst may take: the longest prompt a client can send tokenizes in a few."""
BURST = 1 << 15
"""Characters of prompts that are looked at in one go, at some microsecond each: then the loop turns
before the next ones. Each message counts as `EACH` more."""
EACH = 64
SUBMIT_AGAIN = 0.5
"""Seconds for which a resent Generate is taken for one that had to queue. Later on it is submitted
anew, since the scheduler may have died with it; the scheduler drops what it knows."""


class NoActorMessages(Message, frozen=True, tag="Nudge"):
    """The tokenizer's inbox: no actor sends it anything but this, which only wakes it up."""


class PendingMessage(NamedTuple):
    """A message of the front, not answered yet."""

    client: bytes
    message: Any
    now: float
    """When it came."""
    job: OffloadJob[Any] | None = None
    """What finds out its prompt, where that is long."""

    @property
    def name(self) -> bytes:
        """In the journal."""
        return name_of(self.client, self.message.rid.encode())


class TokenizerCore(Core):
    """See the module."""

    inbox: Any = NoActorMessages
    front: Any = ToTokenizerFront
    journal: InflightJournal

    def __init__(self, ctx: Context, journal: InflightJournal | None = None) -> None:
        self._ctx = ctx
        self.journal = journal or InflightJournal(actor="tokenizer")
        self._config = ctx.config
        self._model: TextModel | None = None
        self._announced = False
        self._seeds = defaults.Seeds(ctx.config.model.seed, ctx.entropy)
        self._prompts: PromptEncoder | None = None
        self._offload = Offload(self.journal)
        self._own_offload = Offload(self.journal, 1 + THREADS)
        """For templates that requests bring, which keep no others waiting."""
        self._pending: deque[PendingMessage] = deque()
        self._left = 0
        """Of `BURST`, in this wake."""
        self._known: dict[tuple[bytes, str], tuple[int, float]] = {}
        """Requests submitted: prompt tokens, and when last."""
        self._parked: list[PendingMessage] = []
        """Until their grammars have been checked, and their prompts found out."""
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
        """Queue one message of the front; `on_wake` answers it."""
        self._pending.append(PendingMessage(client, message, now))

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        """A frame that is no message of the front: its rid is unknown, so `rid` is "-"."""
        self._reject(client, "-", InvalidRequest(error_text))

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """The scheduler does not read: what it is sent is dropped until it does. Clients send all
        that has no effect once more."""
        return role == "scheduler"

    def on_wake(self, now: float) -> Sequence[Send]:
        """Answer everything. The second wake loads: raises `BadModel`, `BadConfig`."""
        if not self._announced:  # let a heartbeat say "loading" before it blocks
            self._announced = True
            return []
        if self._model is None:
            self._model = TextModel(self._config)
            self._prompts = PromptEncoder(self._model)
        if self._parked:
            self._unpark(self._model)
        self._left = BURST
        while self._pending and self._left > 0:
            self._left -= EACH
            self._answer(self._pending.popleft())
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        """At once until the model is loaded, and while there is more to answer."""
        return 0.0 if self._model is None or self._pending else None

    def drain(self, now: float) -> None:
        """Refuse new requests from here on."""
        self._draining = True

    @property
    def done(self) -> bool:
        """True when nothing waits for an answer."""
        return not (self._pending or self._parked)

    def health(self) -> Health:
        """Phase "loading" until the files are read."""
        if self._model is None:
            return Health("loading", 0, LOADING_BUDGET, {}, "tokenizer files")
        phase = "draining" if self._draining else "ready"
        return Health(phase, self._done_requests, WORKING_BUDGET,
                      {"tokenizer_waiting": float(len(self._pending) + len(self._parked))})

    # --- requests -----------------------------------------------------------------------------

    def _answer(self, entry: PendingMessage) -> None:
        client, message = entry.client, entry.message
        self._done_requests += 1
        if isinstance(message, Abort):
            self._parked = [parked for parked in self._parked
                            if (parked.client, parked.message.rid) != (client, message.rid)]
            self._out.append(Send("scheduler", Cancel(message.rid, client)))
            return
        if isinstance(message, Resume):
            self._out.append(Send("scheduler", Recall(
                message.rid, client, message.adopt, message.tenant)))
            return
        journal, name = self.journal, entry.name
        if journal.convicted(name):
            self._reject(client, message.rid, journal.refusal(message.rid))
            return
        journal.put(name)
        try:
            if not (self._waits_for_others(entry, name) or self._waits_for_grammar(entry)
                    or self._waits_for_prompt(entry)):
                self._handle(entry)
        except ActoriumError as error:
            self._reject(client, message.rid, error)
        except BaseException as error:
            self._reject(client, message.rid, journal.failed(error, message.rid))
        journal.clear()
        if not journal.quiet and not any(parked.name == name for parked in self._parked):
            journal.finished(name)

    def _reject(self, client: bytes, rid: str, error: ActoriumError) -> None:
        self._tell(client, Rejected(rid, error.code, error.message[:4096], error.param))

    def _tell(self, client: bytes, message: Any) -> None:
        self._out.append(Send(CLIENT, message, client))

    def _handle(self, entry: PendingMessage) -> None:
        client, message = entry.client, entry.message
        model, prompts = self._model, self._prompts
        assert model is not None and prompts is not None
        if isinstance(message, Generate):
            self._generate(entry, model)
        elif isinstance(message, Tokenize):
            ids = self._ids(entry)
            if ids is not None:
                self._tell(client, Tokenized(message.rid, ids.tobytes()))
        elif isinstance(message, Detokenize):
            text = prompts.text(message) if entry.job is None else entry.job.result()
            self._tell(client, Detokenized(message.rid, text))
        elif isinstance(message, ServerInfo):
            self._tell(client, Info(message.rid, msgspec.json.encode(model.info())))
        elif isinstance(message, FlushCache):
            self._out.append(Send("scheduler", Flush(message.rid, client)))

    # --- what takes long ----------------------------------------------------------------------

    def _waits_for_others(self, entry: PendingMessage, name: bytes) -> bool:
        """Whether it is suspected of a death, and others are worked on at the moment."""
        busy = self._offload.busy or self._own_offload.busy
        if not (self.journal.suspected(name) and busy) or entry.job is not None:
            return False
        self._parked.append(entry)
        return True

    def _waits_for_grammar(self, entry: PendingMessage) -> bool:
        """Whether its grammar is checked first; meanwhile others are answered."""
        message, model, post = entry.message, self._model, self._post
        if not isinstance(message, Generate) or post is None or model is None:
            return False
        wanted = message.params.structured
        if wanted is None:
            return False
        defaults.check_params(message.params, model.facts)
        if model.grammars.knows(wanted):
            return False
        self._parked.append(entry)
        model.grammars.ask(wanted, post)
        return True

    def _waits_for_prompt(self, entry: PendingMessage) -> bool:
        """Whether its prompt is long, and is found out first."""
        message, prompts = entry.message, self._prompts
        if not isinstance(message, PromptRequest | Detokenize) or entry.job is not None \
                or prompts is None or self._post is None:
            return False
        size = prompts.size(message)
        if size <= SHORT_CHARS:
            self._left -= size
            return False
        if isinstance(message, Generate):
            if self._knows(entry):
                return False
            self._check(message)
        self._hand_to_thread(entry)
        return True

    def _hand_to_thread(self, entry: PendingMessage) -> None:
        """What was sent again meanwhile gets one answer."""
        message, prompts, post = entry.message, self._prompts, self._post
        assert prompts is not None and post is not None
        if any(parked.client == entry.client and parked.message.rid == message.rid
               for parked in self._parked):
            return
        work = prompts.text if isinstance(message, Detokenize) else prompts.encode_slow
        own = getattr(message, "chat_template", None) is not None
        offload = self._own_offload if own else self._offload
        job = offload.submit(lambda: work(message), post, entry.name)
        self._parked.append(entry._replace(job=job))

    def _unpark(self, model: TextModel) -> None:
        """Those of whom all is known by now go on (or, if so many others have been asked for
        since that a grammar is forgotten, ask again)."""
        parked, self._parked = self._parked, []
        for entry in parked:
            message = entry.message
            wanted = message.params.structured if isinstance(message, Generate) else None
            waits = (wanted is not None and model.grammars.waits(wanted)) \
                or (entry.job is not None and not entry.job.done)
            (self._parked if waits else self._pending).append(entry)

    def _ids(self, entry: PendingMessage) -> array[int] | None:
        """Of its prompt; None = it takes longer than it looked, and is found out on the side."""
        prompts = self._prompts
        assert prompts is not None
        if entry.job is not None:
            ids: array[int] = entry.job.result()
            return ids
        try:
            return prompts.encode_now(entry.message)
        except RenderBudgetExceeded:
            if self._post is None:
                return prompts.encode_slow(entry.message)
            self._hand_to_thread(entry)
            return None

    # --- completions --------------------------------------------------------------------------

    def _knows(self, entry: PendingMessage) -> bool:
        """It was submitted just now."""
        known = self._known.get((entry.client, entry.message.rid))
        return known is not None and entry.now < known[1] + SUBMIT_AGAIN

    def _check(self, message: Generate) -> None:
        """All of it but the prompt and the grammar. Raises `InvalidRequest`."""
        assert self._model is not None
        defaults.check_params(message.params, self._model.facts)

    def _generate(self, entry: PendingMessage, model: TextModel) -> None:
        client, message, now = entry.client, entry.message, entry.now
        key = (client, message.rid)
        known = self._known.get(key)
        if known is not None and self._knows(entry):
            self._tell(client, Accepted(message.rid, known[0]))
            return
        if self._draining and known is None:
            raise EngineUnavailable("the engine is stopping")
        self._check(message)
        ids = self._ids(entry)
        if ids is None:
            return
        resolved = defaults.resolve(message.params, model.facts, len(ids))
        wanted, seed = message.params.structured, message.params.seed
        grammar = "" if wanted is None else for_choices(model.grammars.grammar(wanted),
                                                        message.params.n)
        timeout = message.timeout or self._config.scheduler.request_timeout
        self._out.append(Send("scheduler", Submit(
            rid=message.rid, client=client, prompt=ids.tobytes(), n=message.params.n,
            params=resolved, text=defaults.text_params(message.params),
            seed=self._seeds.next() if seed is None else seed,
            deadline=now + timeout, arrival=now, tenant=message.tenant,
            priority=message.priority, grammar=grammar, linger=message.linger,
            rules=defaults.token_rules(message.params, model), cache_salt=message.cache_salt)))
        self._remember(key, len(ids), now)
        self._tell(client, Accepted(message.rid, len(ids)))

    def _remember(self, key: tuple[bytes, str], tokens: int, now: float) -> None:
        self._known[key] = tokens, now
        if len(self._known) > KNOWN_REQUESTS:
            del self._known[next(iter(self._known))]


def build(ctx: Context) -> TokenizerCore:
    """The core of the role "tokenizer"."""
    budget = ctx.config.recovery.request_budget
    return TokenizerCore(ctx, open_journal(ctx.run_dir, ctx.role, budget))
