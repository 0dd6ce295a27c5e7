"""`TrainingRounds`: rounds of SPES among several trainers in one process, with the real codecs, means and merge.

What the round protocol decides (who is in the cut, who owns what) the caller says here; what follows from that for
weights, masters and residuals is done as docs/protocol.md, section 7, has it. For experiments and tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from spes_p2p.config import RunConfig
from spes_p2p.ids import Digest, PeerId, RoundNumber
from spes_p2p.ports import BlobStore
from spes_p2p.training.data import TokenStream
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.own_work import MasterRule, ResidualRule
from spes_p2p.training.pieces import PieceOfCut, aggregate_part
from spes_p2p.training.publish import StoredUpdate, publish
from spes_p2p.training.similarity import encode_lists, merge_lists
from spes_p2p.training.start import StartReader, StartSpec
from spes_p2p.training.trainer import RoundStart, Trainer

FIRST_TRAINING_ROUND = 2
"""Round 1 is for claims."""

Row = tuple[tuple[Digest, int], ...]


def peer_of(place: int) -> PeerId:
    """The peer id of the trainer at a place: ids sort as places do."""
    return PeerId(bytes([place]) * 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One trainer's update of one round."""

    update: StoredUpdate
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CutUpdate:
    """One update in a cut."""

    peer: int
    base_round: int
    """The round it was trained in; an earlier one than the cut's is late."""


class TrainingRounds:
    """Several trainers over one blob store, and the state that their certificates would name."""

    def __init__(
        self, config: RunConfig, store: BlobStore, streams: Sequence[TokenStream], owners: Mapping[int, Sequence[int]]
    ) -> None:
        """owners: shard -> places of its owners among `streams`; a shard without is an orphan."""
        self.config = config
        self.store = store
        self.trainers = tuple(Trainer(config, stream) for stream in streams)
        self.owners = {shard: tuple(owners.get(shard, ())) for shard in range(config.num_shards)}
        self.spec = genesis_start(make_genesis(config, store))
        self.round = FIRST_TRAINING_ROUND
        self.published: dict[CutUpdate, Published] = {}
        for place in range(len(self.trainers)):
            self._load(place, None, self.spec)

    def owned_by(self, place: int) -> tuple[int, ...]:
        """Shards of one trainer."""
        return tuple(shard for shard, owners in self.owners.items() if place in owners)

    def train(self, place: int, num_steps: int) -> None:
        """Train one peer from the start of the open round and publish its update."""
        result = self.trainers[place].train(num_steps)
        update = publish(self.trainers[place], self.store, StartReader(self.config, self.store, self.spec).row_tensor)
        self.published[CutUpdate(peer=place, base_round=self.round)] = Published(update=update, tokens=result.tokens)

    def certify(self, cut: Sequence[CutUpdate]) -> StartSpec:
        """End the open round with these updates, at most one of each peer; every trainer loads the new start."""
        before = self.spec
        delivered = {shard for item in cut for shard in self.owned_by(item.peer)}
        step = before.global_step + (self.config.training.inner_steps_at(before.global_step) if cut else 0)
        rows = msgspec.structs.replace(
            before,
            round=RoundNumber(self.round),
            global_step=step,
            parts=tuple(self._part(part, cut) for part in range(psi_layout(self.config).num_parts)),
            shards=tuple(self._row(shard, cut) for shard in range(self.config.num_shards)),
            merge_alpha=0.0,
            merge_lists=b"",
            receivers=(),
        )
        self.spec = rows
        if alpha := self.config.merge_alpha(before.global_step, step):
            lists = merge_lists(self.config, StartReader(self.config, self.store, rows).row_tensor)
            self.spec = msgspec.structs.replace(
                rows,
                merge_alpha=alpha,
                merge_lists=encode_lists(lists),
                receivers=tuple(shard in delivered for shard in range(self.config.num_shards)),
            )
        self.round += 1
        accepted = {item.peer: item.base_round for item in cut}
        for place in range(len(self.trainers)):
            self._load(place, accepted.get(place), before)
        return self.spec

    def _part(self, part: int, cut: Sequence[CutUpdate]) -> Digest:
        previous = self.spec.parts[part]
        if not cut:
            return previous
        pieces = [
            PieceOfCut(
                peer=peer_of(item.peer),
                data=self.store.read(self.published[item].update.psi[part].blob),
                weight=self.published[item].tokens * 0.5 ** (self.round - item.base_round),
            )
            for item in cut
        ]
        return self.store.put(aggregate_part(self.config, part, self.store.read(previous), pieces))

    def _row(self, shard: int, cut: Sequence[CutUpdate]) -> Row:
        fresh = [
            (piece.blob, self.published[item].tokens)
            for item in cut
            for piece in self.published[item].update.experts
            if piece.index == shard
        ]
        return tuple(sorted(fresh)) if fresh else self.spec.shards[shard]

    def _load(self, place: int, accepted_update: int | None, before: StartSpec) -> None:
        masters: dict[int, MasterRule] = {}
        for shard in self.owned_by(place):
            if accepted_update is None:
                masters[shard] = "keep" if self.spec.shards[shard] == before.shards[shard] else "start"
            else:
                masters[shard] = "carry" if len(self.owners[shard]) == 1 else "start"
        residual: ResidualRule = "keep" if accepted_update is None else "advance"
        reader = StartReader(self.config, self.store, self.spec)
        start = RoundStart(
            round=self.round,
            global_step=self.spec.global_step,
            psi=reader.psi_where_it_lies(),
            shards=reader.starts(),
            owned=self.owned_by(place),
            masters=masters,
            residual=residual,
            accepted_update=accepted_update,
        )
        self.trainers[place].load_start(start)
