"""`actorium bench compare`: result files of several runs in one table and one picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from actorium.actors.errors import BadConfig
from actorium.tools.bench.compare import compared, named_runs, picture
from actorium.tools.bench.result_files import read_results

ABOUT = """Runs side by side: result files of `actorium bench`, of vLLM's (--save-result) and of
SGLang's (--output-file); a file may hold several results. In parentheses: how many times the figure
of the first run."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as every command has it."""
        raise BadConfig(f"bench compare: {message}", "compare")


def run(argv: list[str]) -> int:
    """Entry of the command."""
    parser = _Parser(prog="actorium bench compare", description=ABOUT, allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="results, as JSON or JSON lines")
    parser.add_argument("--plot", metavar="FILE.png", help="write the picture there (.png, .svg)")
    parser.add_argument("--label", nargs="+", default=[], metavar="NAME",
                        help="names of the runs, in their order")
    given = parser.parse_intermixed_args(argv)
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
