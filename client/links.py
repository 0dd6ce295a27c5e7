"""Which run a command line means, and the data folder that belongs to it: alike for `join`, `doctor`, `estimate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spes_p2p.client import folders
from spes_p2p.client.settings import Choices
from spes_p2p.errors import LinkError, UsageError
from spes_p2p.network.addresses import parse_announce_address, parse_listen_address, parse_peer_address
from spes_p2p.network.link import InviteLink, parse_link


def find_invite(link: str | None, choices: Choices) -> tuple[InviteLink, Path]:
    """The run, by the link of the command line, --run, SPES_RUN, or the run joined last, and the folder of its node.

    Addresses of `--bootstrap` come before those of the link: they are the newest news. Raises UsageError.
    """
    invite = parse_link(link) if link is not None else find_link(choices)
    if choices.bootstrap:
        invite = replace(invite, bootstrap=tuple(dict.fromkeys([*choices.bootstrap, *invite.bootstrap])))
    named = choices.data_dir or (_folder_of_link(choices) if link is None else None)
    return invite, folders.folder_for(invite.run.hex(), named)


def has_invite(choices: Choices) -> bool:
    """Whether `find_invite` knows a run without a link. Raises UsageError for a run that was named and is not known."""
    folder = _folder_of_link(choices)
    return folder is None or folders.saved_link(folder) is not None


def find_link(choices: Choices) -> InviteLink:
    """Without a link as argument: that of --run or SPES_RUN, or of the run joined last. Raises UsageError."""
    folder = _folder_of_link(choices)
    if folder is None:
        return parse_link(choices.run or "")
    saved = folders.saved_link(folder)
    if saved is None:
        raise UsageError("no run to join: give the invite link, such as `spes-p2p join spes-p2p:...`")
    try:
        return parse_link(saved)
    except LinkError as error:
        raise LinkError(f"{folder / folders.LINK_FILE}: {error}") from error


def _folder_of_link(choices: Choices) -> Path | None:
    """The folder whose link tells the run when the command line has none; None: `choices.run` is itself a link."""
    if choices.run is not None:
        return folders.find_folder(None, choices.run) if _looks_like_run_id(choices.run) else None
    if choices.data_dir is not None and choices.data_dir.is_dir():
        return choices.data_dir
    return folders.find_folder(None, None)


def _looks_like_run_id(text: str) -> bool:
    return 0 < len(text) <= 64 and set(text) <= set("0123456789abcdef")


def checked_addresses(choices: Choices) -> Choices:
    """The same with canonical addresses. Raises AddressError that names the token that is wrong."""
    checked: dict[str, tuple[str, ...]] = {}
    if choices.listen:
        checked["listen"] = tuple(map(parse_listen_address, choices.listen))
    if choices.announce:
        checked["announce"] = tuple(map(parse_announce_address, choices.announce))
    if choices.bootstrap:
        checked["bootstrap"] = tuple(parse_peer_address(text).text for text in choices.bootstrap)
    return choices.model_copy(update=checked)
