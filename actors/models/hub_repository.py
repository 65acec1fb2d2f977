"""What a repository of the Hugging Face hub holds, which of it an engine reads, and what a refusal
of the hub means.

An engine reads the configuration, the tokenizer, the chat template and safetensors; or one GGUF
file. Weights in pickle are refused. `huggingface_hub` is imported when something is asked, not
before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.config.sources import suggestion
from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_file import gguf_files
from actorium.actors.models.model_dir import read_json
from actorium.actors.models.model_files import (
    INDEX,
    MAX_INDEX,
    PICKLES,
    SINGLE,
    unindexed_files,
)
from actorium.actors.models.model_names import (
    MAIN,
    WHEEL_MODELS,
    ModelName,
    cached_repositories,
    choose_gguf,
    gguf_models,
    hub_cache,
)
from actorium.actors.models.template_files import FOLDER, SUFFIX

CONFIG = "config.json"
BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
          "hf_quant_config.json")
"""What an engine reads beside config.json and the weights."""
_SAFE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class RemoteFile(NamedTuple):
    """A file of a repository."""

    name: str
    size: int
    hash: str
    """SHA-256 of the file, or the SHA-1 of the git blob that it is; its name among the blobs."""


class HubListing(NamedTuple):
    """What a repository holds at one commit."""

    name: ModelName
    commit: str
    files: dict[str, RemoteFile]


def list_files(name: ModelName) -> HubListing:
    """Ask the hub. Raises what `huggingface_hub` does, and `BadModel` for other answers."""
    from huggingface_hub import HfApi

    info = HfApi(library_name="actorium").model_info(
        name.repo, revision=name.revision or MAIN, files_metadata=True, timeout=30.0)
    commit = str(info.sha)
    files = {one.rfilename: one for one in info.siblings or ()
             if len(one.rfilename) < 256 and _SAFE.fullmatch(one.rfilename)}
    if not _COMMIT.fullmatch(commit):
        raise BadModel(f"model: {endpoint()} answers for {str(name)!r} with the commit "
                       f"{shown(commit)}", "model")
    return HubListing(name, commit, {path: _remote(name, commit, one)
                                     for path, one in files.items()})


def _remote(name: ModelName, commit: str, sibling: Any) -> RemoteFile:
    lfs = sibling.lfs or {}
    known = lfs.get("sha256") or sibling.blob_id or ""
    size = lfs.get("size") or sibling.size
    return RemoteFile(sibling.rfilename, -1 if size is None else int(size), str(known))


def choose(listing: HubListing, weights: bool) -> list[str]:
    """The files to fetch, less the shards that an index names. What is chosen does not depend on
    whether weights are needed, so that a plan is that of the model that is served. Raises
    `BadModel`."""
    name, files = listing.name, listing.files
    held = [INDEX] if INDEX in files else unindexed_files(files)
    if not name.file and CONFIG in files and held:
        templates = (one for one in files if one.startswith(f"{FOLDER}/") and one.endswith(SUFFIX))
        beside = [CONFIG, *(one for one in BESIDE if one in files), *sorted(templates)]
        return [*beside, *held] if weights or INDEX in files else beside
    if gguf_models(list(files)):
        parts = choose_gguf(list(files), name)
        lacking = [one.name for one in gguf_files(Path(parts[0])) if str(one) not in files]
        if lacking:
            raise BadModel(f"model: {str(name)!r} lacks {lacking[0]} at {endpoint()}", "model")
        return parts
    if name.file:
        raise BadModel(f"model: {str(name)!r} has no GGUF files at {endpoint()}", "model")
    pickles = sorted(one for one in files if one.endswith(PICKLES))
    if pickles:
        raise BadModel(f"model: {str(name)!r} has its weights in pickle alone ({pickles[0]}), "
                       "which can run code of strangers and is never read; a repository with "
                       "safetensors or GGUF is needed", "model")
    missing = CONFIG if CONFIG not in files else SINGLE
    raise BadModel(f"model: {str(name)!r} has neither {missing} nor a GGUF file at {endpoint()}: "
                   "it is no language model that can be served", "model")


def shards_of(index: Path, listing: HubListing) -> list[str]:
    """The files that a safetensors index names. Raises `BadModel`."""
    placed = read_json(index, max_bytes=MAX_INDEX).get("weight_map")
    shards = sorted(set(map(str, placed.values()))) if isinstance(placed, dict) else []
    for one in shards:
        if one not in listing.files or "/" in one or not one.endswith(".safetensors"):
            raise BadModel(f"model: {str(listing.name)!r}: {INDEX} names {shown(one)}, which the "
                           "repository does not hold", "model")
    return shards


# --- refusals -------------------------------------------------------------------------------------

@contextlib.contextmanager
def explained(name: ModelName) -> Iterator[None]:
    """Every error of the hub, the network or the disk as a `BadModel` of one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        raise BadModel(f"model: {_refusal(name, error)}", "model") from None
    except HTTPError as error:
        raise BadModel(f"model: {str(name)!r} is neither here nor in the HF cache, and "
                       f"{endpoint()} cannot be reached: {str(error) or type(error).__name__}; "
                       f"`actorium models` lists the models on this machine{names_like(name)}",
                       "model") from None
    except HFValidationError as error:
        raise BadModel(f"model: {str(name)!r}: {str(error).splitlines()[0]}", "model") from None
    except OSError as error:
        why = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error
        raise BadModel(f"model: {str(name)!r} cannot be written into the HF cache: {why}; what has "
                       "come is kept", "model") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadModel(f"model: {endpoint()} does not answer as a Hugging Face hub does: "
                       f"{type(error).__name__}: {error}", "model") from None


def _refusal(name: ModelName, error: Any) -> str:
    """What the hub's refusal means, and what helps."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where, token, status = endpoint(), _token(), error.response.status_code
    own = token or "none is there: set HF_TOKEN, or log in with `hf auth login`"
    if isinstance(error, GatedRepoError):
        terms = f"{name.repo!r} is gated (status {status}): accept its terms at {where}/{name.repo}"
        return (f"{terms}; {token} is not of an account that has" if token else
                f"{terms}, then give a token of that account: {own}")
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repo!r} has no revision {name.revision or MAIN!r} at {where}"
    if isinstance(error, RepositoryNotFoundError):
        return (f"{name.repo!r} is no directory here, and {where} has no such repository, or a "
                f"private one (status {status}): for that a token is needed, and "
                + (f"{token} does not open it" if token else own) + names_like(name))
    if status in (401, 403):
        return (f"{where} refuses {name.repo!r} (status {status}): "
                + (f"{token} is not valid, or may not read it" if token else
                   f"a token is needed, and {own}"))
    return f"{where} answers for {name.repo!r} with status {status}"


def names_like(name: ModelName) -> str:
    """` (did you mean ...?)` with what is fetched by another way or lies in the HF cache; nothing
    where no name is like this one."""
    return suggestion(name.repo, {*WHEEL_MODELS, *cached_repositories(hub_cache())} - {name.repo})


def _token() -> str | None:
    """Where the token comes from that was sent, in words; None = there is none."""
    from huggingface_hub import constants, get_token

    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(variable, "").strip():
            return f"the token in {variable}"
    return f"the token in {constants.HF_TOKEN_PATH}" if get_token() else None


def endpoint() -> str:
    """Where the hub is."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
