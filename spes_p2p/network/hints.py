"""Signed hints in the DHT: where a peer of a run can be reached. Pure.

A hint lives under a fixed key of its run, in a sub-key that is the peer's id, and is signed by that peer's key: nobody
can replace or prolong another's. It is a *hint*: what it says is tried, never believed. Truth is in certificates.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from spes_p2p.crypto import SIGNATURE_BYTES, verify
from spes_p2p.digests import DIGEST_BYTES
from spes_p2p.errors import AddressError, RemoteProtocolError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.addresses import parse_peer_address
from spes_p2p.ports import Signer

MAX_HINT_BYTES = 4096
MAX_EXPIRY_MS = 5 * 60 * 1000
"""Furthest a hint may expire ahead of the reader's clock."""
MAX_ADDRESSES = 16
SESSION_BYTES = 16
_TAG = "dht hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHint:
    """Where a peer says it can be reached."""

    peer: PeerId
    run: RunId
    protocol: int
    """Version of the peer's protocol."""
    session: bytes
    """16 random bytes of this start of the peer's process."""
    expires_ms: int
    """Wall-clock time in milliseconds, equal to the record's own expiration."""
    addresses: tuple[str, ...]
    """At most 16 multiaddresses that end with the peer's id."""


class _Payload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run: bytes
    protocol: int
    session: bytes
    expires_ms: int
    addresses: tuple[str, ...]


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    payload: bytes
    signature: bytes


def hint_key(run: RunId) -> str:
    """The DHT key under which all peers of a run keep their hints."""
    return f"spes/{run.hex()}/peers"


def hint_key_hash(run: RunId) -> bytes:
    """20 bytes: how hivemind's DHT names that key (SHA-1 of its msgpack encoding)."""
    return hashlib.sha1(msgspec.msgpack.encode(hint_key(run)), usedforsecurity=False).digest()


def encode_hint(signer: Signer, hint: PeerHint) -> bytes:
    """The signed bytes of the signer's own hint."""
    payload = msgspec.msgpack.encode(
        _Payload(hint.run, hint.protocol, hint.session, hint.expires_ms, hint.addresses),
    )
    return msgspec.msgpack.encode(_Envelope(payload, signer.sign(_TAG, payload)))


def decode_hint(peer: PeerId, value: bytes, now_ms: int) -> PeerHint:
    """Check bytes that claim to be `peer`'s hint, at wall-clock time `now_ms`.

    Raises RemoteProtocolError if they are too long, malformed, not signed by `peer`, expired, or expire too late.
    """
    if len(value) > MAX_HINT_BYTES:
        raise RemoteProtocolError(peer, f"hint of {len(value)} bytes, at most {MAX_HINT_BYTES} are allowed")
    try:
        envelope = msgspec.msgpack.decode(value, type=_Envelope)
        if len(envelope.signature) != SIGNATURE_BYTES or not verify(peer, _TAG, envelope.payload, envelope.signature):
            raise RemoteProtocolError(peer, "hint is not signed by its peer")
        payload = msgspec.msgpack.decode(envelope.payload, type=_Payload)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(peer, f"hint is malformed: {error}") from error
    if len(payload.run) != DIGEST_BYTES or len(payload.session) != SESSION_BYTES:
        raise RemoteProtocolError(peer, "hint has a run id or session of the wrong length")
    if not now_ms < payload.expires_ms <= now_ms + MAX_EXPIRY_MS:
        raise RemoteProtocolError(
            peer, f"hint expires {payload.expires_ms - now_ms} ms from now, allowed are 1 to {MAX_EXPIRY_MS}"
        )
    return PeerHint(
        peer=peer,
        run=RunId(payload.run),
        protocol=payload.protocol,
        session=payload.session,
        expires_ms=payload.expires_ms,
        addresses=_checked_addresses(peer, payload.addresses),
    )


def _checked_addresses(peer: PeerId, addresses: tuple[str, ...]) -> tuple[str, ...]:
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise RemoteProtocolError(peer, f"hint has {len(addresses)} addresses, allowed are 1 to {MAX_ADDRESSES}")
    checked = []
    for text in addresses:
        try:
            address = parse_peer_address(text)
        except AddressError as error:
            raise RemoteProtocolError(peer, f"hint has a bad address: {error}") from error
        if address.peer != peer:
            raise RemoteProtocolError(peer, "hint has the address of another peer")
        checked.append(address.text)
    return tuple(checked)
