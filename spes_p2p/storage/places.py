"""Where this user's files lie, for the commands and the bootstrap node alike."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

APP = "spes-p2p"
HOME_VARIABLE = "SPES_HOME"
"""Replaces both folders: for tests, for several users of one account, for a disk of its own."""


def home() -> Path:
    """Folder of all data folders that were not named by hand."""
    named = os.environ.get(HOME_VARIABLE)
    return Path(named) if named else platformdirs.user_data_path(APP, appauthor=False)


def config_home() -> Path:
    """Folder of this user's configuration."""
    named = os.environ.get(HOME_VARIABLE)
    return Path(named) if named else platformdirs.user_config_path(APP, appauthor=False)
