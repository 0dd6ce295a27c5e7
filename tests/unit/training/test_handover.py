from dataclasses import replace

import numpy as np
import pytest

from spes_p2p.digests import digest
from spes_p2p.errors import NotFiniteError, SchemaError
from spes_p2p.node.sizes import handover_bytes
from spes_p2p.testing.training import (
    TINY_MODEL,
    genesis_round,
    genesis_shards,
    tiny_documents,
    tiny_run,
    tiny_trainer,
)
from spes_p2p.training.codecs import decode_expert_blob, encode_expert_blob
from spes_p2p.training.data import TokenStream
from spes_p2p.training.handover import export_handover, import_handover, read_handover
from spes_p2p.training.tokenizer import ByteTokenizer
from spes_p2p.training.trainer import Trainer

CONFIG = tiny_run()
WIDE = tiny_run(model=TINY_MODEL.model_copy(update={"width": 64, "expert_width": 72}))
"""Its experts' weights are large enough for 8-bit moments."""


def leaver() -> Trainer:
    trainer = tiny_trainer()
    trainer.load_start(genesis_round(CONFIG, (1,)))
    trainer.train(3)
    return trainer


def certified(trainer: Trainer, config=CONFIG):
    """The shard's values as its blob has them."""
    return decode_expert_blob(config, 1, encode_expert_blob(config, 1, trainer.trained(1)))


def successor(row, owned=(0, 1)) -> Trainer:
    trainer = tiny_trainer(seed=1)
    shards = dict(genesis_shards(CONFIG)) | {1: row}
    trainer.load_start(replace(genesis_round(CONFIG, owned), round=5, shards=shards.items()))
    return trainer


def test_its_size_is_known_before_it_is_made():
    assert len(export_handover(leaver(), 1)) == handover_bytes(CONFIG, 1)


def test_a_successor_goes_on_with_masters_and_moments_of_the_leaver():
    old = leaver()
    row = certified(old)
    new = successor(row)
    assert import_handover(new, 1, export_handover(old, 1), row) is None
    for name, master in old.trained(1).items():
        np.testing.assert_allclose(new.trained(1)[name], master, rtol=0, atol=1e-8)
        moments = new.optimizer.moments([name])[name]
        np.testing.assert_array_equal(moments.square, old.optimizer.moments([name])[name].square)
        assert moments.num_steps == 3


@pytest.mark.parametrize(("giver", "taker"), [("int8", "fp32"), ("fp32", "int8"), ("int8", "int8")])
def test_a_shard_passes_between_trainers_of_both_formats_of_moments(giver, taker):
    def trainer(moments) -> Trainer:
        made = Trainer(WIDE, TokenStream(tiny_documents(), ByteTokenizer(), digest("tiny", 0)), moments=moments)
        made.load_start(genesis_round(WIDE, (1,)))
        return made

    old, new = trainer(giver), trainer(taker)
    old.train(3)
    row = decode_expert_blob(WIDE, 1, encode_expert_blob(WIDE, 1, old.trained(1)))
    blob = export_handover(old, 1)
    assert len(blob) == len(export_handover(trainer("fp32"), 1))
    assert import_handover(new, 1, blob, row) is None
    names = list(old.trained(1))
    given, taken = old.optimizer.moments(names), new.optimizer.moments(names)
    for name in names:
        assert taken[name].num_steps == 3
        if (giver, taker) == ("fp32", "int8"):
            assert np.linalg.norm(taken[name].mean - given[name].mean) < 0.02 * np.linalg.norm(given[name].mean)
        else:
            np.testing.assert_array_equal(taken[name].mean, given[name].mean)
            np.testing.assert_array_equal(taken[name].square, given[name].square)


def test_a_refused_hand_over_leaves_start_and_no_moments():
    old = leaver()
    row = certified(old)
    new = successor(row)
    reason = import_handover(new, 1, b"nonsense", row)
    assert "bytes instead of" in reason
    assert all(np.array_equal(new.trained(1)[name], row[name]) for name in row)
    assert new.optimizer.moments() == {}


def test_a_master_that_was_not_published_is_refused():
    old = leaver()
    row = {name: values + np.float32(0.01) for name, values in certified(old).items()}
    with pytest.raises(SchemaError, match="not what was published"):
        read_handover(CONFIG, 1, export_handover(old, 1), row)


def test_under_the_fp32_codec_the_master_is_the_published_value():
    config = tiny_run(codecs={"expert": "fp32", "psi": "fp32"})
    old = tiny_trainer(config)
    old.load_start(genesis_round(config, (1,)))
    old.train(1)
    data, row = export_handover(old, 1), certified(old, config)
    read_handover(config, 1, data, row)
    row["layers.0.experts.1.up"][0, 0] += np.float32(1e-6)
    with pytest.raises(SchemaError, match="not what was published"):
        read_handover(config, 1, data, row)


@pytest.mark.parametrize(("value", "error"), [(np.nan, NotFiniteError), (np.inf, NotFiniteError), (-1.0, SchemaError)])
def test_bad_moments_are_refused(value, error):
    old = leaver()
    name = "layers.1.experts.1.down"
    moments = old.optimizer.moments([name])[name]
    moments.square[0, 0] = value
    old.optimizer.load_moments({name: moments})
    with pytest.raises(error):
        read_handover(CONFIG, 1, export_handover(old, 1), certified(old))


def test_a_hand_over_of_another_shard_is_refused():
    old = leaver()
    with pytest.raises(SchemaError):
        read_handover(CONFIG, 2, export_handover(old, 1), certified(old))


def test_a_shard_of_others_cannot_be_handed_over():
    with pytest.raises(ValueError, match="not owned"):
        export_handover(leaver(), 0)
