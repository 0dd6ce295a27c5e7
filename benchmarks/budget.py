"""Claim: an upload cap is held within 10 % over any 10 seconds while rounds go on.

Three real nodes on loopback, one of them joined with `--upload`. The kernel's count of what its libp2p daemon sends
over TCP is read five times a second (`ss`), and every window of ten seconds is compared with the cap: encryption, the
DHT and repeated segments are in it, the heads of packets are not. Without a cap loopback carries a hundred times as
much.

    python benchmarks/budget.py [--cap 1000000] [--rounds 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from spes_p2p.testing.capped import WINDOW_S, run_capped

TARGET = 1.1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=int, default=1_000_000, help="bytes per second")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = run_capped(Path(folder), arguments.cap, arguments.rounds)
    print(f"{run.rounds} rounds in {run.seconds:.0f} s, {run.sent_bytes / 1e6:.1f} MB sent by the capped peer")
    print(f"its updates accepted: {run.updates_accepted}; its limits: {run.limits}")
    print(f"{len(run.rates)} windows of {WINDOW_S:.0f} s; {run.share_near_cap:.0%} of them at 0.9 of the cap or more")
    print(f"busiest window: {run.most:.3f} of the cap (target: at most {TARGET})")
    row = {
        "name": f"busiest {WINDOW_S:.0f} s of an upload cap of {arguments.cap / 1e6:g} MB/s, MB/s",
        "ours": round(max(run.rates) / 1e6, 4),
        "peer": arguments.cap / 1e6,
        "ratio": round(run.most, 3),
        "better": "lower",
        "target": TARGET,
        "rounds": run.rounds,
        "sent_mb": round(run.sent_bytes / 1e6, 1),
        "share_of_windows_near_cap": round(run.share_near_cap, 3),
        "updates_accepted": run.updates_accepted,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps([row], indent=2) + "\n")


if __name__ == "__main__":
    main()
