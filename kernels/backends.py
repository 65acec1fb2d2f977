"""Which backend runs: Triton's kernels on CUDA, C's on a CPU, else torch's."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.torch_ops import TorchOps, TorchSampling
from actorium.kernels.sampling_ops import SamplingOps


def select_ops(dtype: torch.dtype, device: torch.device, head_dim: int, native: bool,
               kernels: str = "auto", exact: bool = False) -> TorchOps:
    """The kernels for a model. native=False: none in C. exact: whatever it costs: recurrent layers
    take prompts token by token, in C, and Triton's products have one configuration for any rows.

    kernels: auto (the fastest: Triton's on CUDA, in C on a CPU) | torch | triton.
    Raises `ValueError` where those asked for cannot run.
    """
    if takes_triton(device, kernels):
        from actorium.kernels.triton.exact_ops import ExactTritonOps
        from actorium.kernels.triton.triton_ops import TritonOps
        return ExactTritonOps() if exact else TritonOps()
    if (kernels == "auto" and native and device.type == "cpu" and dtype is torch.bfloat16
            and head_dim <= 512):
        lib = library()
        if lib is not None:
            return NativeOps(lib, torch.get_num_threads(), exact=exact)
    return TorchOps()


@cache
def select_sampling(device: torch.device, kernels: str = "auto") -> SamplingOps:
    """The sampling kernels of the backend that `select_ops` chooses. kernels: auto (Triton's on
    CUDA) | torch | triton.

    Raises `ValueError` where those asked for cannot run.
    """
    if takes_triton(device, kernels):
        from actorium.kernels.triton.triton_ops import TritonSampling
        return TritonSampling()
    return TorchSampling()


def takes_triton(device: torch.device, kernels: str) -> bool:
    """Whether Triton's kernels are those to run on this device; kernels: see `select_ops`.

    Raises `ValueError` where they were asked for and cannot run.
    """
    if kernels != "triton" and (kernels != "auto" or device.type != "cuda"):
        return False
    fault = triton_fault(device)
    if fault and kernels == "triton":
        raise ValueError(f"kernels: triton was asked for, but {fault}")
    return not fault


def triton_fault(device: torch.device) -> str:
    """Why Triton's kernels cannot run on this device; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        return ""
    from triton import knobs
    if knobs.runtime.interpret:
        return ""
    return "without a CUDA device its kernels run in the interpreter alone (TRITON_INTERPRET=1)"
