"""The rows of plain clients: those of the openai package, each with connections of its own, that
retry nothing and ask for no resumption, while any actor of the engine is killed, gateways too.

The demo model in bfloat16 with `--exact on`, and the flags of recovery as they are by default:
every answer must be what it is undisturbed, log-probabilities to the bit. Chat, completions and
responses, streams and whole answers, greedy, sampled, of two choices, or held to a schema, with and
without log-probabilities, in turn.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from time import monotonic
from typing import Any, NamedTuple

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.gateway.actor import where
from actorium.actors.runtime import roles as actor_roles
from actorium.tools.chaos.checked_streams import Gaps
from actorium.tools.chaos.cluster_rows import at_rest, free_port
from actorium.tools.chaos.faults import actors, send
from actorium.tools.chaos.rig import Rig, held_at_rest, rig

CLIENTS, KILLS = 200, 60
TOKENS = (60, 160)
GATEWAYS = ("gateway-0", "gateway-1")
KILLED = ("worker-0", "scheduler", "tokenizer", "detokenizer", "watchdog", *GATEWAYS)
KILLED_OF_REPLICAS = ("replica-0", "replica-1", "0/worker-0", "1/worker-0", "0/scheduler",
                      "1/scheduler", "scheduler", "tokenizer", "detokenizer", "watchdog",
                      *GATEWAYS)
BACK = 120.0
"""Seconds for which a kill waits until its actor runs."""
SHARE = 0.6
"""Of the text of all answers: what has come when the last kill strikes."""
ROUNDS = 4
"""How often the clients ask, at most: where they end before the last kill, they ask once more."""
WORDS = ("the", "a", "cat", "king", "river", "said", "went", "once", "little", "and", "his", "old")
SCHEMA = {"type": "object", "required": ["name", "counts"], "properties": {
    "name": {"type": "string", "maxLength": 12},
    "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 20}}}
FREE = {"extra_body": {"ignore_eos": True}}
HELD = {"temperature": 1.0, "response_format": {
    "type": "json_schema", "json_schema": {"name": "counts", "schema": SCHEMA}}}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {**FREE, "temperature": 0.0}),
    ("chat", {**FREE, "temperature": 0.9, "top_p": 0.95, "logprobs": True, "top_logprobs": 3}),
    ("completions", {**FREE, "temperature": 0.0, "logprobs": 2}),
    ("completions", {**FREE, "temperature": 0.8, "n": 2}),
    ("chat", HELD),
    ("responses", {**FREE, "temperature": 0.8}),
    ("completions", {**FREE, "temperature": 0.8, "frequency_penalty": 0.4, "logprobs": 1}))
"""API and parameters of requests in turn; of each kind four fifths are streams."""


class DrawnCall(NamedTuple):
    """A request, as an API of the openai package takes it."""

    api: str
    arguments: dict[str, Any]


class DrawnKill(NamedTuple):
    role: str
    at: float
    """Part of the text of all answers that clients have got by then."""


def draw_calls(seed: int, count: int) -> list[DrawnCall]:
    """Returns the requests of a seed."""
    chance, calls = random.Random(seed), []
    for number in range(count):
        api, arguments = KINDS[number % len(KINDS)]
        prompt = " ".join(chance.choices(WORDS, k=chance.randint(3, 30)))
        tokens, is_stream = chance.randint(*TOKENS), chance.random() < 0.8
        asked: dict[str, Any] = {"model": "default", **arguments, "stream": is_stream}
        asked["extra_body"] = asked.get("extra_body", {}) | {"seed": number}
        if api == "responses":
            asked |= {"input": prompt, "max_output_tokens": tokens}
        else:
            asked |= {"max_tokens": tokens} | ({"prompt": prompt} if api == "completions" else {
                "messages": [{"role": "user", "content": prompt}]})
            asked |= {"stream_options": {"include_usage": True}} if is_stream else {}
        calls.append(DrawnCall(api, asked))
    return calls


def draw_kills(seed: int, count: int, roles: Sequence[str]) -> list[DrawnKill]:
    """Returns the kills of a seed: each role as often as any other, in random order."""
    chance = random.Random(seed)
    each = [roles[number % len(roles)] for number in range(count)]
    chance.shuffle(each)
    times = sorted(round(chance.uniform(0, SHARE), 6) for _ in each)
    return [*map(DrawnKill, each, times)]


@dataclass
class ReceivedText:
    """What was received of one choice."""

    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    reason: str = ""


@dataclass
class ReceivedAnswer:
    choices: dict[int, ReceivedText] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    """Tokens of the prompt, and of the completion."""
    numbers: list[int] = field(default_factory=list)
    """Of the events of a stream of Responses, 0 and up."""
    error: str = ""

    @property
    def chars(self) -> int:
        """Returns the length of its text."""
        return sum(len(choice.text) for choice in self.choices.values())

    def add(self, data: dict[str, Any]) -> None:
        """Adds a chunk, or a whole answer."""
        if "choices" not in data:
            self._add_response(data)
            return
        for choice in data["choices"]:
            mine = self.choices.setdefault(choice["index"], ReceivedText())
            part = choice.get("delta") or choice.get("message") or choice
            mine.text += part.get("content") or part.get("text") or ""
            for name, values in (choice.get("logprobs") or {}).items():
                mine.logprobs.setdefault(name, []).extend(values or ())
            mine.reason = choice.get("finish_reason") or mine.reason
        if usage := data.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]

    def _add_response(self, data: dict[str, Any]) -> None:
        """Adds an event of a stream of Responses, or a whole response."""
        choice = self.choices.setdefault(0, ReceivedText())
        if "sequence_number" in data:
            self.numbers.append(data["sequence_number"])
        if data.get("type") == "response.output_text.delta":
            choice.text += data["delta"]
        response = data.get("response", data)
        if response.get("usage"):
            self.usage = response["usage"]["input_tokens"], response["usage"]["output_tokens"]
            choice.reason = response["status"]
        if "output" in data:
            choice.text = "".join(part["text"] for item in data["output"]
                                  for part in item.get("content") or ())

    def differs(self, other: ReceivedAnswer) -> str:
        """Returns the first difference from another; empty = there is none."""
        if self.error or other.error:
            return self.error or other.error
        for index, theirs in other.choices.items():
            mine = self.choices.get(index, ReceivedText())
            for what, a, b in (("text", mine.text, theirs.text),
                               ("reason", mine.reason, theirs.reason), *(
                                   (f"logprobs.{name}", mine.logprobs.get(name, []), values)
                                   for name, values in theirs.logprobs.items())):
                if a != b:
                    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                              min(len(a), len(b)))
                    return (f"choice {index}: {what} equal for {at} of {len(b)}, then "
                            f"{a[at:at + 1]!r} of {len(a)}, not {b[at:at + 1]!r}")
        if self.numbers != [*range(len(self.numbers))]:
            return f"numbers of events {self.numbers[-9:]}"
        return "" if self.usage == other.usage and len(self.choices) == len(other.choices) else (
            f"{len(self.choices)} choices and {self.usage} tokens, not {len(other.choices)} and "
            f"{other.usage}")


class PlainClients:
    """Sends each call from a client of its own, all at once."""

    def __init__(self, url: str, calls: Sequence[DrawnCall]) -> None:
        self._openai, self._url, self._calls = import_module("openai"), url, calls
        self.answers = [ReceivedAnswer() for _ in calls]
        self.over = asyncio.Event()
        self.gaps = Gaps()

    @property
    def chars(self) -> int:
        """Returns the length of the text that has come."""
        return sum(answer.chars for answer in self.answers)

    async def ask(self) -> None:
        try:
            await asyncio.gather(*map(self._ask, range(len(self._calls))))
        finally:
            self.over.set()

    async def _ask(self, number: int) -> None:
        (api, arguments), answer = self._calls[number], self.answers[number]
        begun = monotonic()
        async with self._openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="-",
                                            max_retries=0) as client:
            create = {"chat": client.chat.completions, "completions": client.completions,
                      "responses": client.responses}[api].create
            try:
                data = await create(**arguments)
                if not arguments["stream"]:
                    answer.add(data.model_dump())
                    return
                ids, last = set(), monotonic()
                async for chunk in data:
                    now = monotonic()
                    self.gaps.record(number, begun, last, now)
                    last = now
                    part = chunk.model_dump()
                    ids |= {name for name in (part.get("id"), (part.get("response") or {}).get(
                        "id")) if name}
                    answer.add(part)
                answer.error = f"ids {ids}" if len(ids) != 1 else ""
            except Exception as error:  # of openai, httpx2, ssl, json: whatever a caller would see
                answer.error = f"{type(error).__name__}: {error}"[:300]


async def _kill(made: Rig, kills: deque[DrawnKill], clients: PlainClients, chars: int
                ) -> Counter[str]:
    """Kills each drawn role when so much of all answers has come, and returns how often each was
    killed. What is due only after the last answer stays in `kills`. chars: of all answers."""
    struck: Counter[str] = Counter()
    while kills:
        kill = kills[0]
        while clients.chars < kill.at * chars and not clients.over.is_set():
            await asyncio.sleep(0.005)
        until = monotonic() + BACK
        while (victim := actors(made.run_dir).get(kill.role)) is None and monotonic() < until:
            await asyncio.sleep(0.02)
        if clients.over.is_set():
            break
        kills.popleft()
        if victim is not None:
            clients.gaps.fault(f"kill {kill.role.split('/')[-1]}", monotonic())
            send([victim.pid], signal.SIGKILL)
            struck[kill.role] += 1
    return struck


async def _run(made: Rig, calls: Sequence[DrawnCall], kills: deque[DrawnKill],
               chars: int = 0) -> tuple[PlainClients, Counter[str]]:
    address = where(made.run_dir)
    assert address is not None
    clients = PlainClients(address.url, calls)
    _, struck = await asyncio.gather(clients.ask(), _kill(made, kills, clients, chars))
    return clients, struck


def clients(seed: int, count: int = CLIENTS, kills: int = KILLS, replicas: int = 1,
            **flags: Any) -> dict[str, Any]:
    """Runs the whole row; flags: of the engine, instead of those that it is to have."""
    calls, recovery = draw_calls(seed, count), RecoveryConfig()
    roles = KILLED if replicas == 1 else KILLED_OF_REPLICAS
    drawn, struck = deque(draw_kills(seed, kills, roles)), Counter[str]()
    rounds: list[PlainClients] = []
    config: dict[str, Any] = {
        "null_worker": False, "skip_tokenizer": False, "device": "cpu", "dtype": "bfloat16",
        "exact": "on", "port": free_port(), "gateways": len(GATEWAYS), "replicas": replicas,
        "max_num_seqs": 32, "max_restarts": recovery.max_restarts} | flags
    with rig(actor_roles.ROLES["worker-0"], dict.fromkeys(GATEWAYS, actor_roles.GATEWAY),
             **config) as made:
        calm, _ = asyncio.run(_run(made, calls, deque()))
        while drawn and len(rounds) < ROUNDS:
            killed, more = asyncio.run(_run(made, calls, drawn, calm.chars))
            rounds.append(killed)
            struck += more
        wrong = asyncio.run(_at_rest(made, replicas))
    wrong += made.left
    if struck.total() < kills:
        wrong.append(f"only {struck.total()} of {kills} kills")
    faults = [answer.differs(expected) for killed in rounds
              for answer, expected in zip(killed.answers, calm.answers, strict=True)]
    wrong += [f"client {number % count} ({calls[number % count].api}): {fault}"
              for number, fault in enumerate(faults) if fault]
    return {"clients": count, "rounds": len(rounds),
            "streams": sum(call.arguments["stream"] for call in calls),
            "replicas": replicas, "kills": dict(struck), "complete": faults.count(""),
            "tokens": sum(answer.usage[1] for killed in rounds for answer in killed.answers),
            "gaps": rounds[0].gaps.summary(), "wrong": wrong}


async def _at_rest(made: Rig, replicas: int) -> list[str]:
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        return await (held_at_rest(client, 10.0, ready=True) if replicas == 1
                      else at_rest(client))
