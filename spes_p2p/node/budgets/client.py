"""Asks a running node for its limits, and changes them. Light, as `node.control_client`."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from spes_p2p.errors import ConfigError, MachineError, UnreachableError
from spes_p2p.node.control_client import find_control
from spes_p2p.node.snapshot import LimitsView

TIMEOUT_S = 15.0
"""A GPU's driver may take seconds over a new limit of power."""
MAX_ANSWER_BYTES = 1 << 20


def read_limits_view(data_dir: Path) -> LimitsView:
    """The limits of the node in `data_dir`. Raises UnreachableError or LocalStateError."""
    return _request(data_dir, "GET", b"")


def change_limits(data_dir: Path, changes: Mapping[str, str]) -> LimitsView:
    """Change limits of the node in `data_dir`, name -> text. Raises ConfigError for a text that is wrong, MachineError
    for what its machine cannot do, UnreachableError or LocalStateError."""
    return _request(data_dir, "POST", msgspec.json.encode(dict(changes)))


def _request(data_dir: Path, method: str, body: bytes) -> LimitsView:
    address = find_control(data_dir)
    place = urlsplit(address.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    headers = {"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"}
    try:
        connection.request(method, "/limits", body=body or None, headers=headers)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES)
    except TimeoutError as error:
        raise UnreachableError(f"the node in {data_dir} (process {address.pid}) does not answer") from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"no node runs in {data_dir}; start one with `spes-p2p join`") from error
    finally:
        connection.close()
    if response.status == 400:
        raise ConfigError(answer.decode(errors="replace"))
    if response.status == 409:
        raise MachineError(answer.decode(errors="replace"))
    if response.status >= 300:
        raise UnreachableError(f"the node in {data_dir} refused the request (HTTP {response.status})")
    return msgspec.json.decode(answer, type=LimitsView)
