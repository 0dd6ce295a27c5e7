"""Every exception that spes-p2p raises on purpose.

    SpesError                        has `exit_code`: what a command ends with when nobody handles it
    ├── UsageError (2)               a flag, link, address, config or data path is wrong
    │   ├── ConfigError              a run or node configuration (also a ValueError)
    │   ├── AddressError             a multiaddress, names the token that is wrong
    │   ├── LinkError                an invite link
    │   └── DataError                training text that is missing or unreadable
    ├── UnreachableError (3)         no bootstrap node or no member of the run answers
    ├── NotAdmittedError (4)         the run's admission rule says no
    ├── MachineError (5)             missing GPU, port in use, disk full, not enough memory
    ├── LocalStateError (6)          local state damaged, or the identity is in use
    │   └── IdentityError            the identity file
    ├── LocalProtocolError (1)       our own bug: an illegal call of the protocol core
    ├── RemoteProtocolError (1)      a peer broke the rules: drop, count, tell
    ├── BlobError (1)                a blob is missing or does not match its id
    ├── SchemaError (1)              bytes of tensors that have not the form the run prescribes (also a ValueError)
    ├── NotFiniteError (1)           a NaN or an infinity where only finite values may be (also a ValueError)
    ├── TransportError (1)           a message or a transfer did not get through
    └── TrainerError (1)             the trainer process failed or answered nonsense

Messages say what happened, where, and what to do, in one or two lines.
"""

from __future__ import annotations

from spes_p2p.ids import PeerId

EXIT_INTERRUPTED = 130
"""What a command ends with that the user interrupted: no error of ours."""


class SpesError(Exception):
    """Base of all: one or two lines for a person."""

    exit_code: int = 1


class UsageError(SpesError):
    """A flag, link, address, configuration or data path is wrong."""

    exit_code = 2


class ConfigError(UsageError, ValueError):
    """A run or node configuration does not validate."""


class AddressError(UsageError, ValueError):
    """A multiaddress is malformed; the message names the bad token and shows a good example."""


class LinkError(UsageError, ValueError):
    """An invite link is malformed."""


class DataError(UsageError):
    """Training text is missing, unreadable or empty."""


class UnreachableError(SpesError):
    """No bootstrap node or member answers; the message has a reason for each address."""

    exit_code = 3


class NotAdmittedError(SpesError):
    """The run does not admit this peer."""

    exit_code = 4


class MachineError(SpesError):
    """This machine cannot do what was asked: GPU, port, disk, memory."""

    exit_code = 5


class LocalStateError(SpesError):
    """Files of this node are damaged or in use."""

    exit_code = 6


class IdentityError(LocalStateError):
    """The identity file is damaged, unreadable or in use by another process."""


class LocalProtocolError(SpesError):
    """The protocol core was called in a way its contract forbids: a bug of ours."""


class RemoteProtocolError(SpesError):
    """A peer sent something that an honest peer would not send."""

    def __init__(self, peer_id: PeerId | None, reason: str) -> None:
        super().__init__(reason)
        self.peer_id = peer_id
        self.reason = reason


class BlobError(SpesError):
    """A blob is missing, truncated, or does not match its id."""


class SchemaError(SpesError, ValueError):
    """Bytes of tensors, or of merge lists, that have not the one form which the run's configuration prescribes."""


class NotFiniteError(SpesError, ValueError):
    """A NaN or an infinity where only finite values may be."""


class TransportError(SpesError):
    """A message or a transfer did not get through in time."""


class TrainerError(SpesError):
    """The trainer process failed, or sent what it may not send."""
