"""Where things lie on this machine: one data folder per identity and run.

<user data>/spes-p2p/default/        the first run's node: identity, blobs, journal, ledger
<user data>/spes-p2p/run-<12 hex>/   a node of a further run, with an identity of its own
<any of them>/link                   the invite link of the run that the folder belongs to
<user data>/spes-p2p/last            name of the folder that joined last
<user config>/spes-p2p/config.toml   this user's choices
"""

from __future__ import annotations

from pathlib import Path

from spes_p2p.errors import LocalStateError, UsageError
from spes_p2p.node.files import MANIFEST_FILE
from spes_p2p.storage.places import config_home, home

LINK_FILE = "link"
LAST_FILE = "last"
ID_CHARACTERS = 12


def config_file() -> Path:
    """This user's configuration file, which need not exist."""
    return config_home() / "config.toml"


def default_folder() -> Path:
    """Data folder when nothing says otherwise."""
    return home() / "default"


def folder_for(run_hex: str, named: Path | None) -> Path:
    """Data folder of a node of the run, whose id is given in hex; nothing is created.

    Raises UsageError if the `named` folder belongs to another run.
    """
    folder = named or default_folder()
    if not has_run(folder) or run_hex in (saved_link(folder) or run_hex):
        return folder
    if named is not None:
        raise UsageError(f"{named} belongs to another run\nGive this run a folder of its own with --data-dir.")
    return home() / f"run-{run_hex[:ID_CHARACTERS]}"


def has_run(folder: Path) -> bool:
    """Whether a data folder belongs to a run for good: a link that led nowhere does not count."""
    return (folder / MANIFEST_FILE).exists()


def saved_link(folder: Path) -> str | None:
    """The invite link that a data folder was last used with; None if there was none.

    Raises LocalStateError if the file is there and cannot be read.
    """
    path = folder / LINK_FILE
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LocalStateError(
            f"{path} cannot be read: {error}\nDelete it and join with the invite link again."
        ) from error


def remember(folder: Path, link: str) -> None:
    """Note which run a folder belongs to, and that it was the last one. Raises MachineError when the disk is full."""
    # fsync and rename are worth their import only where something is written
    from spes_p2p.storage.atomic import make_folder, write_file

    make_folder(folder)
    write_file(folder / LINK_FILE, f"{link}\n".encode())
    make_folder(home())
    write_file(home() / LAST_FILE, f"{folder.absolute()}\n".encode())


def last_folder() -> Path | None:
    """Data folder of the run that this user joined last, if it still exists."""
    try:
        folder = Path((home() / LAST_FILE).read_text().strip())
    except OSError:
        return None
    return folder if folder.is_dir() else None


def find_folder(named: Path | None, run: str | None) -> Path:
    """The existing data folder that a command about a node means: the named one, that of a run, or the last one.

    `run` is an invite link or the beginning of a run id. Raises UsageError.
    """
    if named is not None:
        if not named.is_dir():
            raise UsageError(f"--data-dir {named}: no such folder")
        return named
    if run is not None:
        return _folder_of_run(run)
    return last_folder() or default_folder()


def _folder_of_run(run: str) -> Path:
    wanted = run.removeprefix("spes-p2p:").split(",")[0]
    folders = sorted(path.parent for path in home().glob(f"*/{LINK_FILE}"))
    matches = [folder for folder in folders if f":{wanted}" in (saved_link(folder) or "")]
    if wanted and len(matches) == 1:
        return matches[0]
    problem = "more than one run of this machine begins so" if matches else "this machine has not joined such a run"
    raise UsageError(f"--run {run}: {problem}; name its folder with --data-dir")
