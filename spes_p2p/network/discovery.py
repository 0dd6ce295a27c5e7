"""Finding the peers of a run through the DHT: our own rules for what may be stored, announcing, and looking up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from spes_p2p.config import PROTOCOL_VERSION
from spes_p2p.crypto import KEY_BYTES
from spes_p2p.errors import RemoteProtocolError
from spes_p2p.ids import PeerId, RunId
from spes_p2p.network.hints import (
    MAX_ADDRESSES,
    MAX_HINT_BYTES,
    PeerHint,
    decode_hint,
    encode_hint,
    hint_key,
    hint_key_hash,
)
from spes_p2p.network.p2p import DHTNode, DHTRecord, RecordValidatorBase
from spes_p2p.ports import Signer

EXPIRY_MS = 3 * 60 * 1000
"""Well below the 5 minutes that are allowed, so that clocks which are a minute apart do no harm."""
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 60.0
DHT_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class HintValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind ships no types
    """Admits signed hints under their run's key and their peer's sub-key, and nothing else into the DHT."""

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored here, or believed to be what its peer said."""
        try:
            self.check(record.key, record.subkey, record.value, record.expiration_time)
        except RemoteProtocolError as error:
            logger.debug("DHT record refused: %s", error)
            return False
        return True

    @staticmethod
    def check(key: object, subkey: object, value: object, expiration_s: object) -> PeerHint:
        """The hint in a record. Raises RemoteProtocolError if the record is anything else."""
        if not (isinstance(key, bytes) and isinstance(subkey, bytes) and isinstance(value, bytes)):
            raise RemoteProtocolError(None, "key, sub-key or value is not bytes")
        if len(value) > MAX_HINT_BYTES + 8:
            raise RemoteProtocolError(None, f"record of {len(value)} bytes")
        try:
            peer = msgspec.msgpack.decode(subkey, type=bytes)
            hint_bytes = msgspec.msgpack.decode(value, type=bytes)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(None, f"sub-key or value is malformed: {error}") from error
        if len(peer) != KEY_BYTES or msgspec.msgpack.encode(peer) != subkey:
            raise RemoteProtocolError(None, "the sub-key is no peer id")
        hint = decode_hint(PeerId(peer), hint_bytes, _wall_ms())
        if hint_key_hash(hint.run) != key:
            raise RemoteProtocolError(hint.peer, "the key is not that of the hint's run")
        if expiration_s != hint.expires_ms / 1000:
            raise RemoteProtocolError(hint.peer, "the record's expiration is not the one that was signed")
        return hint


class Discovery:
    """This node's part in the DHT."""

    def __init__(self, node: DHTNode, signer: Signer, session: bytes) -> None:
        self._node = node
        self._signer = signer
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()

    async def announce(self, run: RunId, addresses: tuple[str, ...]) -> bool:
        """Publish once where this node can be reached, for 3 minutes. False if nobody took it."""
        expires_ms = _wall_ms() + EXPIRY_MS
        hint = PeerHint(
            peer=self._signer.peer_id,
            run=run,
            protocol=PROTOCOL_VERSION,
            session=self._session,
            expires_ms=expires_ms,
            addresses=addresses[:MAX_ADDRESSES],
        )
        async with asyncio.timeout(DHT_TIMEOUT_S):
            return bool(
                await self._node.store(
                    hint_key(run), encode_hint(self._signer, hint), expires_ms / 1000, subkey=bytes(hint.peer)
                )
            )

    def keep_announcing(self, run: RunId, addresses: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
        """Publish again and again until `close`: soon after the start, then every minute."""
        self._start(self._keep_announcing(run, addresses))

    async def find(self, run: RunId) -> list[PeerHint]:
        """Hints of the run's peers, this node's own included, sorted by peer; empty if none is known.

        Raises TimeoutError after a minute.
        """
        async with asyncio.timeout(DHT_TIMEOUT_S):
            found = await self._node.get(hint_key(run), latest=True)
        if found is None or not isinstance(found.value, Mapping):
            return []
        hints = []
        for subkey, entry in found.value.items():
            try:
                hints.append(decode_hint(PeerId(subkey), entry.value, _wall_ms()))
            except RemoteProtocolError as error:
                logger.debug("hint ignored: %s", error)  # it expired on the way
        return sorted((hint for hint in hints if hint.run == run), key=lambda hint: hint.peer)

    async def close(self) -> None:
        """Stop announcing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_announcing(self, run: RunId, addresses: Callable[[], Awaitable[tuple[str, ...]]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not await self.announce(run, await addresses()):
                    logger.debug("nobody took the hint")
            except (OSError, EOFError, TimeoutError) as error:
                logger.info("could not announce this node in the DHT: %r", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _wall_ms() -> int:
    """Expirations in the DHT are the one place where wall clocks count."""
    return time.time_ns() // 1_000_000
