"""The limits that a volunteer may set, as values, and how people write them. Pure, and light to import.

    name              written as         value
    upload            1MB/s              bytes per second
    download          4MB/s              bytes per second
    monthly           100GB              bytes a calendar month, both directions together
    hours             22:00-07:00        local time; over midnight; several with commas between
    gpu_share         50%, 0.5           of the trainer's time
    gpu_power         200W               watts, of each GPU
    idle_only         yes, no            train only while other programs are quiet
    pause_on_battery  yes, no            train only on mains

`off` takes a limit away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from spes_p2p.config import Limits, first_problem
from spes_p2p.errors import ConfigError
from spes_p2p.node.budgets.hours import parse_hours

OFF = "off"
MIN_RATE_BYTES_PER_S = 50_000
"""Below this a chunk of a blob, 1 MiB, takes longer than its other end waits."""
MIN_MONTH_BYTES = 100_000_000
MIN_SHARE = 0.05
_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_SPEED = re.compile(r"\s*/\s*s(ec)?$")
_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", OFF, "0")


def parse_rate(text: str) -> int:
    """Bytes per second of such as `1MB/s`, `500kB` or `1MiB/s`. Raises ValueError."""
    refuse_bits(text)
    rate = _bytes(_SPEED.sub("", text), "a rate such as 1MB/s")
    if rate < MIN_RATE_BYTES_PER_S:
        raise ValueError(f"{text!r} is too slow to exchange blobs; {MIN_RATE_BYTES_PER_S // 1000}kB/s is the least")
    return rate


def refuse_bits(text: str) -> None:
    """Lines are sold in bits a second: raise ValueError for such as `8Mbit/s` or `8Mb/s`."""
    if re.search(r"bits?\b|[kMG]b\b", text):
        raise ValueError(f"{text!r} is in bits; give bytes, such as 1MB/s (8 Mbit/s)")


def parse_month(text: str) -> int:
    """Bytes of such as `100GB`. Raises ValueError."""
    size = _bytes(text, "bytes a month, such as 100GB")
    if size < MIN_MONTH_BYTES:
        raise ValueError(f"{text!r} a month is too little to take part; 100MB is the least")
    return size


def parse_share(text: str) -> float:
    """A share of such as `50%` or `0.5`. Raises ValueError."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no share; give one such as 50%") from None
    if not MIN_SHARE <= share <= 1.0:
        raise ValueError(f"{text!r}: a share lies between {MIN_SHARE:.0%} and 100%")
    return share


def parse_watts(text: str) -> int:
    """Watts of such as `200W` or `200`. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,5})\s*[wW]?", text.strip())
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no power; give watts, such as 200W")
    return int(match[1])


def _parse_hours(text: str) -> str:
    return str(parse_hours(text))


def _parse_flag(text: str) -> bool:
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise ValueError(f"{text!r}: say yes or no")


def _bytes(text: str, wanted: str) -> int:
    try:
        size = _SIZE.validate_python(text.strip())
    except ValidationError:
        raise ValueError(f"{text!r} is not {wanted}") from None
    if text.strip().isdecimal() and size < 1000:
        raise ValueError(f"{text!r} has no unit; give {wanted}")
    return int(size)


PARSERS: dict[str, Callable[[str], Any]] = {
    "upload": parse_rate,
    "download": parse_rate,
    "monthly": parse_month,
    "hours": _parse_hours,
    "gpu_share": parse_share,
    "gpu_power": parse_watts,
    "idle_only": _parse_flag,
    "pause_on_battery": _parse_flag,
}


def parse_change(name: str, text: str) -> Any:
    """The value of one limit as people write it; None (or False) for `off`. Raises ConfigError that names the flag."""
    try:
        parse = PARSERS[name]
    except KeyError:
        raise ConfigError(f"there is no limit {name!r}; there are {', '.join(PARSERS)}") from None
    if text == OFF and parse is not _parse_flag:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error}") from error


def changed(limits: Limits, changes: Mapping[str, str]) -> Limits:
    """The limits after `changes`, name -> text as people write it. Raises ConfigError that names the flag."""
    values = {name: parse_change(name, text) for name, text in changes.items()}
    try:
        return Limits.model_validate({**limits.model_dump(), **values})
    except ValidationError as error:
        raise ConfigError(f"limits: {first_problem(error)}") from error


def rate_text(bytes_per_s: float) -> str:
    """Such as `1.25 MB/s`."""
    return f"{size_text(bytes_per_s)}/s"


def size_text(num_bytes: float) -> str:
    """Such as `12.3 GB`: three digits and no `.0`, as limits are written. Elsewhere sizes are `units.bytes_text`'s."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}" if num_bytes < 1000 * factor else f"{num_bytes / factor:.0f} {unit}"
            )
    return f"{num_bytes / 1000:.3g} kB" if num_bytes >= 1000 else f"{num_bytes:.0f} B"
