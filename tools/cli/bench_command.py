"""`actorium bench`: offline and serve, each in a module of its own, and compare."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from actorium.actors.errors import BadConfig

KINDS = {
    "offline": "[MODEL]: throughput of a batch; without a dataset W1, W2 and W3, beside "
               "transformers if asked",
    "serve": "[MODEL]: latency and throughput under load, of an engine or of any server",
    "compare": "FILE ...: several runs in one table and one picture",
}


COMPARE = """Runs side by side: result files of `actorium bench`, of vLLM's (--save-result) and of
SGLang's (--output-file); a file may hold several results. In parentheses: how many times the figure
of the first run."""


def run(_command: str, argv: list[str]) -> int:
    if argv[:1] == ["compare"]:
        return compare(argv[1:])
    if argv and argv[0] in KINDS:
        code: int = import_module(f"actorium.tools.cli.bench_{argv[0]}").run(argv[1:])
        return code
    if {"-h", "--help"} & set(argv):
        print("\n".join(f"actorium bench {kind} {about}" for kind, about in KINDS.items()))
        return 0
    raise BadConfig("bench: `actorium bench offline`, `actorium bench serve` and `actorium bench "
                    "compare` are the benchmarks there are", "bench")


class _CompareParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadConfig(f"bench compare: {message}", "compare")


def compare(argv: list[str]) -> int:
    parser = _CompareParser(prog="actorium bench compare", description=COMPARE, allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="results, as JSON or JSON lines")
    parser.add_argument("--plot", metavar="FILE.png", help="write the picture there (.png, .svg)")
    parser.add_argument("--label", nargs="+", default=[], metavar="NAME",
                        help="names of the runs, in their order")
    given = parser.parse_intermixed_args(argv)
    from actorium.tools.bench.results import compared, named_runs, picture, read_results

    found = [(file, result) for file in given.files for result in read_results(Path(file))]
    if len(given.label) not in (0, len(found)):
        raise BadConfig(f"--label: {len(given.label)} names for {len(found)} runs", "label")
    for name, (_, result) in zip(given.label, found, strict=False):
        result["label"] = name
    runs = named_runs(found)
    print(compared(runs))
    if given.plot:
        picture(given.plot, runs)
    return 0
