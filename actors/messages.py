"""Every message of the ring: one closed, tagged union per inbox.

Wire format: msgpack arrays (msgspec `array_like`), one ZMQ frame a message. Integers and lengths
are bounded, unknown fields refused. Columns of numbers travel as little-endian bytes made from
ready numpy arrays (`i4` unless said otherwise), so that a steady decode step builds no Python
object per sequence.

Terms: `rid` names a request at the edges; `sid` names a sequence (one choice of a request) inside
the ring: the scheduler numbers them 1, 2, ... and never reuses one within an epoch; `slot` is a row
of the worker's resident tables and is reused.

All messages are in one file, because the protocol is best read in one place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from actorium.actors.params import (
    MAX_BAD_WORDS,
    MAX_N,
    PoolingParams,
    PoolingTask,
    ResolvedParams,
    ResolvedPooling,
    SamplingParams,
    Seed,
    TextParams,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIRE, WIRES_READ = 2, (1, 2)
"""Version of the messages between clients and actors, counted up with each change that a client of
before cannot read or write; and those of clients that are served. An upgrade is refused where the
new version does not serve clients of the running one."""
MAX_MESSAGE_BYTES = 64 << 20
"""MAXMSGSIZE of every inbox: the connection of a peer that sends a larger frame is closed."""
MAX_RESULT = MAX_MESSAGE_BYTES // 4
"""Bytes of what one prompt is pooled to. The results of a step, in one message, have twice that."""
MAX_CLIENT_MESSAGE_BYTES = 4 << 20
"""The same for the fronts, where clients connect."""
MAX_EMBEDS = 16 << 20
"""Bytes of the rows of a prompt given as embeddings. Where an engine takes them, its fronts take
messages that are so much larger."""
MAX_TOKENS_IN_MESSAGE = 4 << 20
MAX_TURNS = 4096
"""Turns of a conversation."""
MAX_VALUES = 1 << 20
"""Numbers of a tensor that are told at once."""
MAX_SLOTS = 1 << 16
MAX_RESTARTS = 1 << 16

Rid = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+(?!\n)$")]
ClientId = Annotated[bytes, Meta(min_length=1, max_length=255)]
Sid = Annotated[int, Meta(ge=0, le=2**62)]
Slot = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StepNo = Annotated[int, Meta(ge=0, le=2**62)]
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Drafts = Annotated[int, Meta(ge=0, le=16)]
Column = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS_IN_MESSAGE)]
"""Little-endian int32, unless the field says otherwise."""
Sids = Annotated[bytes, Meta(max_length=8 * MAX_TOKENS_IN_MESSAGE)]
"""i8[n], little-endian."""
Seconds = Annotated[float, Meta(ge=0)]
Short = Annotated[str, Meta(max_length=4096)]
Tenant = Annotated[str, Meta(max_length=64, pattern=r"^[\x21-\x7e]*(?!\n)$")]
"""The owner of a request: prefixes are shared within a tenant only, and scheduling is fair between
tenants. Empty = the common tenant."""
WeightsRuns = Annotated[list[tuple[int, int]], Meta(max_length=MAX_TOKENS_IN_MESSAGE)]
"""(number of the first token, version of the model's weights) of each run of a completion's tokens
that one version has made; version 0, of the engine's start, is left out in front."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Higher goes first."""
BACKGROUND = -(2**31)
"""The priority that gives way to any other one, whatever the policy: that of batches' requests."""
ResumeSeconds = Annotated[float, Meta(ge=0, le=3600)]
"""Seconds for which a request continues after its client has left, so that another one can take it
over (`Resume.adopt`). Its rid must then be hard to guess."""


TraceId = Annotated[bytes, Meta(min_length=16, max_length=16)]
SpanId = Annotated[bytes, Meta(min_length=8, max_length=8)]
TraceState = Annotated[str, Meta(max_length=512)]


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of all wire messages."""


class TraceContext(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The OpenTelemetry trace that a request belongs to, as W3C Trace Context has it."""

    trace_id: TraceId
    parent: SpanId | None = None
    """The span whose child the request is; None = it begins the trace."""
    sampled: bool = True
    """Whether spans of it are wanted."""
    state: TraceState = ""
    """`tracestate`, as the caller has sent it."""
    operation: Short = ""
    """chat | text_completion | embeddings: what OpenTelemetry calls it; or classify. The tokenizer
    sets it."""


# --- client -> tokenizer (front) -----------------------------------------------------------------

MAX_TEMPLATE = 1 << 16
"""Characters of a chat template that a request brings."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
                  "mask_token")
"""Special tokens of a model, as chat templates name them."""
RESERVED_TEMPLATE_ARGS = frozenset({"messages", "tools", "raise_exception", "strftime_now",
                                    *SPECIAL_TOKENS})
"""Variables of chat templates that no `template_args` may set."""
Template = Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)]
Salt = Annotated[str, Meta(max_length=256)]
"""Separates cached prefixes: only requests with the same salt share them."""
AdapterName = Annotated[str, Meta(max_length=256)]
"""Name of a LoRA adapter; "" = the model by itself."""
Turns = Annotated[list["ChatMessage"], Meta(max_length=4 * MAX_TURNS)]
"""Bounds what is decoded; the refusal of a longer conversation names the real limit."""
NO_ARGS, NO_TOOLS = Raw(b"\x80"), Raw(b"\x90")
"""An empty map and an empty array of msgpack."""
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Number of last tokens of a prompt that are kept; -1 = as many as fit the context."""
MediaKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""Names an image or a video that the media actor has (`actors/media/media_messages.py`)."""
MediaKeys = Annotated[list[MediaKey], Meta(max_length=1024)]
EmbedsType = Literal["F32", "F16", "BF16"]
"""By safetensors' name."""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool call by the model."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str
    """A JSON object, as text."""
    id: str = ""


class TurnPart(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a turn: text, or where an image or a video stands."""

    type: Literal["text", "image", "video"]
    text: str = ""


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[TurnPart], Meta(max_length=MAX_TURNS)]
    name: str | None = None
    """Name of the speaker; in a tool's turn, of the tool."""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """In a tool's turn: the call that it answers."""
    reasoning_content: str | None = None
    """The model's reasoning before its answer."""


class PromptEmbeds(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A prompt as rows that take the place of token embeddings: what transformers takes as
    `inputs_embeds`. Its token ids are all 0, and nothing but lengths and pages reads them."""

    hidden: Annotated[int, Meta(ge=1)]
    """Numbers of a row."""
    data: Annotated[bytes, Meta(max_length=MAX_EMBEDS)]
    """The rows, little-endian."""
    dtype: EmbedsType = "F32"
    digests: Annotated[bytes, Meta(max_length=MAX_EMBEDS)] = b""
    """SHA-256 of each row and its dtype, by which prefixes are shared; clients leave it empty."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * (4 if self.dtype == "F32" else 2)

    @property
    def rows(self) -> int:
        """Number of rows: tokens."""
        return len(self.data) // self.row_bytes

    def behind(self, count: int) -> PromptEmbeds:
        """Returns what a worker needs that has the first `count` rows in pages."""
        return PromptEmbeds(self.hidden, self.data[count * self.row_bytes:], self.dtype)


class Generate(Message):
    """Requests completions of one prompt, or what a model's pooling makes of it: exactly one of
    text, tokens, messages, embeds is set.

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
    """Extra variables of the chat template, a map of JSON values. Like the tools it stays packed
    until the template is rendered: four megabytes of empty lists take a second to unpack."""
    tenant: Tenant = ""
    priority: Priority = 0
    tools: Raw = NO_TOOLS
    """Tools for the chat template, as OpenAI describes them: an array of maps."""
    resume_seconds: ResumeSeconds = 0.0
    chat_template: Template | None = None
    """Replaces the model's."""
    add_generation_prompt: bool = True
    """The template ends with the beginning of the model's turn."""
    continue_final_message: bool = False
    """The model continues the last turn, which is left open; not with `add_generation_prompt`."""
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: Salt = ""
    media: MediaKeys = []
    """The images and videos of messages or text, in their order there."""
    created: Count = 0
    """Unix time, seconds: what answers call their creation, also when they are sent again."""
    trace: TraceContext | None = None
    """Of an engine that exports traces: None = the request begins one."""
    pooling: PoolingParams | None = None
    """A vector or scores are wanted, not a completion: then `params` are the default ones."""
    text_pair: str | None = None
    """The second text of a pair whose scores are wanted; with `text` and the task classify."""
    adapter: AdapterName = ""
    embeds: PromptEmbeds | None = None


class Abort(Message):
    """Ends a request now. Unknown rids are ignored."""

    rid: Rid


class Resume(Message):
    """Asks for the whole stream of this request again, from its first token: the client has lost
    it. The SDK also sends it when an actor of the ring was replaced. Unknown rids are answered on
    the stream by the error `unknown_request`.

    With `adopt` the request may be another client's: if it can be resumed, has the same tenant,
    and did not finish longer ago than the engine remembers, it belongs to this client from
    then on, and the other client's stream ends with `aborted`. Knowing the rid is enough. The part
    of the rid before its first "." names the request, the rest stands for its parameters: if only
    the rest differs, the answer is `invalid_request`.
    """

    rid: Rid
    adopt: bool = False
    tenant: Tenant = ""


class Tokenize(Message):
    """Asks for the tokens of a text, or of the prompt that a conversation is rendered to."""

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
    media: MediaKeys = []
    parse_special: bool = True
    """False = where `text` writes a special token, it is encoded as the characters that it has."""


class Detokenize(Message):
    rid: Rid
    tokens: Column
    skip_special_tokens: bool = False


class ServerInfo(Message):
    rid: Rid


class FlushCache(Message):
    """Drops every cached prefix that no running sequence holds. Answered on the stream (`Answer`)
    by {"pages": number of pages freed, "kept": cached pages still held}."""

    rid: Rid


Order = Literal["sleep", "wake", "pause", "resume", "state"]
"""Of whether the engine generates; "state" only asks."""
SleepLevel = Annotated[int, Meta(ge=1, le=2)]
"""1: the worker's process stays, without weights and pages; 2: it ends."""
RunningMode = Literal["wait", "keep", "retract", "abort"]
"""What becomes of the requests that run: they end first; they stop where they are, and go on later;
they also give up their pages, and are computed again then; they are aborted."""


class Control(Message):
    """Puts the engine to sleep, wakes it, pauses it or lets it go on. Answered on the stream
    (`Answer`) when that is reached, or another order has taken its place, by {"sleeping": level, 0
    = awake, "paused": bool, "cache_kept": whether the host's memory has kept cached prefixes}."""

    rid: Rid
    order: Order
    level: SleepLevel = 1
    mode: RunningMode = "wait"
    """Of "sleep" and "pause"."""
    clear_cache: bool = False
    """Of "pause": the prefix cache is emptied, too."""


class AdapterCall(Message):
    """Loads a LoRA adapter under a name, unloads it, or asks which there are. Answered on the
    stream (`Answer`), once every rank of the worker has read what is loaded, by {"adapters": those
    that there are}, or {"error": {"code", "message"}}."""

    rid: Rid
    order: Literal["load", "unload", "list"]
    name: Short = ""
    path: Short = ""
    """Of "load": a folder in PEFT's format, or a .gguf file."""
    replace: bool = False
    """Of "load": an adapter of this name may be there, and gives way to it."""


class WeightsCall(Message):
    """Has the engine read its model's weights anew, or asks what it serves. Answered on the stream
    (`Answer`), once every rank of the worker computes with them, by {"version", "path", "seconds",
    "read_seconds"}, or {"error": {"code", "message"}}, after which those of before are served on.
    """

    rid: Rid
    order: Literal["update", "state"]
    path: Short = ""
    """Of "update": a directory with a checkpoint of the same tensors; "" = the one in use."""
    tensors: Short = ""
    """Of "update": a safetensors file whose tensors take the place of those of the same name."""
    mode: RunningMode = "wait"
    """What becomes of the requests that run; "keep": they go on with the new weights."""
    version: Count = 0
    """Of "update": its number, above the present one; 0 = the next."""
    clear_cache: bool = True
    """The prefix cache is emptied, too. What older weights have computed is never used for
    requests that come later, whether it is or not."""


class TensorCall(Message):
    """Asks for a tensor of the weights that are served. Answered on the stream (`Answer`) by
    {"shape", "dtype", "values"}, or {"error": {"code", "message"}}."""

    rid: Rid
    name: Short
    """As the checkpoint has it."""
    most: Annotated[int, Meta(ge=1, le=MAX_VALUES)] = 100
    """Rows that are wanted, the first ones; of a vector: numbers."""


ToTokenizerFront = (Generate | Abort | Resume | Tokenize | Detokenize | ServerInfo | FlushCache
                    | Control | AdapterCall | WeightsCall | TensorCall)


# --- tokenizer (front) -> client -----------------------------------------------------------------

class Accepted(Message):
    """The request was checked and sent to the scheduler. The first delta on its stream, which is
    empty, confirms that it is in the ledger: until then the client repeats it from time to time."""

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
    """Registers this client's stream; sent before its first `Generate`."""


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
    """The drafted tokens that were accepted."""
    weight_version: int = 0
    """Of the weights that made the last token (`WeightsRuns`)."""


class Pooled(Struct, frozen=True, array_like=True, gc=False):
    """A vector, one for each token, or the hidden states of each."""

    shape: list[Count]
    """[width], [tokens, width] or, of hidden states, [tokens, layers, hidden]"""
    data: bytes
    """The numbers, little-endian."""
    dtype: Literal["F32", "F16", "BF16"] = "F32"
    """Of `data`, by safetensors' name: of hidden states, the model's."""
    weight_version: Count = 0
    """Of the weights that computed it."""

    def array(self) -> NDArray[Any]:
        """Returns the numbers: f32[*shape], or f16. bf16, which numpy does not have, as f32."""
        import numpy as np  # clients do without it

        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, "<f4" if self.dtype == "F32" else "<f2").reshape(self.shape)

    def tolist(self) -> list[Any]:
        """Returns the numbers: a list, or a list for each token (of lists, of hidden states)."""
        if len(self.shape) > 2:
            numbers: list[Any] = self.array().tolist()
            return numbers
        view = memoryview(self.data).cast("f")
        *rows, width = self.shape
        if not rows:
            return view.tolist()
        return [view[at:at + width].tolist() for at in range(0, rows[0] * width, width)]

    def safetensors(self, name: str) -> bytes:
        """Returns a safetensors file with the numbers as the only tensor, of this name."""
        head = json.dumps({name: {"dtype": self.dtype, "shape": self.shape,
                                  "data_offsets": [0, len(self.data)]}}).encode()
        head += b" " * (-len(head) % 8)  # readers take the numbers where they lie, aligned
        return len(head).to_bytes(8, "little") + head + self.data


BYTE_EXPERTS = 256
"""Experts of a layer whose numbers fit a byte."""
MAX_ROUTED_BYTES = 24 << 20
"""The most that are kept of a sequence's experts: they go to the client in one message."""


class RoutedExperts(Struct, frozen=True, array_like=True, gc=False):
    """The experts that the mixtures of a model chose for consecutive tokens."""

    shape: tuple[Count, Count, Count]
    """(tokens, layers with a mixture of experts, experts chosen by each)"""
    data: bytes
    """u1[*shape]; u2, little-endian, of models with more than 256 experts a layer."""

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return len(self.data) // max(math.prod(self.shape), 1)

    def tolist(self) -> list[list[list[int]]]:
        """Returns the experts' numbers: by token, by layer, in the order of their scores."""
        tokens, layers, chosen = self.shape
        view = memoryview(self.data).cast("B" if self.width == 1 else "H")
        return [[view[at:at + chosen].tolist()
                 for at in range(token * layers * chosen, (token + 1) * layers * chosen, chosen)]
                for token in range(tokens)]

    def part(self, first: int, end: int) -> RoutedExperts:
        """Returns those of the tokens `first` to `end` - 1."""
        tokens, layers, chosen = self.shape
        size, end = len(self.data) // max(tokens, 1), min(end, tokens)
        return RoutedExperts((end - first, layers, chosen), self.data[first * size:end * size])


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """The output of one choice of one request since its last delta."""

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
    prompt_tokens: Count = 0
    """This and `created` are set where `start` is 0: what was recorded when it was admitted."""
    created: Count = 0
    pooled: Pooled | None = None
    """Set with finish_reason == "stop" where `Generate.pooling` is."""
    weights: WeightsRuns = []
    """Set with finish_reason."""
    routed_experts: RoutedExperts | None = None
    """Set with finish_reason, if asked for: of the prompt and all tokens but the last."""


class TextBatch(Message):
    """detokenizer -> client: at most one per step and client."""

    deltas: list[Delta]


class Answer(Message):
    """The result of an order that went round the ring (`FlushCache`, `Control`, `AdapterCall`,
    `WeightsCall`, `TensorCall`)."""

    rid: Rid
    json: bytes


ToDetokenizerFront = Attach
FromDetokenizerFront = Attached | TextBatch | Answer


# --- tokenizer, detokenizer, worker -> scheduler -------------------------------------------------

class ThoughtRule(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A limit on the thoughts of a completion."""

    format: Short
    """Name of their format in `config/reasoning_formats.py`."""
    budget: Count
    """Tokens, the marks left aside."""
    opened: bool
    """The prompt has begun a thought."""


class TokenRules(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Tokens that the completions of a request may contain, apart from its grammar."""

    vocab_size: Count
    allowed: Column = b""
    """Empty = all."""
    bad_words: Annotated[list[Column], Meta(max_length=2 * MAX_BAD_WORDS)] = []
    """Token sequences that must not occur in a completion."""
    thought: ThoughtRule | None = None


class MediaItem(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An image or a video of a prompt. Its patches lie in shared memory, under its key."""

    key: MediaKey
    """Equal only where patches and grid are."""
    video: bool
    frames: Count
    """Of patches, as rows and columns are."""
    rows: Count
    columns: Count
    start: Count
    """Index in the prompt of its first placeholder."""
    end: Count
    """Index behind its last one; between those of a video there may be text."""
    seconds: float = 0.0
    """Of a video: how long a frame of patches lasts."""


Media = Annotated[list[MediaItem], Meta(max_length=1024)]
"""In the order of the prompt."""


class NamedAdapter(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A LoRA adapter that a request names, and what that name stands for when the request is
    admitted: it ends with that, whatever becomes of the name."""

    name: Short
    path: Short = ""
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    """SHA-256 of all that the adapter holds; empty = the scheduler looks it up."""


class Submit(Message):
    """A checked request: token ids and resolved parameters.

    What the worker samples by (`params`, on to `Admit`), what the detokenizer reads (`text`, on to
    `Open`) and what makes masks (`grammar`, `rules`) are apart, each passed on as it is. One struct
    would have the worker decode grammars and stop strings, and the detokenizer logit biases.
    """

    rid: Rid
    client: ClientId
    prompt: Column
    n: Annotated[int, Meta(ge=1, le=MAX_N)]
    params: ResolvedParams
    text: TextParams
    seed: Seed
    deadline: float | None = None
    arrival: float = 0.0
    """CLOCK_MONOTONIC seconds, as the deadline."""
    tenant: Tenant = ""
    priority: Priority = 0
    grammar: str = ""
    """Grammar of the completion in llguidance's syntax; with `params.masked`."""
    resume_seconds: ResumeSeconds = 0.0
    rules: TokenRules | None = None
    """With `params.masked`."""
    cache_salt: Salt = ""
    media: Media = []
    created: Count = 0
    deterministic: bool = False
    """Refused, or ended, by a worker that is not exact."""
    trace: TraceContext | None = None
    """None = no spans are made of it."""
    queued: float = 0.0
    """When the scheduler got it; CLOCK_MONOTONIC seconds, 0 = no spans are made of it."""
    pooling: ResolvedPooling | None = None
    """Nothing is sampled: the sequence ends with the step that computes the end of its prompt."""
    adapter: NamedAdapter | None = None
    """None = the model by itself."""
    embeds: PromptEmbeds | None = None
    """What takes the place of the prompt's token embeddings."""


class Flush(Message):
    """See `FlushCache`; answered by a `Reply`."""

    rid: Rid
    client: ClientId


class ControlRequest(Message):
    """See `Control`; answered by a `Reply`."""

    client: ClientId
    control: Control


class AdapterOrder(Message):
    """See `AdapterCall`; answered by a `Reply`. Of what is loaded the files are read in front of
    the scheduler's core, which gets what they hold, or why they cannot be served."""

    client: ClientId
    """Empty = the engine's own, at its start: not answered."""
    call: AdapterCall
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    rank: Count = 0
    base: Short = ""
    """Name of the model that the adapter was trained on; "" = not said."""
    error: Short = ""


class WeightsSource(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The files that a model's weights were read from."""

    path: Short = ""
    """A checkpoint's directory; "" = the one that the engine is configured with."""
    over: list[Short] = []
    """Safetensors files whose tensors take the place of those of the same name there, a later
    file's that of an earlier one's."""
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    """Of these files, by name, size, time of change, begin and end; empty = the configured ones
    alone, as they were at the start."""


class WeightsOrder(Message):
    """See `WeightsCall` and `TensorCall`; answered by a `Reply`."""

    client: ClientId
    call: WeightsCall | TensorCall


class AbortRequest(Message):
    """The client (or the engine) cancels the request."""

    rid: Rid
    client: ClientId


class ResumeRequest(Message):
    """See `Resume`."""

    rid: Rid
    client: ClientId
    adopt: bool = False
    tenant: Tenant = ""


class Hello(Message):
    """A new incarnation of an actor has started with no state: send it what it needs."""

    role: Short
    epoch: Epoch
    sids: Annotated[list[Sid], Meta(max_length=MAX_SLOTS)] = []
    """It lives, and has missed something of these sequences alone."""


class Stop(Message):
    """A stop string matched after `tokens` tokens of the sequence. Idempotent."""

    sid: Sid
    tokens: Count


class PageGroup(Struct, frozen=True, array_like=True, gc=False):
    """The layers that share one page pool and one page table: those of one attention window."""

    pages: Count
    """Pages of the pool, the sink page 0 included."""
    window: Count = 0
    """Tokens a query attends to, itself included; 0 = all. Pages behind it are freed early."""


class Ready(Message):
    """A rank of the worker has loaded its part of the model and allocated memory: its capacity."""

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
    needs no number: it belongs to the slot."""
    recurrent: bool = False
    """The model has recurrent layers: a prefix is reused only with a checkpoint of its state."""
    load_seconds: dict[str, float] = {}
    """Seconds by phase: import, load, allocate, warm up."""
    drafts: Drafts = 0
    """Maximum of draft tokens of a sequence and step; 0 = nothing is drafted."""
    draft_methods: dict[str, Drafts] = {}
    """What makes drafts, and how many at most."""
    rank: Count = 0
    host_pages: Count = 0
    """Slots for pages in the host's memory."""
    host_parts: list[Count] = []
    """Slots that a page of each group takes, and at last a checkpoint where there are any."""
    disk: Literal["", "ahead", "at once"] = ""
    """When pages go to a disk as well (`PageOrder`): before host slots run out, or at once."""
    inexact: str = ""
    """Why a token's numbers may depend on more than itself and what is before it; "": they do
    not."""
    adapters: Count = 0
    """Different adapters that the sequences in slots may have; 0 = the worker serves none."""
    pooling: list[PoolingTask] = []
    """What it can make of prompts beside completions."""
    whole_prompts: bool = False
    """Every token attends to all of its prompt, which is computed in one step and never cached."""
    weights: WeightsSource = WeightsSource()
    """What it computes with."""
    routing: tuple[Count, Count, Count] = (0, 0, 0)
    """Layers with a mixture of experts, experts that each chooses, experts that each has."""
    hidden_states: tuple[Count, Count, Count] = (0, 0, 0)
    """Layers, numbers of a token behind each, and bytes of a number."""


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


class RowExperts(Struct, frozen=True, array_like=True, gc=False):
    """The experts of one sequence's tokens of a step, or of consecutive tokens of a sequence."""

    row: int
    """In a result: index of the sampled row; of an extend, -1 - slot."""
    start: int
    """Number of the first token within the sequence, prompt included; in a result: of extends."""
    experts: RoutedExperts

    @property
    def end(self) -> int:
        """Number of the token behind the last one."""
        return self.start + self.experts.shape[0]

    def beyond(self, known: int) -> RowExperts | None:
        """Returns those of the tokens behind the first `known` of the sequence; None where there
        are none, or some between are missing."""
        if not self.start <= known < self.end:
            return None
        first, end = known - self.start, self.experts.shape[0]
        return RowExperts(0, known, self.experts.part(first, end))


def add_experts(rows: list[RowExperts], own: RowExperts) -> None:
    """Adds to the experts of a sequence, which begin with its first token, what is new."""
    if (new := own.beyond(rows[-1].end if rows else 0)) is not None:
        rows.append(new)


def joined_experts(rows: Sequence[RowExperts]) -> RoutedExperts:
    """Returns the experts of tokens that come one behind the other, as one; of one row at least."""
    _, layers, chosen = rows[0].experts.shape
    return RoutedExperts((rows[-1].end - rows[0].start, layers, chosen),
                         b"".join(own.experts.data for own in rows))


class StepResult(Message):
    """The output of a step, in the order of the plan's sampled rows.

    Sampled rows: first the extends that ended their prompt (in plan order; without those that are
    pooled), then `decode`. A decode emits between one token and one more than the drafts it
    verified.
    """

    epoch: Epoch
    step: StepNo
    counts: bytes
    """u1[rows]: tokens emitted by each row; 0 = the sequence had already ended on the device."""
    tokens: Column
    """i4[sum(counts)]"""
    finish: bytes
    """u1[rows]: 0 = continues, 1 = ended by a token of eos_ids, 2 = ended by max_tokens."""
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    busy_us: Count = 0
    """Device time of the step, from begin to end; microseconds."""
    idle_us: Count = 0
    """Device time between the end of the step before and the start of this one, while this plan
    or an older one was waiting or being made; 0 when the engine had no work."""
    drafts: Column = b""
    """i4[n, StepPlan.drafts]: the tokens drafted for the n sampled rows that are `masked`, in
    order: the next masks depend on them. -1 behind those of a row for which fewer were found."""
    late_us: Count = 0
    """Part of busy_us in which the device may have idled, at most, because the host was still
    queueing the step when the device reached it."""
    encoded: list[bytes] = []
    """Keys of `StepPlan.encode` that are made, as far as they can be kept."""
    encode_us: Count = 0
    """Part of busy_us that went into images and videos."""
    failed: list[tuple[Slot, Short, Short]] = []
    """Sequences of the step that end, with their requests: (slot, an `errors.CODES` name, why).
    Extends whose images cannot be had, of which what was computed means nothing, and sampled rows
    whose logits processors failed, of which the tokens mean nothing."""
    lost: Column = b""
    """i4[n]: host slots of `StepPlan.load` that are corrupt: their pages were not copied."""
    pooled: list[tuple[Slot, Pooled]] = []
    """Of each extend that ends a prompt with `Admit.pooling`; such a prompt has no sampled row."""
    draft_counts: bytes = b""
    """u1[decodes]: drafts that each verified, where that is fewer than planned; b"" = as planned.
    The most of them is what the step's window had."""
    experts: list[RowExperts] = []
    """Of extends: of all their tokens; of decodes: of the last token and the accepted drafts."""


class PageAnswer(Message):
    """A rank has done a `PageOrder`; or (ticket 0) made the copies of a plan, of which rank 0 tells
    by its result."""

    epoch: Epoch
    worker: Epoch
    rank: Count
    ticket: StepNo
    step: StepNo = 0
    outcomes: bytes = b""
    """u1[n], of the order's names: 0 = not there or not written, 1 = done, 2 corrupt, 3 late."""
    lost: Column = b""
    pages: Count = 0
    disk_bytes: StepNo = 0
    """What the directory holds, as far as this worker knows."""


class AdapterAnswer(Message):
    """A rank has read an adapter (`LoadAdapter`), or cannot serve it."""

    epoch: Epoch
    rank: Count
    number: Count
    error: Short = ""
    """Why it cannot be served; "": it can."""


class Unloaded(Message):
    """A rank of the worker has done an `Unload`, or was asked (`Reset`) while it is unloaded."""

    epoch: Epoch
    rank: Count = 0


class WeightsAnswer(Message):
    """A rank has done a `PrepareWeights` or an `UpdateWeights`, or has refused it and goes on with
    what it had."""

    epoch: Epoch
    rank: Count
    number: StepNo
    source: WeightsSource = WeightsSource()
    """What it computes with from now on, or has prepared."""
    error: Short = ""
    """Why it has refused; "": it has not."""
    seconds: Seconds = 0.0
    prepared: bool = False
    """It answers a `PrepareWeights`."""


class TensorAnswer(Message):
    """What a `ReadTensor` asked for."""

    epoch: Epoch
    number: StepNo
    json: bytes = b""
    error: Short = ""


ToScheduler = (Submit | AbortRequest | ResumeRequest | Hello | Stop | Flush | ControlRequest | Ready
               | StepResult | PageAnswer | Unloaded | AdapterAnswer | AdapterOrder | WeightsOrder
               | WeightsAnswer | TensorAnswer)


# --- scheduler -> worker -------------------------------------------------------------------------

class Admit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A sequence enters a slot. After a preemption `tokens` includes the emitted tokens."""

    slot: Slot
    tokens: Column
    prompt_len: Count
    """Number of `tokens` that are prompt: penalties and max_tokens count from there."""
    cached_len: Count
    """Tokens whose pages are already filled (a multiple of the page size)."""
    pages: Column
    """i4[groups, n]: the pages of the cached prefix, n = cached_len / page_size, in order; 0 for a
    page behind its group's window. Later pages come as page_appends."""
    params: ResolvedParams
    seed: Seed
    checkpoint: Count = 0
    """The checkpoint of the recurrent state after cached_len tokens; 0 = the state starts empty
    (then cached_len is 0)."""
    media: Media = []
    adapter: Count = 0
    """Number of the adapter (`AdapterRef`) that computes it; 0 = the model by itself."""
    pooling: ResolvedPooling | None = None
    """Nothing is sampled at the end of the tokens; see `StepResult.pooled`."""
    answers: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Owner of the earlier answers that drafts may be made of, and of its own when it leaves the
    slot; 0 = none."""
    embeds: PromptEmbeds | None = None
    """Those of the prompt's tokens from `cached_len` on, without digests."""


class RowMask(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The tokens that a row may sample."""

    slot: Slot
    row: Drafts
    """0 = the row of the last token (or of the end of the prompt), i = the row of draft i."""
    bits: Annotated[bytes, Meta(max_length=1 << 20)]
    """u4[ceil(vocabulary / 32)]: bit t % 32 of word t / 32 is set if token t is allowed."""


class RowDrafts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Drafts of a sequence that the scheduler has made."""

    slot: Slot
    tokens: Annotated[bytes, Meta(min_length=4, max_length=64)]
    """i4[n]"""


class StepPlan(Message):
    """One step, as deltas to the worker's resident tables, applied in the order of the fields.

    First `release` frees slots, then `admit` fills them and `page_appends` extends page tables;
    then the forward pass runs over `extend` and `decode`.

    Speculation: a decode computes its last token and the drafts made for it in the last step in
    which it was sampled (as many as that step's `drafts`). Each row is sampled from its own
    distribution, and the samples up to the first that differs from its draft are emitted. Then
    `drafts` new ones are made for every sampled sequence that continues. Pages are needed for all
    that a step may write: min(L - 1 + drafts, its end) tokens for a sequence that may be L tokens
    long after the step.
    """

    epoch: Epoch
    step: StepNo
    release: Column = b""
    """i4[n]: slots whose sequence has ended."""
    admit: list[Admit] = []
    page_appends: Column = b""
    """i4[n, 2 + groups]: (slot, index in its page tables, a page of each group)."""
    extend: Column = b""
    """i4[n, 2]: (slot, tokens to compute). The row is sampled when it reaches the end of its
    tokens."""
    decode: Column = b""
    """i4[n]: slots that decode one token."""
    checkpoints: Column = b""
    """i4[n, 3]: (slot, checkpoint, tokens): save a copy of the slot's recurrent state after the
    first `tokens` tokens of the slot's extend in this step."""
    drafts: Drafts = 0
    """Draft tokens to make, after sampling, for each sampled sequence; its next decode verifies
    them."""
    draft_method: str = ""
    """What makes them, of `Ready.draft_methods`."""
    draft_cost: Annotated[float, Meta(ge=0)] = 0.0
    """What one more draft for each sequence costs, as a share of a step without; 0 = not measured.
    By it fewer drafts are made where they would not pay."""
    masks: list[RowMask] = []
    """For the sampled rows of sequences that are `masked`."""
    masks_follow: bool = False
    """The masks come as `Masks` of this step instead, after the result of the step before, for
    which the forward pass then need not wait."""
    encode: Media = []
    """Images and videos to be made ahead of the extends that need them, in this order."""
    encode_us: Count = 0
    """Microseconds that this may take; 0 = as long as it takes."""
    store: Column = b""
    load: Column = b""
    """i4[n, 3] each, before all else: (kind * 65536 + part, page, host slot) to copy out, then
    back. kind: a group, or behind them a checkpoint; part: which slot's worth of it."""
    forced: list[RowDrafts] = []
    """Drafts that this step verifies, for some of `decode`, in the place of those that were made.
    With them every decode has as many rows as the longest needs; drafts that are missing are 0 in
    the masks' rows, and accepted by chance at most."""


class Masks(Message):
    """The masks of a plan with `masks_follow`; no other message comes between."""

    epoch: Epoch
    step: StepNo
    masks: list[RowMask]


class Reset(Message):
    """Clears every slot, and forgets what the numbers of adapters stand for, but not what was read
    of them; the next plan carries this epoch.

    A scheduler sends it when it starts, and the worker answers with its `Ready`. It sends it again,
    with the worker's own epoch, when it has processed that `Ready`: a worker ignores all plans
    before that, since they were made for its predecessor.
    """

    epoch: Epoch
    worker: Epoch = 0
    """Epoch of the `Ready` that was processed; 0 = none yet."""


class PageOrder(Message):
    """What is to be done on the disk with pages in host slots, off the steps' thread."""

    epoch: Epoch
    ticket: StepNo
    verb: Literal["find", "read", "write", "wipe"]
    names: Column = b""
    """16 bytes each."""
    slots: Column = b""
    """i4[n], of what is read or written."""


class Unload(Message):
    """Free weights, pages and tables; host slots stay. Answered by `Unloaded`. No plan is under
    way."""

    epoch: Epoch


class Reload(Message):
    """Load what `Unload` has freed; answered by `Ready`. Ignored where nothing is unloaded."""

    epoch: Epoch


class AdapterRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A LoRA adapter as the scheduler names it to the worker."""

    number: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Never used twice within an epoch of the scheduler."""
    path: Short
    """A directory with PEFT's files, or a GGUF file."""
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of all that it holds."""


class LoadAdapter(Message):
    """Read an adapter into the host's memory, off the steps' thread; each rank answers with
    `AdapterAnswer`. Sequences may have it from then on (`Admit.adapter`)."""

    epoch: Epoch
    adapter: AdapterRef


class DropAdapter(Message):
    """Forget an adapter, which no sequence in a slot has. Not answered; unknown numbers are
    ignored."""

    epoch: Epoch
    number: Count


class PrepareWeights(Message):
    """Read weights beside those that are served, off the steps' thread; each rank answers with
    `WeightsAnswer`. What was prepared before is given up."""

    epoch: Epoch
    number: StepNo
    source: WeightsSource
    """Its digest is empty."""


class UpdateWeights(Message):
    """Compute with what was prepared under this number from the next step on; each rank answers
    with `WeightsAnswer`. All ranks do, or none. No plan is under way."""

    epoch: Epoch
    number: StepNo
    take: bool = True
    """Else it is given up, and nothing answered."""


class ReadTensor(Message):
    """Tell the first rows of a tensor (`TensorAnswer`), off the steps' thread; of rank 0."""

    epoch: Epoch
    number: StepNo
    name: Short
    most: Count


ToWorker = (StepPlan | Masks | Reset | PageOrder | Unload | Reload | LoadAdapter
            | DropAdapter | PrepareWeights | UpdateWeights | ReadTensor)


# --- scheduler -> detokenizer --------------------------------------------------------------------

class SequenceEvent(Struct, frozen=True, array_like=True, gc=False):
    """A rare event of one sequence, sent with the step in which it happened."""

    sid: Sid
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    """Sent once, with the first token."""
    error_code: str | None = None
    error: str | None = None
    logprobs: RowLogprobs | None = None
    """For this batch's tokens of the sequence."""
    prompt_logprobs: RowLogprobs | None = None
    draft_tokens: int | None = None
    """Sent with the end: drafts verified for the sequence, and those accepted."""
    accepted_tokens: int | None = None
    pooled: Pooled | None = None
    """Sent with the end; the ledger does not keep it."""
    weights: tuple[int, int] | None = None
    """The run of tokens (`WeightsRuns`) that begins in this batch."""
    experts: RowExperts | None = None
    """The next ones of the sequence."""


class Open(Message):
    """A sequence exists. Sent again to a new detokenizer, by a new scheduler, and when its client
    asks: `emitted` then holds its tokens so far. A detokenizer that knows the sequence adds what is
    missing, and tells the scheduler again if it has ended it (`Stop`, `AbortRequest`)."""

    sid: Sid
    rid: Rid
    index: int
    client: ClientId
    prompt: Column
    text: TextParams
    logprobs: int = -1
    emitted: Column = b""
    emitted_logprobs: list[RowLogprobs] = []
    """In order; together they cover all of `emitted`, if logprobs are wanted."""
    prompt_logprobs: list[RowLogprobs] = []
    end: SequenceEvent | None = None
    """How the sequence has ended, if it has."""
    epoch: Epoch = 0
    """The scheduler's; messages of older epochs are dropped."""
    again: bool = False
    """Send the client everything from the first token, even what was sent before."""
    cached_tokens: Count | None = None
    """As in `SequenceEvent`, if that was sent already."""
    draft_tokens: Count = 0
    """Drafts verified for `emitted`, and those accepted."""
    accepted_tokens: Count = 0
    resume_seconds: ResumeSeconds = 0.0
    prompt_before: Count = 0
    """Number of prompt tokens before those in `prompt`: of a long prompt, a request with many
    choices sends only the end for each."""
    created: Count = 0
    trace: TraceContext | None = None
    weights: WeightsRuns = []
    experts: list[RowExperts] = []
    """In order, from the first token on."""


class TokenBatch(Message):
    """The tokens of one step: columns over sequences, then events."""

    step: StepNo
    sids: Sids
    starts: Column
    """i4[n]: number of the first token within its completion."""
    counts: bytes
    """u1[n]"""
    tokens: Column
    """i4[sum(counts)]"""
    events: list[SequenceEvent] = []
    epoch: Epoch = 0
    """The scheduler's; messages of older epochs are dropped."""
    drafts: Drafts = 0
    """Drafts verified for each sequence except the first `firsts`, at most."""
    firsts: Count = 0
    """Number of leading sequences whose first token after the prompt is in this batch."""
    draft_counts: bytes = b""
    """u1[n - firsts]: drafts verified for each of the others, where they are not `drafts` each."""


class Unknown(Message):
    """Answers a `ResumeRequest` of a request that the scheduler does not know (any more)."""

    rid: Rid
    client: ClientId
    other: bool = False
    """It knows a request of this name with other parameters."""


class Reply(Message):
    """An answer for the detokenizer to forward to a client as `Answer`."""

    rid: Rid
    client: ClientId
    json: bytes


ToDetokenizer = Open | TokenBatch | Unknown | Reply


# --- everyone -> watchdog, watchdog <-> launcher -------------------------------------------------

class Beat(Message):
    """A heartbeat: an actor is alive. Sent periodically and at each change of phase."""

    role: Short
    pid: Count
    epoch: Epoch
    phase: Short
    """starting | loading | warming | ready | stepping | idle | paused | sleeping | waking |
    draining | stopping"""
    step: StepNo
    """Work done so far: messages or steps; never falls."""
    budget: Seconds
    """Seconds this phase may take without progress."""
    gauges: dict[str, float] = {}
    detail: str = ""
    """Progress of the phase, for people ("loading 3/5 shards")."""
    loop_age: Seconds = 0.0
    """Seconds since the actor's loop last turned. A thread of its own sends the heartbeats, which
    distinguishes a stuck loop from a stopped process."""


class Fatal(Message):
    """An actor is about to exit because of this error."""

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
    """watchdog -> launcher: the restarts of an actor so far. The launcher hands it to the next
    watchdog, so that the limit on restarts outlives a watchdog."""

    role: Short
    delays: Count
    """How many times the delay before its next restart is doubled."""
    worked: Seconds
    """Seconds of work of all earlier incarnations."""
    working_since: Seconds | None
    """CLOCK_MONOTONIC seconds."""
    counted: Annotated[list[Seconds], Meta(max_length=MAX_RESTARTS)]
    """`worked` at each restart that counts."""
    causes: dict[str, Count]
    """Restarts by cause, since the engine was started."""


class Children(Message):
    """launcher -> watchdog: the actors that run now."""

    children: list[Child]
    up: bool = False
    """The engine has been ready, and the launcher knows."""
    restarted: list[Restarted] = []
    """For a new watchdog: the records of its predecessor."""


class Exited(Message):
    """launcher -> watchdog: a child has exited. `status` is its exit code or -signal. Sent again to
    a new watchdog while the child has no successor."""

    role: Short
    pid: int
    epoch: Epoch
    status: int
    released: bool = False
    """As the watchdog has ordered (`Release`): it is not a death."""


ToWatchdog = Beat | Fatal | Children | Exited


class Kill(Message):
    """watchdog -> launcher: have this actor write down its stacks, then kill it. The role
    "launcher" stands for the whole engine, which then ends for this reason. Only the restart policy
    sends it."""

    role: Short
    pid: int
    reason: str


class Release(Message):
    """watchdog -> launcher: end this actor, which is not needed while the engine sleeps. It is
    started again by `Spawn`."""

    role: Short
    pid: int


class Spawn(Message):
    """watchdog -> launcher: start the next incarnation of an actor that has exited."""

    role: Short
    epoch: Epoch


class Up(Message):
    """watchdog -> launcher: the engine is ready for the first time. From now on dead actors are
    started again; before, a death ends the engine, since it would only be repeated. Answered by
    `Children`; only then does the watchdog report the engine as ready."""


class Recovered(Message):
    """watchdog -> launcher: an actor that follows one that has ended is ready."""

    role: Short
    epoch: Epoch


class Upgrade(Message):
    """`actorium upgrade` -> launcher: give your process to the launcher of this interpreter's
    version, with this configuration. How that goes is in a file (`launcher/handover.py`)."""

    id: Rid
    python: Short
    config: bytes
    """JSON, as in the run directory."""


ToLauncher = Kill | Release | Spawn | Up | Recovered | Restarted | Fatal | Beat | Upgrade
"""The watchdog's own heartbeats go to the launcher, which supervises it."""


# --- anyone -> watchdog (front) ------------------------------------------------------------------

class GetStatus(Message):
    """Asks for a `Status`. With `wait` it is answered when the engine is ready or has failed."""

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
    """Why the engine will never be ready, if it will not."""
    actors: list[ActorStatus]


ToWatchdogFront = GetStatus
FromWatchdogFront = Status
