"""The tokenizer actor's core: checks requests, turns them into token ids, puts them on the ring.

One request gives one answer to its client, `Accepted` or `Rejected`, and at most one `Submit`; a
request that is sent again is submitted again. Text never reaches the scheduler. The model's files
are read at the second wake, so that heartbeats can say "loading" meanwhile; what came before is
answered then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actorium.actors.core import CLIENT, Context, Health, Send
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
from actorium.actors.tokenizer import defaults
from actorium.actors.tokenizer.model import TextModel

LOADING_BUDGET = 120.0
WORKING_BUDGET = 60.0
"""Seconds one burst may take: the longest prompt a client can send tokenizes in a few."""
REMEMBERED = 1 << 16
"""Requests kept for telling a resent Generate from a new one; the oldest are forgotten."""
SUBMIT_AGAIN = 0.5
"""Seconds for which a resent Generate is taken for one that had to queue. Later on it is submitted
anew, since the scheduler may have died with it; the scheduler drops what it knows."""


class Nudge(Message, frozen=True):
    """The whole inbox of the tokenizer: it makes the actor wake up and does nothing else."""


class TokenizerCore:
    """See the module. Implements `actorium.actors.core.Core`."""

    inbox: Any = Nudge
    front: Any = ToTokenizerFront

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._config = ctx.config
        self._model: TextModel | None = None
        self._announced = False
        self._seeds = defaults.Seeds(ctx.config.model.seed, ctx.entropy)
        self._pending: deque[tuple[bytes, Any, float]] = deque()
        self._known: dict[tuple[bytes, str], tuple[int, float]] = {}
        """Requests submitted: prompt tokens, and when last."""
        self._parked: list[tuple[bytes, Generate, float]] = []
        """They wait until their grammars have been checked."""
        self._post: Callable[[], None] | None = None
        self._out: list[Send] = []
        self._draining = False
        self._done_requests = 0

    # --- Core ---------------------------------------------------------------------------------

    def on_start(self, post: Callable[[], None]) -> None:
        """post: wakes the core, from any thread."""
        self._post = post

    def on_message(self, message: Any, now: float) -> None:
        """A Nudge: nothing to do."""

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Queue one message of the front; `on_wake` answers it."""
        self._pending.append((client, message, now))

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        """A frame that is no message of the front: its rid is unknown, so `rid` is "-"."""
        self._reject(client, "-", InvalidRequest(error_text))

    def on_missed(self, role: str, now: float) -> bool:
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
        if self._parked:
            self._unpark(self._model)
        while self._pending:
            self._answer(*self._pending.popleft())
        out, self._out = self._out, []
        return out

    def next_timer(self) -> float | None:
        """At once until the model is loaded, then never."""
        return 0.0 if self._model is None else None

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

    def _answer(self, client: bytes, message: Any, now: float) -> None:
        self._done_requests += 1
        if isinstance(message, Abort):
            self._parked = [parked for parked in self._parked
                            if (parked[0], parked[1].rid) != (client, message.rid)]
            self._out.append(Send("scheduler", Cancel(message.rid, client)))
            return
        if isinstance(message, Resume):
            self._out.append(Send("scheduler", Recall(
                message.rid, client, message.adopt, message.tenant)))
            return
        try:
            if isinstance(message, Generate) and self._parks(client, message, now):
                return
            self._handle(client, message, now)
        except ActoriumError as error:
            self._reject(client, message.rid, error)
        except Exception as error:  # one request's trouble stays that request's
            self._reject(client, message.rid,
                         ActoriumError(f"tokenizer: {type(error).__name__}: {error}"))

    def _reject(self, client: bytes, rid: str, error: ActoriumError) -> None:
        self._tell(client, Rejected(rid, error.code, error.message[:4096], error.param))

    def _tell(self, client: bytes, message: Any) -> None:
        self._out.append(Send(CLIENT, message, client))

    def _handle(self, client: bytes, message: Any, now: float) -> None:
        model = self._model
        assert model is not None
        if isinstance(message, Generate):
            self._generate(client, message, now, model)
        elif isinstance(message, Tokenize):
            ids = self._tokens(message, model)
            self._tell(client, Tokenized(message.rid, ids.tobytes()))
        elif isinstance(message, Detokenize):
            ids = model.ids(message.tokens, "tokens")
            text = model.decode(ids.tolist(), message.skip_special_tokens)
            self._tell(client, Detokenized(message.rid, text))
        elif isinstance(message, ServerInfo):
            self._tell(client, Info(message.rid, msgspec.json.encode(model.info())))
        elif isinstance(message, FlushCache):
            self._out.append(Send("scheduler", Flush(message.rid, client)))

    def _parks(self, client: bytes, message: Generate, now: float) -> bool:
        """Whether its grammar is checked first; meanwhile others are answered."""
        wanted, model, post = message.params.structured, self._model, self._post
        if wanted is None or post is None or model is None:
            return False
        defaults.check_params(message.params, model.facts)
        if model.grammars.knows(wanted):
            return False
        self._parked.append((client, message, now))
        model.grammars.ask(wanted, post)
        return True

    def _unpark(self, model: TextModel) -> None:
        """Those whose grammars are known by now go on (or, if so many others have been asked for
        since that theirs is forgotten, ask again)."""
        parked, self._parked = self._parked, []
        for entry in parked:
            wanted = entry[1].params.structured
            waits = wanted is not None and model.grammars.waits(wanted)
            (self._parked if waits else self._pending).append(entry)

    def _generate(self, client: bytes, message: Generate, now: float, model: TextModel) -> None:
        key = (client, message.rid)
        known = self._known.get(key)
        if known is not None and now < known[1] + SUBMIT_AGAIN:
            self._tell(client, Accepted(message.rid, known[0]))
            return
        if self._draining and known is None:
            raise EngineUnavailable("the engine is stopping")
        defaults.check_params(message.params, model.facts)
        ids = self._prompt(message, model)
        resolved = defaults.resolve(message.params, model.facts, len(ids))
        wanted, seed = message.params.structured, message.params.seed
        grammar = "" if wanted is None else model.grammars.grammar(wanted)
        timeout = message.timeout or self._config.scheduler.request_timeout
        self._out.append(Send("scheduler", Submit(
            rid=message.rid, client=client, prompt=ids.tobytes(), n=message.params.n,
            params=resolved, text=defaults.text_params(message.params),
            seed=self._seeds.next() if seed is None else seed,
            deadline=now + timeout, arrival=now, tenant=message.tenant,
            priority=message.priority, grammar=grammar, linger=message.linger)))
        self._remember(key, len(ids), now)
        self._tell(client, Accepted(message.rid, len(ids)))

    @staticmethod
    def _tokens(message: Tokenize, model: TextModel) -> Any:
        if message.messages is None:
            return model.encode(message.text, message.add_special_tokens, "text")
        text = model.render(message.messages, message.template_args, message.tools)
        return model.encode(text, False, "messages")

    def _prompt(self, message: Generate, model: TextModel) -> Any:
        """The prompt as array('i'), checked."""
        given = [name for name in ("text", "tokens", "messages")
                 if getattr(message, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt: exactly one of text, tokens and messages must be set, "
                                 f"got {' and '.join(given) or 'none'}", "prompt")
        if message.tokens is not None:
            ids = model.ids(message.tokens, "prompt", check=False)
        elif message.text is not None:
            ids = model.encode(message.text, True, "prompt", model.facts.max_model_len)
        else:
            text = model.render(message.messages or [], message.template_args, message.tools)
            ids = model.encode(text, False, "messages", model.facts.max_model_len)
        defaults.check_prompt(ids, model.facts, given[0] if given[0] == "messages" else "prompt")
        return ids

    def _remember(self, key: tuple[bytes, str], tokens: int, now: float) -> None:
        self._known[key] = tokens, now
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]


def build(ctx: Context) -> TokenizerCore:
    """The core of the role "tokenizer"."""
    return TokenizerCore(ctx)
