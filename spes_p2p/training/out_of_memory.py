"""Knowing that memory ran out, giving back what an attempt left behind, and bounding what a process may take."""

from __future__ import annotations

import gc
import importlib
import sys

import torch

from spes_p2p.errors import MachineError

_PLAIN_ERRORS = (
    *("can't allocate memory", "not enough memory", "std::bad_alloc"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)
"""What comes as a plain RuntimeError: from PyTorch's allocator for the CPU, on Linux, on Windows, from below it; and on
a GPU from whatever asks the driver past PyTorch's allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this exception means that an allocation failed, on a GPU or in main memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _PLAIN_ERRORS)


def says_out_of_memory(reason: str) -> bool:
    """Whether another process ended for want of memory, by what it said: `TYPE: MESSAGE` of the exception."""
    words = (torch.OutOfMemoryError.__name__, MemoryError.__name__, *_PLAIN_ERRORS)
    return any(word in reason for word in words)


def give_back(device: torch.device) -> None:
    """Return memory that nothing refers to any more, cycles of an abandoned graph included, to whoever asks next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_error(what: str, error: BaseException) -> MachineError:
    """What the user is told when nothing smaller is left to try: what does not fit, why, and what would help."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    return MachineError(
        f"not enough memory for {what}: {reason}\n"
        "Own fewer shards (--capacity), store others' experts smaller (--frozen-format), or allow more (--memory)."
    )


def limit_memory(device: torch.device, memory_bytes: int) -> bool:
    """From now on allocations of this process beyond `memory_bytes` fail, as if the machine had no more.

    On a GPU this is what PyTorch's allocator holds there; otherwise the process's data, libraries' own included
    (Linux's RLIMIT_DATA). False: this system has no such limit. Raises MachineError if the GPU is smaller.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if memory_bytes > total:
            raise MachineError(f"--memory {memory_bytes / 1e9:.1f}GB: the GPU has {total / 1e9:.1f} GB")
        torch.cuda.set_per_process_memory_fraction(memory_bytes / total, device)
        return True
    if sys.platform != "linux":
        return False
    import resource  # other systems need not have it

    # Recomputing layers, the last resort, loads PyTorch's compiler at its first call: 36 MB, which are not left then.
    importlib.import_module("torch._dynamo")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or memory_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))
    return True
