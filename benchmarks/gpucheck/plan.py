"""Every row of every call, in one list that a real run and a toy run share: the toy's test asserts
that each of them was written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import shapes

ROOT = Path(__file__).parent.parent.parent
ALONE = "tests/gpu/worker/test_worker_gpu.py"
"""Reads how much of the whole device is free."""
SLOWER = 8
"""Times as long a toy run may take: others may be at work on its machine, which runs fewer tests at
a time."""
SHARDS = {"tests/kernels/test_triton_attention_gpu.py": 6, "tests/kernels/test_triton_delta.py": 3,
          "tests/kernels/test_triton_delta_extend.py": 2,
          "tests/kernels/test_triton_sampling_gpu.py": 2}
"""Files cut into several processes; most of their time goes into compiling, on one core each."""


class Row(NamedTuple):
    name: str
    limit: float = 60.0
    """Seconds after which its process is ended."""
    gib: float = 0.0
    """Memory that a device must have free, about."""
    needs: float = 2.0
    """Seconds that must be left to begin it."""


class Suite(NamedTuple):
    """Tests that one process of pytest runs; a row as well."""

    name: str
    file: str
    """Or several, with blanks between them."""
    keyword: str = ""
    shard: tuple[int, int] = (0, 1)
    """(which, of how many)"""
    limit: float = 90.0
    """Seconds of one test."""


FIRST_TESTS = tuple(Suite(*own, limit=40) for own in (
    ("tokens", ALONE, "cpu or take_over or tokens_of_steps"),
    ("windows", ALONE, "windows or capturing"),
    ("no waiting", ALONE, "not_wait"),
    ("attention", "tests/kernels/test_triton_attention_gpu.py",
     "graph or waits or same or 32_bits or torchs_own"),
    ("delta extends", "tests/kernels/test_triton_delta_extend.py"),
    ("fp8 products", "tests/kernels/test_scaled_mm.py"),
    ("draws", "tests/kernels/test_triton_sampling_gpu.py", "likeliest or graph or bit_for_bit"),
    ("staging and rows", "tests/gpu/step/test_staging.py tests/kernels/test_triton_fill.py")))
"""Tests of a first contact, one process each."""


class Group(NamedTuple):
    """Rows that share a process of their own, and its time."""

    name: str
    rows: tuple[Row, ...]
    least: float
    """Seconds below which it is not begun."""
    most: float
    runs: str = ""
    """"module.function", which measures them."""
    options: dict[str, Any] = {}
    suites: tuple[Suite, ...] = ()
    """Instead: tests."""
    jobs: int = 1
    """Suites run at a time."""


def _tests(name: str, suites: Iterable[Suite], least: float, most: float, jobs: int = 1) -> Group:
    own = tuple(suites)
    return Group(name, tuple(Row(suite.name) for suite in own), least, most, suites=own, jobs=jobs)


def _decoding(name: str, least: float, most: float, batches: Iterable[shapes.Batch],
              more: Iterable[Row] = (), **options: Any) -> Group:
    rows = [Row(each.name, 40, each.gib, 3) for each in batches]
    return Group(name, (*more, *rows), least, most, "decode.run", options)


CEILINGS = Group("ceilings", (Row("copy"), Row("bf16 products"), Row("fp8 products"),
                              Row("small launches")), 10, 25, "ceilings.run")
CAPTURE = Row("graph capture")
LADDER = Row("capture of 58 sizes", 60, 0.0, 10)
"""Graphs of steps with prompts up to 8,192 tokens: as many as SGLang captures by default."""
TINY = Row("demo model in fp32, device beside CPU")
BESIDE = "graphs beside eager, "
"""Before the name of a batch: its tokens, from graphs and from steps launched one by one."""


def _beside() -> tuple[Row, ...]:
    return tuple(Row(BESIDE + each.name, 40, each.gib, 3) for each in shapes.FIRST)


def _ring(overlap: bool) -> Group:
    return Group("ring" if overlap else "ring without overlap",
                 tuple(Row(each.name, 60, each.gib, 5) for each in shapes.RING), 40, 75, "ring.run",
                 {"overlap": overlap})


def contact() -> list[Group]:
    """Returns groups in order of importance: correctness, speed, what the engine loses around the
    device, then why. Test processes compile kernels in parallel, so later groups find most
    compiled."""
    profiled = (Row(f"replay {each.name}", 60, each.gib, 8) for each in shapes.PROFILED)
    return [
        _tests("tests", FIRST_TESTS, 20, 60, 8),
        Group("tokens", (TINY,), 10, 60, "decode.equal"),
        _decoding("decode", 40, 180, shapes.FIRST, (CAPTURE, *_beside())),
        _ring(True),
        _ring(False),
        _decoding("decode, fp8 weights", 40, 60, shapes.FIRST, _beside(),
                  model={"quantization": "fp8"}),
        _decoding("decode, fp8 pages", 40, 60, shapes.FIRST, _beside(),
                  memory={"kv_cache_dtype": "fp8_e4m3"}),
        Group("profile", (*profiled, CAPTURE, LADDER), 35, 80, "profiled.run"),
        CEILINGS,
    ]


def kernels() -> list[Group]:
    """Kernel by kernel beside its peers, then speculation, and what else models do."""
    def group(name: str, cases: Iterable[str], most: float, module: str, gib: float = 12.0
              ) -> Group:
        return Group(name, tuple(Row(case, 40, gib) for case in cases), 12, most, "ceilings.table",
                     {"cases": module})

    heads = [f"{keys}/{values} heads of 128" for keys, values in shapes.DELTA_HEADS]
    rows = shapes.PRODUCT_ROWS
    return [
        CEILINGS,
        group("paged decode", (own.name for own in shapes.DECODES), 60, "attention.decodes"),
        group("paged extend", (own.name for own in shapes.EXTENDS), 50, "attention.extends"),
        group("gdn", (name for own in heads for name in (
            *(f"{what}, {batch} x {own}" for batch in shapes.DELTA_BATCHES
              for what in ("step", "window of 3")),
            *(f"{what}, {shapes.DELTA_TOKENS} x {own}" for what in ("extend", "convolution")),
            f"extend, {shapes.DELTA_TOKENS} x {own}, bf16 state"
        )), 60, "recurrent.deltas"),
        Group("speculation", tuple(Row(f"{drafts} drafts, batch {batch}", 60, shapes.HYBRID_GIB
                                       + 2 * shapes.ROOM_GIB, 5)
                                   for drafts in (0, 2) for batch in shapes.DRAFTING),
              60, 180, "decode.speculation"),
        group("sampling", shapes.DRAWS, 30, "products.draws"),
        group("products", (*(f"bf16, {n} rows" for n in rows), *(f"fp8 {kind}, {n} rows"
              for kind in ("row", "block") for n in rows)), 40, "products.products"),
        group("products of codes", (f"{kind}, {n} rows" for kind in shapes.CODES for n in rows),
              40, "products.codes"),
        group("exact", (*(own[0] for own in (*shapes.EXACT_PRODUCTS, *shapes.EXACT_DECODES)),
                        shapes.EXACT_PROMPT), 60, "exact.exacts"),
        group("experts", (f"{n} rows" for n in shapes.EXPERT_ROWS), 35, "products.mixtures"),
        group("latent decode", (f"{b} x {n}, {h} heads" for b, n, h in shapes.LATENTS), 25,
              "attention.latents"),
        group("mamba-2 step", (f"{n} x 128 heads" for n in shapes.MAMBA_BATCHES), 20,
              "recurrent.mambas"),
        group("sums over ranks", (f"{n} x 8192, 2 ranks" for n in shapes.SUM_ROWS), 20,
              "products.sums"),
        group("elementwise", ("rms_norm", "rms_norm_add", "silu_mul", "rotate_write"), 20,
              "products.elementwise"),
        _decoding("longer and mixed", 50, 90, (*shapes.DECODED[:3], *shapes.LONGER),
                  [Row(f"mixed {n}, {how}", 40, shapes.DECODED[1].gib, 2)
                   for n in shapes.MIXED for how in ("segments", "eager")]),
        Group("transformers", tuple(Row(own.name, 60, own.gib + 4, 8)
                                    for own in shapes.DECODED[:3]), 40, 70, "decode.transformers"),
    ]


def tests() -> list[Group]:
    suites = []
    for file in gpu_files():
        parts = SHARDS.get(file, 1)
        name = Path(file).stem.removeprefix("test_")
        suites += [Suite(name if parts == 1 else f"{name} {i + 1}/{parts}", file, "", (i, parts))
                   for i in range(parts)]
    suites.sort(key=lambda suite: -suite.shard[1])  # the longest first
    return [_tests("worker", [Suite("worker", ALONE)], 20, 150),
            _tests("others", suites, 20, 480, 8)]


def gpu_files() -> list[str]:
    """Files of tests marked gpu, but for the one to be run alone."""
    mark = "pytest.mark." + "gpu"  # this line is no test
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = (path.relative_to(ROOT).as_posix() for path in files if mark in path.read_text())
    return [path for path in found
            if path != ALONE and path != "tests/benchmarks/test_gpu_benchmark.py"]


PARTS = {"contact": contact, "kernels": kernels, "tests": tests}
