"""Agreed values do not depend on the process that computes them: threads, hash seed, or whether torch is loaded."""

import os
import subprocess
import sys

PROGRAM = """
import sys
import msgspec, numpy as np
from spes_p2p.config import ModelConfig, ProtocolConfig, RunConfig
from spes_p2p.digests import digest
from spes_p2p.testing.blobs import MemoryBlobs
from spes_p2p.training.genesis import genesis_start, make_genesis
from spes_p2p.training.layout import psi_layout
from spes_p2p.training.pieces import PieceOfCut, aggregate_part, encode_psi_update, zero_residual
from spes_p2p.training.selftest import self_test
from spes_p2p.training.similarity import encode_lists, merge_lists
from spes_p2p.training.start import StartReader

self_test()
config = RunConfig(model=ModelConfig(width=128, num_experts=8, expert_width=128), protocol=ProtocolConfig(parts=4))
store = MemoryBlobs()
spec = genesis_start(make_genesis(config, store))
reader = StartReader(config, store, spec)
lists = encode_lists(merge_lists(config, reader.row_tensor))
merged = StartReader(
    config, store, msgspec.structs.replace(spec, merge_alpha=0.1, merge_lists=lists, receivers=(True,) * 8)
)
layout = psi_layout(config)
pieces = {}
for peer in range(3):
    values = np.random.default_rng(peer).standard_normal(layout.num_values).astype(np.float32)
    for piece, _ in encode_psi_update(config, values, zero_residual(config)):
        pieces.setdefault(piece.index, []).append(PieceOfCut(peer=bytes([peer]), data=piece.data, weight=peer + 1.0))
parts = [aggregate_part(config, part, store.read(spec.parts[part]), pieces[part]) for part in range(layout.num_parts)]
experts = [tensor.tobytes() for _, tensors in merged.starts() for tensor in tensors.values()]
print(digest("all", *spec.parts, lists, *parts, *experts).hex(), "torch" in sys.modules)
"""


def outcome(num_threads: str, hash_seed: str, first: str = "") -> tuple[str, str]:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, num_threads), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", first + PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    digest, torch_loaded = done.stdout.split()
    return digest, torch_loaded


def test_threads_hash_seed_and_torch_change_no_bit() -> None:
    alone, torch_loaded = outcome("1", "1")
    assert torch_loaded == "False"
    assert outcome("2", "2", "import torch\n") == (alone, "True")
