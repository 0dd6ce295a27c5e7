import math

import pytest
import torch
import torch.nn.functional as F

from spes_p2p.model.init import initial_psi
from spes_p2p.model.transformer import Transformer
from spes_p2p.testing.training import TINY_MODEL, genesis_shards, tiny_documents, tiny_run
from spes_p2p.training.evaluate import evaluate, evaluate_weights
from spes_p2p.training.tokenizer import ByteTokenizer

CONFIG = tiny_run()


def model() -> Transformer:
    model = Transformer.build(TINY_MODEL)
    model.load(initial_psi(TINY_MODEL, 0))
    for _, tensors in genesis_shards(CONFIG):
        model.load(tensors)
    return model


def test_a_model_that_knows_nothing_needs_log_256_nats_per_byte():
    result = evaluate(Transformer.build(TINY_MODEL), tiny_documents(), ByteTokenizer(), 16)
    assert result.nats_per_byte == pytest.approx(math.log(256), rel=1e-6)
    assert result.num_bytes == sum(map(len, tiny_documents()))


def test_every_byte_is_predicted_once_from_its_sequence():
    documents = (b"hello there", b"abc")
    stream = torch.tensor(list(b"\0hello there\0abc"))
    net = model()
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(stream) - 1, 4):
            inputs, targets = stream[first : first + 4], stream[first + 1 : first + 5]
            inputs = inputs[: len(targets)]
            losses = F.cross_entropy(net(inputs[None])[0][0], targets, reduction="none")
            nats += sum(loss.item() for loss, target in zip(losses, targets, strict=True) if target != 0)
    result = evaluate(net, documents, ByteTokenizer(), 4, batch_sequences=3)
    assert result.nats_per_byte == pytest.approx(nats / 14, rel=1e-5)


def test_batches_do_not_change_the_result():
    net = model()
    results = [evaluate(net, tiny_documents(), ByteTokenizer(), 16, batch_sequences=b).nats_per_byte for b in (1, 5)]
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_bound_uses_the_first_documents_that_fit_and_at_least_one():
    net, documents = model(), tiny_documents()
    size = len(documents[0]) + len(documents[1])
    assert evaluate(net, documents, ByteTokenizer(), 16, max_bytes=size).num_bytes == size
    assert evaluate(net, documents, ByteTokenizer(), 16, max_bytes=size - 1).num_bytes == len(documents[0])
    assert evaluate(net, documents, ByteTokenizer(), 16, max_bytes=1).num_bytes == len(documents[0])


def test_weights_are_evaluated_as_a_model_that_holds_them():
    expected = evaluate(model(), tiny_documents(), ByteTokenizer(), 16, 2)
    got = evaluate_weights(CONFIG, initial_psi(TINY_MODEL, 0), genesis_shards(CONFIG), tiny_documents())
    assert got == expected


def test_nothing_to_evaluate_on_is_an_error():
    with pytest.raises(ValueError, match="no documents"):
        evaluate(model(), (), ByteTokenizer(), 16)
