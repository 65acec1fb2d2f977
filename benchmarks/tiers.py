"""Time to the first token behind a prefix that is computed, on the host, and on the disk, by turns.

    python benchmarks/tiers.py [--shape S06] [--tokens 2000] [--rounds 5] [--no-disk] [--json FILE]

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

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client
from actorium.tools.bench.workloads import shape_dir

PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
FROM_POOL, FROM_HOST = 2, 7
"""Other prompts after which all pages of one have left the pool; the host as well."""
COUNTED = ("host_pages_hit", "disk_pages_hit", "host_pages_stored", "host_pages_unstored")


class TierTurn(NamedTuple):
    """A prompt that was asked for."""

    seconds: float
    host: int
    """Pages that were copied back."""
    disk: int
    """Of these, from the disk."""
    stored: int
    """Copied out meanwhile, to make room."""


class TierBench:
    """An engine, and what it is asked."""

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
        """Asks for prompts that nobody asks for again; wait: until each is settled, so that what
        leaves the host is on the disk."""
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
        """See the module; by where the pages came from."""
        prompt = self.new()
        found = {"computed": self.turn(prompt)}
        self.others(FROM_POOL)
        found["host"] = self.turn(prompt)
        if disk is not None:
            self.others(FROM_HOST, wait=True)
            found["disk"] = self.turn(prompt, disk)
        wanted = {"computed": (0, 0), "host": (self.whole, 0), "disk": (self.whole, self.whole)}
        for kind, turn in list(found.items()):
            counts = (turn.host, turn.disk) == wanted[kind]
            print(f"{kind:9}{1e3 * turn.seconds:9.1f} ms, {turn.host} of {self.whole} pages from "
                  f"the tiers ({turn.disk} of them from the disk), {turn.stored} copied out"
                  + ("" if counts else ": not counted"), flush=True)
            if not counts:
                del found[kind]
        return found


def drop_cached(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(shape: str, tokens: int, rounds: int, disk: bool) -> list[dict[str, TierTurn]]:
    """The turns that count, by round."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="S06")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = measure(args.shape, args.tokens, args.rounds, not args.no_disk)
    missing = False
    for kind in ("computed", "host") + (() if args.no_disk else ("disk",)):
        seconds = [own[kind].seconds for own in rounds if kind in own]
        ratios = [own["computed"].seconds / own[kind].seconds for own in rounds
                  if kind in own and "computed" in own]
        missing = missing or not ratios
        if ratios:
            print(f"{kind:9}{1e3 * statistics.median(seconds):9.1f} ms ({1e3 * min(seconds):.1f} "
                  f"to {1e3 * max(seconds):.1f}, {len(seconds)} of {args.rounds} turns); sooner "
                  f"than computed: median of the rounds {statistics.median(ratios):.2f}x "
                  f"({min(ratios):.2f} to {max(ratios):.2f})")
        else:
            print(f"{kind:9}no turn counts")
    if args.json:
        args.json.write_text(json.dumps({
            "shape": args.shape, "tokens": args.tokens, "cores": os.cpu_count(),
            "load": [load, os.getloadavg()[0]],
            "rounds": [{kind: turn._asdict() for kind, turn in own.items()} for own in rounds],
        }, indent=1) + "\n")
    return int(missing)


if __name__ == "__main__":
    raise SystemExit(main())
