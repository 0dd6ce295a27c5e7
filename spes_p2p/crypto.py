"""Ed25519: one key is the libp2p identity, the peer id and the signer of everything a peer says.

Signatures cover a tag, so that bytes signed for one purpose can never serve for another. Files that hold keys are
`storage/identity.py`'s business.
"""

from __future__ import annotations

import functools

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spes_p2p.ids import PeerId

SIGNATURE_BYTES = 64
KEY_BYTES = 32

# libp2p: multihash "identity" (0x00) of 36 bytes (0x24): the protobuf PublicKey{Type: Ed25519, Data: 32 bytes}
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# protobuf PrivateKey{Type: Ed25519, Data: 64 bytes = seed and public key}
_PRIVATE_KEY_PREFIX = bytes.fromhex("08011240")


def peer_text(peer: PeerId) -> str:
    """libp2p's textual peer id (`12D3KooW...`) of a raw public key."""
    return base58.b58encode(_PEER_ID_PREFIX + peer).decode()


def peer_from_text(text: str) -> PeerId:
    """Raw public key of a textual libp2p peer id. Raises ValueError if it is not an Ed25519 peer id."""
    try:
        raw = base58.b58decode(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not base58") from error
    if not raw.startswith(_PEER_ID_PREFIX) or len(raw) != len(_PEER_ID_PREFIX) + KEY_BYTES:
        raise ValueError(f"{text!r} is not an Ed25519 peer id (they start with 12D3KooW)")
    return PeerId(raw[len(_PEER_ID_PREFIX) :])


def signed_bytes(tag: str, payload: bytes) -> bytes:
    """What is signed: the product's domain, the tag, and the payload."""
    return b"spes-p2p/1/" + tag.encode() + b"\0" + payload


class Identity:
    """An Ed25519 key pair. Satisfies `ports.Signer`."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self._peer_id = PeerId(private_key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Identity:
        """A fresh random key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The key of a 32-byte seed. Raises ValueError for another length."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_libp2p_bytes(cls, data: bytes) -> Identity:
        """The key in libp2p's private-key encoding. Raises ValueError if it is anything else."""
        if len(data) != len(_PRIVATE_KEY_PREFIX) + 2 * KEY_BYTES or not data.startswith(_PRIVATE_KEY_PREFIX):
            raise ValueError("not an Ed25519 private key in libp2p's encoding")
        seed, public = data[4 : 4 + KEY_BYTES], data[4 + KEY_BYTES :]
        identity = cls.from_seed(seed)
        if identity.peer_id != public:
            raise ValueError("the public half does not belong to the private half")
        return identity

    def to_libp2p_bytes(self) -> bytes:
        """The key in libp2p's private-key encoding, as `p2pd` reads it."""
        return _PRIVATE_KEY_PREFIX + self._private_key.private_bytes_raw() + self._peer_id

    @property
    def peer_id(self) -> PeerId:
        """The raw public key."""
        return self._peer_id

    @property
    def text(self) -> str:
        """The libp2p peer id of this key."""
        return peer_text(self._peer_id)

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes."""
        return self._private_key.private_bytes_raw()

    def sign(self, tag: str, payload: bytes) -> bytes:
        """64 bytes: the signature over `signed_bytes(tag, payload)`."""
        return self._private_key.sign(signed_bytes(tag, payload))


@functools.lru_cache(maxsize=4096)
def _public_key(peer: PeerId) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(peer)


def verify(peer: PeerId, tag: str, payload: bytes, signature: bytes) -> bool:
    """Whether `signature` is the peer's over (tag, payload). False for any malformed key or signature."""
    try:
        _public_key(peer).verify(signature, signed_bytes(tag, payload))
    except (InvalidSignature, ValueError):
        return False
    return True
