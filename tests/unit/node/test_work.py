"""The node's own arithmetic on blobs, and what a manifest must say of a piece before a byte is fetched."""

from __future__ import annotations

import pytest

from spes_p2p.config import OuterConfig
from spes_p2p.errors import MachineError
from spes_p2p.node import work as work_module
from spes_p2p.node.sizes import EXPERT_CODECS, PSI_CODECS, expert_blob_bytes, piece_sizes, psi_piece_bytes
from spes_p2p.node.work import Work
from spes_p2p.protocol.body import BlobShare
from spes_p2p.protocol.codec import pack_float
from spes_p2p.protocol.messages import Piece
from spes_p2p.protocol.wire import NO_DIGEST, PieceKind, RefusalReason
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.testing.training import TINY_TRAINING, tiny_run, tiny_trainer
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.publish import publish
from spes_p2p.training.start import StartReader
from spes_p2p.training.trainer import RoundStart

CONFIG = tiny_run()


def expert_piece(**changes: object) -> Piece:
    fields = {
        "kind": PieceKind.EXPERT, "index": 0, "blob": NO_DIGEST, "size_bytes": expert_blob_bytes(CONFIG, 0),
        "codec": EXPERT_CODECS[CONFIG.codecs.expert], "base_row": NO_DIGEST, "squared_norm": pack_float(1.0),
    }  # fmt: skip
    return Piece(**(fields | changes))


def test_size_and_codec_are_judged_before_anything_is_fetched() -> None:
    work = Work(CONFIG, MemoryBlobs())
    psi = expert_piece(kind=PieceKind.PSI, size_bytes=psi_piece_bytes(CONFIG, 0), codec=PSI_CODECS[CONFIG.codecs.psi])
    assert work.refuse_unseen(expert_piece()) is None
    assert work.refuse_unseen(psi) is None
    assert work.refuse_unseen(expert_piece(size_bytes=expert_blob_bytes(CONFIG, 0) + 1)) is RefusalReason.SCHEMA
    assert work.refuse_unseen(expert_piece(codec=EXPERT_CODECS["fp32"])) is RefusalReason.SCHEMA
    work.close()


@pytest.mark.parametrize("rule", ["mean", "nesterov"])
def test_sizes_are_those_of_the_blobs_of_genesis(rule: str) -> None:
    store = MemoryBlobs()
    config = tiny_run(training=TINY_TRAINING.model_copy(update={"outer": OuterConfig(rule=rule)}))
    genesis, sizes = make_genesis(config, store), piece_sizes(config)
    assert max(store.size_bytes(part) for part in genesis.parts) == sizes.part_result_bytes
    assert {store.size_bytes(shard) for shard in genesis.shards} == {sizes.expert_blob_bytes}
    assert (len(genesis.parts), len(genesis.shards)) == (sizes.num_parts, sizes.num_shards)


async def test_update_of_a_trainer_is_accepted_and_one_with_another_norm_is_not() -> None:
    store = MemoryBlobs()
    genesis = make_genesis(CONFIG, store)
    trainer, reader = tiny_trainer(CONFIG), StartReader(CONFIG, store, genesis_start(genesis))
    trainer.load_start(RoundStart(round=1, global_step=0, psi=reader.psi(), shards=reader.starts(), owned=(0,)))
    trainer.train(2)
    update = publish(trainer, store, reader.row_tensor)
    stored = update.experts[0]
    base = (BlobShare(genesis.shards[0], 1),)
    piece = expert_piece(blob=stored.blob, squared_norm=pack_float(stored.squared_norm))
    wrong = expert_piece(blob=stored.blob, squared_norm=pack_float(2 * stored.squared_norm))
    work = Work(CONFIG, store)
    assert await work.run(lambda: work.check_piece(piece, base, genesis.parts)) is None
    assert await work.run(lambda: work.check_piece(wrong, base, genesis.parts)) is RefusalReason.NORM_MISMATCH
    store.delete(genesis.shards[0])
    assert await work.run(lambda: work.check_piece(piece, base, genesis.parts)) is RefusalReason.MISSING
    work.close()


async def test_threads_that_fail_their_self_test_end_the_node_as_an_unfit_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise MachineError("this process flushes denormal numbers to zero")

    monkeypatch.setattr(work_module, "self_test", fail)
    work = Work(CONFIG, MemoryBlobs())
    with pytest.raises(MachineError, match="denormal"):
        await work.run(lambda: None)
    work.close()
