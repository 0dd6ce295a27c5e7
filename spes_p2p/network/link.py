"""The invite link: all that a newcomer needs to find a run, in one word that every shell leaves alone.

    spes-p2p:<run id>,bootstrap=<multiaddress>,bootstrap=<multiaddress>,invite=<key>,allow=<permit>

The run id is 64 hexadecimal digits. There may be any number of bootstrap addresses. `invite`, present in runs that
admit by invitation, is the 32-byte seed of the run's invite key in base64url without padding. `allow`, in runs with an
allowlist, is for one peer alone: a founder's key (32 bytes) and its signature over that peer's id (64 bytes). Commas
and equal signs are used because `?` and `&` mean something to shells.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from spes_p2p.crypto import KEY_BYTES, SIGNATURE_BYTES
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
    permit: bytes | None = None
    """A founder's key and its signature over one peer's id: 96 bytes."""


def parse_link(text: str) -> InviteLink:
    """Read an invite link. Raises LinkError naming what is wrong, with a good example."""
    text = text.strip()
    if len(text) > MAX_LINK_CHARS:
        raise _wrong(f"is longer than {MAX_LINK_CHARS} characters")
    if not text.startswith(SCHEME):
        raise _wrong(f"must begin with {SCHEME!r}, not with {text[: len(SCHEME)]!r}")
    head, *options = text.removeprefix(SCHEME).split(",")
    bootstrap: list[str] = []
    keys: dict[str, bytes] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise _wrong(f"{option!r} has no '='")
        if key == "bootstrap":
            bootstrap.append(_address(value))
        elif key in _KEYS:
            if key in keys:
                raise _wrong(f"names {key!r} twice")
            keys[key] = _key(*_KEYS[key], value)
        else:
            raise _wrong(f"{key!r} is none of 'bootstrap', 'invite', 'allow'")
    return InviteLink(
        run=_run(head), bootstrap=tuple(bootstrap), invite_seed=keys.get("invite"), permit=keys.get("allow")
    )


def format_link(link: InviteLink) -> str:
    """The text of a link; `parse_link` is its inverse."""
    parts = [SCHEME + link.run.hex(), *(f"bootstrap={address}" for address in link.bootstrap)]
    if link.invite_seed is not None:
        parts.append(f"invite={_base64(link.invite_seed)}")
    if link.permit is not None:
        parts.append(f"allow={_base64(link.permit)}")
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


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


_KEYS = {"invite": ("invite key", KEY_BYTES), "allow": ("permit", KEY_BYTES + SIGNATURE_BYTES)}


def _key(name: str, size: int, text: str) -> bytes:
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(f"the {name} is not base64url") from error
    if len(key) != size:
        raise _wrong(f"the {name} has {len(key)} bytes, not {size}; it may have been cut off")
    return key


def _wrong(problem: str) -> LinkError:
    return LinkError(f"invite link: {problem}; good: {LINK_EXAMPLE}")
