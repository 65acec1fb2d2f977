"""Every message of the ring: one closed, tagged union per inbox.

Wire format: msgpack arrays (msgspec `array_like`), one ZMQ frame a message. Integers and lengths
are bounded, unknown fields refused. Columns of numbers travel as little-endian bytes made from
ready numpy arrays (`i4` unless said otherwise), so that a steady decode step builds no Python
object per sequence.

Words: `rid` names a request at the edges; `sid` names a sequence (one choice of a request) inside
the ring: the scheduler numbers them 1, 2, ... and never reuses one within an epoch; `slot` is a row
of the worker's resident tables and is reused.

One long file, because the protocol is best read in one place.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

from actorium.actors.params import (
    MAX_BAD_WORDS,
    MAX_N,
    Resolved,
    SamplingParams,
    Seed,
    TextParams,
)

MAX_MESSAGE_BYTES = 64 << 20
"""MAXMSGSIZE of every inbox: a larger frame drops its sender's connection."""
MAX_CLIENT_MESSAGE_BYTES = 4 << 20
"""The same at the fronts, where clients connect."""
MAX_TOKENS_IN_MESSAGE = 4 << 20
MAX_TURNS = 4096
"""Of a conversation."""
MAX_SLOTS = 1 << 16
MAX_RESTARTS = 1 << 16

Rid = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+(?!\n)$")]
ClientId = Annotated[bytes, Meta(min_length=1, max_length=255)]
Sid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Slot = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StepNo = Annotated[int, Meta(ge=0, le=2**62)]
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Drafts = Annotated[int, Meta(ge=0, le=16)]
Column = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS_IN_MESSAGE)]
"""Little-endian int32, unless the field says otherwise."""
Seconds = Annotated[float, Meta(ge=0)]
Short = Annotated[str, Meta(max_length=4096)]
Tenant = Annotated[str, Meta(max_length=64, pattern=r"^[\x21-\x7e]*(?!\n)$")]
"""Whose request it is: prefixes are shared within a tenant only, and fair scheduling is between
tenants. Empty = the common one."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Higher goes first."""
Linger = Annotated[float, Meta(ge=0, le=3600)]
"""Seconds for which a request goes on after its client has gone, for another one to take it up
(`Resume.adopt`). Its rid must be hard to guess then."""


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True,
              gc=False):
    """Base of all wire messages."""


# --- client -> tokenizer (front) -----------------------------------------------------------------

MAX_TEMPLATE = 1 << 16
"""Characters of a chat template of a request's own."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
                  "mask_token")
"""Of a model, as chat templates name them."""
RESERVED_TEMPLATE_ARGS = frozenset({"messages", "tools", "raise_exception", "strftime_now",
                                    *SPECIAL_TOKENS})
"""Variables of chat templates that no `template_args` may set."""
Template = Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)]
Salt = Annotated[str, Meta(max_length=256)]
"""Keeps cached prefixes apart: they are shared among requests of the same salt only."""
Turns = Annotated[list["ChatMessage"], Meta(max_length=4 * MAX_TURNS)]
"""Bounds what is decoded; how many a conversation may have is told by its refusal."""
NO_ARGS, NO_TOOLS = Raw(b"\x80"), Raw(b"\x90")
"""An empty map and an empty array of msgpack."""
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""How many tokens of a prompt are kept, its last ones; -1 = as many as fit the context."""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of a tool that the model has made."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str
    """A JSON object, as text."""
    id: str = ""


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str
    name: str | None = None
    """Who speaks; of a tool's turn, which tool."""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """Of a tool's turn: the call that it answers."""
    reasoning_content: str | None = None
    """What the model thought before it answered."""


class Generate(Message):
    """Ask for completions of one prompt: exactly one of text, tokens, messages is set.

    Idempotent by (client, rid).
    """

    rid: Rid
    params: SamplingParams
    text: str | None = None
    tokens: Column | None = None
    messages: Turns | None = None
    """A conversation for the model's chat template."""
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from receipt to the deadline; past it the request ends with `deadline`."""
    template_args: Raw = NO_ARGS
    """Extra variables of the chat template, a map: what JSON can say. It stays packed until the
    template is rendered, as the tools do: four megabytes of empty lists take a second to unpack."""
    tenant: Tenant = ""
    priority: Priority = 0
    tools: Raw = NO_TOOLS
    """For the chat template: tools as OpenAI describes them, an array of maps."""
    linger: Linger = 0.0
    chat_template: Template | None = None
    """Instead of the model's."""
    add_generation_prompt: bool = True
    """The template ends with the beginning of the model's turn."""
    continue_final_message: bool = False
    """The model goes on in the last turn, which is left open; not with `add_generation_prompt`."""
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: Salt = ""


class Abort(Message):
    """End a request now. Unknown rids are ignored."""

    rid: Rid


class Resume(Message):
    """Tell everything about this request once more, from its first token: the client has lost its
    stream. Also sent by itself when an actor of the ring was replaced. Unknown rids are answered on
    the stream by an error, `unknown_request`.

    With `adopt` also a request that another client has sent is meant: if it lingers, was sent with
    the same tenant, and is not over for longer than the engine remembers, it is this client's from
    then on; the other one is told that it was `aborted`. Whoever knows the rid may do so. What
    stands before the rid's first "." names the request, what follows says what was asked: where
    that differs, the answer is `invalid_request`.
    """

    rid: Rid
    adopt: bool = False
    tenant: Tenant = ""


class Tokenize(Message):
    """Of a text, or of the prompt that a conversation becomes."""

    rid: Rid
    text: str
    add_special_tokens: bool = True
    messages: Turns | None = None
    template_args: Raw = NO_ARGS
    tools: Raw = NO_TOOLS
    chat_template: Template | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: Truncation | None = None


class Detokenize(Message):
    rid: Rid
    tokens: Column
    skip_special_tokens: bool = False


class ServerInfo(Message):
    rid: Rid


class FlushCache(Message):
    """Forget every cached prefix that no running sequence holds. Answered on the stream (`Answer`)
    by {"pages": number of pages freed, "kept": cached pages still held}."""

    rid: Rid


ToTokenizerFront = Generate | Abort | Resume | Tokenize | Detokenize | ServerInfo | FlushCache


# --- tokenizer (front) -> client -----------------------------------------------------------------

class Accepted(Message):
    """The request was checked and sent on. The first delta on its stream, which is empty, says that
    it is in the ledger: until then the client sends it again now and then."""

    rid: Rid
    prompt_tokens: Count


class Rejected(Message):
    """The request was refused; nothing more comes. `code` is an `errors.CODES` name."""

    rid: Rid
    code: str
    message: Short
    param: str | None = None


class Tokenized(Message):
    rid: Rid
    tokens: Column


class Detokenized(Message):
    rid: Rid
    text: str


class Info(Message):
    """Answer to ServerInfo: JSON of the model and the engine's configuration."""

    rid: Rid
    json: bytes


FromTokenizerFront = Accepted | Rejected | Tokenized | Detokenized | Info


# --- client <-> detokenizer (front) --------------------------------------------------------------

class Attach(Message):
    """Register this client's stream; sent before its first Generate."""


class Attached(Message):
    epoch: Epoch


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token and of the likeliest ones at its position."""

    token_id: int
    logprob: float
    rank: int
    """1 = the likeliest."""
    top: list[tuple[int, float]]
    """(token id, logprob), likeliest first."""


class Usage(Struct, frozen=True, array_like=True, gc=False):
    """Token counts of one choice."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int = 0
    """Tokens drafted ahead and verified (speculative decoding)."""
    accepted_tokens: int = 0
    """Those of them that were accepted."""


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """What one choice of one request has to say since its last delta."""

    rid: Rid
    index: int
    start: int
    """Number of the first token in `tokens`, counted from 0 within the completion."""
    text: str
    tokens: Column
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    """stop | length | abort | deadline | error"""
    stop_reason: str | int | None = None
    """The stop string or the stop token id that matched."""
    usage: Usage | None = None
    """Set with finish_reason."""
    error: Rejected | None = None
    """Set with finish_reason == "error"."""


class TextBatch(Message):
    """detokenizer -> client: at most one a step and client."""

    deltas: list[Delta]


class Answer(Message):
    """What became of an order that went round the ring (`FlushCache`)."""

    rid: Rid
    json: bytes


ToDetokenizerFront = Attach
FromDetokenizerFront = Attached | TextBatch | Answer


# --- tokenizer, detokenizer, worker -> scheduler -------------------------------------------------

class TokenRules(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Which tokens the completions of a request may have, whatever its grammar says."""

    vocab_size: Count
    allowed: Column = b""
    """Empty = all."""
    bad_words: Annotated[list[Column], Meta(max_length=2 * MAX_BAD_WORDS)] = []
    """Token sequences that must not come about in a completion."""


class Submit(Message):
    """A checked request: token ids and resolved parameters."""

    rid: Rid
    client: ClientId
    prompt: Column
    n: Annotated[int, Meta(ge=1, le=MAX_N)]
    params: Resolved
    text: TextParams
    seed: Seed
    deadline: float | None = None
    """CLOCK_MONOTONIC seconds."""
    arrival: float = 0.0
    """CLOCK_MONOTONIC seconds."""
    tenant: Tenant = ""
    priority: Priority = 0
    grammar: str = ""
    """What the completion must be, as llguidance writes grammars; with `params.masked`."""
    linger: Linger = 0.0
    rules: TokenRules | None = None
    """With `params.masked`."""
    cache_salt: Salt = ""


class Flush(Message):
    """See `FlushCache`; answered by a `Reply`."""

    rid: Rid
    client: ClientId


class Cancel(Message):
    """The client (or the engine) gives the request up."""

    rid: Rid
    client: ClientId


class Recall(Message):
    """See `Resume`."""

    rid: Rid
    client: ClientId
    adopt: bool = False
    tenant: Tenant = ""


class Hello(Message):
    """A new incarnation of an actor knows nothing: tell it what it needs."""

    role: Short
    epoch: Epoch


class Stop(Message):
    """A stop string matched after `tokens` tokens of the sequence. Idempotent."""

    sid: Sid
    tokens: Count


class PageGroup(Struct, frozen=True, array_like=True, gc=False):
    """The layers that share one page pool and one page table: those of one attention window."""

    pages: Count
    """Pages of the pool, the sink page 0 included."""
    window: Count = 0
    """Tokens a query sees, itself included; 0 = all. Pages behind it are given back early."""


class Ready(Message):
    """The worker has loaded and allocated: what it can hold."""

    epoch: Epoch
    groups: Annotated[list[PageGroup], Meta(min_length=1, max_length=8)]
    page_size: Annotated[int, Meta(ge=1, le=4096)]
    slots: Slot
    """Rows of the resident tables, the sink slot 0 included."""
    max_model_len: Count
    vocab_size: Count
    device: str
    checkpoints: Count = 0
    """Copies of a recurrent state that the worker can keep, numbered from 1; 0 = none. A live state
    needs no number: it goes with the slot."""
    recurrent: bool = False
    """The model has recurrent layers: a prefix is reused only with a checkpoint of its state."""
    load_seconds: dict[str, float] = {}
    """Seconds by phase: import, load, allocate, warm up."""
    drafts: Drafts = 0
    """Draft tokens that a sequence can have in a step at the most; 0 = nothing is drafted."""


class RowLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of the tokens of one sampled row, or of consecutive prompt positions."""

    row: int
    """Index of the sampled row in the result; for prompt logprobs: the slot."""
    start: int
    """First position, for prompt logprobs; 0 otherwise."""
    chosen: bytes
    """f4[count]: log-probability of each token."""
    ranks: Column
    """i4[count], 1 = the likeliest."""
    top_ids: Column
    """i4[count, k]"""
    top_logprobs: bytes
    """f4[count, k]"""


class StepResult(Message):
    """What a step produced, in the order of the plan's sampled rows.

    Sampled rows: first the extends that ended their prompt (in plan order), then `decode`. A decode
    emits between one token and one more than the drafts it verified.
    """

    epoch: Epoch
    step: StepNo
    counts: bytes
    """u1[rows]: tokens emitted by each row; 0 = the sequence had already ended on the device."""
    tokens: Column
    """i4[sum(counts)]"""
    finish: bytes
    """u1[rows]: 0 goes on, 1 ended by a token of eos_ids, 2 ended by max_tokens."""
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    busy_us: Count = 0
    """Device time of the step, from its begin to its end; microseconds."""
    idle_us: Count = 0
    """Device time between the end of the step before and the start of this one, while this plan
    or an older one was waiting or being made; 0 when the engine had no work."""
    drafts: Column = b""
    """i4[n, StepPlan.drafts]: what was drafted for the n sampled rows that are `masked`, in order:
    the next masks depend on it."""
    late_us: Count = 0
    """Of busy_us: the most that the device may have idled since the host was still queueing the
    step when the device had come to it."""


ToScheduler = Submit | Cancel | Recall | Hello | Stop | Flush | Ready | StepResult


# --- scheduler -> worker -------------------------------------------------------------------------

class Admit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A sequence enters a slot. After a preemption `tokens` holds what was emitted, too."""

    slot: Slot
    tokens: Column
    prompt_len: Count
    """How many of `tokens` are prompt: penalties and max_tokens count from there."""
    cached_len: Count
    """Tokens whose pages are already filled (a multiple of the page size)."""
    pages: Column
    """i4[groups, n]: the pages of the cached prefix, cached_len / page_size of each group, in
    order; 0 where a page lies behind its group's window. More come as page_appends."""
    params: Resolved
    seed: Seed
    checkpoint: Count = 0
    """Models with recurrent layers: the checkpoint of the state after cached_len tokens; 0 = the
    state starts empty (cached_len is 0 then)."""


class RowMask(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Which tokens a row may sample."""

    slot: Slot
    row: Drafts
    """0 = the row of the last token (or of the end of the prompt), i = that of the i-th draft."""
    bits: Annotated[bytes, Meta(max_length=1 << 20)]
    """u4[ceil(vocabulary / 32)]: bit t % 32 of word t / 32 is set where token t is allowed."""


class StepPlan(Message):
    """One step, as deltas to the worker's resident tables, applied in the order of the fields.

    `release` first frees slots, then `admit` fills them, `page_appends` extends page tables, and
    the forward runs over `extend` and `decode`.

    Speculation: a decode computes its last token and the drafts that the last step it was sampled
    in has made for it (as many as that step's `drafts` said), each row sampled from its own
    distribution, and emits the samples up to the first that differs from its draft. Then `drafts`
    new ones are made for every sampled sequence that goes on. Pages must be there for all that a
    step may write: a sequence that may be L tokens long after it needs them for
    min(L - 1 + max(drafts - 1, 0), its end) tokens.
    """

    epoch: Epoch
    step: StepNo
    release: Column = b""
    """i4[n]: slots whose sequence is gone."""
    admit: list[Admit] = []
    page_appends: Column = b""
    """i4[n, 2 + groups]: (slot, index in its page tables, a page of each group)."""
    extend: Column = b""
    """i4[n, 2]: (slot, tokens to compute). The row is sampled when it reaches the end of its
    tokens."""
    decode: Column = b""
    """i4[n]: slots that go on by one token."""
    checkpoints: Column = b""
    """i4[n, 3]: (slot, checkpoint, tokens): keep a copy of the slot's recurrent state as it is
    after the first `tokens` tokens of the slot's extend in this step."""
    drafts: Drafts = 0
    """Draft tokens to make, after sampling, for each sampled sequence; its next decode verifies
    them."""
    masks: list[RowMask] = []
    """Of the sampled rows of sequences that are `masked`."""
    masks_follow: bool = False
    """They come as `Masks` of this step instead, after what the step before has brought: the
    forward pass need not wait for that."""


class Masks(Message):
    """The masks of a plan that was sent without; nothing else comes between."""

    epoch: Epoch
    step: StepNo
    masks: list[RowMask]


class Reset(Message):
    """Forget every slot; the next plan carries this epoch.

    A scheduler sends it when it starts, and the worker answers with its `Ready`; and, with the
    worker's own epoch, when it has taken that `Ready` up: a worker ignores all plans before that,
    since they were made for the one before it.
    """

    epoch: Epoch
    worker: Epoch = 0
    """Epoch of the `Ready` that was taken up; 0 = none yet."""


ToWorker = StepPlan | Masks | Reset


# --- scheduler -> detokenizer --------------------------------------------------------------------

class SequenceEvent(Struct, frozen=True, array_like=True, gc=False):
    """Rare things about one sequence, told with the step in which they happened."""

    sid: Sid
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    """Told once, with the first token."""
    error_code: str | None = None
    error: str | None = None
    logprobs: RowLogprobs | None = None
    """For this batch's tokens of the sequence."""
    prompt_logprobs: RowLogprobs | None = None
    draft_tokens: int | None = None
    """Told with the end: drafts verified for the sequence, and those accepted."""
    accepted_tokens: int | None = None


class Open(Message):
    """A sequence exists. Told once more to a new detokenizer, by a new scheduler, and when its
    client asks: `emitted` then holds what it has said so far. Who knows the sequence takes what is
    missing, and says again to the scheduler if it has ended it (`Stop`, `Cancel`)."""

    sid: Sid
    rid: Rid
    index: int
    client: ClientId
    prompt: Column
    text: TextParams
    logprobs: int = -1
    emitted: Column = b""
    emitted_logprobs: list[RowLogprobs] = []
    """In order; together of all of `emitted`, where they are wanted."""
    prompt_logprobs: list[RowLogprobs] = []
    end: SequenceEvent | None = None
    """The sequence is over: how."""
    epoch: Epoch = 0
    """The scheduler's: older ones are fenced off."""
    again: bool = False
    """Tell the client everything from the first token, also what was told before."""
    cached_tokens: Count | None = None
    """As in `SequenceEvent`, where that was told already."""
    draft_tokens: Count = 0
    """Of `emitted`: drafts verified, and those accepted."""
    accepted_tokens: Count = 0
    linger: Linger = 0.0
    prompt_before: Count = 0
    """Tokens of a long prompt that come before those of `prompt`: a request of many choices tells
    of each."""


class TokenBatch(Message):
    """The tokens of one step: columns over sequences, then events."""

    step: StepNo
    sids: Column
    starts: Column
    """i4[n]: number of the first token within its completion."""
    counts: bytes
    """u1[n]"""
    tokens: Column
    """i4[sum(counts)]"""
    events: list[SequenceEvent] = []
    epoch: Epoch = 0
    """The scheduler's: older ones are fenced off."""
    drafts: Drafts = 0
    """Drafts that were verified for each sequence but the first `firsts`."""
    firsts: Count = 0
    """How many of the sequences, leading ones, have the token after their prompt here."""


class Unknown(Message):
    """Answer to a `Recall` of a request that the scheduler does not know (any more)."""

    rid: Rid
    client: ClientId
    other: bool = False
    """It knows one of this name, that asked for something else."""


class Reply(Message):
    """An answer to pass on to a client, as `Answer`."""

    rid: Rid
    client: ClientId
    json: bytes


ToDetokenizer = Open | TokenBatch | Unknown | Reply


# --- everyone -> watchdog, watchdog <-> launcher -------------------------------------------------

class Beat(Message):
    """An actor is alive: sent every heartbeat, and at each change of phase."""

    role: Short
    pid: Count
    epoch: Epoch
    phase: Short
    """starting | loading | warming | ready | stepping | idle | draining | stopping"""
    step: StepNo
    """Work done so far: messages or steps, monotonic."""
    budget: Seconds
    """Seconds this phase may take without progress."""
    gauges: dict[str, float] = {}
    detail: str = ""
    """What the phase is doing, for people ("loading 3/5 shards")."""
    loop_age: Seconds = 0.0
    """Seconds since the actor's loop last turned; its beats come from a thread of their own, which
    tells a stuck loop from a stopped process."""


class Fatal(Message):
    """An actor is about to die of this."""

    role: Short
    pid: Count
    epoch: Epoch
    message: str
    stack: str = ""
    code: Short = "internal"
    """An `errors.CODES` name."""


class Child(Struct, frozen=True, array_like=True, gc=False):
    role: Short
    pid: int
    epoch: int


class Restarted(Message):
    """watchdog -> launcher: how an actor was started again so far. The launcher hands it to the
    next watchdog, so that a limit on restarts outlives who counts them."""

    role: Short
    delays: Count
    """How often the delay before its next restart is doubled."""
    worked: Seconds
    """In all its lives that are over."""
    working_since: Seconds | None
    """CLOCK_MONOTONIC seconds."""
    counted: Annotated[list[Seconds], Meta(max_length=MAX_RESTARTS)]
    """`worked` at each restart that counts."""
    causes: dict[str, Count]
    """Restarts by cause, of the whole life of the engine."""


class Children(Message):
    """launcher -> watchdog: who is running now."""

    children: list[Child]
    up: bool = False
    """The engine has been ready, and the launcher knows."""
    restarted: list[Restarted] = []
    """For a new watchdog: what the one before knew."""


class Exited(Message):
    """launcher -> watchdog: a child is gone. `status` is a wait status: exit code or -signal. Told
    once more to a new watchdog while nobody has taken the child's place."""

    role: Short
    pid: int
    epoch: Epoch
    status: int


ToWatchdog = Beat | Fatal | Children | Exited


class Kill(Message):
    """watchdog -> launcher: have this actor write down its stacks, then kill it. The role
    "launcher" stands for the whole engine, which then ends for this reason. The restart policy uses
    it; nobody else does."""

    role: Short
    pid: int
    reason: str


class Spawn(Message):
    """watchdog -> launcher: start the next incarnation of an actor that is gone."""

    role: Short
    epoch: Epoch


class Up(Message):
    """watchdog -> launcher: the engine is ready for the first time. From now on the dead are
    started again; before, a death ends the engine, since its reason would come again. Answered by
    `Children`; only then the watchdog tells others that the engine is ready."""


ToLauncher = Kill | Spawn | Up | Restarted | Fatal | Beat
"""The watchdog's own beats go to the launcher, who watches over it."""


# --- anyone -> watchdog (front) ------------------------------------------------------------------

class GetStatus(Message):
    """`wait` = answer when the engine is ready (or has failed), else at once."""

    rid: Rid
    wait: bool = False


class ActorStatus(Struct, frozen=True, gc=False):
    """One line of `actorium ps`."""

    name: str
    """Name of the engine."""
    role: str
    pid: int
    epoch: int
    phase: str
    step: int
    step_age: float
    """Seconds since `step` last moved or the phase changed."""
    beat_age: float
    detail: str = ""
    gauges: dict[str, float] = {}


class Status(Message):
    rid: Rid
    ready: bool
    error: str | None
    """Why the engine will never be ready."""
    actors: list[ActorStatus]


ToWatchdogFront = GetStatus
FromWatchdogFront = Status
