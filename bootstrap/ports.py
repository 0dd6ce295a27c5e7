"""The ports of a bootstrap node, chosen once and kept in a file, so that its addresses stay the same over restarts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from spes_p2p.errors import LocalStateError, MachineError
from spes_p2p.network.addresses import parse_listen_address, socket_address, with_port
from spes_p2p.network.ports import check_ports_free, free_port
from spes_p2p.storage.atomic import write_file

METRICS_KEY = "metrics"


class LastingPorts:
    """The ports in a file. Raises LocalStateError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = _read(path)

    def listen(self, listen: tuple[str, ...]) -> tuple[str, ...]:
        """The listen addresses with every port 0 replaced by the one kept, or by a free one, then kept.

        One port serves them all, as far as it is free: one rule for a router or firewall. Raises MachineError.
        """
        chosen = dict(self._kept)
        result = []
        for text in map(parse_listen_address, listen):
            port = socket_address(text)[2]
            if not port:
                if text not in chosen:
                    chosen[text] = _free_port(text, [chosen[other] for other in chosen if other != METRICS_KEY])
                port = chosen[text]
            result.append(with_port(text, port))
        self._keep(chosen)
        return tuple(result)

    def metrics(self, host: str, port: int) -> int:
        """The port of health and metrics: `port`, or if that is 0 the one kept, or a free one, then kept."""
        if port:
            return port
        found = self._kept.get(METRICS_KEY) or free_port("tcp", host)
        self._keep({**self._kept, METRICS_KEY: found})
        return found

    def _keep(self, chosen: dict[str, int]) -> None:
        if chosen != self._kept:
            write_file(self._path, json.dumps(chosen, indent=1, sort_keys=True).encode())
            self._kept = chosen


def _free_port(text: str, others: list[int]) -> int:
    """A free port for a listen address, one of `others` if possible. Raises MachineError."""
    transport, host, _ = socket_address(text)
    for port in dict.fromkeys(others):
        with suppress(MachineError):
            check_ports_free([with_port(text, port)])
            return port
    return free_port(transport, host)


def _read(path: Path) -> dict[str, int]:
    try:
        ports = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LocalStateError(f"{path} cannot be read: {error}\nDelete it to listen on another port.") from error
    if not isinstance(ports, dict) or not all(isinstance(port, int) and 0 < port < 65536 for port in ports.values()):
        raise LocalStateError(f"{path} does not hold ports\nDelete it to listen on another port.")
    return ports
