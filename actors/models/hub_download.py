"""Fetches a model by its name from the Hugging Face hub into the HF cache.

`huggingface_hub` says where the hub is, who asks (its tokens) and what a repository holds. The
bytes are received here: it compares no hashes, and begins a file anew where an earlier process
broke off. The layout of the cache is its own, so that either finds what the other has fetched:

    models--ORG--NAME/refs/REVISION           the commit of a branch or a tag
    models--ORG--NAME/snapshots/COMMIT/FILE   a link to the blob
    models--ORG--NAME/blobs/HASH              the file; HASH.incomplete while it is received

`huggingface_hub` is imported when something is fetched, not before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, BinaryIO

from actorium.actors.errors import BadModel
from actorium.actors.models.download_bar import DownloadBar, Report, human_bytes
from actorium.actors.models.hub_repository import (
    HubListing,
    RemoteFile,
    choose,
    endpoint,
    explained,
    list_files,
    names_like,
    shards_of,
)
from actorium.actors.models.model_files import INDEX, SNAPSHOTS
from actorium.actors.models.model_names import MAIN, ModelName, repository_dir

INCOMPLETE = ".incomplete"
CHUNK = 1 << 20
THREADS = 4
"""Files that are received at once."""
ATTEMPTS = 5
"""In a row that bring nothing, of one file."""
PAUSE_SECONDS = 0.5
"""Before the second attempt; each further one waits twice as long."""
SPARE_BYTES = 64 << 20
"""Left free on the disk."""
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids to ask the hub."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def fetch(name: ModelName, cache: Path, weights: bool = True,
          say: Callable[[str], None] | None = None, terminal: bool | None = None,
          report: Report | None = None) -> Path:
    """Bring a model, as the hub has it now, into the HF cache; what is there is not fetched again.
    weights: False = all but those. say, terminal, report: as of `DownloadBar`.

    Returns the snapshot's folder, or the GGUF file. Raises `BadModel` with one line that says what
    is missing: the repository, the revision, a token, safetensors, room on the disk, the network.
    """
    if offline():
        raise BadModel(f"model: {str(name)!r} is neither a directory nor, as a whole, in the HF "
                       f"cache {cache}, and HF_HUB_OFFLINE forbids to fetch it{names_like(name)}",
                       "model")
    with explained(name):
        listing = list_files(name)
        download = _Download(listing, cache, say, terminal, report)
        wanted = choose(listing, weights)
        if weights and INDEX in wanted:
            download.receive([listing.files[INDEX]], silent=True)
            wanted += shards_of(download.snapshot / INDEX, listing)
        download.receive([listing.files[one] for one in wanted])
        download.name_revision()
    return download.snapshot / wanted[0] if wanted[0].endswith(".gguf") else download.snapshot


# --- bytes ----------------------------------------------------------------------------------------

class _Download:
    """Files of one commit on their way into the cache."""

    def __init__(self, listing: HubListing, cache: Path, say: Callable[[str], None] | None,
                 terminal: bool | None, report: Report | None) -> None:
        self.listing, self._cache, self._say, self._terminal = listing, cache, say, terminal
        self._report = report
        self._folder = repository_dir(listing.name.repo, cache)
        self.snapshot = self._folder / SNAPSHOTS / listing.commit
        self._stop = threading.Event()

    def receive(self, files: Sequence[RemoteFile], silent: bool = False) -> None:
        """Fetch those that are not there. silent: nobody is told. Raises as `fetch`; what had come
        stays, and the next attempt goes on there."""
        files = [self._identified(one) for one in files if not (self.snapshot / one.name).exists()]
        if not files:
            return
        self._check_space(files)
        total = sum(one.size for one in files)
        what = f"{self.listing.name} ({len(files)} files)" if len(files) > 1 else \
            f"{self.listing.name} ({files[0].name})"
        say, terminal = (lambda _: None, False) if silent else (self._say, self._terminal)
        with DownloadBar(what, total, say, terminal, None if silent else self._report) as bar:
            pool = ThreadPoolExecutor(THREADS, "fetch")
            try:
                for done in as_completed([pool.submit(self._receive_one, one, bar)
                                          for one in files]):
                    done.result()
            except BaseException:
                self._stop.set()
                raise
            finally:
                pool.shutdown(cancel_futures=True)

    def name_revision(self) -> None:
        """Write down which commit the branch or tag is: all that was asked for is there."""
        revision = self.listing.name.revision or MAIN
        if revision != self.listing.commit:
            ref = self._folder / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f"{ref.name}.{os.getpid()}")
            new.write_text(self.listing.commit)
            new.replace(ref)

    def _identified(self, file: RemoteFile) -> RemoteFile:
        """With size and hash, by a question of its own where the listing lacks them (mirrors)."""
        if file.size >= 0 and _HASH.fullmatch(file.hash):
            return file
        from huggingface_hub import get_hf_file_metadata

        found = get_hf_file_metadata(self._url(file))
        if found.size is None or not _HASH.fullmatch(found.etag or ""):
            raise BadModel(f"model: {endpoint()} tells neither size nor hash of {file.name}",
                           "model")
        return file._replace(size=found.size, hash=str(found.etag))

    def _url(self, file: RemoteFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.listing.name.repo, file.name, revision=self.listing.commit,
                          endpoint=endpoint())

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.hash

    def _check_space(self, files: Sequence[RemoteFile]) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        missing = sum(max(one.size - _size(_partial(self._blob(one))), 0) for one in files
                      if not self._blob(one).exists())
        free = shutil.disk_usage(self._cache).free
        if missing + SPARE_BYTES > free:
            raise BadModel(
                f"model: no space for {str(self.listing.name)!r}: {human_bytes(missing)} are still "
                f"to come, and {human_bytes(free)} are free at {self._cache} (HF_HUB_CACHE names "
                "another place)", "model")

    def _receive_one(self, file: RemoteFile, bar: DownloadBar) -> None:
        blob, link = self._blob(file), self.snapshot / file.name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._cache / ".locks" / self._folder.name / f"{file.hash}.lock"):
            if blob.exists():
                bar.add(file.size, received=False)
            else:
                with _partial(blob).open("a+b") as partial:
                    self._receive_bytes(file, partial, bar)
                _partial(blob).replace(blob)
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(os.path.relpath(blob, link.parent))
            except OSError:  # a file system without links
                shutil.copyfile(blob, link)

    def _receive_bytes(self, file: RemoteFile, partial: BinaryIO, bar: DownloadBar) -> None:
        """Append what is missing, over as many connections as that takes, and compare the hash."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        digest, have = _begin_digest(file), 0
        partial.seek(0)
        while chunk := partial.read(CHUNK):
            digest.update(chunk)
            have += len(chunk)
        if have > file.size:
            partial.truncate(0)
            digest, have = _begin_digest(file), 0
        bar.add(have, received=False)
        failures = 0
        while have < file.size:
            before = have
            try:
                for start, chunk in self._stream(file, have):
                    if start != have:  # the server begins anew
                        bar.add(-have, received=False)
                        digest, have = _begin_digest(file), 0
                        partial.truncate(0)
                    partial.write(chunk)
                    digest.update(chunk)
                    have += len(chunk)
                    bar.add(len(chunk))
                    if have > file.size:
                        break
                broken: object = "the connection ended"
            except HfHubHTTPError as error:
                if error.response.status_code < 500 and error.response.status_code != 429:
                    raise
                broken = f"status {error.response.status_code}"
            except HTTPError as error:
                broken = str(error) or type(error).__name__
            finally:
                partial.flush()
            failures = 0 if have > before else failures + 1
            if have < file.size and failures >= ATTEMPTS:
                raise BadModel(
                    f"model: the download of {str(self.listing.name)!r} broke off in {file.name} "
                    f"after {have:,} of {file.size:,} bytes ({broken}); the same command goes on "
                    "from there", "model")
            if failures and self._stop.wait(PAUSE_SECONDS * 2 ** (failures - 1)):
                raise KeyboardInterrupt
        if have != file.size or (file.hash != digest.hexdigest()):
            os.truncate(partial.fileno(), 0)
            wrong = f"{have:,} bytes instead of {file.size:,}" if have != file.size else \
                f"the hash {digest.hexdigest()[:12]}... instead of {file.hash[:12]}..."
            raise BadModel(f"model: {file.name} of {str(self.listing.name)!r} came with {wrong}, "
                           "and was thrown away", "model")

    def _stream(self, file: RemoteFile, have: int) -> Iterator[tuple[int, bytes]]:
        """(where it begins, bytes) of what follows `have` bytes. Raises errors of HTTP."""
        from huggingface_hub import constants, get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers

        headers = {**build_hf_headers(library_name="actorium"), "accept-encoding": "identity"}
        if have:
            headers["range"] = f"bytes={have}-"
        with get_session().stream("GET", self._url(file), headers=headers, follow_redirects=True,
                                  timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            start = have if response.status_code == 206 else 0
            for chunk in response.iter_bytes():
                if self._stop.is_set():
                    raise KeyboardInterrupt
                yield start, chunk
                start += len(chunk)


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + INCOMPLETE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _begin_digest(file: RemoteFile) -> Any:
    """SHA-256; of files that lie in git itself, SHA-1 with a blob's head."""
    if len(file.hash) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock that `huggingface_hub` holds, too, while it fetches the same blob."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
