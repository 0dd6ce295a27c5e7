"""`run create`, `identity show` and `ledger show` on real files; figures from records."""

from __future__ import annotations

import dataclasses
import json
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
from spes_p2p.network.link import parse_link
from spes_p2p.node.history import RoundRecord, read_manifest
from spes_p2p.node.joining import check_admission
from spes_p2p.node.snapshot import NodeSnapshot
from spes_p2p.testing.handle import imagined_peer, imagined_snapshot

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
