"""Time to the first token behind a prefix that is computed, on the host, and on the disk, by turns.

One engine with random weights, whose pool holds a prompt and a quarter, and whose host's memory
four and a half: a quarter of it, more than a prompt, is kept written ahead. A round asks for a new
prompt; asks for others until its pages have left the pool, and asks for it again; asks for others
until they have left the host, too, and asks once more. Each turn says how many pages came from
where: a turn counts if all whole pages of the prompt came from there (the last token is computed in
any case), so that all turns that are compared have as many. Pages that make room are copied out in
every turn. Before a turn that counts, what is on its way to the disk is waited for; files are
dropped from the system's page cache before they are read, as far as the system does so
(posix_fadvise).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import Rows, scenario

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client
from actorium.tools.bench.workloads import shape_dir

PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
FROM_POOL, FROM_HOST = 2, 7
"""Other prompts after which all pages of one have left the pool; the host as well."""
COUNTED = ("host_pages_hit", "disk_pages_hit", "host_pages_stored", "host_pages_unstored")


class TierTurn(NamedTuple):
    seconds: float
    host: int
    """Pages that were copied back."""
    disk: int
    """Those of them read from disk."""
    stored: int
    """Copied out meanwhile, to make room."""


class TierBench:
    def __init__(self, engine: Engine, tokens: int, vocabulary: int) -> None:
        self.client: Client = engine.client
        self._tokens, self._vocabulary, self._dice = tokens, vocabulary, random.Random(1)
        self.whole = (tokens - 1) // engine.config.memory.page_size
        """Pages of a prompt that can come from anywhere."""

    def gauges(self) -> dict[str, float]:
        """The scheduler's, of a heartbeat that was sent after this was asked."""
        time.sleep(1.2)
        (scheduler,) = [own for own in self.client.status().actors if own.role == "scheduler"]
        return scheduler.gauges

    def settled(self) -> dict[str, float]:
        """The gauges once nothing is written to the disk any more."""
        before = self.gauges()
        while (after := self.gauges()).get("disk_pages_written") != before.get(
                "disk_pages_written"):
            before = after
        return after

    def new(self) -> list[int]:
        return [self._dice.randrange(self._vocabulary - 1) for _ in range(self._tokens)]

    def ask(self, prompt: list[int]) -> float:
        """Seconds to its first token."""
        start = time.perf_counter()
        self.client.generate(prompt, PARAMS)
        return time.perf_counter() - start

    def others(self, count: int, wait: bool = False) -> None:
        """Sends prompts that are never repeated; wait: until each has settled, so that what leaves
        the host tier is on disk."""
        for _ in range(count):
            self.ask(self.new())
            if wait:
                self.settled()

    def turn(self, prompt: list[int], dropped: Path | None = None) -> TierTurn:
        """dropped: a directory that is dropped from the page cache before."""
        before = self.settled()
        if dropped is not None:
            drop_cached(dropped)
        seconds = self.ask(prompt)
        after = self.gauges()
        host, disk, stored, unstored = (int(after.get(name, 0) - before.get(name, 0))
                                        for name in COUNTED)
        if unstored:
            print(f"{unstored} pages found no room on the host", flush=True)
        return TierTurn(seconds, host, disk, stored)

    def round(self, disk: Path | None) -> dict[str, TierTurn]:
        prompt = self.new()
        found = {"computed": self.turn(prompt)}
        self.others(FROM_POOL)
        found["host"] = self.turn(prompt)
        if disk is not None:
            self.others(FROM_HOST, wait=True)
            found["disk"] = self.turn(prompt, disk)
        wanted = {"computed": (0, 0), "host": (self.whole, 0), "disk": (self.whole, self.whole)}
        for kind in [*found]:
            if (found[kind].host, found[kind].disk) != wanted[kind]:
                print(f"not counted: {kind}, {found.pop(kind)}", flush=True)
        return found


def drop_cached(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(shape: str, tokens: int, rounds: int, disk: bool) -> list[dict[str, TierTurn]]:
    with tempfile.TemporaryDirectory(prefix="act") as base:
        (Path(base) / "model").mkdir()
        model = shape_dir(shape, Path(base) / "model")
        config = json.loads((model / "config.json").read_text())
        token = (config["num_hidden_layers"] * 2 * config["num_key_value_heads"]
                 * config["head_dim"] * 2)  # bytes in bf16
        pages = Path(base) / "pages" if disk else None
        settings: dict[str, Any] = {} if pages is None else {"disk_cache": f"{pages}:32GiB"}
        with Engine(str(model), run_dir=f"{base}/run", load_format="dummy", skip_tokenizer=True,
                    device="cpu", max_total_tokens=5 * tokens // 4, kv_cache_bytes=4 << 30,
                    host_cache=9 * tokens * token // 2, **settings) as engine:
            bench = TierBench(engine, tokens, config["vocab_size"])
            bench.others(FROM_HOST)  # memory is taken when it is first written
            return [bench.round(pages) for _ in range(rounds)]


@scenario
def prefix(shape: str = "S06", tokens: int = 2000, rounds: int = 5, disk: bool = True) -> Rows:
    """Milliseconds to the first token behind a prefix that is computed, on the host, on the disk.

    `sooner`: than computed, the median over rounds, the least and the most.
    """
    found, missing = measure(shape, tokens, rounds, disk), False
    for kind in ("computed", "host", "disk")[:2 + disk]:
        seconds = [own[kind].seconds for own in found if kind in own]
        sooner = [own["computed"].seconds / own[kind].seconds for own in found
                  if kind in own and "computed" in own]
        missing = missing or not sooner
        yield {"from": kind, "turns": len(seconds), "ms": [1e3 * own for own in sorted(seconds)],
               **({"sooner": [statistics.median(sooner), min(sooner), max(sooner)]}
                  if sooner else {})}
    if missing:
        raise SystemExit("of one kind no turn counts")
