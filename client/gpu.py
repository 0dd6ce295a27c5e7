"""Which devices `--gpu` means on this machine."""

from __future__ import annotations

import warnings

from spes_p2p.errors import ConfigError, MachineError

CPU = "cpu"


def choose_devices(gpu: str | None) -> tuple[str, ...]:
    """Device names (`cpu`, `cuda:0`) for a value of `--gpu`: a number, several with commas between, or `none`; None:
    the first GPU, if there is one.

    Raises ConfigError for a value that is none of these, MachineError for a GPU that is not there.
    """
    if gpu is None:
        return ("cuda:0" if _driver_answers() and _num_usable_gpus() else CPU,)
    if gpu == "none":
        return (CPU,)
    numbers = check_gpu_text(gpu)
    num_gpus = _num_usable_gpus()
    if max(numbers) >= num_gpus:
        here = "this machine has no usable GPU" if num_gpus == 0 else f"this machine has {num_gpus}, counted from 0"
        raise MachineError(f"--gpu {gpu}: {here}; `--gpu none` trains on the CPU")
    return tuple(f"cuda:{number}" for number in numbers)


def check_gpu_text(gpu: str) -> list[int]:
    """The numbers of GPUs that a value of `--gpu` names, none for `none`. Raises ConfigError for what is no value."""
    if gpu == "none":
        return []
    texts = gpu.split(",")
    if not all(text.isdecimal() and len(text) < 4 for text in texts):
        raise ConfigError(f"--gpu {gpu}: give the number of a GPU, such as 0, several, such as 0,1, or none")
    numbers = [int(text) for text in texts]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--gpu {gpu}: a GPU is named twice")
    return numbers


def _driver_answers() -> bool:
    """Whether an NVIDIA driver is there: asked first, since a machine without one need not load torch to know."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def _num_usable_gpus() -> int:
    """GPUs that the installed torch can use, which is fewer than the machine has if torch is a CPU build."""
    import torch

    with warnings.catch_warnings():
        # a driver that is too old is reported by a warning; the count says all that matters here
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
