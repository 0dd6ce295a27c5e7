"""systemd user units that run a node or a bootstrap node: their text, and where they lie. Pure but for the paths.

    ~/.config/systemd/user/spes-p2p-join.service
    ~/.config/systemd/user/spes-p2p-bootstrap.service

What they promise: started at boot (with lingering), restarted when they fail but not when trying again is of no use,
ended by SIGTERM, which leaves the run's lease alone, and watched: a node that hangs is restarted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spes_p2p.errors import EXIT_INTERRUPTED

Kind = Literal["join", "bootstrap"]
KINDS: tuple[Kind, ...] = ("join", "bootstrap")

WATCHDOG_S = 180
START_S = 300
"""A run that nobody answers for is given up after a minute; importing torch on a busy machine takes another."""
STOP_S = 60
RESTART_S = 15
_USELESS = (2, 4, 6)
"""Exit codes after which another start would fail alike: usage, not admitted, local state."""
_TITLES: dict[Kind, str] = {"join": "spes-p2p: take part in a run", "bootstrap": "spes-p2p: bootstrap node"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One service."""

    kind: Kind
    command: tuple[str, ...]
    """Program and arguments, absolute where it matters."""
    folder: Path
    """Working directory."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the unit."""
        return unit_name(self.kind)


def unit_name(kind: Kind) -> str:
    """Such as `spes-p2p-join.service`."""
    return f"spes-p2p-{kind}.service"


def units_folder(environment: Mapping[str, str]) -> Path:
    """Where systemd looks for this user's units."""
    config = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME") or Path.home()) / ".config")
    return Path(config) / "systemd" / "user"


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the present environment the service is to see too: this user's choices."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith("SPES_")}


def unit_text(unit: Unit) -> str:
    """The unit file. The options that harden it are those that work without root."""
    useless = " ".join(map(str, _USELESS))
    lines = [
        "# Written by `spes-p2p service install`; `spes-p2p service uninstall` removes it.",
        "[Unit]",
        f"Description={_TITLES[unit.kind]}",
        "# it tries again for as long as there is no network",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"WorkingDirectory={_escaped(str(unit.folder))}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in unit.environment.items()),
        "Environment=PYTHONUNBUFFERED=1",
        f"ExecStart={command_line(unit.command)}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={useless}",
        f"SuccessExitStatus={EXIT_INTERRUPTED}",
        f"TimeoutStartSec={START_S}",
        f"WatchdogSec={WATCHDOG_S}",
        "# SIGTERM ends the node now and keeps its place in the run; its children are killed if they stay",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "LimitNOFILE=65536",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "RestrictSUIDSGID=yes",
        "RestrictRealtime=yes",
        "RestrictNamespaces=yes",
        "LockPersonality=yes",
        "SystemCallArchitectures=native",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines)


def command_line(command: Sequence[str]) -> str:
    """The value of ExecStart: each word quoted where systemd would read something else into it."""
    return " ".join(_quoted(word) for word in command)


def exec_start(text: str) -> tuple[str, ...]:
    """Program and arguments in a unit file that `unit_text` made. Raises ValueError if there are none."""
    line = next((line for line in text.splitlines() if line.startswith("ExecStart=")), None)
    if line is None:
        raise ValueError("no ExecStart")
    return tuple(_words(line.removeprefix("ExecStart=")))


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=+@")


def _escaped(word: str) -> str:
    return word.replace("%", "%%")


def _quoted(word: str) -> str:
    """One word: `%` names a specifier, `$` a variable, and a backslash or a quote something else."""
    if word and set(word) <= _PLAIN:
        return word
    inner = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    return f'"{inner}"'


def _words(line: str) -> list[str]:
    """The inverse of `command_line`."""
    words: list[str] = []
    rest = line
    while rest := rest.lstrip(" "):
        if rest[0] != '"':
            word, _, rest = rest.partition(" ")
            words.append(word)
            continue
        word, at = "", 1
        while rest[at] != '"':
            pair = rest[at : at + 2]
            if pair in _ESCAPES:
                word, at = word + _ESCAPES[pair], at + 2
            else:
                word, at = word + rest[at], at + 1
        words.append(word)
        rest = rest[at + 1 :]
    return words


_ESCAPES = {"\\\\": "\\", '\\"': '"', "%%": "%", "$$": "$", "\\n": "\n"}
