"""A hostile voter: it changes what it sends, and signs the change with its own key.

What it says is rightly signed and wrong in one place or two: a number, a digest of any length, a list, a reason. It
also changes what it relays of others, whose signatures it cannot make.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from spes_p2p.ports import Signer
from spes_p2p.protocol import effects as fx
from spes_p2p.protocol.codec import body_hash, cut_hash, decode, encode, pack_float, sign
from spes_p2p.protocol.messages import CutMessage, Message, ProposalMessage, Signed

StructType = TypeVar("StructType", bound=msgspec.Struct)

_NUMBERS = (0, 1, 2, 3, 4, 7, 63, 64, 65, 2**16 - 1, 2**31, 2**61)
_FLOATS = (0.0, 1e30, -1.0, float("nan"), float("inf"), 1e-300, 2.0)
_FLOAT_BYTES = 8
_SPARED = {"run": 0.9, "round": 0.6, "epoch": 0.6}
"""Field -> how often it is left alone: a message of another run or round is refused before it is looked at."""


def tamper(me: Signer, rate: float, random: random.Random) -> Callable[[fx.Send], bytes]:
    """For `SimPeer.tampers`: changes a share `rate` of what `me` sends, each time once or twice."""

    def tampered(send: fx.Send) -> bytes:
        if random.random() > rate:
            return send.data
        message = decode(send.data)
        for _ in range(random.randint(1, 2)):
            message = _changed_message(message, me, random)
        return encode(message)

    return tampered


def _changed_message(message: Message, me: Signer, random: random.Random) -> Message:
    """The message with a change somewhere; what bears the signature of `me` is signed again."""
    match message:
        case Signed() if message.peer == me.peer_id:
            return sign(me, changed(message.body, random))
        case ProposalMessage() if message.proposal.peer == me.peer_id:
            return _changed_proposal(message, me, random)
        case CutMessage() if message.announcement.peer == me.peer_id:
            cut = changed(message.cut, random)
            announcement = msgspec.structs.replace(message.announcement.body, cut=cut_hash(cut))
            return CutMessage(sign(me, announcement), cut)
        case _:
            return changed(message, random)


def _changed_proposal(message: ProposalMessage, me: Signer, random: random.Random) -> ProposalMessage:
    """Mostly another body under a proposal that names it, else another proposal of the same body."""
    body, proposal = message.body, message.proposal.body
    if random.random() < 0.7:
        body = changed(body, random)
        proposal = msgspec.structs.replace(proposal, body=body_hash(body))
    else:
        proposal = changed(proposal, random)
    return ProposalMessage(sign(me, proposal), body, message.merge_lists)


def changed(struct: StructType, random: random.Random) -> StructType:
    """The struct with one field changed, at any depth."""
    names = struct.__struct_fields__
    if not names:
        return struct
    name = random.choice(names)
    if random.random() < _SPARED.get(name, 0.0):
        return struct
    return msgspec.structs.replace(struct, **{name: _changed_value(getattr(struct, name), random)})


def _changed_value(value: Any, random: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case enum.IntEnum():
            return random.choice(list(type(value)))
        case int():
            return random.choice([*_NUMBERS, max(0, value - 1), value + 1])
        case bytes():
            return _changed_bytes(value, random)
        case tuple():
            return _changed_tuple(value, random)
        case msgspec.Struct():
            return changed(value, random)
        case _:
            return value


def _changed_bytes(value: bytes, random: random.Random) -> bytes:
    if len(value) == _FLOAT_BYTES:
        return pack_float(random.choice(_FLOATS))
    if not value:
        return random.choice([b"", bytes(8), bytes(64)])
    return random.choice([bytes(len(value)), random.randbytes(len(value)), value[:-1], value + b"\0"])


def _changed_tuple(value: tuple[Any, ...], random: random.Random) -> tuple[Any, ...]:
    if not value:
        return value
    items, place = list(value), random.randrange(len(value))
    match random.randrange(5):
        case 0:
            items.pop(place)
        case 1:
            items.append(items[place])
        case 2:
            random.shuffle(items)
        case 3:
            items.clear()
        case _:
            items[place] = _changed_value(items[place], random)
    return tuple(items)
