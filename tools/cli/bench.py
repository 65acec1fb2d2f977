"""`actorium bench`: offline | serve | compare, each in a module of its own."""

from __future__ import annotations

from importlib import import_module

from actorium.actors.errors import BadConfig

KINDS = {
    "offline": "[MODEL]: throughput of a batch; without a dataset W1, W2 and W3, beside "
               "transformers if asked",
    "serve": "[MODEL]: latency and throughput under load, of an engine or of any server",
    "compare": "FILE ...: several runs in one table and one picture",
}


def run(_command: str, argv: list[str]) -> int:
    """Entry of the commands."""
    if argv and argv[0] in KINDS:
        code: int = import_module(f"actorium.tools.cli.bench_{argv[0]}").run(argv[1:])
        return code
    if {"-h", "--help"} & set(argv):
        print("\n".join(f"actorium bench {kind} {about}" for kind, about in KINDS.items()))
        return 0
    raise BadConfig("bench: `actorium bench offline`, `actorium bench serve` and `actorium bench "
                    "compare` are the benchmarks there are", "bench")
