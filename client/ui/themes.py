"""Colour themes of the terminal UI, one of them without any colour."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import Theme

from spes_p2p.errors import ConfigError

MONO = "mono"
THEME_NAMES = {
    "dark": "textual-dark",
    "light": "textual-light",
    "gruvbox": "gruvbox",
    "terminal": "ansi-dark",
    MONO: MONO,
}
"""What people call a theme -> what Textual calls it; the key goes through them in this order."""
VARIABLE = "SPES_THEME"

_PLAIN = "ansi_default"
MONO_THEME = Theme(
    name=MONO,
    ansi=True,
    primary=_PLAIN,
    secondary=_PLAIN,
    warning=_PLAIN,
    error=_PLAIN,
    success=_PLAIN,
    accent=_PLAIN,
    foreground=_PLAIN,
    background=_PLAIN,
    surface=_PLAIN,
    panel=_PLAIN,
    boost=_PLAIN,
    variables={"ansi-background": _PLAIN, "ansi-foreground": _PLAIN, "input-cursor-text-style": "reverse"},
)
"""Bold, dim and reverse alone tell things apart."""


def first_theme(environment: Mapping[str, str]) -> str:
    """The theme to begin with, as people call it: NO_COLOR, then SPES_THEME, then dark. Raises ConfigError."""
    if environment.get("NO_COLOR"):
        return MONO
    name = environment.get(VARIABLE, "") or "dark"
    if name not in THEME_NAMES:
        raise ConfigError(f"environment variable {VARIABLE}: {name!r} is no theme; take {', '.join(THEME_NAMES)}")
    return name


def next_theme(name: str) -> str:
    """The theme after `name`, and the first after the last."""
    names = list(THEME_NAMES)
    return names[(names.index(name) + 1) % len(names)]
