"""Small tokenizers and model directories, and an engine without a model for the client's tests.

`FakeEngine` runs the real tokenizer and detokenizer cores behind real sockets in one thread; its
scheduler says the prompt over and over again, one token a step.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
from array import array
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.core import CLIENT, Context
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.detokenizer.incremental import byte_of_char
from actorium.actors.detokenizer.stop_strings import StopMatch, StopRegexChecker, StopStringChecker
from actorium.actors.messages import (
    AbortRequest,
    ActorStatus,
    Attach,
    Flush,
    GetStatus,
    Hello,
    Open,
    Reply,
    ResumeRequest,
    SequenceEvent,
    Status,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
)
from actorium.actors.runtime.rundir import RunDir, address, write_private
from actorium.actors.tokenizer.core import TokenizerCore

TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIALS = ["<bos>", "<eos>", "<|user|>", "<|assistant|>"]


def i4(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def i8(ids: list[int]) -> bytes:
    return array("q", ids).tobytes()


def ints(column: bytes) -> list[int]:
    return array("i", column).tolist()


def feed_all(checker: StopStringChecker | StopRegexChecker, pieces: list[str]
             ) -> tuple[str, str] | str:
    """The text that is shown, with what stopped it, if anything did."""
    shown = ""
    for piece in pieces:
        out = checker.feed(piece)
        if isinstance(out, StopMatch):
            return shown + out.text, out.stop
        shown += out
    return shown + checker.flush()


def byte_level() -> Tokenizer:
    """All bytes, a few merges that end inside characters, special and ordinary added tokens."""
    char = {byte: c for c, byte in byte_of_char().items()}
    vocab = {char[byte]: byte for byte in range(256)}
    merges = []
    for pair in (b"\xe2\x82", b"\xf0\x9f", b"th", b"he", b" t", b"\xc3\xa9", b"\xac\xe2"):
        left, right = char[pair[0]], char[pair[1]]
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("día €", special=False)])
    return tokenizer


def byte_fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2: pieces with a leading mark, 256 byte tokens, special tokens."""
    vocab = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", "a", "b", "h", "i", "é", "▁a", "▁hi", "hi", "▁▁", "€"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("h", "i"), ("▁", "hi"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True,
                                     unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    return tokenizer


def write_model(path: Path, tokenizer: Tokenizer | None = None, **config: Any) -> Path:
    """A model directory without weights. `generation=` sets generation_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level()
    generation = config.pop("generation", {"temperature": 0.5, "top_k": 7})
    base = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": tokenizer.get_vocab_size() + 8,
            "max_position_embeddings": 256, "eos_token_id": tokenizer.token_to_id("<eos>")}
    (path / "config.json").write_text(json.dumps(base | config))
    (path / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(path, tokenizer)
    return path


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Its files, with a chat template, in the model directory `path`."""
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": {"content": "<eos>"}}))


def context(model: Path, run_dir: Path = Path("/nowhere"), **model_config: Any) -> Context:
    config = Config(model=ModelConfig(model=str(model), **model_config))
    return Context(config, run_dir, "tokenizer", 3, 0x1234_5678_9ABC)


def loaded(core: Any) -> Any:
    """The core after the wakes in which it loads."""
    core.on_wake(0.0)
    core.on_wake(0.0)
    return core


def attached(model: Path, *clients: bytes) -> DetokenizerCore:
    """A detokenizer's core that has loaded and knows the clients."""
    core: DetokenizerCore = loaded(DetokenizerCore(context(model)))
    for client in clients:
        core.on_client(client, Attach(), 0.0)
    core.on_wake(0.0)
    return core


class Asked:
    """A tokenizer's core that is woken by others."""

    CLIENT, NOW = b"client", 1000.0

    def __init__(self, model: Path) -> None:
        self.core = loaded(TokenizerCore(context(model)))
        self.woken = threading.Semaphore(0)
        self.core.on_start(lambda: self.woken.release())

    def tell(self, message: Any, now: float = NOW) -> list[Any]:
        self.core.on_client(self.CLIENT, message, now)
        return self.wake()

    def wake(self) -> list[Any]:
        return [send.message for send in self.core.on_wake(self.NOW)]

    def later(self) -> list[Any]:
        """Returns what the core sends when a thread has woken it."""
        assert self.woken.acquire(timeout=60)
        return self.wake()


class FakeScheduler:
    """Every sequence repeats its prompt, one token a step, up to max_tokens or an eos id."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.cancels: list[AbortRequest] = []
        self.stops: list[Stop] = []
        self.live: dict[int, tuple[Submit, list[int], int]] = {}
        self.full_at: int | None = None
        self._sid = 0
        self._step = 0
        self._known: set[tuple[bytes, str]] = set()

    def on_message(self, message: Any) -> list[Any]:
        """Returns the messages that go to the detokenizer at once."""
        if isinstance(message, Submit):
            return self._submit(message)
        if isinstance(message, Hello):
            return []
        if isinstance(message, ResumeRequest):
            key = message.client, message.rid
            return [] if key in self._known else [Unknown(message.rid, message.client)]
        if isinstance(message, Flush):
            return [Reply(message.rid, message.client, b'{"pages": 7, "kept": 2}')]
        if isinstance(message, Stop):
            self.stops.append(message)
            self.live.pop(message.sid, None)
            return []
        self.cancels.append(message)
        mine = [sid for sid, (s, _, _) in self.live.items()
                if (s.rid, s.client) == (message.rid, message.client)]
        return [self._end(sid, finish_reason="abort") for sid in mine]

    def _submit(self, submit: Submit) -> list[Any]:
        if (submit.client, submit.rid) in self._known:
            return []
        self._known.add((submit.client, submit.rid))
        self.submits.append(submit)
        full = self.full_at is not None and len(self.live) + submit.n > self.full_at
        out: list[Any] = []
        for index in range(submit.n):
            self._sid += 1
            self.live[self._sid] = (submit, ints(submit.prompt), 0)
            out.append(Open(self._sid, submit.rid, index, submit.client, submit.prompt,
                            submit.text, submit.params.logprobs))
            if full:
                out.append(self._end(self._sid, finish_reason="error", error_code="queue_full",
                                     error="too many"))
        return out

    def _end(self, sid: int, **event: Any) -> TokenBatch:
        del self.live[sid]
        return TokenBatch(self._step, b"", b"", b"", b"", [SequenceEvent(sid, **event)])

    def step(self, now: float) -> TokenBatch:
        self._step += 1
        sids, starts, tokens, events = [], [], [], []
        for sid, (submit, prompt, done) in list(self.live.items()):
            if submit.deadline is not None and now >= submit.deadline:
                events.append(SequenceEvent(sid, finish_reason="deadline"))
                del self.live[sid]
                continue
            token = prompt[done % len(prompt)]
            sids.append(sid)
            starts.append(done)
            tokens.append(token)
            if done == 0:
                events.append(SequenceEvent(sid, cached_tokens=16))
            self.live[sid] = (submit, prompt, done + 1)
            if token in submit.params.eos_ids or done + 1 >= submit.params.max_tokens:
                stop = token if token in submit.params.eos_ids else None
                events.append(SequenceEvent(sid, finish_reason="length" if stop is None else "stop",
                                            stop_token=stop))
                del self.live[sid]
        return TokenBatch(self._step, i8(sids), i4(starts), b"\1" * len(sids), i4(tokens), events)


class FakeEngine:
    """The fronts of an engine, in a thread; a context manager. `allow` = steps it may make."""

    def __init__(self, model: Path, name: str = "fake", base: str | None = None,
                 **model_config: Any) -> None:
        self.base = base or tempfile.mkdtemp(dir="/tmp", prefix="ac-")
        self.name = name
        self.dir = RunDir(name, self.base)
        write_private(self.dir.path / "config.json", b"{}")
        ctx = context(model, self.dir.path, **model_config)
        self.tokenizer, self.detokenizer = TokenizerCore(ctx), DetokenizerCore(ctx)
        self.scheduler = FakeScheduler()
        self.allow = math.inf
        self.error: str | None = None
        self._stop = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._fronts: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeEngine:
        for role in ("tokenizer", "detokenizer", "watchdog"):
            socket = self._fronts[role] = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # as `ClientEndpoint`: a client connects anew
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address(self.dir.path, f"{role}.front"))
        loaded(self.tokenizer)
        loaded(self.detokenizer)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        shutil.rmtree(self.base, ignore_errors=True)

    def die(self) -> None:
        """As when the launcher is killed: sockets closed, lock gone."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._context.destroy(0)
            self.dir.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._fronts.values():
            poller.register(socket, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(0 if self.scheduler.live and self.allow > 0 else 5)
            self._serve("tokenizer", self.tokenizer)
            self._serve("detokenizer", self.detokenizer)
            self._status()
            if self.allow > 0 and self.scheduler.live:
                self.allow -= 1
                self.detokenizer.on_message(self.scheduler.step(monotonic()), monotonic())
                self._flush(self.detokenizer, "detokenizer")

    def _frames(self, role: str) -> Any:
        while True:
            try:
                yield self._fronts[role].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _serve(self, role: str, core: Any) -> None:
        for client, frame in self._frames(role):
            core.on_client(client, msgspec.msgpack.decode(frame, type=core.client_inbox),
                           monotonic())
        self._flush(core, role)

    def _flush(self, core: Any, role: str) -> None:
        for send in core.on_wake(monotonic()):
            if send.to == CLIENT:
                try:
                    self._fronts[role].send_multipart(
                        [send.client, msgspec.msgpack.encode(send.message)])
                except zmq.ZMQError:
                    if role == "detokenizer":
                        core.on_client_lost(send.client, monotonic())
            else:
                for answer in self.scheduler.on_message(send.message):
                    self.detokenizer.on_message(answer, monotonic())

    def _status(self) -> None:
        for client, frame in self._frames("watchdog"):
            ask = msgspec.msgpack.decode(frame, type=GetStatus)
            actor = ActorStatus(self.name, "tokenizer", 1, 1, "ready", 0, 0.0, 0.0)
            scheduler = ActorStatus(self.name, "scheduler", 2, 1, "idle", 5, 0.0, 0.0,
                                    gauges={"free_pages": 90.0, "held_pages": 6.0,
                                            "cached_pages": 12.0, "running": 1.0})
            status = Status(ask.rid, self.error is None, self.error, [actor, scheduler])
            self._fronts["watchdog"].send_multipart([client, msgspec.msgpack.encode(status)])


