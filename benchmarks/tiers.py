"""Time to the first token behind a prefix that is computed, on the host, and on the disk, by turns.

    python benchmarks/tiers.py [--shape S06] [--tokens 2000] [--rounds 5] [--json FILE]

One engine with random weights, whose pool holds two prompts and whose host's memory three more.
Each turn asks for a new prompt, then for one that has left the pool, then for one that has left the
host as well; the gauges must say that it came from there. Files are dropped from the system's page
cache before they are read, as far as the system does so (posix_fadvise).
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

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client
from actorium.tools.bench.workloads import shape_dir

PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def gauges(client: Client) -> dict[str, float]:
    """The scheduler's, of a heartbeat that was sent after this was asked."""
    time.sleep(1.2)
    (scheduler,) = [own for own in client.status().actors if own.role == "scheduler"]
    return scheduler.gauges


def drop_cached(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(shape: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by where the prefix was."""
    dice, found = random.Random(1), dict[str, list[float]](computed=[], host=[], disk=[])
    with tempfile.TemporaryDirectory(prefix="act") as base:
        (Path(base) / "model").mkdir()
        model = shape_dir(shape, Path(base) / "model")
        config = json.loads((model / "config.json").read_text())
        token = (config["num_hidden_layers"] * 2 * config["num_key_value_heads"]
                 * config["head_dim"] * 2)  # bytes in bf16
        disk = Path(base) / "pages"
        prompts: list[list[int]] = []
        with Engine(str(model), run_dir=f"{base}/run", load_format="dummy", skip_tokenizer=True,
                    device="cpu", max_total_tokens=5 * tokens // 2, kv_cache_bytes=4 << 30,
                    host_cache=7 * tokens * token // 2, disk_cache=f"{disk}:32GiB") as engine:
            def ask(prompt: list[int]) -> float:
                start = time.perf_counter()
                engine.client.generate(prompt, PARAMS)
                return time.perf_counter() - start

            def new() -> float:
                prompts.append([dice.randrange(config["vocab_size"] - 1) for _ in range(tokens)])
                return ask(prompts[-1])

            for _ in range(10):
                new()
            for _ in range(rounds):
                for kind, back in (("computed", 0), ("host", 4), ("disk", 9)):
                    before = gauges(engine.client)
                    if kind == "disk":
                        drop_cached(disk)
                    took = ask(prompts[-back]) if back else new()
                    after = gauges(engine.client)
                    gained = {name: after[name] - before[name]
                              for name in ("host_pages_hit", "disk_pages_hit")}
                    if gained["disk_pages_hit"] > 0 and kind != "disk" \
                            or kind == "disk" and gained["disk_pages_hit"] < tokens // 32 \
                            or kind == "host" and gained["host_pages_hit"] < tokens // 32:
                        print(f"{kind}: {gained}: not counted")
                        continue
                    found[kind].append(took)
                    print(f"{kind}: {1e3 * took:.1f} ms, {gained}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="S06")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.shape, args.tokens, args.rounds)
    base = statistics.median(found["computed"])
    for kind, seconds in found.items():
        if seconds:
            middle = statistics.median(seconds)
            print(f"{kind:9}{1e3 * middle:9.1f} ms ({1e3 * min(seconds):.1f} to "
                  f"{1e3 * max(seconds):.1f}, {len(seconds)} turns), {base / middle:.1f}x")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
