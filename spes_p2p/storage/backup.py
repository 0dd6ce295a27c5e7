"""An identity in one encrypted file that can be kept anywhere: text, so that it survives mail, paper and clipboards.

The key is sealed by ChaCha20-Poly1305 under a key that scrypt (RFC 7914) derives from a passphrase. Everything else in
the file is authenticated with it, so that not a byte of the file can be changed unnoticed. As JSON:

    format, version      what this is
    peer                 whose key it holds, to tell backups apart without their passphrases
    scrypt               n, r, p and salt (hex)
    nonce, sealed        (hex) of the key in libp2p's encoding

Files of other versions are refused, and so are costs that no version has used: whoever makes a file must not choose how
much memory reading it takes.
"""

from __future__ import annotations

import secrets

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from spes_p2p.crypto import Identity
from spes_p2p.errors import IdentityError

FORMAT = "spes-p2p identity backup"
VERSION = 1
SCRYPT_N = 1 << 17
"""With r = 8: 128 MiB and a third of a second for each passphrase that somebody tries."""
MAX_FILE_BYTES = 16_384
"""Far above a backup's 500 bytes: nothing large is read into memory."""
_ALLOWED_N = frozenset({1 << power for power in range(14, 19)})
_R, _P = 8, 1
_KEY_BYTES, _SALT_BYTES, _NONCE_BYTES = 32, 16, 12


class _Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    n: int
    r: int
    p: int
    salt: str


class _Backup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    peer: str
    scrypt: _Cost
    nonce: str
    sealed: str = ""

    def authenticated(self) -> bytes:
        """What the seal covers besides the key."""
        return msgspec.json.encode(msgspec.structs.replace(self, sealed=""))


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


def seal(identity: Identity, passphrase: str, *, scrypt_n: int = SCRYPT_N) -> bytes:
    """The content of a backup file. `scrypt_n`: memory and time that a try costs, 2^14 to 2^18."""
    salt, nonce = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
    bare = _Backup(
        format=FORMAT,
        version=VERSION,
        peer=identity.text,
        scrypt=_Cost(n=scrypt_n, r=_R, p=_P, salt=salt.hex()),
        nonce=nonce.hex(),
    )
    sealed = _cipher(passphrase, salt, scrypt_n).encrypt(nonce, identity.to_libp2p_bytes(), bare.authenticated())
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(bare, sealed=sealed.hex()))) + b"\n"


def unseal(data: bytes, passphrase: str, name: str) -> Identity:
    """The key in a backup, of which `name` is what messages call the file.

    Raises IdentityError, in one line, if it is no backup, of another version, damaged, or the passphrase is wrong.
    """
    backup = _parsed(data, name)
    try:
        salt, nonce, sealed = map(bytes.fromhex, (backup.scrypt.salt, backup.nonce, backup.sealed))
    except ValueError as error:
        raise IdentityError(f"{name} is damaged: it is not hexadecimal where it should be") from error
    if backup.scrypt.n not in _ALLOWED_N or (backup.scrypt.r, backup.scrypt.p) != (_R, _P):
        raise IdentityError(f"{name} is damaged: no backup of ours has such scrypt parameters")
    if (len(salt), len(nonce)) != (_SALT_BYTES, _NONCE_BYTES):
        raise IdentityError(f"{name} is damaged: salt or nonce has the wrong length")
    try:
        opened = _cipher(passphrase, salt, backup.scrypt.n).decrypt(nonce, sealed, backup.authenticated())
        identity = Identity.from_libp2p_bytes(opened)
    except (InvalidTag, ValueError) as error:
        raise IdentityError(f"{name} cannot be opened: the passphrase is wrong, or the file was changed") from error
    return identity


def peer_of(data: bytes, name: str) -> str:
    """Peer id that a backup says it is of, believed only once it is opened. Raises IdentityError as `unseal` does."""
    return _parsed(data, name).peer


def _parsed(data: bytes, name: str) -> _Backup:
    if len(data) > MAX_FILE_BYTES:
        raise IdentityError(f"{name} is no identity backup: it is too large")
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "is empty" if not data.strip() else "is no identity backup, or was cut off"
        raise IdentityError(f"{name} {what}") from error
    if head.format != FORMAT:
        raise IdentityError(f"{name} is no identity backup")
    if head.version != VERSION:
        raise IdentityError(f"{name} is a backup of version {head.version}, and this program reads {VERSION}")
    try:
        return msgspec.json.decode(data, type=_Backup)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IdentityError(f"{name} is damaged: {error}") from error


def _cipher(passphrase: str, salt: bytes, scrypt_n: int) -> ChaCha20Poly1305:
    kdf = Scrypt(salt=salt, length=_KEY_BYTES, n=scrypt_n, r=_R, p=_P)
    return ChaCha20Poly1305(kdf.derive(passphrase.encode()))
