"""`python -m spes_p2p.bootstrap.health [DIR]`: exit code 0 if the node of that data folder is well, 1 if not.

For the health check of a container, where there is no curl.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

from spes_p2p.bootstrap.cli import default_data_dir
from spes_p2p.bootstrap.node import http_file

TIMEOUT_S = 5.0


def check(data_dir: Path) -> tuple[bool, str]:
    """(well, what it said or why it cannot be asked)."""
    try:
        url = str(json.loads(http_file(data_dir).read_bytes())["url"])
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/health", timeout=TIMEOUT_S) as answer:
            return True, answer.read().decode(errors="replace")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return False, f"no bootstrap node answers for {data_dir}: {error}"


def main() -> None:
    """Entry point."""
    is_well, text = check(Path(sys.argv[1]) if len(sys.argv) > 1 else default_data_dir())
    print(text, file=sys.stdout if is_well else sys.stderr)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
