"""The local API's description, OpenAPI 3.1: paths by hand, schemas from the structs that are sent."""

from __future__ import annotations

from typing import Any

import msgspec

from spes_p2p import __version__
from spes_p2p.node.snapshot import LogEvent, NodeSnapshot

_REFERENCE = "#/components/schemas/{name}"
_REFUSED = {
    "401": {"description": "The token is missing or wrong."},
    "421": {"description": "Asked under another host name than loopback's."},
}
_AFTER = {
    "name": "after",
    "in": "query",
    "description": "Only log lines with a higher number.",
    "schema": {"type": "integer", "minimum": 0, "default": 0},
}
_CHANGE_LIMITS = {
    "post": {
        "summary": "Change limits, name -> text as people write it; the answer is a LimitsView.",
        "requestBody": {
            "content": {
                "application/json": {
                    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
                    "example": {"upload": "1MB/s", "hours": "off"},
                }
            }
        },
        "responses": {
            "200": {
                "description": "Changed.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/LimitsView"}}},
            },
            "400": {"description": "A text that is wrong; nothing is changed."},
            "409": {"description": "What this machine or its line cannot do; nothing is changed."},
            **_REFUSED,
        },
    }
}


def describe() -> dict[str, Any]:
    """The whole document. Every request needs the bearer token of `control.json`."""
    _, schemas = msgspec.json.schema_components((NodeSnapshot, LogEvent), ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "spes-p2p node",
            "version": __version__,
            "description": "Loopback only. Address and token are in control.json, in the node's data folder.",
        },
        "security": [{"token": []}],
        "paths": {
            "/snapshot": _get("The node as it is now.", _json("NodeSnapshot")),
            "/events": _get(
                "Server-sent events without end: `snapshot` (a NodeSnapshot) at most four times a second and at least "
                "once, `log` (a LogEvent) for each line.",
                {"text/event-stream": {"schema": {"type": "string"}}},
                _AFTER,
            ),
            "/log": _get(
                "The last 1000 log lines, oldest first.",
                {"application/json": {"schema": {"type": "array", "items": {"$ref": _ref("LogEvent")}}}},
                _AFTER,
            ),
            "/metrics": _get("Metrics for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}),
            "/openapi.json": _get("This.", {"application/json": {"schema": {"type": "object"}}}),
            "/pause": _post("Hold training; membership, votes and served blobs go on, leases while they last."),
            "/resume": _post("End the pause. Other reasons, such as limits, may still hold training."),
            "/leave": _post("Leave properly; `leave` of the snapshot says what remains."),
            "/recover": _post("Begin a new epoch by the run's recovery key; a refusal is a line of the log."),
            "/limits": {**_get("The limits that are set.", _json("LimitsView")), **_CHANGE_LIMITS},
            "/stop": _post("End now, without a leave."),
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }


def _ref(name: str) -> str:
    return _REFERENCE.format(name=name)


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _ref(name)}}}


def _get(summary: str, content: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "Here it is.", "content": content}} | _REFUSED
    if parameters:
        responses["400"] = {"description": "A parameter is not what it should be."}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": responses}}


def _post(summary: str) -> dict[str, Any]:
    return {"post": {"summary": summary, "responses": {"202": {"description": "It will be done."}} | _REFUSED}}
