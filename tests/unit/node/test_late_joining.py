"""Whole nodes that join a run, or come back to it, when it is hundreds of rounds old."""

from __future__ import annotations

import re
from pathlib import Path

from spes_p2p.errors import LocalStateError
from spes_p2p.node.audit import audit
from spes_p2p.node.files import LEDGER_FILE
from spes_p2p.node.history import read_gaps, read_history, read_manifest
from spes_p2p.node.sizes import piece_sizes
from spes_p2p.protocol.codec import decode_certificate
from spes_p2p.protocol.head import genesis_head
from spes_p2p.storage.ledger import Ledger
from spes_p2p.testing.chains import MadeChain, store
from spes_p2p.testing.nodes import NodeSwarm, node_swarm


def chain_of(swarm: NodeSwarm, founder: str, num_rounds: int) -> MadeChain:
    """Rounds in which the founder did nothing but live."""
    signed = read_manifest(swarm.data_dir(founder))
    if signed is None:
        raise LocalStateError("no manifest")
    identity = swarm.identity(founder)
    genesis = genesis_head(signed.manifest, piece_sizes(swarm.config))
    return MadeChain(genesis, {identity.peer_id: identity}, trains=False).grow(num_rounds)


def give(swarm: NodeSwarm, name: str, chain: MadeChain, num_rounds: int) -> None:
    """Put the first rounds of a chain into a node's ledger, before it starts."""
    ledger = Ledger(swarm.data_dir(name) / LEDGER_FILE)
    store(ledger, chain.genesis, [decode_certificate(data) for data in chain.certificates[:num_rounds]])
    ledger.close()


async def test_a_joiner_at_round_200_checks_the_whole_chain_and_becomes_a_member(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(["ada"])
        give(swarm, "ada", chain_of(swarm, "ada", 200), 200)
        ada = await swarm.start("ada")
        dan = await swarm.start("dan", manifest_from="ada")
        assert dan.round >= 200  # before its first message
        begun = re.fullmatch(r"checking round 1 of (\d+)", dan.notes[0])
        assert begun is not None and int(begun[1]) >= 200  # rounds may be over by then
        swarm.introduce()
        await swarm.wait(lambda: dan.driver.machine.is_member, "membership")
        reached = dan.round
        await swarm.wait(lambda: all(reached in node.history() for node in (ada, dan)), "that round in both ledgers")
        assert ada.history()[reached] == dan.history()[reached]
        rounds = sorted(dan.history())
        assert rounds == list(range(1, rounds[-1] + 1))
        found = audit(swarm.data_dir("dan"))
        assert (found.problem, found.skipped) == (None, [])
        assert found.num_checked >= reached


async def test_a_member_that_was_away_for_long_skips_and_goes_on_training(tmp_path: Path) -> None:
    async with node_swarm(tmp_path / "swarm") as swarm:
        swarm.create(["ada"])
        chain = chain_of(swarm, "ada", 1_200)
        give(swarm, "ada", chain, 1_200)
        ada = await swarm.start("ada")
        swarm.identity("dan")
        give(swarm, "dan", chain, 100)
        dan = await swarm.start("dan", manifest_from="ada")
        assert dan.round >= 1_200
        swarm.introduce()
        skipped_to = min(number for number in dan.history() if number > 100)
        await swarm.wait(lambda: skipped_to + 1 in dan.history(), "a round that the machine followed")
        await swarm.kill("dan")
        ((first, last),) = read_gaps(swarm.data_dir("dan"))
        assert (first, last) == (101, skipped_to)
        assert last >= 1_200
        history = read_history(swarm.data_dir("dan"))
        assert [record.round for record in history[:101]] == [*range(1, 101), last + 1]
        dan = await swarm.start("dan")
        swarm.introduce()
        await swarm.wait(lambda: "accepted" in [one.verdict for one in dan.tools.sync.updates.latest(9)], "an update")
        common = ada.history().keys() & dan.history().keys()
        assert {number: ada.history()[number] for number in common} == {n: dan.history()[n] for n in common}
        assert min(number for number in common if number > 101) == last
        found = audit(swarm.data_dir("dan"))
        assert (found.problem, found.skipped) == (None, [(101, last)])
