"""`ledger leaderboard` and `ledger show --peer`: text for people, JSON for programs, one line for what is wrong."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.crypto import Identity, peer_text
from spes_p2p.ids import RoundNumber
from spes_p2p.node.files import IDENTITY_FILE, LEDGER_FILE, MANIFEST_FILE
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.storage.identity import replace_identity
from spes_p2p.storage.ledger import Ledger, OwnUpdate
from spes_p2p.testing.chains import MadeChain, made_chain, store
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config

Run = Callable[..., Any]
ROUNDS = 12


@pytest.fixture(scope="module")
def chain() -> MadeChain:
    grown = made_chain(4, quick_config(), NUM_PARTS).grow(ROUNDS - 1)
    grown.trains = False  # in the last round nobody's update is included
    return grown.grow(1)


@pytest.fixture
def me(chain: MadeChain) -> Identity:
    return chain.peers[chain.genesis.state.members[0]]


@pytest.fixture
def folder(chain: MadeChain, me: Identity, tmp_path: Path) -> Path:
    path = tmp_path / "node"
    path.mkdir()
    manifest = chain.genesis.run.manifest
    signature = chain.peers[manifest.created_by].sign("run", encode(manifest))
    (path / MANIFEST_FILE).write_bytes(encode(SignedRun(manifest, signature)))
    replace_identity(path / IDENTITY_FILE, me)
    ledger = Ledger(path / LEDGER_FILE)
    store(ledger, chain.genesis, [decode_certificate(data) for data in chain.certificates])
    ledger.record_update(OwnUpdate(round=RoundNumber(ROUNDS), verdict="not included", tokens=900))
    ledger.close()
    return path


def test_leaderboard_ranks_the_peers_of_the_last_rounds(spes_p2p: Run, folder: Path, chain: MadeChain) -> None:
    answer = spes_p2p("ledger", "leaderboard", "--data-dir", folder, "--last", "5")
    assert (answer.code, answer.err) == (0, "")
    title, head, *peers = answer.out.splitlines()
    assert title == "final rounds 8 to 12"
    assert head.split() == ["rank", "peer", "tokens", "updates", "rounds"]
    assert [line.split()[2:] for line in peers] == [["4,000", "4", "5"]] * 4
    found = json.loads(spes_p2p("ledger", "leaderboard", "--data-dir", folder, "--json").out)
    assert (found["first_round"], found["last_round"]) == (1, ROUNDS)
    assert [peer["peer"] for peer in found["peers"]] == [peer_text(peer) for peer in chain.head.state.members]
    assert sum(peer["tokens"] for peer in found["peers"]) == 4 * (ROUNDS - 1) * 1_000


def test_leaderboard_of_two_folders_is_the_same_text(spes_p2p: Run, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in (MANIFEST_FILE, LEDGER_FILE):
        (other / name).write_bytes((folder / name).read_bytes())
    answers = [spes_p2p("ledger", "leaderboard", "--json", "--data-dir", place).out for place in (folder, other)]
    assert answers[0] == answers[1] != ""


def test_leaderboard_counts_no_damaged_ledger(spes_p2p: Run, folder: Path) -> None:
    connection = sqlite3.connect(folder / LEDGER_FILE)
    with connection:
        connection.execute("DELETE FROM certificate WHERE round = 5")
    connection.close()
    answer = spes_p2p("ledger", "leaderboard", "--data-dir", folder)
    assert (answer.code, answer.out) == (6, "")
    assert answer.err.splitlines()[0] == "round 5: its certificate is missing"


def test_show_of_me_says_what_became_of_every_round(spes_p2p: Run, folder: Path, me: Identity) -> None:
    answer = spes_p2p("ledger", "show", "--peer", "me", "--data-dir", folder)
    assert (answer.code, answer.err) == (0, "")
    head, *rounds, last = answer.out.splitlines()
    assert head.split() == ["round", "tokens", "shards", "update"]
    assert rounds[0].split() == ["1", "1,000", "0,4", "accepted"]
    assert rounds[-1].split() == ["12", "0", "-", "not", "included", "(alive)"]
    assert last == "11 of 12 rounds with an accepted update, 11,000 tokens"
    found = json.loads(spes_p2p("ledger", "show", "--peer", "me", "--json", "--data-dir", folder).out)
    assert found["peer"] == me.text
    assert [one["verdict"] for one in found["rounds"]] == ["accepted"] * 11 + ["not included"]
    assert found["rounds"][3]["shards"] == [0, 4]


def test_show_finds_a_peer_by_the_end_of_its_id(spes_p2p: Run, folder: Path, chain: MadeChain) -> None:
    other = peer_text(chain.genesis.state.members[1])
    for wanted in (other, other[-8:], f"…{other[-8:]}"):
        found = json.loads(spes_p2p("ledger", "show", "--peer", wanted, "--json", "--data-dir", folder).out)
        assert found["peer"] == other
        assert found["rounds"][-1]["verdict"] == ""
    stranger = Identity.from_seed(b"s" * 32).text
    answer = spes_p2p("ledger", "show", "--peer", stranger, "--data-dir", folder)
    assert answer.out == "no certified round names this peer\n"


@pytest.mark.parametrize(
    ("peer", "words"), [("zzzz", "no certified round names such a peer"), ("x", "--peer x"), ("", "--peer")]
)
def test_show_names_a_peer_that_nobody_knows(spes_p2p: Run, folder: Path, peer: str, words: str) -> None:
    answer = spes_p2p("ledger", "show", "--peer", peer, "--data-dir", folder)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err and len(answer.err.splitlines()) == 1


def test_show_of_me_without_a_key_ends_with_6(spes_p2p: Run, folder: Path) -> None:
    (folder / IDENTITY_FILE).unlink()
    answer = spes_p2p("ledger", "show", "--peer", "me", "--data-dir", folder)
    assert answer.code == 6 and IDENTITY_FILE in answer.err
