"""Which device `--gpu` means on this machine."""

from __future__ import annotations

import warnings

from spes_p2p.errors import ConfigError, MachineError

CPU = "cpu"


def choose_device(gpu: str | None) -> str:
    """Device name (`cpu`, `cuda:0`) for a value of `--gpu`: a number, or `none`; None: the first GPU, if there is one.

    Raises ConfigError for a value that is neither, MachineError for a GPU that is not there.
    """
    if gpu is None:
        return "cuda:0" if _driver_answers() and _num_usable_gpus() else CPU
    if gpu == "none":
        return CPU
    wanted = gpu.split(",")
    if not all(text.isdecimal() and len(text) < 4 for text in wanted):
        raise ConfigError(f"--gpu {gpu}: give the number of a GPU, such as 0, or none")
    if len(wanted) > 1:
        raise ConfigError(f"--gpu {gpu}: a node uses one GPU; start one node per GPU, each with its own --data-dir")
    num_gpus = _num_usable_gpus()
    if int(gpu) >= num_gpus:
        here = "this machine has no usable GPU" if num_gpus == 0 else f"this machine has {num_gpus}, counted from 0"
        raise MachineError(f"--gpu {gpu}: {here}; `--gpu none` trains on the CPU")
    return f"cuda:{gpu}"


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
