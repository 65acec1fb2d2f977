"""What this project's dependencies are held to:
`python tools/dependencies.py lock|oldest|newest|extra VENV`.

`lock VENV` brings VENV to the newest versions in range and writes them into `constraints.txt`,
from which set-up installs.
`oldest VENV` and `newest VENV` run the tests of whatever touches a request with the ends of the
ranges in `pyproject.toml`, in an environment of its own (`build/oldest`, `build/newest`); what is
not named there (torch above all) is taken from VENV.
`extra VENV NAME FOLDER` makes such an environment with an extra that set-up leaves out. Only the
standard library is imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
LIBRARIES = ("llguidance", "starlette", "uvicorn", "httptools", "uvloop", "msgspec", "pyzmq",
             "tokenizers", "transformers", "jinja2", "rich", "prometheus_client", "safetensors",
             "huggingface_hub", "pillow")
"""Packages that handle a request, a command line or a model's files."""
TESTS = ("cli", "client*", "crash", "delivery*", "detokenizer*", "engine_cli", "gateway*",
         "grammar*", "hub_download", "keys", "loader", "mailbox", "masking", "models_dir",
         "openapi", "parity", "probes*", "settings", "structured*", "tcp", "tokenizer*",
         "tool_parsers", "batch_neighbours", "media_hostile", "media_fetching")
"""Names of `test_<name>.py`, anywhere in `tests/`."""
_RANGE = re.compile(r"(?P<name>[\w-]+)\s*>=\s*(?P<low>[\w.]+)\s*,\s*<\s*(?P<high>[\w.]+)")
HEADER = """\
# The versions that the tests ran with: what set-up installs. Made by `make lock`; the ranges that
# are promised stand in pyproject.toml, and `make test-oldest` / `make test-newest` try their ends.
"""


def ranges() -> dict[str, tuple[str, str]]:
    """Library -> (lowest version, the first one above the range), of all that the project's
    dependencies name with both bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"],
              *(one for extra in project["optional-dependencies"].values() for one in extra)]
    found = (_RANGE.match(one.replace('"', "")) for one in wanted)
    return {one["name"]: (one["low"], one["high"]) for one in found if one is not None}


def pins(end: str) -> list[str]:
    """What pip is asked for. Raises `KeyError` for a library without both bounds."""
    known = ranges()
    if end == "oldest":
        return [f"{name}=={known[name][0]}" for name in LIBRARIES]
    return [f"{name}>={known[name][0]},<{known[name][1]}" for name in LIBRARIES]


def lock(venv: Path) -> None:
    """Bring the environment to the newest versions in range and write `constraints.txt`."""
    subprocess.run([venv / "bin/python", "-m", "pip", "--disable-pip-version-check", "install",
                    "--quiet", "--upgrade", "--upgrade-strategy", "eager", "-e",
                    f"{ROOT}[engine,test,bench]"], check=True)
    frozen = _output(venv / "bin/python", "-m", "pip", "freeze", "--exclude-editable")
    lines = sorted((line.partition("+")[0] for line in frozen.splitlines()
                    if re.fullmatch(r"[\w.-]+==[\w.+]+", line)), key=str.lower)
    CONSTRAINTS.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{CONSTRAINTS.name}: {len(lines)} versions")


def layered(folder: Path, venv: Path, wanted: list[str]) -> Path:
    """Makes an environment anew with what is wanted, above all that VENV has. Returns its
    interpreter."""
    python = folder / "bin" / "python"
    subprocess.run([venv / "bin/python", "-m", "venv", "--clear", folder], check=True)
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
                    *wanted], check=True)
    site = _output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    rest = _output(venv / "bin/python", "-c",
                   "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Paths of a .pth file come behind the environment's own.
    Path(site, "zz_rest.pth").write_text(f"{rest}\n{ROOT}\n")
    for line in _output(python, "-m", "pip", "freeze", "--path", site).splitlines():
        print(line, end="  ")
    print(flush=True)
    return python


def extra(name: str) -> list[str]:
    """What an extra of the project asks for. Raises `KeyError` if there is none of that name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"][name])


def run_tests(end: str, venv: Path, flags: list[str]) -> int:
    python = layered(ROOT / "build" / end, venv, pins(end))
    return subprocess.run([python, "-m", "pytest", "-m", "not slow", *flags, *files_of_tests()],
                          cwd=ROOT, check=False).returncode


def files_of_tests() -> list[Path]:
    """The files that `TESTS` names. Raises `LookupError` where a name has none."""
    found = {name: sorted((ROOT / "tests").rglob(f"test_{name}.py")) for name in TESTS}
    if gone := [name for name, paths in found.items() if not paths]:
        raise LookupError(f"no tests are called {', '.join(gone)}")
    return sorted({path for paths in found.values() for path in paths})


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: list[str]) -> int:
    match arguments:
        case ["lock", venv]:
            lock(Path(venv))
            return 0
        case ["oldest" | "newest" as end, venv, *flags]:
            return run_tests(end, Path(venv).resolve(), flags)
        case ["extra", venv, name, folder]:
            layered(Path(folder).resolve(), Path(venv).resolve(), extra(name))
            return 0
    print("usage: python tools/dependencies.py lock|oldest|newest VENV [PYTEST FLAGS], or extra "
          "VENV NAME FOLDER", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
