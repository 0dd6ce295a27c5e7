"""`run create`, `identity show`, `ledger show` and `ledger verify` on real files; figures from records."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spes_p2p.client.commands.ledger import record_json, record_line
from spes_p2p.client.demo.config import demo_config, write_toml
from spes_p2p.client.demo.figures import swarm_figures
from spes_p2p.client.demo.texts import deal_texts
from spes_p2p.crypto import Identity
from spes_p2p.errors import NotAdmittedError, SpesError
from spes_p2p.ids import RoundNumber
from spes_p2p.network.link import parse_link
from spes_p2p.node.files import LEDGER_FILE, MANIFEST_FILE
from spes_p2p.node.history import RoundRecord, read_manifest
from spes_p2p.node.joining import check_admission
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.node.stored import entry_of, tables_of
from spes_p2p.protocol.codec import decode_certificate, encode
from spes_p2p.protocol.messages import SignedRun
from spes_p2p.storage.ledger import Gap, Ledger
from spes_p2p.testing.chains import made_chain, store
from spes_p2p.testing.handle import imagined_peer, imagined_snapshot
from spes_p2p.testing.protocol_cases import NUM_PARTS, quick_config

Run = Callable[..., Any]


@pytest.fixture
def created(spes_p2p: Run, tmp_path: Path) -> tuple[Path, str]:
    """Data folder and link of a run with two founders."""
    write_toml(demo_config(2, 3), tmp_path / "run.toml")
    deal_texts([tmp_path / "text"])
    founder = Identity.from_seed(b"f" * 32).text
    folder = tmp_path / "node"
    arguments = ["--data-dir", folder, "--data", tmp_path / "text", "--founder", founder]
    answer = spes_p2p("run", "create", tmp_path / "run.toml", *arguments)
    assert (answer.code, answer.err) == (0, "")
    return folder, answer.out.strip()


def test_created_run_names_its_founders_and_admits_by_its_link(spes_p2p: Run, created: tuple[Path, str]) -> None:
    folder, link = created
    signed = read_manifest(folder)
    assert signed is not None
    me = spes_p2p("identity", "show", "--data-dir", folder).out.strip()
    founders = {Identity.from_seed(b"f" * 32).peer_id}
    invite = parse_link(link)
    assert founders < set(signed.manifest.founders) and len(signed.manifest.founders) == 2
    assert invite.invite_seed is not None
    assert Identity.from_seed(invite.invite_seed).peer_id == signed.manifest.invite_key
    assert me.startswith("12D3KooW")
    assert (folder / "link").read_text().strip() == link


def test_created_run_is_the_last_one_and_has_no_certified_round(spes_p2p: Run, created: tuple[Path, str]) -> None:
    assert spes_p2p("ledger", "show").out == "no certified round yet\n"
    assert json.loads(spes_p2p("ledger", "show", "--json").out) == []


def test_second_run_in_one_folder_is_refused(spes_p2p: Run, created: tuple[Path, str], tmp_path: Path) -> None:
    answer = spes_p2p("run", "create", tmp_path / "run.toml", "--data-dir", created[0])
    assert answer.code == 2
    assert "belongs to a run already" in answer.err


def test_founder_admits_one_peer_to_a_run_with_an_allowlist(spes_p2p: Run, tmp_path: Path) -> None:
    config = demo_config(2, 3)
    allowlist = config.protocol.model_copy(update={"admission": "allowlist"})
    write_toml(config.model_copy(update={"protocol": allowlist}), tmp_path / "run.toml")
    deal_texts([tmp_path / "text"])
    arguments = ["--data-dir", tmp_path / "node", "--data", tmp_path / "text"]
    assert parse_link(spes_p2p("run", "create", tmp_path / "run.toml", *arguments).out).permit is None
    signed, newcomer = read_manifest(tmp_path / "node"), Identity.from_seed(b"n" * 32)
    assert signed is not None
    link = parse_link(spes_p2p("run", "admit", newcomer.text, "--data-dir", tmp_path / "node").out)
    check_admission(signed.manifest, "allowlist", newcomer.peer_id, None, link.permit)
    with pytest.raises(NotAdmittedError):
        check_admission(signed.manifest, "allowlist", Identity.from_seed(b"o" * 32).peer_id, None, link.permit)


def test_run_without_an_allowlist_needs_no_admitting(spes_p2p: Run, created: tuple[Path, str]) -> None:
    answer = spes_p2p("run", "admit", Identity.from_seed(b"n" * 32).text, "--data-dir", created[0])
    assert (answer.code, answer.out) == (2, "")
    assert "its admission is 'invited'" in answer.err


def test_identity_is_made_once_and_private(spes_p2p: Run, tmp_path: Path) -> None:
    first = spes_p2p("identity", "show", "--data-dir", tmp_path, "--json")
    second = spes_p2p("identity", "show", "--data-dir", tmp_path, "--json")
    assert json.loads(first.out) == json.loads(second.out)
    path = Path(json.loads(first.out)["file"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def imagined_record(number: int, **changes: Any) -> RoundRecord:
    record = RoundRecord(
        round=number,
        view=0,
        leader=imagined_peer(number % 3),
        final=True,
        updates=4,
        tokens=1000,
        loss=2.5,
        merge_alpha=0.05 if number % 2 else 0.0,
        owners={0: (imagined_peer(0),), 1: (imagined_peer(1), imagined_peer(2)), 2: ()},
        psi_digest=f"{number:064x}",
        members=tuple(map(imagined_peer, range(4))),
        kept_parts=0,
    )
    return dataclasses.replace(record, **changes)


def imagined_swarm(num_rounds: int) -> tuple[dict[int, list[RoundRecord]], dict[int, NodeSnapshot]]:
    ledgers = {peer: [imagined_record(number) for number in range(1, num_rounds + 1)] for peer in (1, 2)}
    snapshot = imagined_snapshot(number=num_rounds + 1)
    idle = msgspec.structs.replace(snapshot.counters, parts_aggregated=0)
    busy = msgspec.structs.replace(snapshot.counters, parts_aggregated=5)
    return ledgers, {
        1: msgspec.structs.replace(snapshot, counters=busy),
        2: msgspec.structs.replace(snapshot, counters=idle),
    }


def test_figures_come_from_ledgers_and_snapshots() -> None:
    figures = swarm_figures(4, *imagined_swarm(4))
    assert figures == {
        "rounds_certified": 4,
        "tentative": 0,
        "val_loss_first": 5.6,
        "val_loss_last": 5.6 - 0.4 * 4,
        "psi_digest_equal": True,
        "ledgers_equal": True,
        "owners": {"0": imagined_peer(0), "1": [imagined_peer(1), imagined_peer(2)], "2": None},
        "aggregators_used": 1,
        "leaders_used": 3,
        "merges_applied": 2,
        "updates_included": 16,
        "bytes_sent": 24_000_000,
        "bytes_received": 69_000_000,
        "tokens_trained": 4000,
    }


def test_other_bits_on_one_peer_are_seen() -> None:
    ledgers, snapshots = imagined_swarm(3)
    ledgers[2][1] = imagined_record(2, psi_digest="ff" * 32)
    figures = swarm_figures(3, ledgers, snapshots)
    assert (figures["psi_digest_equal"], figures["ledgers_equal"]) == (False, False)


def test_the_same_body_from_another_view_is_the_same() -> None:
    ledgers, snapshots = imagined_swarm(3)
    ledgers[2][1] = imagined_record(2, view=1, leader=imagined_peer(5))
    assert swarm_figures(3, ledgers, snapshots)["ledgers_equal"]


def test_ledger_that_ends_early_is_an_error() -> None:
    ledgers, snapshots = imagined_swarm(3)
    with pytest.raises(SpesError, match="round 3 of 4"):
        swarm_figures(4, ledgers, snapshots)


def test_ledger_line_is_readable_and_its_json_complete() -> None:
    record = imagined_record(7, final=False)
    line = record_line(record)
    assert line.split() == [
        "7",
        "0",
        "…BBBB0001",
        "4",
        "1,000",
        "2.500",
        "0.050",
        "…AAAA0000",
        "…BBBB0001,…CCCC0002",
        "orphan",
        "(tentative)",
    ]
    assert set(record_json(record)) == {field.name for field in dataclasses.fields(RoundRecord)}


# --- ledger verify ---------------------------------------------------------------------------------------------------


@pytest.fixture
def verified(tmp_path: Path) -> Path:
    """Folder of a node that knows 30 rounds of a run."""
    chain = made_chain(4, quick_config(), NUM_PARTS).grow(30)
    manifest = chain.genesis.run.manifest
    signature = chain.peers[manifest.created_by].sign("run", encode(manifest))
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / MANIFEST_FILE).write_bytes(encode(SignedRun(manifest, signature)))
    ledger = Ledger(folder / LEDGER_FILE)
    store(ledger, chain.genesis, [decode_certificate(data) for data in chain.certificates])
    ledger.close()
    return folder


def test_verify_prints_what_everybody_gave_and_writes_it_as_json(spes_p2p: Run, verified: Path, tmp_path: Path) -> None:
    answer = spes_p2p("ledger", "verify", "--data-dir", verified, "--json", tmp_path / "verified.json")
    assert (answer.code, answer.err) == (0, "")
    first, head, *peers = answer.out.splitlines()
    assert first == "30 certificates verified, the newest of round 30"
    assert head.split() == ["peer", "rounds", "updates", "tokens", "refused", "shards", "trained"]
    assert [line.split()[1:5] for line in peers] == [["30", "30", "30,000", "-"]] * 4
    found = json.loads((tmp_path / "verified.json").read_text())
    assert (found["ok"], found["problem"], found["last_round"], found["rounds_checked"]) == (True, None, 30, 30)
    assert found["rounds_skipped"] == []
    assert [peer["tokens"] for peer in found["peers"]] == [30_000] * 4
    assert sorted(shard for peer in found["peers"] for shard in peer["shards"]) == list(range(8))


def test_verify_refuses_a_json_file_in_what_is_no_folder(spes_p2p: Run, verified: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = spes_p2p("ledger", "verify", "--data-dir", verified, "--json", tmp_path / "file" / "verified.json")
    assert (answer.code, answer.out) == (2, "")
    assert f"{tmp_path / 'file'} is a file, not a folder" in answer.err


def test_verify_names_the_round_of_a_missing_certificate_and_ends_with_6(
    spes_p2p: Run, verified: Path, tmp_path: Path
) -> None:
    connection = sqlite3.connect(verified / LEDGER_FILE)
    with connection:
        connection.execute("DELETE FROM certificate WHERE round = 17")
    connection.close()
    answer = spes_p2p("ledger", "verify", "--data-dir", verified, "--json", tmp_path / "verified.json")
    assert answer.code == 6
    assert answer.err.splitlines()[0] == "round 17: its certificate is missing"
    assert answer.out.splitlines()[0] == "16 certificates verified, the newest of round 16"
    found = json.loads((tmp_path / "verified.json").read_text())
    assert (found["ok"], found["problem_round"]) == (False, 17)


def test_verify_of_a_run_that_has_begun_no_round_has_nothing_to_say(spes_p2p: Run, created: tuple[Path, str]) -> None:
    answer = spes_p2p("ledger", "verify")
    assert (answer.code, answer.out) == (0, "no certified round yet: there is nothing to verify\n")


def test_verify_of_a_folder_without_a_run_is_refused(spes_p2p: Run, tmp_path: Path) -> None:
    answer = spes_p2p("ledger", "verify", "--data-dir", tmp_path)
    assert answer.code == 2
    assert "has joined no run" in answer.err


def test_verify_help_shows_an_example(spes_p2p: Run) -> None:
    assert "spes-p2p ledger verify --data-dir ./a --json verified.json" in spes_p2p("ledger", "verify", "--help").out


def test_show_names_the_rounds_that_were_skipped(spes_p2p: Run, verified: Path) -> None:
    chain = made_chain(4, quick_config(), NUM_PARTS)
    chain.keep_heads = True
    chain.grow(40)
    gap = Gap(epoch=0, from_round=RoundNumber(30), to_round=RoundNumber(39), waypoints=(encode(chain.waypoint(39)),))
    ledger = Ledger(verified / LEDGER_FILE)
    certificates = [decode_certificate(data) for data in chain.certificates]
    ledger.skip(gap, entry_of(certificates[38]), tables_of(chain.heads[39], always=True))
    store(ledger, chain.heads[39], certificates[39:])
    ledger.close()
    skipped, head, *rounds = spes_p2p("ledger", "show", "--data-dir", verified).out.splitlines()
    assert skipped.startswith("rounds 31 to 39 were skipped")
    assert head.startswith("round")
    assert [int(line.split()[0]) for line in rounds] == [*range(1, 31), 40]
    answer = spes_p2p("ledger", "verify", "--data-dir", verified)
    assert answer.out.splitlines()[:2] == [
        "rounds 31 to 39: skipped; verified from round 39 on by the skip rule",
        "31 certificates verified, the newest of round 40",
    ]


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_folder_that_belongs_to_no_run_is_no_empty_ledger(spes_p2p: Run, tmp_path: Path, command: str) -> None:
    answer = spes_p2p("ledger", command, "--data-dir", tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert "it has joined no run" in answer.err and "--data-dir" in answer.err
