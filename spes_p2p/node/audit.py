"""Verifying a ledger from the run manifest on, offline: every hash, every quorum, every gap, and who gave what.

The node believes its own ledger; this believes nothing of it but the manifest, whose hash is the run id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.crypto import verify
from spes_p2p.errors import LocalStateError, RemoteProtocolError
from spes_p2p.ids import Digest, RoundNumber
from spes_p2p.node.contributions import Contributions
from spes_p2p.node.files import LEDGER_FILE
from spes_p2p.node.history import not_joined, read_manifest, sizes_of_nothing
from spes_p2p.node.stored import LAST_ROUND, behind, decode_waypoint, tables_of, tip_branch
from spes_p2p.node.verifying import Verification
from spes_p2p.protocol.body import Body
from spes_p2p.protocol.chain import Link, next_link
from spes_p2p.protocol.codec import body_hash, decode_certificate, encode
from spes_p2p.protocol.head import Head, genesis_head
from spes_p2p.protocol.questions import decode_state
from spes_p2p.protocol.skip import anchor_of, head_at, retrace
from spes_p2p.protocol.wire import NO_DIGEST
from spes_p2p.storage.ledger import Gap, Ledger, LedgerEntry

_BATCH = 64
"""Certificates whose signatures are verified together."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """What a verification found."""

    run_id: str
    head: Head
    """The newest certificate that is good."""
    num_checked: int = 0
    """Certificates that were verified one by one."""
    num_tentative: int = 0
    """Tentative ones among them."""
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """(first, last) of rounds that were skipped, and are vouched for by the skip rule."""
    contributions: Contributions = field(default_factory=Contributions)
    problem_round: int | None = None
    problem: str | None = None
    """What is wrong at `problem_round`; None: nothing."""


class _WrongError(Exception):
    """Something is wrong at a round."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number = number
        self.problem = problem


def audit(data_dir: Path, follow: Callable[[Head, Body, Head], None] = lambda before, body, after: None) -> Audit:
    """Verify the ledger of a data folder. What is wrong with the chain is in the result. `follow` is called with (head
    before, body, head after) of every certificate that was verified, in order.

    Raises UsageError if the folder has joined no run, LocalStateError if a file cannot be read at all.
    """
    signed = read_manifest(data_dir)
    if signed is None:
        raise not_joined(data_dir)
    genesis = genesis_head(signed.manifest, sizes_of_nothing(signed.manifest))
    found = Audit(run_id=genesis.run.run_id.hex(), head=genesis)
    if not (data_dir / LEDGER_FILE).exists():
        return found
    ledger = Ledger(data_dir / LEDGER_FILE)
    verification = Verification(verify)
    try:
        _Auditor(ledger, verification, found, follow).run()
    except _WrongError as wrong:
        found.problem_round, found.problem = wrong.number, wrong.problem
    finally:
        verification.close()
        ledger.close()
    return found


class _Auditor:
    def __init__(
        self,
        ledger: Ledger,
        verification: Verification,
        found: Audit,
        follow: Callable[[Head, Body, Head], None],
    ) -> None:
        self._follow_link = follow
        self._ledger = ledger
        self._verification = verification
        self._found = found
        self._followed = found.head
        """The newest certificate that fits, its signatures not verified yet."""
        self._links: list[Link] = []

    def run(self) -> None:
        """Raises _WrongError at the first round that is wrong."""
        gaps = {gap.from_round: gap for gap in self._ledger.gaps()}
        for entry in self._entries():
            gap = gaps.get(RoundNumber(self._followed.round))
            if gap is not None and gap.to_round == entry.round:
                self._settle()
                self._cross(gap, entry)
                continue
            self._follow(entry)
            if len(self._links) == _BATCH:
                self._settle()
        self._settle()
        self._ledger.check()

    def _entries(self) -> Iterator[LedgerEntry]:
        try:
            for entry in self._ledger.range(RoundNumber(0), LAST_ROUND):
                if entry.round != self._followed.round + 1:
                    yield from behind(self._ledger, Digest(_via(entry)), self._followed.hash)
                yield entry
            yield from tip_branch(self._ledger, self._followed.hash)
        except RemoteProtocolError as error:
            self._settle()
            raise _WrongError(self._followed.round + 1, error.reason) from error
        except LocalStateError as error:
            self._settle()
            raise _WrongError(self._followed.round + 1, str(error).splitlines()[0]) from error

    def _follow(self, entry: LedgerEntry) -> None:
        number = self._followed.round + 1
        if entry.round != number:
            self._settle()
            raise _WrongError(number, "its certificate is missing")
        try:
            _check_columns(entry)
            link = next_link(self._followed, entry.certificate)
            self._check_tables(link.after)
        except RemoteProtocolError as error:
            self._settle()
            raise _WrongError(number, error.reason) from error
        self._links.append(link)
        self._followed = link.after

    def _check_tables(self, head: Head) -> None:
        kept = self._ledger.tables_before(head.round) if tables_of(head) else None
        if kept is not None and kept[0] == head.hash and kept[1] != tables_of(head):
            raise RemoteProtocolError(None, "the tables kept beside it are not those that follow from it")

    def _settle(self) -> None:
        """Verify the signatures of what was followed, and count it."""
        links, self._links = self._links, []
        try:
            self._verification.check([check for link in links for check in link.checks])
        except RemoteProtocolError:
            self._settle_one_by_one(links)
            return
        for link in links:
            self._count(link)

    def _settle_one_by_one(self, links: Sequence[Link]) -> None:
        for link in links:
            try:
                self._verification.check(link.checks)
            except RemoteProtocolError as error:
                raise _WrongError(link.after.round, error.reason) from error
            self._count(link)

    def _count(self, link: Link) -> None:
        self._found.contributions.add(link.before, link.certificate.body, link.after)
        self._follow_link(link.before, link.certificate.body, link.after)
        self._found.head = link.after
        self._found.num_checked += 1
        self._found.num_tentative += not link.after.is_final

    def _cross(self, gap: Gap, entry: LedgerEntry) -> None:
        """From one side of a gap to the other."""
        before = self._found.head
        try:
            path = tuple(map(decode_waypoint, gap.waypoints))
            anchor, checks = retrace(anchor_of(before), path)
            self._verification.check(checks)
            _check_columns(entry)
            kept = self._ledger.tables_before(gap.to_round)
            if kept is None or not kept[0] == entry.hash == anchor.hash:
                raise RemoteProtocolError(None, "the certificate after the skipped rounds is another one")
            after = head_at(before.run, path[-1], decode_state(kept[1]))
        except RemoteProtocolError as error:
            raise _WrongError(entry.round, error.reason) from error
        self._found.skipped.append((before.round + 1, after.round))
        self._found.head = self._followed = after


def _via(entry: LedgerEntry) -> bytes:
    try:
        return decode_certificate(entry.certificate).body.via
    except RemoteProtocolError:
        return NO_DIGEST  # told when it is followed


def _check_columns(entry: LedgerEntry) -> None:
    """Raises RemoteProtocolError unless what the ledger has of one certificate belongs together."""
    certificate = decode_certificate(entry.certificate)
    whole = (encode(certificate.body), body_hash(certificate.body), certificate.merge_lists)
    if whole != (entry.body, entry.hash, entry.attachments):
        raise RemoteProtocolError(None, "its hash, its body and its certificate are not of one piece")
