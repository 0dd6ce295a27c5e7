"""Bytes to messages and back; the only parser of network bytes.

The encoding is canonical: decode, encode again and compare, else malformed. Depth is bounded by the types, size by
MAX_MESSAGE_BYTES before anything is parsed.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from spes_p2p.crypto import verify
from spes_p2p.digests import digest
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.ports import Signer, Verifier
from spes_p2p.protocol.body import Body, Certificate, Cut
from spes_p2p.protocol.messages import Message, Receipt, RunManifest, Signed, SignedBody, SignedRun
from spes_p2p.protocol.wire import Wire

MAX_MESSAGE_BYTES = 4 << 20
FLOAT_BYTES = 8

M = TypeVar("M", bound=Wire)
Found = TypeVar("Found")

ENCODER = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Wire) -> bytes:
    """Canonical bytes of any struct of the wire."""
    return ENCODER.encode(message)


def decode_canonical(
    decoder: msgspec.msgpack.Decoder[Found], data: bytes, sender: PeerId | None, max_bytes: int = MAX_MESSAGE_BYTES
) -> Found:
    """What canonical bytes say. Raises RemoteProtocolError for anything else, and for more than `max_bytes`."""
    if len(data) > max_bytes:
        raise RemoteProtocolError(sender, f"message of {len(data)} bytes is larger than {max_bytes}")
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(sender, f"malformed message: {error}") from error
    if ENCODER.encode(message) != data:
        raise RemoteProtocolError(sender, "malformed message: not in canonical encoding")
    return message


def decode(data: bytes, sender: PeerId | None = None) -> Message:
    """Message of canonical bytes. Raises RemoteProtocolError for anything else. Signatures are not checked."""
    return decode_canonical(_message_decoder, data, sender)


def decode_as(kind: type[M], data: bytes, sender: PeerId | None = None) -> M:
    """Like `decode`, for the bytes of one kind of message."""
    message = decode(data, sender)
    if not isinstance(message, kind):
        raise RemoteProtocolError(sender, f"malformed message: not a {kind.__name__}")
    return message


def decode_signed(data: bytes, sender: PeerId | None = None) -> Signed:
    """Like `decode`, for the bytes of one `Signed`."""
    return decode_as(Signed, data, sender)


def decode_certificate(data: bytes, sender: PeerId | None = None) -> Certificate:
    """Like `decode`, for the bytes of one `Certificate`."""
    return decode_as(Certificate, data, sender)


def decode_signed_run(data: bytes, sender: PeerId | None = None) -> SignedRun:
    """Like `decode`, for the bytes of one `SignedRun`; the creator's signature is checked."""
    message = decode_as(SignedRun, data, sender)
    if not verify(message.manifest.created_by, "run", encode(message.manifest), message.signature):
        raise RemoteProtocolError(sender, "the run manifest's signature is wrong")
    return message


def sign(signer: Signer, body: SignedBody) -> Signed:
    """Sign a body as `signer`."""
    return Signed(peer=signer.peer_id, body=body, signature=signer.sign(body.tag, encode(body)))


def check_signature(signed: Signed, verifier: Verifier) -> None:
    """Raises RemoteProtocolError if the signature is not the author's."""
    if not verifier(signed.peer, signed.body.tag, encode(signed.body), signed.signature):
        raise RemoteProtocolError(signed.peer, f"wrong signature on a {signed.body.tag}")


def run_id(manifest: RunManifest) -> RunId:
    """Hash of certificate 0."""
    return RunId(digest("spes run", encode(manifest)))


def body_hash(body: Body) -> Digest:
    """Hash of a certificate: of its body, without signatures."""
    return digest("spes body", encode(body))


def cut_hash(cut: Cut) -> Digest:
    """Hash of a cut, view and signature outside."""
    return digest("spes cut", encode(cut))


def statement_hash(signed: Signed) -> Digest:
    """Identity of a statement: author and body, without the signature."""
    return digest("spes statement", signed.peer, encode(signed.body))


def receipt_hash(receipt: Receipt) -> Digest:
    """Identity of a receipt."""
    return digest("spes receipt", encode(receipt))


def pack_float(value: float) -> bytes:
    """8 bytes, little-endian IEEE 754."""
    return struct.pack("<d", value)


def unpack_float(data: bytes) -> float:
    """Inverse of `pack_float`."""
    return float(struct.unpack("<d", data)[0])


def bitmap(indices: set[int] | frozenset[int], size: int) -> bytes:
    """Bytes with the bits of `indices` set, for `size` bits."""
    data = bytearray(-(-size // 8))
    for index in sorted(indices):
        data[index // 8] |= 1 << (index % 8)
    return bytes(data)


def bits(data: bytes, size: int) -> frozenset[int]:
    """Indices of the set bits. Raises RemoteProtocolError for a wrong length or a bit beyond `size`."""
    if len(data) != -(-size // 8):
        raise RemoteProtocolError(None, f"bitmap of {len(data)} bytes for {size} bits")
    left, found = int.from_bytes(data, "little"), set()
    if left >> size:
        raise RemoteProtocolError(None, f"bitmap has a bit beyond {size}")
    while left:
        lowest = left & -left
        found.add(lowest.bit_length() - 1)
        left ^= lowest
    return frozenset(found)
