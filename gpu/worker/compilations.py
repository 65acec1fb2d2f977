"""Kernels that are compiled while requests wait."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

LOG = logging.getLogger(__name__)
Hook = Callable[..., Any] | None


class Compilations:
    """Counts them, and names each in the log."""

    def __init__(self) -> None:
        self.count = 0
        self._begun = 0.0

    def watch(self) -> None:
        """Count from now on, in this process. Nothing where Triton is not in use."""
        if "triton" not in sys.modules:
            return
        from triton import knobs

        runtime: Any = knobs.runtime
        before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook
        runtime.jit_cache_hook = _both(self._begins, before)
        runtime.jit_post_compile_hook = _both(self._ends, after)

    def _begins(self, **_: Any) -> None:
        self._begun = perf_counter()

    def _ends(self, *, fn: Any, compile: Mapping[str, Any], **_: Any) -> None:
        self.count += 1
        spent = 1e3 * (perf_counter() - self._begun)
        LOG.warning("a kernel was compiled, or loaded from the cache, while requests waited: "
                    "%s.%s(%s), %.0f ms; this is a gap in the warm-up, please report it",
                    fn.module, fn.name, _constants(fn, compile), spent)


def _constants(fn: Any, compile: Mapping[str, Any]) -> str:
    """What the form has fixed, by argument."""
    names = getattr(getattr(fn, "jit_function", None), "arg_names", [])
    return ", ".join(
        f"{names[path[0]] if path[0] < len(names) else path[0]}={value}"
        for path, value in compile.get("constants", {}).items())


def _both(own: Callable[..., None], other: Hook) -> Callable[..., Any]:
    """A hook that calls ours, then one that was there, whose answer counts: true skips."""
    def hook(**given: Any) -> Any:
        own(**given)
        return None if other is None else other(**given)

    return hook
