"""Flags, then the environment, then a file, then defaults: into one frozen NodeConfig.

    flag            environment         key of the file
    --data-dir      SPES_DATA_DIR       data_dir
    --run           SPES_RUN            run
    --gpu           SPES_GPU            gpu
    --data          SPES_DATA           data            several: separated like PATH
    --listen        SPES_LISTEN         listen          several: separated by spaces
    --announce      SPES_ANNOUNCE       announce        several: separated by spaces
    --bootstrap     SPES_BOOTSTRAP      bootstrap       several: separated by spaces
    --capacity      SPES_CAPACITY       capacity
    --threads       SPES_THREADS        threads
    --frozen-format SPES_FROZEN_FORMAT  frozen_format
    --moments       SPES_MOMENTS        moments
    --memory        SPES_MEMORY         memory
    --compile       SPES_COMPILE        compile
    --upload        SPES_UPLOAD         upload          and the other limits alike: download, monthly, hours, gpu_share,
                                                        gpu_power, idle_only, pause_on_battery

Limits are remembered in the data folder: what no place names stays as it was there, and `off` takes a limit away.

The file is `config.toml` in the user's configuration folder, or the one that SPES_CONFIG names. A list from a higher
place replaces the whole list of a lower one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from spes_p2p.client import folders
from spes_p2p.client.gpu import CPU
from spes_p2p.config import Frozen, FrozenFormat, MomentsFormat, NodeConfig, first_problem
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.node.budgets.limits import OFF, PARSERS, changed
from spes_p2p.node.budgets.store import read_limits
from spes_p2p.training.documents import find_files

PREFIX = "SPES_"
TEXTS = ("upload", "download", "monthly", "hours", "gpu_share", "gpu_power")
"""Limits that are texts; the others are flags."""
_MANY_WORDS = frozenset({"listen", "announce", "bootstrap"})
_SHOWN_CHARACTERS = 80
_LEAST_MEMORY = 1 << 28
"""An empty trainer process has nearly as much; whoever gives less forgot the unit."""
_MOST_MEMORY = 1 << 60
"""More than any machine has; the kernel's limits and the trainer's messages hold no more than eight times that."""


def _sensible(size: ByteSize) -> ByteSize:
    if not _LEAST_MEMORY <= size <= _MOST_MEMORY:
        what = "too little to train with" if size < _LEAST_MEMORY else "more than any machine has"
        raise ValueError(f"{size.human_readable()} is {what}; give a size such as 10GB")
    return size


def _possible(path: Path) -> Path:
    """The path, if there can be such a file or folder at all."""
    try:
        path.expanduser().exists()
    except OSError as error:
        raise ValueError(f"{str(path)[:_SHOWN_CHARACTERS]}: {error.strerror}") from error
    return path


def _folder(path: Path) -> Path:
    """The path, if it is a folder or can become one."""
    there = next((one for one in (path, *path.absolute().parents) if _possible(one).exists()), path)
    if not there.is_dir():
        raise ValueError(f"{there} is a file, not a folder")
    return path


class Choices(Frozen):
    """What one place (flags, environment or file) says; None: nothing."""

    data_dir: Annotated[Path, AfterValidator(_folder)] | None = None
    run: str | None = None
    gpu: str | None = None
    data: tuple[Annotated[Path, AfterValidator(_possible)], ...] | None = None
    listen: tuple[str, ...] | None = None
    announce: tuple[str, ...] | None = None
    bootstrap: tuple[str, ...] | None = None
    capacity: PositiveInt | None = None
    threads: PositiveInt | None = None
    frozen_format: FrozenFormat | None = None
    moments: MomentsFormat | None = None
    memory: Annotated[ByteSize, AfterValidator(_sensible)] | None = None
    compile: bool | None = None
    upload: str | None = None
    download: str | None = None
    monthly: str | None = None
    hours: str | None = None
    gpu_share: str | None = None
    gpu_power: str | None = None
    idle_only: bool | None = None
    pause_on_battery: bool | None = None
    rounds: int | None = Field(default=None, ge=1)
    """Only a flag: it means one start, not a habit."""

    @field_validator(*TEXTS)
    @classmethod
    def _is_a_limit(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and text != OFF and info.field_name is not None:
            PARSERS[info.field_name](text)
        return text

    def limit_changes(self) -> dict[str, str]:
        """The limits that are named, as people write them."""
        texts = {name: getattr(self, name) for name in PARSERS}
        return {
            name: value if isinstance(value, str) else "yes" if value else "no"
            for name, value in texts.items()
            if value is not None
        }


def from_flags(**flags: Any) -> Choices:
    """Choices of the command line; empty lists count as nothing. Raises ConfigError that names the flag."""
    given = {key: value for key, value in flags.items() if value not in (None, [], ())}
    try:
        return Choices.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"--{first_problem(error).replace('_', '-', 1)}") from error


def from_environment(environment: Mapping[str, str]) -> Choices:
    """Choices of the environment. Raises ConfigError that names the variable."""
    given: dict[str, Any] = {}
    for key in Choices.model_fields:
        text = environment.get(PREFIX + key.upper(), "")
        if not text or key == "rounds":
            continue
        given[key] = text.split() if key in _MANY_WORDS else text.split(os.pathsep) if key == "data" else text
    try:
        return Choices.model_validate(given)
    except ValidationError as error:
        where, _, what = first_problem(error).partition(":")
        raise ConfigError(f"environment variable {PREFIX}{where.split('.')[0].upper()}:{what}") from error


def from_file(path: Path, *, required: bool) -> Choices:
    """Choices of a TOML file. A missing file says nothing unless it is `required`. Raises ConfigError."""
    return Choices() if not required and not path.exists() else Choices.from_toml(path)


def choose(flags: Choices, environment: Mapping[str, str] | None = None) -> Choices:
    """The choices of all places, the highest place first. Raises ConfigError."""
    variables = os.environ if environment is None else environment
    named = variables.get(f"{PREFIX}CONFIG", "")
    file = from_file(Path(named) if named else folders.config_file(), required=bool(named))
    merged: dict[str, Any] = {}
    for place in (file, from_environment(variables), flags):
        merged |= {key: value for key, value in place if value is not None}
    return Choices.model_validate(merged)


def node_config(choices: Choices, *, data_dir: Path, devices: tuple[str, ...], invite_seed: bytes | None) -> NodeConfig:
    """The frozen configuration of one node. Raises ConfigError, DataError for text that is not there, LocalStateError
    for limits on disk that are damaged."""
    given = choices.model_dump(
        exclude_none=True, exclude={"data_dir", "run", "gpu", "rounds", "data", "memory", *PARSERS}
    )
    if choices.rounds is not None:
        given["stop_after_round"] = choices.rounds
    if choices.memory is not None:
        given["memory_bytes"] = int(choices.memory)
    if changes := choices.limit_changes():
        given["limits"] = changed(read_limits(data_dir), changes)
    if choices.compile and devices[0] == CPU:
        raise ConfigError("--compile needs a GPU: on a CPU compiling takes longer than it can save")
    if choices.compile and len(devices) > 1:
        raise ConfigError("--compile does not go together with several GPUs")
    given |= {"data_dir": data_dir, "device": devices[0], "more_devices": devices[1:], "invite_seed": invite_seed}
    try:
        return NodeConfig.model_validate({**given, "data": data_paths(choices.data or ())})
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error


def data_paths(given: tuple[Path, ...]) -> tuple[Path, ...]:
    """Files, folders and globs, absolute. Raises DataError if one of them names no readable text."""
    paths = tuple(path.expanduser().absolute() for path in given)
    for file in find_files(paths):
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: no permission to read it")
    return paths
