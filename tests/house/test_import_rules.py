"""Who may import whom, and what an import costs."""

from __future__ import annotations

import sys

import pytest
from helpers_code_facts import PACKAGES, ROOT, circles, files, imports, needs
from helpers_imports import loaded_by
from helpers_speed import seconds_of_process, slowness

HEAVY = {"torch", "triton", "transformers"}
GPU_MAY_USE = {"messages", "params", "config", "errors", "core", "runtime", "models",
               "media.patch_store", "plugins"}
"""`models` finds a model's directory and reads its files: tokenizer and worker must agree on
them; `media.patch_store` is where images come from."""


def offenders(package: str, forbidden: set[str]) -> list[str]:
    """"file imports module" for each import whose dotted prefix is forbidden."""
    return [f"{path.relative_to(ROOT)} imports {name}"
            for path in files(package) for name in imports(path)
            if any(name == bad or name.startswith(bad + ".") for bad in forbidden)]


def test_the_scan_sees_what_it_should() -> None:
    assert "actorium.actors.messages" in set(imports(ROOT / "actors/watchdog/core.py"))
    launcher = set(imports(ROOT / "actors/launcher/launcher.py"))
    assert "zmq" in launcher, "imports inside functions count"


def test_actors_are_free_of_torch_and_of_what_stands_on_it() -> None:
    assert offenders("actors", HEAVY | {f"actorium.{p}" for p in ("gpu", "kernels", "tools")}) == []


def test_gpu_uses_only_the_contract_of_actors() -> None:
    allowed = {f"actorium.actors.{name}" for name in GPU_MAY_USE}
    bad = [f"{path.relative_to(ROOT)} imports {name}"
           for path in files("gpu") for name in imports(path)
           if name.startswith("actorium.actors.")
           and not any(name == ok or name.startswith(ok + ".") for ok in allowed)]
    assert bad == []
    assert offenders("gpu", {"actorium.tools"}) == []


def test_plans_and_readers_of_configs_need_no_torch() -> None:
    """What a model is, and where its bytes go, is known before anything heavy is loaded."""
    rooms = ("gpu/families/", "gpu/plan/")
    heavy = HEAVY | {"numpy", "safetensors", "actorium.kernels"}
    heavy |= {f"actorium.gpu.{room}" for room in ("graphs", "models", "step", "weights", "worker")}
    assert [line for line in offenders("gpu", heavy) if line.startswith(rooms)] == []


def test_kernels_import_nothing_of_ours() -> None:
    assert offenders("kernels", {f"actorium.{p}" for p in ("actors", "gpu", "tools")}) == []


def test_nobody_imports_by_top_level_name() -> None:
    for package in PACKAGES:
        assert offenders(package, set(PACKAGES)) == []


def test_no_pickle_anywhere() -> None:
    for package in PACKAGES:
        assert offenders(package, {"pickle", "cloudpickle", "dill", "marshal", "shelve"}) == []


def test_the_client_loads_only_zmq_and_msgspec() -> None:
    """And what these two load themselves."""
    allowed = loaded_by("import zmq, msgspec, msgspec.msgpack, msgspec.json") | {"actorium"}
    loaded = loaded_by("import actorium.actors.client.client")
    assert "zmq" in loaded
    assert loaded - set(sys.stdlib_module_names) - allowed == set()


def test_the_launcher_starts_actors_before_it_loads_anything_heavy() -> None:
    loaded = loaded_by("import actorium.actors.launcher.launcher")
    assert not loaded & {"zmq", "asyncio", "uvloop", "numpy", "torch"}


@pytest.mark.parametrize("role", ["watchdog"])
def test_an_actor_loads_neither_torch_nor_argparse(role: str) -> None:
    loaded = loaded_by("import actorium.actors.runtime.main, actorium.actors.runtime.shell, "
                       f"actorium.actors.{role}.core")
    assert not loaded & {"torch", "transformers", "numpy", "argparse", "tyro", "rich"}


def test_import_actorium_is_cheap() -> None:
    """Under 100 ms of a processor beyond bare Python, where bounds were measured: the least of
    several, since what else runs on the machine only adds to it."""
    bare = min(seconds_of_process("pass") for _ in range(5))
    mine = min(seconds_of_process("import actorium") for _ in range(5))
    assert mine - bare < 0.1 * slowness()


@pytest.mark.parametrize("package", ["actors", "gpu", "kernels", "tools"])
def test_no_module_imports_one_that_imports_it(package: str) -> None:
    """Not lazily nor for a type either."""
    assert circles(needs(package)) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set[str]()}
    assert circles(graph) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set[str]()}) == []
