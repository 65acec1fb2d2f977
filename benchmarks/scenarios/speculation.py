"""Drafts of a text's own words: what they gain on texts that repeat, and cost on those that do not,
beside vLLM's and llama.cpp's.

Each server is started, warmed, asked for all tasks, greedily, and stopped; then comes the next
one's turn. Figures are of answers alone: from the first piece of text to the last.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness import Row, Rows, markdown, scenario, take_turns
from scenarios.gguf_files import PYTHON, llama_cpp
from scenarios.peers import ACTORIUM, VLLM, Programs, Server, check_programs, command, serving

CODE = '''class Cart:
    def __init__(self, items, tax_rate):
        self.items = items
        self.tax_rate = tax_rate

    def subtotal(self):
        return sum(item.price * item.quantity for item in self.items)

    def total(self):
        return self.subtotal() * (1 + self.tax_rate)

    def add(self, item):
        self.items.append(item)
        return len(self.items)
'''
TEXT = '''The town library was founded in 1892 by a group of teachers who wanted books for everyone.
In its first year it held only four hundred volumes, most of them given by families of the town.
A fire in 1931 destroyed the reading room, but the books were carried out through the windows.
Today the library lends more than two hundred thousand books, films and instruments each year.
On Saturdays volunteers read stories to children, and the garden behind the house is open to all.
'''
RECORDS = json.dumps([
    {"id": 101, "name": "Anna Keller", "city": "Bern", "active": True, "score": 72},
    {"id": 102, "name": "Luis Ortega", "city": "Madrid", "active": True, "score": 65},
    {"id": 103, "name": "Mei Tanaka", "city": "Osaka", "active": False, "score": 88},
    {"id": 104, "name": "Omar Haddad", "city": "Tunis", "active": True, "score": 91}], indent=2)
PROMPTS = {
    "summary": [f"Text {{}}:\n\n{TEXT}\nWhich {what}? Quote them word for word, one on each line."
                for what in ("three sentences say most", "sentences tell of the past",
                             "sentences tell of today")],
    "code": [f"File {{}}:\n\n```python\n{CODE}```\n\nWrite the whole file again, but {change}."
             for change in ("rename the method total to total_price",
                            "rename the class Cart to Basket", "add a docstring to subtotal")],
    "json": [f"Record set {{}}:\n\n{RECORDS}\n\nWrite the same JSON again, but {change}."
             for change in ("set every score to 50", "set active to false everywhere",
                            "change Osaka to Kyoto")],
    "chat": ["Note {}. What should I think of when I plan a garden?",
             "Note {}. Tell me a story about a fox who learns to swim.",
             "Note {}. Why do people find it hard to get up early?"],
}
"""Prompts of each task; the number in them tells streams apart."""
TASKS, METHODS, NO_PEERS = [*PROMPTS], ["off", "ngram:4", "suffix"], list[str]()
STREAMS = [1, 32]
TOKENS = 200
LOOKUP = 10, 2
"""Drafts, and tokens that are looked for, of llama-cpp-python's prompt lookup: its defaults."""


class Answer(NamedTuple):
    tokens: int
    first: float
    """When its first piece came."""
    last: float


def conversation(task: str, number: int) -> list[dict[str, str]]:
    prompts = PROMPTS[task]
    return [{"role": "user", "content": prompts[number % len(prompts)].replace("{}", str(number))}]


def streamed(url: str, model: str, messages: list[dict[str, str]]) -> Answer:
    body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json"})
    tokens, times = 0, list[float]()
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in event["choices"]):
                times.append(time.perf_counter())
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Answer(tokens, times[0], times[-1])


def rate(answers: Sequence[Answer], at_once: bool) -> float:
    """Tokens a second of streams at once, or of one after the other."""
    seconds = (max(own.last for own in answers) - min(own.first for own in answers) if at_once
               else sum(own.last - own.first for own in answers))
    return sum(own.tokens - 1 for own in answers) / seconds


def user_seconds(port: str) -> float:
    """CPU seconds, without the kernel's, of all processes in the session of the server with this
    port."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        processes[int(folder.name)] = int(fields[1]), int(fields[11]), port.encode() in words
    servers = {pid for pid, (_, _, own) in processes.items() if own}
    grown = True
    while grown:
        more = {pid for pid, (parent, _, _) in processes.items() if parent in servers} - servers
        servers |= more
        grown = bool(more)
    return sum(processes[pid][1] for pid in servers) / os.sysconf("SC_CLK_TCK")


def counters(url: str) -> tuple[float, float]:
    """Drafts verified and accepted since the start, of all engines of this server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines
                   if line.startswith(f"vllm:spec_decode_num_{name}_tokens_total"))

    return total("draft"), total("accepted")


def figures(server: Server, model: str, tasks: Sequence[str], streams: Sequence[int],
            programs: Programs) -> Row:
    """Tokens a second, user seconds for a thousand tokens, and acceptance, by task and streams."""
    result: Row = {}
    with serving(command(server, model, 2048, max(streams), programs)) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as reply:
            name = json.loads(reply.read())["data"][0]["id"]
        port = url.rpartition(":")[2]
        streamed(url, name, conversation("chat", 99))
        for task in tasks:
            for count in streams:
                began, before = user_seconds(port), counters(url)
                with ThreadPoolExecutor(count) as pool:
                    answers = [*pool.map(
                        lambda number, task=task: streamed(url, name, conversation(task, number)),
                        range(max(count, len(PROMPTS[task]))))]
                tokens = sum(own.tokens for own in answers)
                drafts, accepted = (after - earlier for earlier, after in
                                    zip(before, counters(url), strict=True))
                result |= {f"{task}, {count}: tok/s": rate(answers, count > 1),
                           f"{task}, {count}: user s/1,000": 1000 * (
                               user_seconds(port) - began) / tokens}
                if drafts:
                    result[f"{task}, {count}: accepted"] = accepted / drafts
    return result


def llama_figures(python: str, gguf: str, drafts: int, tasks: Sequence[str], threads: int) -> Row:
    """The same of llama.cpp's Python binding, one stream."""
    result: Row = {}
    with ExitStack() as running:
        peer = running.enter_context(llama_cpp(python))
        for task in ["chat", *tasks]:  # the first time to get warm
            answers = [peer.ask("chat", model=gguf, messages=conversation(task, number),
                                output=TOKENS, lookup=[drafts, LOOKUP[1]], threads=threads)
                       for number in range(len(PROMPTS[task]))]
            result[f"{task}, 1: tok/s"] = (sum(own["tokens"] - 1 for own in answers)
                                           / sum(own["seconds"] for own in answers))
    return result


@scenario
def text(model: str, methods: list[str] = METHODS, tasks: list[str] = TASKS,
         streams: list[int] = STREAMS, vllm: str = "", vllm_configs: list[str] = NO_PEERS,
         llama: str = PYTHON, gguf: str = "", flags: str = "", rounds: int = 3) -> Rows:
    """Tokens a second on four tasks, with so many streams at once.

    MODEL: a folder in HF format. methods: values of --speculative; flags: others of our servers.
    With --vllm PROGRAM vLLM has its turn too, without drafts and with each of --vllm-configs
    (default: its n-grams). With --gguf FILE llama.cpp's Python binding has, with and without its
    prompt lookup, of the Python of --llama.
    """
    programs, contenders = Programs(vllm or Programs().vllm), dict[str, Any]()
    for method in methods:
        server = Server(ACTORIUM, flags=("--speculative", method, *shlex.split(flags)))
        contenders[f"actorium {method}"] = partial(figures, server, model, tasks, streams,
                                                   programs)
    if vllm:
        check_programs({VLLM}, programs)
        configs = vllm_configs or [json.dumps({
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5,
            "prompt_lookup_min": 2})]
        for config in ["", *configs]:
            server = Server(VLLM, flags=("--speculative-config", config) if config else ())
            contenders[f"vllm {config or 'off'}"] = partial(figures, server, model, tasks, streams,
                                                            programs)
    if gguf:
        for drafts in (0, LOOKUP[0]):
            contenders[f"llama.cpp {drafts or 'off'}"] = partial(
                llama_figures, llama, gguf, drafts, tasks, os.cpu_count() or 1)
    turns = take_turns(contenders, rounds)
    found = {name: {what: median(turn.get(what, 0.0) for turn in own) for what in own[0]}
             for name, own in turns.items()}
    for name, own in found.items():
        yield {"engine": name, **own, "rounds": turns[name]}
    print(table(found))


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each figure; speeds with their ratio to those of the same engine without drafts."""
    rows = []
    for what in next(iter(found.values())):
        cells = []
        for name, own in found.items():
            base = found.get(f"{name.split()[0]} off", {}).get(what)
            cell = f"{own[what]:,.2f}" if what in own else "-"
            if what in own and base and what.endswith("tok/s"):
                cell += f" ({own[what] / base:.2f}x)"
            cells.append(cell)
        rows.append([what, *cells])
    return markdown(["", *found], rows)
