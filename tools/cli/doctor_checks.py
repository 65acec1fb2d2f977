"""What `actorium doctor` makes of a machine: a table of checks, each a function of what was read.

Pure: `doctor_command` reads the machine. Nothing but the standard library and msgspec is imported,
since the base install has no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from actorium.actors.models.download_bar import human_bytes

OK, OFF, BAD = "ok", "off", "bad"
"""Off: not possible here, or slower, and an engine can do without. Bad: no engine can serve."""
PYTHONS = (3, 11), (3, 13)
"""The first version that serves, and the last one that set-up takes."""
LEAST_MEMORY = 1 << 30
"""Bytes: the six processes take about as much before the weights of a model."""
LEAST_FILES, MANY_FILES = 256, 4096
"""Open files: an engine's own sockets and some callers; as many callers as a gateway takes."""
FEATURES: tuple[tuple[str, tuple[set[str], ...], str], ...] = (
    ("avx2", ({"avx2", "fma", "f16c"},), "the C kernels run without vectors"),
    ("avx512", ({"avx512f", "avx512bw", "avx512vl", "avx512dq"},), "vectors have half the width"),
    ("vnni", ({"avx512_vnni"}, {"avx_vnni"}), "weights in 4 and 8 bits take more instructions"),
    ("bf16", ({"avx512_bf16"},), "bfloat16 is widened before it is multiplied"),
    ("amx", ({"amx_tile", "amx_bf16"},), "prompts in bfloat16 take vectors instead of tiles"),
)
"""Instructions that the C kernels use: their name; what any one of these sets, in Linux's names,
has; and what their lack means."""
OLDEST_GPU = (8, 0)
FP8_GPU = (8, 9)
"""Compute capabilities: the oldest that kernels are compiled for; the first that multiplies FP8."""
EXTRAS = {"engine": "serving", "video": "videos in requests", "cluster": "replicas on Ray's nodes",
          "otel": "traces", "remote": "pages in a Redis server"}


class Package(NamedTuple):
    """A distribution that an extra asks for."""

    name: str
    wanted: str
    """Its range, as `>=2.11,<2.14`."""
    version: str | None
    """None: not installed."""
    fits: bool = True

    @property
    def fault(self) -> str:
        if self.version is None:
            return self.name
        return "" if self.fits else f"{self.name} {self.version} is not {self.wanted}"


class Gpu(NamedTuple):
    name: str
    bytes: int
    capability: tuple[int, int]


class Machine(Struct, frozen=True, kw_only=True):
    """What was read of a machine."""

    system: str
    """As `Linux x86_64`."""
    python: tuple[int, int, int]
    extras: dict[str, list[Package]]
    """Extra -> its packages; empty where the distribution is not installed."""
    torch: str
    """Version; empty where it is not installed or cannot be imported."""
    torch_fault: str
    """Why it cannot be imported, though it is there; else empty."""
    torch_cuda: str | None
    """CUDA's version that torch was built for; None: a build for CPUs."""
    gpus: list[Gpu]
    driver: bool
    """There is a trace of a GPU's driver."""
    triton_fault: str
    """Why Triton's kernels cannot run here; empty if they can."""
    processor: str
    instructions: frozenset[str]
    """As Linux names them."""
    compiler: str | None
    built: bool
    """The C kernels lie in the cache."""
    cpus: int
    """That this process may run on."""
    cpu_quota: float | None
    """CPUs' worth of time that its control group allows; None = no limit."""
    threads: int
    """--threads; 0 = one for each CPU."""
    free_memory: int
    memory: int
    """Bytes, within the limits of control groups."""
    memory_limit: str
    """Which group's file limits it; empty if none."""
    shared_memory: int
    """Free bytes of /dev/shm; 0 = it cannot be written."""
    open_files: int
    """The hard limit."""
    run_dir: str
    run_dir_fault: str
    """Why no engine can have its sockets there; empty if one can."""
    host: str
    port: int
    port_fault: str
    cache: str
    """The folder of downloaded models."""
    cache_free: int
    """Free bytes; 0 = it cannot be written."""
    cached: int
    """Repositories in it."""
    token: bool
    offline: bool
    model: str
    """As it was given; empty = the demo model."""
    model_fault: str
    """Why it cannot be served; empty if it can."""
    model_missing: bool
    """It is a name, and must be fetched first."""
    model_text: str
    engines: dict[str, str]
    """Name of each running engine -> its state."""


class Check(NamedTuple):
    """One line."""

    name: str
    state: str
    text: str
    next: str = ""
    """The command or the flag that changes it."""


def check_all(machine: Machine) -> list[Check]:
    """Every line, in the table's order."""
    return [check for each in CHECKS for check in each(machine)]


def serves(checks: list[Check]) -> bool:
    return all(check.state != BAD for check in checks)


def _python(m: Machine) -> list[Check]:
    text = f"{'.'.join(map(str, m.python))}, {m.system}"
    if not m.system.startswith("Linux"):
        return [Check("python", BAD, f"{text}: an engine needs Linux",
                      "run it in a container, in a virtual machine or in WSL")]
    oldest, newest = (".".join(map(str, one)) for one in PYTHONS)
    if m.python[:2] < PYTHONS[0]:
        return [Check("python", BAD, f"{text}: {oldest} or newer is needed",
                      f"apt install python{oldest} python{oldest}-venv; make setup PYTHON="
                      f"python{oldest}")]
    if m.python[:2] > PYTHONS[1]:
        return [Check("python", OFF, f"{text}: the newest that is tested is {newest}")]
    return [Check("python", OK, text)]


def _packages(m: Machine) -> list[Check]:
    if not m.extras:
        return [Check("packages", BAD, "actorium is not installed, only on the path",
                      "pip install -e '.[engine]', in the checkout")]
    checks = []
    for extra, packages in m.extras.items():
        name = "packages" if extra == "engine" else f"extra {extra}"
        faults = [package.fault for package in packages if package.fault]
        for_what = EXTRAS.get(extra, "developing")
        if faults:
            state = BAD if extra == "engine" else OFF
            lacks = [fault for fault in faults if " " not in fault]
            wrong = [fault for fault in faults if " " in fault]
            text = "; ".join([f"{', '.join(lacks)} missing"] * bool(lacks) + wrong)
            checks.append(Check(name, state, f"{text} ({for_what})",
                                f"pip install -e '.[{extra}]', in the checkout"))
        else:
            shown = ", ".join(f"{package.name} {package.version}" for package in packages[:4])
            rest = len(packages) - 4
            checks.append(Check(name, OK, shown + (f" and {rest} more" if rest > 0 else "")))
    return checks


def _torch(m: Machine) -> list[Check]:
    if not m.torch and not m.torch_fault:
        return []  # it is among the packages that are missing
    if m.torch_fault:
        return [Check("torch", BAD, f"cannot be imported: {m.torch_fault}",
                      "pip install --force-reinstall torch")]
    build = f"for CUDA {m.torch_cuda}" if m.torch_cuda else "for CPUs"
    return [Check("torch", OK, f"{m.torch}, built {build}")]


def _gpu(m: Machine) -> list[Check]:
    without = "a CPU serves; off: Triton's kernels, CUDA graphs"
    if not m.gpus:
        if m.driver and not m.torch_cuda:
            return [Check("gpu", OFF, f"a driver is there, and torch is built without CUDA: "
                          f"{without}",
                          f"pip install --force-reinstall torch=={m.torch.partition('+')[0]}")]
        if m.driver:
            return [Check("gpu", OFF, f"a driver is there, and torch finds no device: {without}",
                          "nvidia-smi; echo $CUDA_VISIBLE_DEVICES")]
        return [Check("gpu", OFF, f"no CUDA device: {without}")]
    checks = []
    for number, gpu in enumerate(m.gpus):
        capability = "sm_{}{}".format(*gpu.capability)
        text = f"{gpu.name}, {gpu.bytes / 2**30:.0f} GiB, {capability}"
        lacks = []
        if gpu.capability < OLDEST_GPU:
            lacks.append("kernels are compiled and tested from sm_80 on")
        if gpu.capability < FP8_GPU:
            lacks.append("off: products in FP8")
        if m.triton_fault:
            lacks.append(f"torch's kernels serve, slower: {m.triton_fault}")
        checks.append(Check(f"gpu {number}", OFF if lacks else OK, "; ".join([text, *lacks]),
                            "pip install -e '.[engine]', in the checkout" * bool(m.triton_fault)))
    return checks


def _processor(m: Machine) -> list[Check]:
    has = [name for name, sets, _ in FEATURES
           if any(m.instructions.issuperset(needed) for needed in sets)]
    lacks = [f"{name} ({why})" for name, _, why in FEATURES if name not in has]
    if not m.system.endswith("x86_64"):
        return [Check("processor", OFF, f"{m.processor}: the C kernels have vectors for x86-64 "
                      "alone, and run as plain C")]
    text = f"{m.processor}: {', '.join(has) or 'plain x86-64'}"
    return [Check("processor", OFF if lacks else OK,
                  text + (f"; off: {', '.join(lacks)}" if lacks else ""))]


def _kernels(m: Machine) -> list[Check]:
    if m.compiler is None:
        return [Check("kernels", OFF, "no C compiler: torch's kernels serve, several times as slow",
                      "apt install gcc")]
    if not m.built:
        return [Check("kernels", OK, f"the first engine builds them in C with {m.compiler}, which "
                      "takes a minute or two")]
    return [Check("kernels", OK, f"C, built for this processor with {m.compiler}")]


def _threads(m: Machine) -> list[Check]:
    threads = m.threads or m.cpus
    text = f"{threads} of {m.cpus} CPUs"
    if m.cpu_quota is not None and m.cpu_quota + 0.5 < threads:
        fits = max(1, round(m.cpu_quota))
        return [Check("threads", OFF, f"{text}, but the control group allows the time of "
                      f"{m.cpu_quota:g}: they wait for each other",
                      f"actorium serve --threads {fits}")]
    if threads > m.cpus:
        return [Check("threads", OFF, f"{threads} on {m.cpus} CPUs: they wait for each other",
                      f"actorium serve --threads {m.cpus}")]
    return [Check("threads", OK, text)]


def _memory(m: Machine) -> list[Check]:
    text = f"{human_bytes(m.free_memory)} free of {human_bytes(m.memory)}"
    text += f" (limit: {m.memory_limit})" if m.memory_limit else ""
    if m.free_memory < LEAST_MEMORY:
        return [Check("memory", BAD, f"{text}; {human_bytes(LEAST_MEMORY)} is the least",
                      "ps aux --sort=-rss | head, or a larger limit")]
    return [Check("memory", OK, text)]


def _shared_memory(m: Machine) -> list[Check]:
    if not m.shared_memory:
        return [Check("/dev/shm", OFF, "cannot be written: prepared images lie in the run "
                      "directory", "docker run --shm-size 1g")]
    return [Check("/dev/shm", OK, f"{human_bytes(m.shared_memory)} free")]


def _open_files(m: Machine) -> list[Check]:
    text = f"{m.open_files:,} may be open"
    if m.open_files >= MANY_FILES:
        return [Check("files", OK, text)]
    state = BAD if m.open_files < LEAST_FILES else OFF
    return [Check("files", state, f"{text}: about as many callers can be connected at once",
                  f"ulimit -Hn {1 << 16}, as root; docker run --ulimit nofile={1 << 16}")]


def _run_dir(m: Machine) -> list[Check]:
    if m.run_dir_fault:
        return [Check("run dir", BAD, m.run_dir_fault, "--run-dir DIR, or ACTORIUM_RUN_DIR=DIR")]
    return [Check("run dir", OK, m.run_dir)]


def _port(m: Machine) -> list[Check]:
    where = f"{m.host}:{m.port}"
    if m.port_fault:
        return [Check("port", OFF, f"{where}: {m.port_fault}",
                      f"actorium serve --port {m.port + 1}; ss -ltnp sport = :{m.port}")]
    return [Check("port", OK, f"{where} is free")]


def _cache(m: Machine) -> list[Check]:
    text = f"{m.cache}: {m.cached} repositories"
    if not m.cache_free:
        return [Check("hub cache", OFF, f"{text}; it cannot be written: nothing is downloaded",
                      "--download-dir DIR, or HF_HOME=DIR")]
    text += f", {human_bytes(m.cache_free)} free, "
    text += "a token is there" if m.token else "no token (`hf auth login` opens gated models)"
    if m.offline:
        return [Check("hub cache", OFF, f"{text}; HF_HUB_OFFLINE forbids downloads",
                      "unset HF_HUB_OFFLINE")]
    return [Check("hub cache", OK, text)]


def _model(m: Machine) -> list[Check]:
    named = m.model or "the demo model"
    if m.model_missing:
        return [Check("model", BAD if m.offline else OFF, f"{named} is not on this machine",
                      "actorium models" if m.offline else f"actorium pull {m.model}")]
    if m.model_fault:
        return [Check("model", BAD, m.model_fault, f"actorium plan {m.model}; actorium models")]
    return [Check("model", OK, m.model_text)]


def _engines(m: Machine) -> list[Check]:
    checks = []
    for name, state in m.engines.items():
        ready = state.startswith("ready")
        checks.append(Check("engine", OK if ready else OFF, f"{name}: {state}",
                            "" if ready else "actorium ps"))
    return checks or [Check("engine", OK, "none runs")]


CHECKS: tuple[Callable[[Machine], list[Check]], ...] = (
    _python, _packages, _torch, _gpu, _processor, _kernels, _threads, _memory, _shared_memory,
    _open_files, _run_dir, _port, _cache, _model, _engines)
"""All checks, in the order in which they are shown."""
