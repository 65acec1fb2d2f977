"""Fills Triton's cache for gpu-check without its device: what its models and tables of kernels
launch is compiled for sm_90, by the Triton that runs this.

`python benchmarks/ptxas_cache.py FOLDER [--wheel UNPACKED] [--python PYTHON] [--archive FILE]`.
Models have a layer of each kind, and nothing is computed (`gpu.worker.warmup`). Keys of the
cache depend on the bytes of libtriton, which differ between Python versions, and on no paths:
--wheel is Triton's wheel for the device's, of the same version. --python makes what launches
kernels as well, in C: Triton 3.6 runs the C compiler for that. A second run over the same folder
counts what is missing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpucheck import cache, models, plan, shapes
from gpucheck.case import Setting
from msgspec.structs import replace
from ptxas_device import Standin
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from actorium.actors.config.tree import Config
from actorium.gpu.attention.attention_backend import TritonAttention
from actorium.gpu.models.registry import load_model
from actorium.gpu.worker.allocation import first_runner
from actorium.gpu.worker.warmup import ZeroMode, compiling_launches, one_layer_per_kind, walk_warmup
from actorium.kernels.grouped_rows import pack_rows
from actorium.kernels.triton.triton_ops import TritonOps

CPU = torch.device("cpu")
LAYERS = 8
"""Enough for one of each kind, and the last one."""
MOST_MIB = 25.0
"""Largest size of the archive."""


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """What is chosen by the device's type is chosen as there."""
    with ExitStack() as stack:
        for name, value in (
                ("kernels.backends.triton_fault", ""), ("gpu.models.registry.triton_fault", ""),
                ("gpu.attention.attention_backend.triton_fault", ""),
                ("gpu.models.forward_context._few", None),
                ("kernels.triton.triton_ops.can_pack", False)):
            stack.enter_context(patch(f"actorium.{name}", lambda *_, value=value: value))
        stack.enter_context(patch("actorium.gpu.weights.random_weights._random",
                                  lambda spec, block: torch.zeros(spec.shape, dtype=block.dtype)))
        for module in ("exact", "products"):  # rows carry their format, which is read
            stack.enter_context(patch(f"gpucheck.{module}.pack_rows", computed(pack_rows)))
        yield


def computed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, whose result is no zeros in the place of what torch would compute."""
    def really(*args: Any) -> Tensor:
        with _disable_current_modes():
            return make(*args)
    return really


def start(config: Config, path: Path) -> None:
    model = load_model(path, config, CPU, lambda *_: None)
    with one_layer_per_kind(model):
        walk_warmup(first_runner(config, model, CPU), model.ops,
                    config.scheduler.max_num_batched_tokens)


def starts() -> Iterator[tuple[str, dict[str, Any], tuple[Any, ...]]]:
    """Yields each group that opens a model: name, shape, arguments of `models.settings`."""
    most = max(own.batch for own in shapes.DECODED)
    for group in (*plan.contact(), *plan.kernels()):
        if group.runs in ("decode.run", "ring.run", "profiled.run"):
            own = group.options
            yield group.name, shapes.LLAMA, (most, "off", own.get("model", {}),
                                             own.get("memory", {}))
    for speculative in ("off", "mtp:2,fixed"):
        yield f"speculation {speculative}", shapes.HYBRID, (max(shapes.DRAFTING), speculative)


def tables() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Rows of the tables of kernels, ours without their peers."""
    setting = Setting(CPU, False, TritonOps(), TritonAttention)
    for group in plan.kernels():
        if group.runs == "ceilings.table":
            module, _, name = str(group.options["cases"]).rpartition(".")
            make = getattr(importlib.import_module(f"gpucheck.{module}"), name)
            for row, case in make(setting):
                yield f"{group.name}: {row}", lambda case=case: case().run()


def work(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything, by name. folder: for configurations of models."""
    seen: list[Any] = []
    for name, kind, asked in starts():
        if (kind, asked) in seen:
            continue
        seen.append((kind, asked))
        path = folder / f"{len(seen)}"
        path.mkdir()
        less = {"num_hidden_layers": LAYERS}
        if "layer_types" in kind:
            less["layer_types"] = kind["layer_types"][:LAYERS]
        (path / "config.json").write_text(json.dumps(kind | less))
        config = models.settings(False, path, *asked)
        here = replace(config.device, device="cpu", kernels="triton")
        yield name, partial(start, replace(config, device=here), path)
    yield from tables()


def keyed_for(wheel: Path) -> None:
    """Makes cache keys those that Triton has with this wheel's library."""
    import triton
    from triton.runtime import cache as triton_cache

    library = Path("_C") / "libtriton.so"
    own, other = (hashlib.sha256((root / library).read_bytes()).hexdigest()
                  for root in (Path(triton.__file__).parent, wheel / "triton"))
    key = triton_cache.triton_key()
    assert own in key, "Triton's key is made in another way"
    triton_cache.triton_key = lambda: key.replace(own, other)


class Counted(set[tuple[str, str]]):
    """The forms of kernels that are asked for; none is compiled."""

    def __init__(self) -> None:
        from triton import knobs

        knobs.runtime.jit_cache_hook = self._asked

    def _asked(self, *, fn: Any, key: Any, **_: Any) -> bool:
        self.add((f"{fn.module}.{fn.name}", str(key)))
        return True


class Launchers:
    """Makes in C what launches kernels, for another Python than this one."""

    def __init__(self, python: str) -> None:
        self.include, self.suffix = subprocess.check_output(
            [python, "-c", "import sysconfig as s; print(s.get_path('include')); "
                           "print(s.get_config_var('EXT_SUFFIX'))"], text=True).split()
        self.made = 0

    def __call__(self, source: Any, metadata: Any) -> None:
        from triton.backends.nvidia import driver
        from triton.runtime.build import platform_key
        from triton.runtime.cache import get_cache_manager

        if not hasattr(driver, "make_launcher"):  # from 3.7 on there is one for all
            return
        code = driver.make_launcher(source.constants, dict(source.signature), None)
        key = hashlib.sha256((code + platform_key()).encode()).hexdigest()
        kept, name = get_cache_manager(key), f"__triton_launcher{self.suffix}"
        if kept.get_file(name) is None:
            with tempfile.TemporaryDirectory() as folder:
                self._make(code, Path(folder))
                kept.put((Path(folder) / "out.so").read_bytes(), name)
            self.made += 1

    def _make(self, code: str, folder: Path) -> None:
        from triton.backends.nvidia import driver

        (folder / "main.c").write_text(code)
        (folder / "none.c").write_text("")
        stub = folder / "libcuda.so.1"  # the device has the driver's own
        shared = ["gcc", "-shared", "-fPIC", "-Wno-psabi"]
        subprocess.check_call([*shared, folder / "none.c", "-o", stub])
        subprocess.check_call([*shared, "-O3", folder / "main.c", "-o", folder / "out.so",
                               f"-L{folder}", "-l:libcuda.so.1", f"-I{self.include}",
                               *(f"-I{own}" for own in driver.include_dirs)])


def main() -> None:
    """Fill, and say what was missing; end with 1 where something could not be walked through."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="unpacked")
    parser.add_argument("--python", default="", help="of the device's version, with its headers")
    parser.add_argument("--archive", type=Path, help="what is carried")
    parser.add_argument("--only", default="", help="what has this expression in its name")
    parser.add_argument("--threads", type=int, default=0, help="that compile; 0 = one a core")
    parser.add_argument("--count", action="store_true", help="compile nothing; tell what there is")
    arguments = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(arguments.folder.resolve())
    device, bad, total = Standin().install(), 0, 0
    launchers = Launchers(arguments.python) if arguments.python else None
    if launchers is not None:
        device.launcher_cls = launchers  # type: ignore[method-assign]
    if arguments.wheel:
        keyed_for(arguments.wheel)
    forms = Counted() if arguments.count else set()
    with tempfile.TemporaryDirectory() as folder, as_on_cuda(), torch.inference_mode():
        for name, run in work(Path(folder)):
            if not re.search(arguments.only, name):
                continue
            try:
                with compiling_launches(arguments.threads) as missed, ZeroMode():
                    run()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                bad += 1
            gc.collect()  # the models that were walked refer to themselves
            total += len(missed)
            print(f"{name}: " + (f"{len(forms)} kernels so far" if arguments.count else
                                 f"{len(missed)} kernels were missing"), flush=True)
    print(f"{total} kernels were missing" + (
        f", {launchers.made} launchers" if launchers is not None else ""))
    if arguments.archive:
        print(cache.pack(arguments.folder, arguments.archive, MOST_MIB))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
