"""`actorium bench`: offline and serve, each in a module of its own, and compare; and the flags of
`serve`, under the names that vLLM's and SGLang's benchmarks give them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec

from actorium.actors.errors import BadConfig
from actorium.tools.bench.datasets.options import DatasetOptions, check_dataset
from actorium.tools.bench.figures import GOALS, METRICS, percentile_name
from actorium.tools.bench.load_driver import RampUp
from actorium.tools.bench.server_backends import ENDPOINTS, SDK, kind_of
from actorium.tools.cli.flags import check_least

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


BACKENDS = (SDK, *ENDPOINTS)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty")


class BenchServeOptions(DatasetOptions, frozen=True, kw_only=True):
    """The load, whom it is for, and where the figures go."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        **DatasetOptions.ALIASES, "base_url": ("http",), "label": ("tag",),
        "num_warmups": ("warmup-requests", "warm-ups"), "extra_request_body": ("extra-body",),
        "save_detailed": ("output-details",)}
    """Field -> further names of its flag."""

    backend: str | None = None
    """actorium (the client, no HTTP) | openai, vllm, sglang-oai, llama.cpp (/v1/completions) |
    openai-chat, vllm-chat, sglang-oai-chat (/v1/chat/completions) | sglang (/generate). Default:
    actorium for an engine of one's own or by --name, openai for a URL."""
    base_url: str | None = None
    """A running server of any kind: http://HOST:PORT; self = this engine's own HTTP API."""
    host: str | None = None
    """The same by host (default 127.0.0.1) ..."""
    port: int | None = None
    """... and port (default 8000, for sglang's backends 30000)."""
    endpoint: str | None = None
    """/v1/completions | /v1/chat/completions | /generate; default: the backend's."""
    header: list[str] = []
    """NAME=VALUE: further headers of each request."""
    insecure: bool = False
    """Take any certificate of a https server."""
    ready_check_timeout_sec: float = 0.0
    """Seconds to wait for a server at a URL, or an engine by --name, to be there."""
    tokenizer: str | None = None
    """Directory, or id in the HF cache, of the tokenizer that counts and makes text; default: the
    model's."""
    num_warmups: int = 1
    """Requests, of their own, before the clock starts."""
    flush_cache: bool = False
    """Have the server forget its cached prefixes before the clock starts."""
    request_rate: float = math.inf
    """Requests a second; inf = all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distributed gaps: 1 = Poisson, less = bursts, inf = a clock."""
    ramp_up_strategy: str | None = None
    """linear | exponential: a rate that grows, instead of --request-rate, ..."""
    ramp_up_start_rps: float | None = None
    """... from so many requests a second ..."""
    ramp_up_end_rps: float | None = None
    """... to so many."""
    max_concurrency: int | None = None
    """Requests under way at once; default: any number."""
    disable_stream: bool = False
    """Ask for whole answers (the time to the first token is then that to the last)."""
    ignore_eos: bool = False
    """Go on past the end of sequence. Default: so with random, sonnet and generated-shared-prefix,
    and with sglang's backends; --disable-ignore-eos: not even there."""
    temperature: float = 0.0
    """Of sampling; 0 = greedy."""
    top_p: float | None = None
    """Sampling; default: the server's."""
    top_k: int | None = None
    """Sampling; default: the server's."""
    min_p: float | None = None
    """Sampling; default: the server's."""
    frequency_penalty: float | None = None
    """Sampling; default: the server's."""
    presence_penalty: float | None = None
    """Sampling; default: the server's."""
    repetition_penalty: float | None = None
    """Sampling; default: the server's."""
    extra_request_body: str | None = None
    """A JSON object: further members of each request's body, which win."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Times to report, of ttft, tpot, itl, e2el. itl is reported twice: from event to event, as
    vLLM measures, and per token, with the wait for a burst shared out."""
    metric_percentiles: str = "99"
    """Percentiles to report of them, as 50,90,99.9."""
    goodput: list[str] = []
    """NAME:MS, of ttft, tpot, e2el: report how many requests a second met all of these."""
    save_result: bool = False
    """Write the figures to a file, as JSON under vLLM's names."""
    save_detailed: bool = False
    """Write those of each request as well."""
    append_result: bool = False
    """Write them after those that the file holds."""
    result_dir: str | None = None
    """Where the file goes; default: here."""
    result_filename: str | None = None
    """Its name; default: LABEL-RATEqps-MODEL-DATE.json."""
    output_file: str | None = None
    """SGLang's: --append-result --result-filename FILE."""
    json: str | None = None
    """File for the figures, made anew."""
    label: str | None = None
    """Name of the run, in the file and in `bench compare`; default: the backend's."""
    metadata: list[str] = []
    """KEY=VALUE: further members of the file."""
    disable_tqdm: bool = False
    """No progress line."""
    profile: bool = False
    """Refused: `actorium serve --trace DIR` says where the time goes."""
    shape: str | None = None
    """Random weights of this shape: S06, TINY, HYB, a config.json (implies --load-format dummy)."""

    @property
    def metrics(self) -> list[str]:
        found = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        if "itl" in found and "itl_per_token" not in found:
            found.insert(found.index("itl") + 1, "itl_per_token")
        return found

    @property
    def percentiles(self) -> list[float]:
        """Returns the percentiles to report. Raises `BadConfig`."""
        try:
            found = [float(p) for p in self.metric_percentiles.split(",")]
        except ValueError:
            found = [math.nan]
        if not all(0 <= p <= 100 for p in found):
            raise BadConfig("--metric-percentiles: must be numbers from 0 to 100, got "
                            f"{self.metric_percentiles!r}", "metric_percentiles")
        return found

    @property
    def percentile_names(self) -> list[str]:
        return [percentile_name(p) for p in self.percentiles]

    @property
    def goals(self) -> dict[str, float]:
        """--goodput, in ms. Raises `BadConfig`."""
        found = {}
        for pair in self.goodput:
            name, _, value = pair.partition(":")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if name not in GOALS or not found[name] >= 0:
                raise BadConfig(f"--goodput: must be NAME:MS of {', '.join(GOALS)}, got {pair!r}",
                                "goodput")
        return found

    @property
    def ramp_up(self) -> RampUp | None:
        """Raises `BadConfig`."""
        if self.ramp_up_strategy is None:
            return None
        if self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
            raise BadConfig("--ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps",
                            "ramp_up_strategy")
        found = RampUp(self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        found.check()
        return found

    @property
    def extra(self) -> dict[str, Any]:
        """--extra-request-body. Raises `BadConfig`."""
        if self.extra_request_body is None:
            return {}
        try:
            return msgspec.json.decode(self.extra_request_body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise BadConfig(f"--extra-request-body: must be a JSON object: {error}",
                            "extra_request_body") from None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are not the server's."""
        return {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}

    def pairs(self, name: str) -> dict[str, str]:
        """--header or --metadata. Raises `BadConfig`."""
        found = {}
        for pair in getattr(self, name):
            key, equals, value = pair.partition("=")
            if not equals or not key.strip():
                raise BadConfig(f"--{name}: must be NAME=VALUE, got {pair!r}", name)
            found[key.strip()] = value.strip()
        return found


def check_serve(options: BenchServeOptions, written: Collection[str] | Mapping[str, str]) -> None:
    """Raise `BadConfig`, naming the flag, on anything that cannot be meant."""
    check_dataset(options)
    check_least(options, {"max_concurrency": 0, "num_warmups": 0, "ready_check_timeout_sec": 0})
    for name in ("request_rate", "burstiness"):
        if not getattr(options, name) > 0:
            raise BadConfig(f"--{name.replace('_', '-')}: must be above 0, got "
                            f"{getattr(options, name)}", name)
    if options.backend not in (None, *BACKENDS):
        raise BadConfig(f"--backend: must be one of {', '.join(BACKENDS)}, got "
                        f"{options.backend!r}", "backend")
    if options.endpoint is not None:
        kind_of(options.endpoint)
    for name in options.metrics:
        if name not in METRICS:
            raise BadConfig(f"--percentile-metrics: must be some of {', '.join(METRICS)}, got "
                            f"{name!r}", "percentile_metrics")
    if options.profile:
        raise BadConfig("--profile: there is no profiler behind the API; `actorium serve --trace "
                        "DIR` tells when the device idled and why", "profile")
    if options.ramp_up is not None and "request_rate" in written:
        raise BadConfig("--ramp-up-strategy: cannot be combined with --request-rate",
                        "ramp_up_strategy")
    _ = options.percentiles, options.goals, options.extra  # each raises what is wrong with it
    options.pairs("header"), options.pairs("metadata")
