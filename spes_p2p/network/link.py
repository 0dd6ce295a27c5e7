"""The invite link: all that a newcomer needs to find a run, in one word that every shell leaves alone.

    spes-p2p:<run id>,bootstrap=<multiaddress>,bootstrap=<multiaddress>,invite=<key>

The run id is 64 hexadecimal digits. There may be any number of bootstrap addresses. `invite`, present in runs that
admit by invitation, is the 32-byte seed of the run's invite key in base64url without padding. Commas and equal signs
are used because `?` and `&` mean something to shells.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from spes_p2p.crypto import KEY_BYTES
from spes_p2p.digests import DIGEST_BYTES
from spes_p2p.errors import AddressError, LinkError
from spes_p2p.ids import RunId
from spes_p2p.network.addresses import EXAMPLE, parse_peer_address

SCHEME = "spes-p2p:"
MAX_LINK_CHARS = 8192
LINK_EXAMPLE = f"{SCHEME}{'1f' * DIGEST_BYTES},bootstrap={EXAMPLE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteLink:
    """What a link says."""

    run: RunId
    bootstrap: tuple[str, ...] = ()
    """Addresses of bootstrap nodes or members, in the order of the link."""
    invite_seed: bytes | None = None
    """Secret half of the run's invite key: 32 bytes."""


def parse_link(text: str) -> InviteLink:
    """Read an invite link. Raises LinkError naming what is wrong, with a good example."""
    text = text.strip()
    if len(text) > MAX_LINK_CHARS:
        raise _wrong(f"is longer than {MAX_LINK_CHARS} characters")
    if not text.startswith(SCHEME):
        raise _wrong(f"must begin with {SCHEME!r}, not with {text[: len(SCHEME)]!r}")
    head, *options = text.removeprefix(SCHEME).split(",")
    bootstrap: list[str] = []
    seed: bytes | None = None
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise _wrong(f"{option!r} has no '='")
        if key == "bootstrap":
            bootstrap.append(_address(value))
        elif key == "invite":
            if seed is not None:
                raise _wrong("names 'invite' twice")
            seed = _seed(value)
        else:
            raise _wrong(f"{key!r} is neither 'bootstrap' nor 'invite'")
    return InviteLink(run=_run(head), bootstrap=tuple(bootstrap), invite_seed=seed)


def format_link(link: InviteLink) -> str:
    """The text of a link; `parse_link` is its inverse."""
    parts = [SCHEME + link.run.hex(), *(f"bootstrap={address}" for address in link.bootstrap)]
    if link.invite_seed is not None:
        parts.append("invite=" + base64.urlsafe_b64encode(link.invite_seed).decode().rstrip("="))
    return ",".join(parts)


def _run(text: str) -> RunId:
    try:
        run = bytes.fromhex(text)
    except ValueError as error:
        raise _wrong(f"{text[:70]!r} is not a run id of {2 * DIGEST_BYTES} hexadecimal digits") from error
    if len(run) != DIGEST_BYTES or text != run.hex():
        raise _wrong(f"the run id must have {2 * DIGEST_BYTES} lower-case hexadecimal digits, {text[:70]!r} does not")
    return RunId(run)


def _address(text: str) -> str:
    try:
        return parse_peer_address(text).text
    except AddressError as error:
        raise LinkError(f"invite link: {error}") from error


def _seed(text: str) -> bytes:
    try:
        seed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong("the invite key is not base64url") from error
    if len(seed) != KEY_BYTES:
        raise _wrong(f"the invite key has {len(seed)} bytes, not {KEY_BYTES}; it may have been cut off")
    return seed


def _wrong(problem: str) -> LinkError:
    return LinkError(f"invite link: {problem}; good: {LINK_EXAMPLE}")
