"""When the holder of the recovery key begins a new epoch, by itself or because it is told to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.ids import PeerId
from spes_p2p.ports import Signer
from spes_p2p.protocol.body import Certificate
from spes_p2p.protocol.context import Context
from spes_p2p.protocol.head import Head, Terms
from spes_p2p.protocol.params import RECOVERY_MS
from spes_p2p.protocol.recovery import recover, sign_recovery

SPLIT = "the run has split: a recovery has begun a new epoch that is not on top of what this node has seen final"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a recovery would do."""

    keeps: tuple[PeerId, ...]
    """Members of the new epoch, by peer id."""
    time_left_ms: int | None
    """Until it happens by itself; None: it does not."""


class Rescue:
    """`key`: None for a peer that does not hold one."""

    def __init__(self, key: Signer | None) -> None:
        self._key = key
        self._said_split = False
        self.troubled_at_ms: int | None = None
        """Since when no final certificate has been in sight: the tip is tentative, or the run waits."""

    def watch(self, head: Head, halted: str, now_ms: int) -> None:
        """Note whether the run is in trouble."""
        if head.is_final and not halted:
            self.troubled_at_ms = None
        elif self.troubled_at_ms is None:
            self.troubled_at_ms = now_ms

    def say_split(self, context: Context) -> None:
        """Tell a person, once."""
        if not self._said_split:
            self._said_split = True
            context.notify(SPLIT, "error")

    def due_ms(self, context: Context) -> int | None:
        """When this peer makes a new epoch by itself."""
        if self.troubled_at_ms is None or self._own_key(context) is None or not context.is_member:
            return None
        return self.troubled_at_ms + RECOVERY_MS if context.terms.config.protocol.recovers_by_itself else None

    def due(self, context: Context, heard: frozenset[PeerId]) -> Certificate | None:
        """The certificate of a new epoch, once it is due: with the voters that are heard, and the members that do not
        vote and were in the last cut."""
        due_ms = self.due_ms(context)
        if due_ms is None or context.now_ms < due_ms:
            return None
        return self.wanted(context, None, heard)

    def outlook(self, context: Context, heard: frozenset[PeerId], now_ms: int) -> Outlook | None:
        """What a recovery would do now; None: there is no case for it here."""
        if self.troubled_at_ms is None or self._own_key(context) is None or not context.is_member:
            return None
        due_ms = self.due_ms(context)
        left_ms = None if due_ms is None else max(0, due_ms - now_ms)
        return Outlook(keeps=tuple(sorted(_kept(context, None, heard))), time_left_ms=left_ms)

    def wanted(self, context: Context, keep: Iterable[PeerId] | None, heard: frozenset[PeerId]) -> Certificate | None:
        """The certificate of a new epoch with these members and this peer, None: with those that are heard; None if
        there is no case for it."""
        key = self._own_key(context)
        if key is None:
            context.notify("this node does not hold the run's recovery key", "error")
            return None
        if self.troubled_at_ms is None or not context.is_member:
            context.notify("a recovery is for a run that cannot go on: this one can", "error")
            return None
        kept = _kept(context, keep, heard)
        head = context.terms.head
        context.notify(f"recovery: epoch {head.epoch + 1} begins with {len(kept)} members", "warning")
        return sign_recovery(recover(Terms(head), kept), key)

    def _own_key(self, context: Context) -> Signer | None:
        key = self._key
        return key if key is not None and key.peer_id == context.terms.head.run.manifest.recovery_key else None


def _kept(context: Context, keep: Iterable[PeerId] | None, heard: frozenset[PeerId]) -> set[PeerId]:
    """Members of the new epoch: those that are named, or else the voters that are heard and the members that do not
    vote and were in the last cut; and this peer."""
    terms = context.terms
    chosen = set(heard | (terms.live - set(terms.all_voters))) if keep is None else set(keep)
    return (chosen | {context.me}) & set(terms.members)
