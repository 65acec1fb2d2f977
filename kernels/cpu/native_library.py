"""The C kernels (`cpu/`): built once with the machine's compiler, called through ctypes.

Where there is no compiler, or no bf16 worth the trouble, `library` returns None and the torch
kernels serve. The library shares torch's OpenMP threads: it is linked to the `libgomp.so.1` that
torch has already loaded, and is not used where torch brought another runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from threading import get_ident

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fassociative-math",
         "-fno-signed-zeros", "-fno-trapping-math")
THIS_PROCESSOR = ("-march=native",)
SLOW_PAIRS = "-DSLOW_PAIRS"
PAIRS_PAY = 1.2
"""Of `pair_rate`: what widening to floats costs is not in it."""
VERSION = 1
BUILD_SECONDS = 300.0
"""For a source: some take 10 seconds of a quiet core."""
LOG = logging.getLogger("actorium.kernels")

_POINTER = [c_void_p]
SIGNATURES = {
    "rms_norm": _POINTER * 3 + [c_int64, c_int, c_float, c_int],
    "layer_norm": [c_void_p, c_int64] + _POINTER * 2 + [c_int64] * 2 + [c_int] * 2
                  + [c_float, c_int],
    "silu_mul": _POINTER * 2 + [c_int64, c_int, c_int],
    "token_scores": _POINTER * 4 + [c_int64] + _POINTER * 2 + [c_int64] * 3 + [c_int] * 4,
    "text_drafts": [c_void_p, c_int64, c_int64] + _POINTER * 2 + [c_int64] + _POINTER * 7
                   + [c_int] * 4 + [c_double] * 2 + [c_int],
    "add_answer": _POINTER * 4 + [c_int64] * 2 + [c_void_p] + [c_int64] * 2,
    "earlier_drafts": _POINTER * 4 + [c_int64] * 3 + _POINTER * 2 + [c_int64] * 2 + _POINTER * 2
                      + [c_int64] + _POINTER * 7 + [c_int] * 4 + [c_double] * 2 + [c_int],
    "gelu_mul": _POINTER * 2 + [c_int64, c_int, c_int],
    "rms_norm_int8": _POINTER * 5 + [c_int64, c_int, c_int, c_float, c_int],
    "gate_mul_int8": _POINTER * 3 + [c_int64] + [c_int] * 4,
    "rotate_write": _POINTER * 6 + [c_int64, c_int, c_int, c_int, c_float, c_int],
    "paged_decode": [c_void_p, c_int64] + _POINTER * 3 + [c_int64, c_void_p, c_void_p, c_int64]
                    + [c_int] * 6 + [c_float, c_int, c_int, c_void_p, c_float, c_void_p],
    "paged_extend": [c_void_p, c_int64] + _POINTER * 3 + [c_int64, c_void_p] + [c_int] * 5
                    + [c_float, c_int, c_void_p, c_float, c_void_p],
    "sage_extend": [c_void_p, c_int64] + _POINTER * 4 + [c_int64, c_void_p] + [c_int] * 5
                   + [c_float, c_int],
    "latent_extend": [c_void_p, c_int64] + _POINTER * 3 + [c_int64, c_void_p] + [c_int] * 4
                     + [c_float, c_int],
    "latent_decode": [c_void_p, c_int64] + _POINTER * 3 + [c_int64] + _POINTER * 2 + [c_int64]
                     + [c_int] * 5 + [c_float, c_int],
    "chunk_tables": [c_void_p, c_int64, c_int64, c_void_p] + [c_int64] * 4
                    + [c_void_p, c_int64, c_void_p],
    "cut_gelu_mul": _POINTER * 2 + [c_int64, c_int, c_float, c_float, c_int],
    "as_large": _POINTER * 3 + [c_int64, c_int, c_int],
    "widen_pages": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int],
    "turn_heads_wide": _POINTER * 3 + [c_int64, c_int, c_int, c_int],
    "map_numbers": _POINTER * 3 + [c_int64, c_int],
    "delta_step": [c_void_p, c_int64, c_int64] + _POINTER * 9 + [c_float, c_int],
    "delta_window": [c_void_p, c_int64, c_int64] + _POINTER * 11 + [c_int] * 2 + [c_float, c_int],
    "delta_extend_steps": [c_void_p, c_int64, c_int64] + _POINTER * 11 + [c_float, c_int],
    "delta_extend": [c_void_p, c_int64, c_int64] + _POINTER * 11 + [c_float, c_int],
    "mamba_steps": [c_void_p] + [c_int64] * 3 + _POINTER * 14 + [c_float] * 2 + [c_int],
    "conv_steps": [c_void_p] + [c_int64] * 3 + _POINTER * 8 + [c_int64] + [c_int] * 3,
    "scan_steps": _POINTER * 4 + [c_int64] + _POINTER * 8 + [c_int64] + [c_int] * 3,
    "kda_steps": _POINTER * 3 + [c_int64] + _POINTER * 7 + [c_int] * 4,
    "norm_gated": _POINTER * 3 + [c_int64, c_void_p, c_int64] + [c_int] * 2 + [c_float, c_int],
    "linear": _POINTER * 5 + [c_int64, c_int, c_int, c_int],
    "linear_histogram": [c_void_p, c_int64, c_int64, c_void_p],
    "linear_count": [c_void_p] + [c_int64] * 3 + [c_void_p, c_void_p, c_int],
    "linear_pack": [c_void_p] + [c_int64] * 3 + _POINTER * 4 + [c_int],
    "linear_unpack": [c_void_p, c_int64, c_void_p],
    "linear_rows": [c_void_p, c_void_p, c_int64, c_void_p, c_int],
    "linear_packed": _POINTER * 5 + [c_int64, c_int, c_int],
    "linear_heads": _POINTER * 3 + [c_int64, c_int64, c_int],
    "linear_leaves": _POINTER * 6 + [c_int64, c_int, c_int64, c_int],
    "grouped_pack": [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int],
    "grouped_rows": [c_void_p, c_void_p, c_int64, c_void_p, c_int, c_int],
    "gguf_rows": [c_int, c_void_p] + [c_int64] * 3 + _POINTER * 2 + [c_int64, c_int],
    "gguf_numbers": [c_int, c_void_p] + [c_int64] * 3 + [c_void_p, c_int, c_int],
    "gguf_pack": _POINTER * 2 + [c_int64] * 2 + _POINTER * 2 + [c_int],
    "grouped_linear": _POINTER * 5 + [c_int64, c_int, c_void_p, c_int64, c_int],
    "grouped_linear_int8": _POINTER * 6 + [c_int64, c_int, c_void_p, c_int64, c_int],
    "choose_experts": [c_void_p, c_int64, c_int, c_int64] + [c_int] * 7 + [c_void_p]
                      + [c_float] * 3 + _POINTER * 2 + [c_int],
    "group_rows": [c_void_p] + [c_int64] * 3 + _POINTER * 4,
    "expert_plan": [c_void_p, c_int64] + _POINTER * 3 + [c_int],
    "expert_packed": [c_void_p, c_int64] + _POINTER * 5 + [c_int] * 2,
    "expert_grouped": [c_void_p, c_int64] + _POINTER * 5
                      + [c_int, c_void_p, c_int64, c_void_p, c_int],
    "expert_combine": _POINTER * 4 + [c_int64] + [c_int] * 3,
    "clamped_swiglu": _POINTER * 2 + [c_int64, c_int, c_float, c_float, c_int],
    "gate_rows": _POINTER * 2 + [c_int64] + _POINTER * 2 + [c_int64, c_int, c_int],
    "strided": [c_int64] + _POINTER * 3 + [c_int64] * 16 + [c_float],
    "move_rows": [c_void_p, c_int64] + _POINTER * 2 + [c_int64] * 3 + [c_int],
    "sigmoid_mul": _POINTER * 3 + [c_int64],
    "adapt_rows": [c_void_p, c_int64] * 2 + [c_int] + _POINTER * 2 + [c_int64] + _POINTER * 6
                  + [c_int64] * 4 + [c_int],
    "gather_columns": [c_void_p, c_int64] + _POINTER * 2 + [c_int64] * 2,
    "crc_of": [c_void_p, c_int64, c_void_p],
    "page_copies": [c_void_p, c_int64] + _POINTER * 3 + [c_int64] + _POINTER * 2 + [c_int] * 2,
    "share_work": [c_int],
    "run_program": [c_void_p, c_int64, c_int],
    "sample_rows": [c_void_p] + [c_int64] * 2 + _POINTER * 7 + [c_int],
    "rank_all_reduce": [c_void_p, c_void_p, c_int64, c_int],
    "rank_reduce_add_norm": [c_void_p, c_void_p, c_int] + _POINTER * 3
                            + [c_float, c_void_p, c_int64, c_int],
    "rank_all_gather": _POINTER * 3 + [c_int64] * 3,
    "rank_broadcast": [c_void_p, c_void_p, c_int64, c_int64],
    "rank_barrier": _POINTER,
    "rank_fence": [c_void_p, c_int64],
}


def library(cache: Path | None = None,
            processor: tuple[str, ...] = THIS_PROCESSOR) -> ctypes.CDLL | None:
    """The library, built if the cache has none for this source, compiler and processor; None where
    it cannot be had. torch must be imported before. cache: default `~/.cache/actorium`. processor:
    the compiler's flags that say what it may use of the processor.

    Each thread has functions of its own: what it records of them (`program.py`) is none of the
    calls of others, which may be ranks in threads of one process."""
    return _of_thread(get_ident(), _path(cache, processor))


@functools.cache
def _path(cache: Path | None, processor: tuple[str, ...]) -> Path | None:
    compiler = c_compiler()
    if compiler is None or not _torch_threads_are_gomp():
        return None
    try:
        path = _built(compiler, cache or cache_folder(), (*FLAGS, *processor))
        ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as e:
        LOG.warning("the C kernels cannot be built, torch's serve, several times as slow: %s", e)
        return None
    return path


@functools.cache
def _of_thread(thread: int, path: Path | None) -> ctypes.CDLL | None:
    if path is None:
        return None
    lib = ctypes.CDLL(str(path))
    if lib.actorium_version() != VERSION:
        return None
    for name, types in SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = types, None
    return lib


def c_compiler() -> str | None:
    """Path of the compiler that builds the library; None: there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def is_built() -> bool:
    """Whether the library lies in the cache, built for this processor by this compiler."""
    compiler = c_compiler()
    return compiler is not None and _library_file(
        compiler, cache_folder(), (*FLAGS, *THIS_PROCESSOR)).is_file()


def cache_folder() -> Path:
    """Where this user's builds and measurements of this machine are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "actorium"


def _library_file(compiler: str, cache: Path, flags: tuple[str, ...]) -> Path:
    """Where the library of these sources is, or would be built."""
    what = (*(s.read_bytes() for s in sorted(SOURCES.glob("*.[ch]"))), " ".join(flags).encode(),
            os.path.realpath(compiler).encode(), processor_facts().encode())
    return cache / f"native-{hashlib.sha256(b'|'.join(what)).hexdigest()[:20]}.so"


def _built(compiler: str, cache: Path, flags: tuple[str, ...]) -> Path:
    """Path of the shared library. Raises OSError or SubprocessError."""
    path = _library_file(compiler, cache, flags)
    if path.is_file() and path.stat().st_uid == os.getuid():
        return path
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks or engines one builds
        if path.is_file():
            return path
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            if ({*THIS_PROCESSOR} <= {*flags}
                    and _pair_rate([compiler, *flags], Path(scratch)) < PAIRS_PAY):
                flags = (*flags, SLOW_PAIRS)
            whole = _compiled([compiler, *flags], list(SOURCES.glob("*.c")), Path(scratch))
            os.replace(whole, path)  # whole or not at all
    finally:
        os.close(lock)
    return path


def _pair_rate(compiler: list[str], to: Path) -> float:
    """What `pair_rate.c` measures. Raises OSError or SubprocessError."""
    probe = ctypes.CDLL(str(_compiled(compiler, [SOURCES / "pair_rate.c"], to))).pair_rate
    probe.restype = c_double
    rate: float = probe()
    LOG.info("products of pairs of bf16: %.2f times as fast as of floats", rate)
    return rate


def _compiled(compiler: list[str], sources: list[Path], to: Path) -> Path:
    """The library, its sources compiled side by side, the longest first, and linked.

    Raises OSError or SubprocessError.
    """
    def run(*words: str) -> None:
        subprocess.run([*compiler, *words], check=True, capture_output=True,
                       timeout=BUILD_SECONDS)

    def compiled(source: Path) -> str:
        run("-c", "-o", str(to / f"{source.stem}.o"), str(source))
        return str(to / f"{source.stem}.o")

    sources = sorted(sources, key=lambda s: -s.stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compiled, sources))
    run("-o", str(to / "native.so"), *objects, "-lm")
    return to / "native.so"


def processor_facts() -> str:
    """What the processor is and can do: what `-march=native` depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(dict.fromkeys(
            line for line in lines if line.startswith(("flags", "Features", "model name"))))
    return platform.machine() + platform.processor()


def _torch_threads_are_gomp() -> bool:
    """Whether this process has loaded exactly one GNU OpenMP, under the name we link to."""
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return False
    found = {word for word in maps if "libgomp" in word or "libiomp" in word or "libomp" in word}
    return len(found) == 1 and os.path.basename(found.pop()).startswith("libgomp.so.1")
