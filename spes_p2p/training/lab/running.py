"""One experiment, from its text to its curve."""

from __future__ import annotations

import time
from collections.abc import Callable

from spes_p2p.config import MergeConfig, OuterConfig, RunConfig
from spes_p2p.digests import digest
from spes_p2p.ports import BlobStore
from spes_p2p.training.data import TokenStream
from spes_p2p.training.evaluate import evaluate_weights
from spes_p2p.training.lab.experiment import Experiment, Outcome, Point
from spes_p2p.training.lab.swarms import Alone, Pairs, Replicas, Spes, Swarm
from spes_p2p.training.lab.texts import DealtTexts, deal, in_pieces
from spes_p2p.training.tokenizer import ByteTokenizer


def conduct(
    experiment: Experiment, store: BlobStore, on_point: Callable[[Point], None] = lambda point: None
) -> Outcome:
    """Train to the end of the schedule and evaluate on the way. `store` is filled with the blobs of SPES.

    Raises DataError if this machine has too little text.
    """
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    config = experiment.run.model_copy(update={"seed": experiment.seed})
    texts = deal(
        experiment.text, experiment.num_peers, experiment.seed, experiment.text_bytes, experiment.run.held_out_bytes
    )
    texts = in_pieces(texts, experiment.document_bytes)
    swarm = make_swarm(experiment, config, store, texts)
    training = config.training
    curve: list[Point] = []
    step, evaluated = 0, 0
    while step < training.total_steps:
        num_steps = min(training.inner_steps_at(step), training.total_steps - step)
        swarm.round(num_steps)
        step += num_steps
        if step - evaluated < experiment.evaluate_every and step < training.total_steps:
            continue
        evaluated = step
        loss = evaluate_weights(config, *swarm.weights(), texts.held_out).nats_per_byte
        tokens = step * training.batch_tokens * experiment.num_peers
        curve.append(Point(step=step, tokens=tokens, nats_per_byte=loss))
        on_point(curve[-1])
    return Outcome(
        experiment=experiment,
        curve=tuple(curve),
        cpu_seconds=round(time.process_time() - began_cpu_s, 1),
        wall_seconds=round(time.monotonic() - began_s, 1),
    )


def make_swarm(experiment: Experiment, config: RunConfig, store: BlobStore, texts: DealtTexts) -> Swarm:
    """The swarm of an experiment, before its first round."""
    streams = [
        TokenStream(documents, ByteTokenizer(), digest("spes lab data", experiment.seed, peer))
        for peer, documents in enumerate(texts.peers)
    ]
    match experiment.method:
        case "centralised":
            return Alone(config, streams)
        case "fedavg":
            return Replicas(config, streams)
        case "diloco":
            return Replicas(with_outer_step(config, experiment.outer), streams)
        case "noloco":
            return Pairs(config, streams, experiment.owners_per_shard, experiment.pair)
        case "spes-nesterov":
            config = with_outer_step(config, experiment.outer)
            return Spes(config, store, streams, experiment.owners_per_shard)
        case "spes":
            return Spes(config, store, streams, experiment.owners_per_shard)
        case "spes-no-merge":
            return Spes(without_merge(config), store, streams, experiment.owners_per_shard)


def with_outer_step(config: RunConfig, outer: OuterConfig) -> RunConfig:
    """The same run with another outer step."""
    training = config.training.model_copy(update={"outer": outer})
    return config.model_copy(update={"training": training})


def without_merge(config: RunConfig) -> RunConfig:
    """The same run without the merge warm-up."""
    training = config.training.model_copy(update={"merge": MergeConfig(alpha=0)})
    return config.model_copy(update={"training": training})
