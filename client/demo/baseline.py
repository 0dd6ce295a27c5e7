"""What the swarm is compared with: one such peer alone, on its own text, owning all shards.

Runs in a process of its own (`python -m spes_p2p.client.demo.baseline RUN.TOML PEER_FOLDER STEPS TEXT...`), as the
peers' trainers did; the first of the texts is the peer's own, and the held-out set is drawn from all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spes_p2p.client.demo.processes import output_of
from spes_p2p.config import RunConfig


def run_baseline(config_file: Path, peer_folder: Path, num_steps: int, texts: Sequence[Path]) -> dict[str, float]:
    """Held-out loss before and after, in nats per byte: `first` and `last`. Raises SpesError if the process fails."""
    arguments = [str(config_file), str(peer_folder), str(num_steps), *map(str, texts)]
    result: dict[str, float] = json.loads(output_of("spes_p2p.client.demo.baseline", arguments, config_file.parent))
    return result


def train_alone(config: RunConfig, peer_folder: Path, num_steps: int, texts: Sequence[Path]) -> dict[str, Any]:
    """Train in this process, from the run's first weights, with the peer's own order of its text."""
    import torch

    from spes_p2p.ids import ShardId
    from spes_p2p.model.init import initial_psi, initial_shard
    from spes_p2p.node.files import IDENTITY_FILE
    from spes_p2p.storage.identity import load_identity
    from spes_p2p.training.data import TokenStream, data_key, load_corpus
    from spes_p2p.training.documents import find_files, read_documents
    from spes_p2p.training.heldout import draw_held_out, held_out_hashes
    from spes_p2p.training.tokenizer import ByteTokenizer
    from spes_p2p.training.trainer import RoundStart, Trainer

    torch.set_num_threads(1)
    documents = [document for file in find_files(texts) for document in read_documents(file)]
    held_out = draw_held_out(documents, config.held_out_bytes, config.seed)
    key = data_key(config.seed, load_identity(peer_folder / IDENTITY_FILE).peer_id)
    corpus = load_corpus([texts[0]], held_out_hashes(held_out), key=key)
    trainer = Trainer(config, TokenStream(corpus.documents, ByteTokenizer(), key))
    shards = [ShardId(shard) for shard in range(config.num_shards)]
    trainer.load_start(
        RoundStart(
            round=1,
            global_step=0,
            psi=initial_psi(config.model, config.seed),
            shards=[
                (shard, initial_shard(config.model, config.experts_per_shard, config.seed, shard)) for shard in shards
            ],
            owned=shards,
        )
    )
    first = trainer.evaluate(held_out).nats_per_byte
    trainer.train(num_steps)
    return {"first": first, "last": trainer.evaluate(held_out).nats_per_byte}


if __name__ == "__main__":
    _, _config_file, _peer, _steps, *_texts = sys.argv
    _config = RunConfig.from_toml(Path(_config_file))
    print(json.dumps(train_alone(_config, Path(_peer), int(_steps), [Path(_text) for _text in _texts])))
