"""The controller's HTTP API: what :mod:`.views` shows, and what people ask for. OpenAPI at ``/schema/openapi.json``.

Every request but ``/healthz`` and the schema needs ``Authorization: Bearer TOKEN`` (:mod:`.tokens`); one that changes
something needs a token that may write. Errors are ``{"status_code": ..., "detail": "one sentence"}``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
from litestar import Litestar, MediaType, Request, Response, delete, get, post, put
from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException, PermissionDeniedException, ValidationException
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult, DefineMiddleware
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.params import FromPath, FromQuery, JSONBody

from nearcast import __version__
from nearcast.config import Retention
from nearcast.controller import topic_api, views
from nearcast.controller.guards import PREFIX, Limit, may_write
from nearcast.controller.metrics import CONTENT_TYPE, render
from nearcast.controller.tokens import Tokens
from nearcast.fabric.classes import SET
from nearcast.fabric.refusals import Refused
from nearcast.functionconfig import Function

if TYPE_CHECKING:
    from nearcast.controller.process import ControllerProcess

CHALLENGE = {"WWW-Authenticate": "Bearer"}


class BearerAuthentication(AbstractAuthenticationMiddleware):
    """Lets in who has a token; ``request.auth`` is then what the token allows."""

    def __init__(self, app: Any, tokens: Tokens, **options: Any) -> None:
        super().__init__(app, **options)
        self._tokens = tokens

    async def authenticate_request(self, connection: ASGIConnection[Any, Any, Any, Any]) -> AuthenticationResult:
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        right = self._tokens.right_of(token.strip()) if scheme.lower() == "bearer" else None
        if right is None:
            raise NotAuthorizedException("a token is needed: Authorization: Bearer TOKEN", headers=CHALLENGE)
        return AuthenticationResult(user=None, auth=right)


def _refused(request: Request[Any, Any, Any], error: Refused) -> Response[dict[str, object]]:
    status = 404 if error.missing else 409
    return Response({"status_code": status, "detail": str(error)}, status_code=status)


def _invalid(request: Request[Any, Any, Any], error: ValidationException) -> Response[dict[str, object]]:
    """Litestar says that something is wrong in ``detail`` and what it is elsewhere; here it is one sentence."""
    faults = error.extra if isinstance(error.extra, list) else []
    words = "; ".join(f"{fault.get('key', 'body')}: {fault.get('message', '')}" for fault in faults if isinstance(fault, dict))
    return Response({"status_code": error.status_code, "detail": words or error.detail}, status_code=error.status_code)


def build(process: ControllerProcess) -> Litestar:
    """The application for one controller."""
    controller = process.controller
    now = process.monotonic

    @get("/healthz", exclude_from_auth=True, summary="Whether the controller is there", tags=["health"])
    async def healthz() -> dict[str, bool]:
        return {"ok": True}

    @get("/metrics", media_type=MediaType.TEXT, include_in_schema=False)
    async def metrics() -> Response[bytes]:
        return Response(render(controller), media_type=CONTENT_TYPE)

    @get(f"{PREFIX}/status", summary="The fabric at a glance", tags=["fabric"])
    async def status() -> views.Status:
        return views.status(controller, process.name, process.started_at, now())

    @get(f"{PREFIX}/nodes", summary="Brokers and gateways", tags=["nodes"])
    async def nodes(role: FromQuery[Literal["broker", "gateway"] | None] = None) -> list[views.NodeView]:
        entries = sorted(controller.entries.values(), key=lambda entry: (entry.node.role, entry.name))
        return [views.node(controller, entry, now()) for entry in entries if role is None or entry.node.role == role]

    @get(PREFIX + "/nodes/{name:str}", summary="One broker or gateway", tags=["nodes"], raises=[PermissionDeniedException])
    async def node(name: FromPath[str]) -> views.NodeView:
        return views.node(controller, controller.entry(name), now())

    @post(
        PREFIX + "/nodes/{name:str}/drain",
        guards=[may_write],
        status_code=202,
        summary="Empty a broker of its gateways' clients, at a pace",
        tags=["nodes"],
    )
    async def drain(name: FromPath[str], data: JSONBody[views.DrainRequest | None] = None) -> views.NodeView:
        rate = data.clients_per_second if data is not None else None
        if rate is not None and rate <= 0:
            raise Refused("clients_per_second must be above 0")
        entry = controller.drain(name, True, now(), rate)
        process.flush()
        return views.node(controller, entry, now())

    @delete(
        PREFIX + "/nodes/{name:str}/drain",
        guards=[may_write],
        status_code=200,
        summary="End a drain: the broker gets clients again",
        tags=["nodes"],
    )
    async def undrain(name: FromPath[str]) -> views.NodeView:
        entry = controller.drain(name, False, now())
        process.flush()
        return views.node(controller, entry, now())

    @get(f"{PREFIX}/links", summary="Paths between nodes, with their measured quality", tags=["fabric"])
    async def links() -> list[views.LinkView]:
        return views.graph(controller)

    @get(f"{PREFIX}/groups", summary="Broadcast groups, the largest first", tags=["fabric"])
    async def groups() -> list[views.GroupView]:
        return views.groups(controller)

    @get(f"{PREFIX}/clients", summary="Connected clients, and where", tags=["clients"])
    async def clients(node: FromQuery[str] = "", after: FromQuery[str] = "", limit: Limit = 1_000) -> views.Page:
        return views.clients(controller, node, after, limit)

    @get(f"{PREFIX}/moves", summary="Moves, pending and past, newest first, each with its reason", tags=["moves"])
    async def moves(pending: FromQuery[bool | None] = None, limit: Limit = 100) -> list[views.MoveView]:
        found = [] if pending is False else list(controller.moves.pending.values())
        if not pending:
            found = [*controller.moves.past, *found]
        return [views.move(move) for move in reversed(found[-limit:])]

    @post(
        f"{PREFIX}/moves",
        guards=[may_write],
        status_code=202,
        summary="Move a client, or all clients of a gateway",
        tags=["moves"],
    )
    async def move(data: JSONBody[views.MoveRequest]) -> views.MoveView:
        ordered = controller.move(data.target, now(), client=data.client, gateway=data.gateway)
        process.flush()
        return views.move(ordered)

    @get(PREFIX + "/moves/{number:int}", summary="One move", tags=["moves"])
    async def one_move(number: FromPath[int]) -> views.MoveView:
        for move in (*controller.moves.pending.values(), *reversed(controller.moves.past)):
            if move.number == number:
                return views.move(move)
        raise Refused(f"there is no move {number}; the last 1,000 are kept", missing=True)

    def class_views() -> list[views.ClassView]:
        return [
            views.ClassView(
                topic_filter=rule.topic_filter,
                topic_class=rule.topic_class,
                max_latency_ms=rule.max_latency_ms,
                retention=rule.retention if rule.topic_class.startswith(SET) else msgspec.UNSET,
            )
            for rule in controller.rules.rules
        ]

    @get(f"{PREFIX}/classes", summary="Topic classes", tags=["classes"])
    async def classes() -> list[views.ClassView]:
        return class_views()

    @put(f"{PREFIX}/classes", guards=[may_write], summary="Give topics a class", tags=["classes"])
    async def set_class(data: JSONBody[views.ClassView]) -> list[views.ClassView]:
        controller.set_class(data.topic_filter, data.topic_class, now(), data.max_latency_ms, data.retention or Retention())
        process.flush()
        return class_views()

    @delete(f"{PREFIX}/classes", guards=[may_write], status_code=200, summary="Remove a rule", tags=["classes"])
    async def remove_class(topic_filter: FromQuery[str]) -> list[views.ClassView]:
        controller.remove_class(topic_filter, now())
        process.flush()
        return class_views()

    @get(f"{PREFIX}/sets", summary="Replica sets", tags=["sets"])
    async def sets() -> list[views.SetView]:
        return views.sets(controller)

    @post(f"{PREFIX}/sets", guards=[may_write], status_code=201, summary="Make a replica set", tags=["sets"])
    async def create_set(data: JSONBody[views.SetRequest]) -> views.SetView:
        made = controller.create_set(
            data.name,
            now(),
            members=tuple(data.members),
            replicas=data.replicas,
            placement=data.placement,
            site=data.site,
            preferred=data.preferred,
            write_quorum=data.write_quorum,
        )
        process.flush()
        return next(view for view in views.sets(controller) if view.name == made.name)

    @delete(
        PREFIX + "/sets/{name:str}",
        guards=[may_write],
        status_code=200,
        summary="Forget a replica set that keeps no topics; its members' disks stay as they are",
        tags=["sets"],
    )
    async def remove_set(name: FromPath[str]) -> list[views.SetView]:
        controller.remove_set(name, now())
        process.flush()
        return views.sets(controller)

    @get(f"{PREFIX}/functions", summary="Functions that react to topics of replica sets", tags=["functions"])
    async def functions() -> list[views.FunctionView]:
        return views.functions(controller)

    @post(f"{PREFIX}/functions", guards=[may_write], status_code=201, summary="Deploy a function", tags=["functions"])
    async def deploy(data: JSONBody[Function]) -> views.FunctionView:
        made = controller.deploy(data, now())
        process.flush()
        return next(view for view in views.functions(controller) if view.name == made.name)

    @delete(
        PREFIX + "/functions/{name:str}",
        guards=[may_write],
        status_code=200,
        summary="Take a function out of service",
        tags=["functions"],
    )
    async def remove_function(name: FromPath[str]) -> list[views.FunctionView]:
        controller.remove_function(name, now())
        process.flush()
        return views.functions(controller)

    return Litestar(
        route_handlers=[
            healthz,
            metrics,
            status,
            nodes,
            node,
            drain,
            undrain,
            links,
            groups,
            clients,
            moves,
            move,
            one_move,
            classes,
            set_class,
            remove_class,
            sets,
            create_set,
            remove_set,
            functions,
            deploy,
            remove_function,
            *topic_api.handlers(process),
        ],
        middleware=[DefineMiddleware(BearerAuthentication, tokens=process.tokens, exclude="^/schema")],
        exception_handlers={Refused: _refused, ValidationException: _invalid},
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="Nearcast controller",
            version=__version__,
            description="Who is in the fabric, how far apart, and who should be where.",
            render_plugins=[JsonRenderPlugin()],
            components=Components(
                security_schemes={"bearer": SecurityScheme(type="http", scheme="bearer", description="A token.")}
            ),
            security=[{"bearer": []}],
        ),
        request_max_body_size=1_048_576,
    )
