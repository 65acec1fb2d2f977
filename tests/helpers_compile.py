"""Triton kernels compiled for Hopper (sm_90) where there is no device; nothing is launched.

What the interpreter accepts may still not compile. Run in a process whose triton does not
interpret; the compiler and its assembler come with triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED = 227 * 1024
"""Bytes of shared memory that one program may have."""


@dataclass
class Hopper:
    """Stands for triton's driver; `kernels` collects what was compiled, in order of launches."""

    kernels: list[Any] = field(default_factory=list)

    def get_current_target(self) -> Any:
        """What to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def install(self) -> Hopper:
        """From now on a launch compiles, and does nothing."""
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        compiled = JITFunction.run

        def run(this: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.kernels.append(compiled(this, *args, grid=grid, warmup=True, **options))

        JITFunction.run = run
        driver.set_active(self)
        return self

    def check(self) -> None:
        """Print, and hold against the device, what each kernel takes."""
        for kernel in self.kernels:
            print(kernel.metadata.name, kernel.metadata.num_warps, kernel.metadata.shared)
            assert kernel.metadata.shared <= SHARED, kernel.metadata.name
            assert kernel.asm["cubin"]


def compiled(code: str, cache: Path) -> list[str]:
    """Run code after `hopper = Hopper().install()`; the kernels it launched, by name."""
    before = "from helpers_compile import Hopper\nhopper = Hopper().install()\n"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", f"{before}{code}\nhopper.check()"], env=env,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split()[0] for line in done.stdout.splitlines()]
