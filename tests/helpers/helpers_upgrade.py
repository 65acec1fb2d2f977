"""Upgrades of running engines: the command, another version beside this one, and a worker that
leaves time for it."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from actorium.actors.core import Context, Core
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import StepPlan, StepResult
from actorium.tools.null.null_worker import NullWorker, build

ROOT = Path(__file__).parents[2]
PACKAGES = ("actorium", "actors", "gpu", "kernels", "tools")
STEP = 0.004
"""Seconds that a step of the slow worker takes at the least."""
SLOW, PACE = "slow", 0.2
"""See `build_paced`; PACE is in seconds."""


def build_slow(ctx: Context) -> Core:
    """A null worker whose steps take a while."""
    core = build(ctx)
    assert isinstance(core, NullWorker)
    usual = core.run

    def run(plan: StepPlan) -> StepResult:
        time.sleep(STEP)
        return usual(plan)

    core.run = run  # type: ignore[method-assign]
    return core


def build_paced(ctx: Context) -> Core:
    """A worker whose first life takes its time over a step while there is a file `SLOW` in the run
    directory: so streams outlast what comes before an upgrade, on a machine of any speed."""
    from actorium.gpu.worker.core import build as build_worker

    core = build_worker(ctx)
    usual = core.on_message

    def on_message(message: Any, now: float) -> None:
        if ctx.epoch == 1 and isinstance(message, StepPlan) and (ctx.run_dir / SLOW).exists():
            time.sleep(PACE)
        usual(message, now)

    core.on_message = on_message  # type: ignore[method-assign]
    return core


def upgrade(engine: Engine, *flags: str, python: str = sys.executable
            ) -> subprocess.CompletedProcess[str]:
    """Runs the command, of this version."""
    run_dir = engine.config.runtime.run_dir
    where = [] if run_dir is None else ["--run-dir", run_dir]
    return subprocess.run(
        [sys.executable, "-P", "-m", "actorium.tools.cli", "upgrade", engine.name, *where, *flags,
         "--python", python], text=True, capture_output=True, timeout=300)


def other_version(folder: Path, release: str, **formats: int) -> str:
    """Makes another version of actorium, a copy of this one; formats: the `ledger` that it writes,
    and the `wire` that it speaks. Returns its interpreter."""
    tree, venv = folder / "tree", folder / "venv"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True,
                        ignore=shutil.ignore_patterns("__pycache__"))
    _replace(tree / "actorium" / "__init__.py", r'__version__ = ".*"', f'__version__ = "{release}"')
    if "ledger" in formats:
        segments = tree / "actors" / "ledger" / "segments.py"
        _replace(segments, r"^OLDER = \(1, 2, 4, 7\)", "OLDER = (1, 2, 4, 7, 8)")
        _replace(segments, r"^VERSION = \d+", f"VERSION = {formats['ledger']}")
    if "wire" in formats:
        _replace(tree / "actors" / "messages.py", r"^WIRE, WIRES_READ = .*",
                 f"WIRE, WIRES_READ = {formats['wire']}, ({formats['wire']},)")
    base = Path(getattr(sys, "_base_executable", sys.executable))
    packages = venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "other.pth").write_text("\n".join([str(tree), *site.getsitepackages()]))
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(base)
    (venv / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    return str(venv / "bin" / "python")


def _replace(path: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, path.read_text(), flags=re.MULTILINE)
    assert count == 1, (path, pattern)
    path.write_text(text)
