"""From a run id to the manifest, the held-out set, and being let in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from spes_p2p.crypto import Identity, peer_text
from spes_p2p.errors import (
    BlobError,
    IdentityError,
    NotAdmittedError,
    RemoteProtocolError,
    TransportError,
    UnreachableError,
)
from spes_p2p.ids import Digest, PeerId, RunId
from spes_p2p.node.joining import FIND_TIMEOUT_S, ManifestSeeker, bring_held_out, check_admission, find_peers
from spes_p2p.protocol.codec import encode, run_id
from spes_p2p.protocol.messages import SignedRun, TipAsk
from spes_p2p.protocol.roster import invite_payload
from spes_p2p.testing import protocol_cases as cases
from spes_p2p.testing.clock import VirtualClock
from spes_p2p.testing.swarm import identity_of, make_manifest

FOUNDER, OTHER, ME = cases.identities(3)
MANIFEST = make_manifest(cases.quick_config(), [FOUNDER.peer_id], cases.NUM_PARTS, identity_of("invite"))
SIGNED = SignedRun(MANIFEST, FOUNDER.sign("run", encode(MANIFEST)))
RUN = RunId(run_id(MANIFEST))


class Transport:
    """Peers that answer as scripted."""

    def __init__(self, peers: Sequence[Identity], answer: Callable[[PeerId], None] = lambda peer: None) -> None:
        self.peer_id = ME.peer_id
        self.refusals: dict[PeerId, str] = {}
        self.peers = [*peers, ME]
        self.answer = answer
        self.asked: list[tuple[PeerId, bytes]] = []
        self.discovery = self
        self.fails: BaseException | None = None
        self.fetched: list[tuple[PeerId, ...]] = []

    async def find(self, run: RunId) -> list[SimpleNamespace]:
        assert run == RUN
        if self.fails is not None:
            raise self.fails
        return [SimpleNamespace(peer=peer.peer_id) for peer in self.peers]

    async def send(self, peer: PeerId, data: bytes) -> None:
        self.asked.append((peer, data))
        self.answer(peer)

    async def fetch(self, blob: Digest, sources: Sequence[PeerId], max_bytes: int | None = None) -> None:
        self.fetched.append(tuple(sources))
        raise BlobError("no source is left")


def quiet(level: str, text: str) -> None:
    pass


async def seek_in_vain(transport: Transport) -> None:
    """Seek until all peers have been asked, and then until the time is over."""
    clock = VirtualClock()
    seeker = ManifestSeeker(RUN, transport, lambda seconds: clock.sleep_ms(round(1000 * seconds)))
    seeking = asyncio.create_task(seeker.seek(quiet))
    while clock.next_wake_ms() is None or len(transport.asked) < len(transport.peers) - 1:
        await asyncio.sleep(0)
    clock.jump(round(1000 * FIND_TIMEOUT_S))
    await seeking


async def test_manifest_comes_from_whoever_has_it() -> None:
    transport = Transport([FOUNDER])
    seeker = ManifestSeeker(RUN, transport)
    sender = FOUNDER.peer_id

    def answer(peer: PeerId) -> None:
        seeker._found.set_result(SIGNED)

    transport.answer = answer
    assert await seeker.seek(quiet) == SIGNED
    assert transport.asked == [(sender, encode(TipAsk(0, 0)))]
    assert seeker.peers == (sender,)


async def test_manifest_of_another_run_is_refused_and_other_messages_are_ignored() -> None:
    seeker = ManifestSeeker(RunId(b"o" * 32), Transport([]))
    await seeker.receive(FOUNDER.peer_id, encode(TipAsk(0, 0)))
    with pytest.raises(RemoteProtocolError, match="another run"):
        await seeker.receive(FOUNDER.peer_id, encode(SIGNED))


async def test_run_that_is_not_found_names_what_every_peer_said() -> None:
    def answer(peer: PeerId) -> None:
        if peer == OTHER.peer_id:
            raise TransportError("connection refused")

    transport = Transport([FOUNDER, OTHER], answer)
    transport.refusals[identity_of("old").peer_id] = "protocol: 1 here, 0 there"
    with pytest.raises(UnreachableError) as raised:
        await seek_in_vain(transport)
    text = str(raised.value)
    assert "not found within 180 s" in text
    assert f"{peer_text(FOUNDER.peer_id)}: it has not given the manifest" in text
    assert f"{peer_text(OTHER.peer_id)}: connection refused" in text
    assert "protocol: 1 here, 0 there" in text
    assert raised.value.exit_code == 3


async def test_run_without_known_peers_says_so() -> None:
    with pytest.raises(UnreachableError, match="no peer of it is known here"):
        await seek_in_vain(Transport([]))


async def test_look_up_that_fails_is_told_and_tried_again() -> None:
    notes: list[str] = []
    transport = Transport([FOUNDER])
    transport.fails = TimeoutError()
    assert await find_peers(transport, RUN, ME.peer_id, lambda level, text: notes.append(text)) == ()
    assert notes == ["peers could not be looked up: TimeoutError()"]
    transport.fails = None
    assert [hint.peer for hint in await find_peers(transport, RUN, ME.peer_id, quiet)] == [FOUNDER.peer_id]


async def test_identity_in_use_ends_the_search_if_all_peers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.node.joining._ASK_EVERY_S", 0.0)

    def answer(peer: PeerId) -> None:
        raise IdentityError("identity in use: elsewhere")

    with pytest.raises(IdentityError, match="elsewhere"):
        await ManifestSeeker(RUN, Transport([FOUNDER, OTHER], answer)).seek(quiet)


async def test_held_out_set_that_nobody_has_is_unreachable() -> None:
    transport = Transport([])
    with pytest.raises(UnreachableError, match="held-out set"):
        await bring_held_out(MANIFEST, transport, (OTHER.peer_id,), timeout_s=0.0)
    assert transport.fetched == [(OTHER.peer_id, FOUNDER.peer_id)]


async def test_a_bootstrap_node_gives_the_manifest_when_no_peer_is_known() -> None:
    transport = Transport([])
    entry = identity_of("bootstrap").peer_id
    seeker = ManifestSeeker(RUN, transport, entries=(entry,))
    seeking = asyncio.create_task(seeker.seek(quiet))
    while not transport.asked:
        await asyncio.sleep(0)
    assert transport.asked == [(entry, encode(TipAsk(0, 0)))]
    await seeker.receive(entry, encode(SIGNED))
    assert await seeking == SIGNED
    assert seeker.peers == ()


async def test_held_out_set_is_asked_of_bootstrap_nodes_last() -> None:
    transport = Transport([])
    entry = identity_of("bootstrap").peer_id
    with pytest.raises(UnreachableError):
        await bring_held_out(MANIFEST, transport, (OTHER.peer_id,), (entry,), timeout_s=0.0)
    assert transport.fetched == [(OTHER.peer_id, FOUNDER.peer_id), (entry,)]


@pytest.mark.parametrize(
    ("admission", "seed", "reason"),
    [
        ("invited", None, "the link has no invite key"),
        ("invited", b"\1" * 32, "not that of this run"),
        ("allowlist", identity_of("invite").seed, "that a founder has signed for"),
    ],
)
def test_peer_that_is_not_admitted_learns_what_to_ask_for(admission: str, seed: bytes | None, reason: str) -> None:
    with pytest.raises(NotAdmittedError, match=reason) as raised:
        check_admission(MANIFEST, admission, ME.peer_id, seed, None)
    assert raised.value.exit_code == 4
    assert "Ask" in str(raised.value)


def test_invited_founder_and_anybody_in_an_open_run_are_admitted() -> None:
    check_admission(MANIFEST, "invited", ME.peer_id, identity_of("invite").seed, None)
    check_admission(MANIFEST, "invited", FOUNDER.peer_id, None, None)
    check_admission(MANIFEST, "allowlist", FOUNDER.peer_id, None, None)
    check_admission(MANIFEST, "open", ME.peer_id, None, None)


def permit(sponsor: Identity, peer: PeerId, run: RunId = RUN) -> bytes:
    return sponsor.peer_id + sponsor.sign("allow", invite_payload(run, peer))


def test_permit_of_a_founder_admits_its_peer_alone() -> None:
    check_admission(MANIFEST, "allowlist", ME.peer_id, None, permit(FOUNDER, ME.peer_id))
    for wrong in (
        permit(FOUNDER, OTHER.peer_id),
        permit(OTHER, ME.peer_id),
        permit(FOUNDER, ME.peer_id, RunId(bytes(32))),
    ):
        with pytest.raises(NotAdmittedError, match="another peer or another run"):
            check_admission(MANIFEST, "allowlist", ME.peer_id, None, wrong)
