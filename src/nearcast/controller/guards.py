"""What all of the HTTP API's handlers share: where it is, how much it returns at once, and who may change things."""

from __future__ import annotations

from typing import Annotated, Any

from litestar.connection import ASGIConnection
from litestar.exceptions import PermissionDeniedException
from litestar.handlers.base import BaseRouteHandler
from litestar.params import QueryParameter

PREFIX = "/api/v1"

Limit = Annotated[int, QueryParameter(ge=1, le=10_000, description="Most entries to return.")]


def may_write(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuses tokens that may only look."""
    if connection.auth != "write":
        raise PermissionDeniedException("this token may look, not change anything")
