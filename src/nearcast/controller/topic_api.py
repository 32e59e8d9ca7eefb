"""The part of the HTTP API that is about owned topics. Names of topics have slashes, so they are parameters, not paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from nearcast.controller import topic_views
from nearcast.controller.guards import PREFIX, Limit, may_write
from nearcast.fabric.refusals import Refused

if TYPE_CHECKING:
    from nearcast.controller.process import ControllerProcess


def handlers(process: ControllerProcess) -> list[HTTPRouteHandler]:
    """For one controller."""
    manager = process.controller.topics
    now = process.monotonic

    @get(f"{PREFIX}/topics", summary="Owned topics: owner, latency, bound", tags=["topics"])
    async def topics(
        topic_filter: FromQuery[str] = "",
        owner: FromQuery[str] = "",
        violated: FromQuery[bool] = False,
        after: FromQuery[str] = "",
        limit: Limit = 1_000,
    ) -> topic_views.OwnedTopicPage:
        return topic_views.page(manager, topic_filter, owner, violated, after, limit, now())

    @get(f"{PREFIX}/topics/one", summary="One owned topic", tags=["topics"])
    async def topic(name: FromQuery[str]) -> topic_views.OwnedTopicView:
        return topic_views.one(manager, name, now())

    @get(f"{PREFIX}/topics/why", summary="Why a topic is where it is, and how it came there", tags=["topics"])
    async def why(name: FromQuery[str]) -> topic_views.WhyView:
        return topic_views.why(manager, name, now())

    @get(f"{PREFIX}/migrations", summary="Topics that change hands, or did, newest first, with reasons", tags=["topics"])
    async def migrations(
        name: FromQuery[str] = "", pending: FromQuery[bool | None] = None, limit: Limit = 100
    ) -> list[topic_views.MigrationView]:
        found = [] if pending is False else list(manager.migrations.pending.values())
        if not pending:
            found = [*manager.migrations.past, *found]
        if name:
            found = [migration for migration in found if migration.topic == name]
        return [topic_views.migration(migration) for migration in reversed(found[-limit:])]

    @get(PREFIX + "/migrations/{number:int}", summary="One migration", tags=["topics"])
    async def migration(number: FromPath[int]) -> topic_views.MigrationView:
        found = manager.migrations.find(number)
        if found is None:
            raise Refused(f"there is no migration {number}; the last 10,000 are kept", missing=True)
        return topic_views.migration(found, explained=True)

    @post(
        f"{PREFIX}/migrations",
        guards=[may_write],
        status_code=202,
        summary="Hand a topic over to another broker",
        tags=["topics"],
    )
    async def migrate(data: JSONBody[topic_views.TopicMoveRequest]) -> topic_views.MigrationView:
        ordered = manager.move(data.topic, data.target, now())
        process.flush()
        return topic_views.migration(ordered)

    return [topics, topic, why, migrations, migration, migrate]
