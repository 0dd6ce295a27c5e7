"""`/limits` of the local API: GET shows the limits, POST changes them. Mounted by `node.control`.

The body of POST is a JSON object, name -> text as people write it, such as `{"upload": "1MB/s", "hours": "off"}`. The
answer of both is a `LimitsView`. What is wrong with the text is answered by 400, what this machine cannot do by 409,
each with the message as text; nothing is changed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from spes_p2p.errors import ConfigError, LocalStateError, MachineError
from spes_p2p.node.snapshot import LimitsView, NodeSnapshot

MAX_BODY_BYTES = 4096


class LimitsHandle(Protocol):
    """What this part of the API needs of the node."""

    def snapshot(self) -> NodeSnapshot:
        """The node as it is now."""
        ...

    async def change_limits(self, changes: Mapping[str, str]) -> LimitsView:
        """Change limits, now and over restarts. Raises ConfigError, MachineError, LocalStateError."""
        ...


def limits_routes(handle: LimitsHandle) -> list[Route]:
    """GET and POST /limits."""

    async def show(_: Request) -> Response:
        return _answer(handle.snapshot().limits)

    async def change(request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse("the body is too long", 413)
        try:
            changes = msgspec.json.decode(bytes(body), type=dict[str, str])
            return _answer(await handle.change_limits(changes))
        except msgspec.DecodeError as error:
            return PlainTextResponse(f"the body must be an object of texts: {error}", 400)
        except ConfigError as error:
            return PlainTextResponse(str(error), 400)
        except (MachineError, LocalStateError) as error:
            return PlainTextResponse(str(error), 409)

    async def limits(request: Request) -> Response:
        return await (change if request.method == "POST" else show)(request)

    return [Route("/limits", limits, methods=["GET", "POST"])]


def _answer(view: LimitsView) -> Response:
    return Response(msgspec.json.encode(view), media_type="application/json")
