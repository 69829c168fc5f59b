"""Attention kernels of the suite as Python functions; docs/python.md is the guide.

Arrays on the CPU run in the emulator, tensors on a CUDA device on the GPU, without a copy.
"""
from .arrays import Bf16, bf16
from .judge import Report, check, cost, describe, reference, steps, time, which
from .library import DeviceError, Error, InvalidValue, KernelError, Unsupported
from .operations import (backward, decode, forward, paged_append, paged_decode, paged_prefill,
                         quantised_forward)

__all__ = [
    "Bf16", "DeviceError", "Error", "InvalidValue", "KernelError", "Report", "Unsupported",
    "backward", "bf16", "check", "cost", "decode", "describe", "forward", "paged_append",
    "paged_decode", "paged_prefill", "quantised_forward", "reference", "steps", "time", "which"]
