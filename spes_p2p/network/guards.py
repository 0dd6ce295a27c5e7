"""What hivemind 1.1.12 does not protect, put right before anything listens. The one place where a library is patched.

guard                                   against
DHT values nested at most 8 deep        a crash of the process by stack overflow in msgpack's extension hook
stream frames of at most 4 MiB          memory exhaustion by an 8-byte length that is trusted
DHT: sub-keys, keys and records of a    memory exhaustion, and answers so large that nobody can read them
  peer bounded; renewals only forward
DHT: at most 64 keys per request        a 4 MiB request that costs seconds of work
64 open streams, 64 open calls a peer   exhaustion of file handles and tasks (`StreamLimit`); what peers share beyond
                                          that is theirs by turns (fairness.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]  # ships no types

from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId

with warnings.catch_warnings():
    # hivemind.moe, which nothing here calls, is loaded with hivemind and uses a part of torch that is being retired
    warnings.simplefilter("ignore", DeprecationWarning)
    import hivemind.dht.protocol as dht_protocol  # type: ignore[import-untyped]  # hivemind ships no types
    import hivemind.dht.storage as dht_storage  # type: ignore[import-untyped]  # hivemind ships no types
    import hivemind.hivemind_cli as daemon_package  # type: ignore[import-untyped]  # hivemind ships no types
    from hivemind.dht.node import DHTNode  # type: ignore[import-untyped]  # hivemind ships no types
    from hivemind.dht.routing import DHTID  # type: ignore[import-untyped]  # hivemind ships no types
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # type: ignore[import-untyped]  # no types
    from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID  # type: ignore[import-untyped]  # no types
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector  # type: ignore[import-untyped]  # as above
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo  # type: ignore[import-untyped]  # no types
    from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client  # type: ignore[import-untyped]  # no types
    from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg  # type: ignore[import-untyped]  # as above
    from hivemind.proto import dht_pb2, p2pd_pb2  # type: ignore[import-untyped]  # hivemind ships no types
    from hivemind.utils.logging import use_hivemind_log_handler  # type: ignore[import-untyped]  # no types
    from hivemind.utils.multiaddr import Multiaddr as DaemonMultiaddr  # type: ignore[import-untyped]  # no types
    from hivemind.utils.serializer import MSGPackSerializer  # type: ignore[import-untyped]  # hivemind ships no types

__all__ = [
    "DHTID",
    "P2P",
    "Client",
    "ControlClient",
    "DHTNode",
    "DHTRecord",
    "DaemonConnector",
    "DaemonMultiaddr",
    "P2PContext",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "StreamInfo",
    "daemon_package",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]

MAX_NESTING = 8
MAX_FRAME_BYTES = 4 << 20
MAX_STREAMS_PER_PEER = 64
MAX_KEYS_PER_REQUEST = 64
MAX_SUBKEYS = 512
"""Hints per run: times 4 KiB a hint, the whole dictionary still fits one 4 MiB answer."""
MAX_DHT_KEYS = 4096
MAX_KEYS_PER_SUBKEY = 16
"""Runs in which one peer may have a hint at this node at a time."""

_depth = threading.local()


class NestingError(ValueError):
    """A DHT value is nested deeper than any honest one."""


def decode_extension(code: int, data: bytes) -> object:
    """Stand-in for `MSGPackSerializer._decode_ext_types`: the same two kinds, to a depth of MAX_NESTING.

    Raises NestingError beyond that depth, and ValueError for an unknown kind.
    """
    depth = getattr(_depth, "value", 0)
    if depth >= MAX_NESTING:
        raise NestingError(f"nested deeper than {MAX_NESTING}")
    _depth.value = depth + 1
    try:
        if code == MSGPackSerializer._TUPLE_EXT_TYPE_CODE:
            return tuple(msgpack.unpackb(data, ext_hook=decode_extension, raw=False))
        kind = MSGPackSerializer._ext_type_codes.get(code)
        if kind is None:
            raise ValueError(f"unknown extension type {code}")
        return kind.unpackb(data)
    finally:
        _depth.value = depth


async def receive_bounded(reader: asyncio.StreamReader) -> bytes:
    """Stand-in for `P2P.receive_raw_data`. Raises RemoteProtocolError for a frame above MAX_FRAME_BYTES."""
    size = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if size > MAX_FRAME_BYTES:
        raise RemoteProtocolError(None, f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return await reader.readexactly(size)


class BoundedStorage(dht_storage.DHTLocalStorage):  # type: ignore[misc]  # hivemind ships no types
    """A DHT storage with bounded keys and a quota per sub-key; `MAX_SUBKEYS` is kept by the dictionaries themselves."""

    def store(self, key: int, value: object, expiration_time: float, subkey: object = None) -> bool:
        """Store a value that is no dictionary's entry, if there is room for its key."""
        if key not in self and len(self) >= MAX_DHT_KEYS:
            return False
        return bool(super().store(key, value, expiration_time, subkey))

    def store_subkey(self, key: int, subkey: object, value: bytes, expiration_time: float) -> bool:
        """Store an entry if it is newer than what is here and within the quota of its sub-key."""
        held = self.get(key)
        if held is None and len(self) >= MAX_DHT_KEYS:
            return False
        entries = held.value if held is not None else None
        entry = entries.get(subkey) if isinstance(entries, dht_storage.DictionaryDHTValue) else None
        if entry is not None and entry.expiration_time >= expiration_time:
            return False
        if entry is None and self._num_keys_with(subkey) >= MAX_KEYS_PER_SUBKEY:
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def num_records(self) -> int:
        """Records here, each entry of a dictionary for itself."""
        values = [item.value for _, item in self.items()]
        return sum(len(held.data) if isinstance(held, dht_storage.DictionaryDHTValue) else 1 for held in values)

    def _num_keys_with(self, subkey: object) -> int:
        dictionaries = (item.value for _, item in self.items())
        return sum(isinstance(held, dht_storage.DictionaryDHTValue) and subkey in held for held in dictionaries)


_plain_dictionary_store = dht_storage.DictionaryDHTValue.store


def _store_in_bounded_dictionary(self: object, key: object, value: object, expiration_time: float) -> bool:
    """Stand-in for `DictionaryDHTValue.store`, which merging of answers calls too: no more than MAX_SUBKEYS."""
    entries = self.data  # type: ignore[attr-defined]  # a DictionaryDHTValue
    if key not in entries and len(entries) >= MAX_SUBKEYS:
        return False
    return bool(_plain_dictionary_store(self, key, value, expiration_time))


def check_request(request: object) -> None:
    """Refuse DHT requests that name more keys than any honest one. Raises RemoteProtocolError."""
    is_bulk = isinstance(request, dht_pb2.FindRequest | dht_pb2.StoreRequest)
    if is_bulk and len(request.keys) > MAX_KEYS_PER_REQUEST:  # type: ignore[attr-defined]  # checked just before
        raise RemoteProtocolError(None, f"DHT request for more than {MAX_KEYS_PER_REQUEST} keys")


class StreamLimit:
    """Counts what each peer has open, and refuses more than `most`. Says nothing of what all peers share: that is
    `fairness.FairPlaces`."""

    def __init__(self, most: int = MAX_STREAMS_PER_PEER) -> None:
        self._most = most
        self._open: dict[PeerId, int] = {}

    @contextlib.contextmanager
    def of(self, peer: PeerId) -> Iterator[None]:
        """Hold one place of the peer's. Raises RemoteProtocolError if all are taken."""
        num_open = self._open.get(peer, 0)
        if num_open >= self._most:
            raise RemoteProtocolError(peer, f"more than {self._most} streams at once")
        self._open[peer] = num_open + 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


def install() -> None:
    """Put all guards in place; again is harmless. Happens on import, before a daemon can start."""
    MSGPackSerializer._decode_ext_types = staticmethod(decode_extension)
    P2P.receive_raw_data = staticmethod(receive_bounded)
    dht_storage.DictionaryDHTValue.store = _store_in_bounded_dictionary
    dht_protocol.DHTLocalStorage = BoundedStorage
    use_hivemind_log_handler("nowhere")  # its messages go to the root logger, where the application decides


install()
