"""What the device of a launch has, as far as tiles depend on it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton


class DeviceLimits(NamedTuple):
    """The limits of a device."""

    capability: int
    """90 is 9.0."""
    processors: int
    shared: int
    """Bytes of shared memory that one program may have."""


HOPPER = DeviceLimits(90, 1, 227 * 1024)
"""What the interpreter stands for: its programs run one by one."""


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Returns the limits of this device, for which Triton compiles what is launched with it."""
    if triton.knobs.runtime.interpret:
        return HOPPER
    active = triton.runtime.driver.active
    index = active.get_current_device() if device.index is None else device.index
    own = active.utils.get_device_properties(index)
    return DeviceLimits(active.get_current_target().arch, own["multiprocessor_count"],
                        own["max_shared_mem"])
