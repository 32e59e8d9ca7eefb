"""``nearcast topic`` for topics that a broker owns: their class and bound, who owns them, why, and moving them.

All of it is the controller's to know; commands about what is kept ask a broker's bulk port instead
(:mod:`nearcast.cli.topic_rules`).
"""

from __future__ import annotations

import os
import time
import urllib.parse
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from nearcast.cli.controller_client import DEFAULT_API, Api, AsJson, CaFile, ControllerClient, Secret, TokenFile
from nearcast.cli.tables import ago, counted, new_table, open_console, plain, print_json
from nearcast.config import Retention
from nearcast.errors import NearcastError
from nearcast.mqtt.topics import overlaps

FABRIC = "Where topics are"
POLL_SECONDS = 0.05

CLASSES = ("bridged", "local", "broadcast", "broadcast-filtered", "owned")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A topic.")]
Filter = Annotated[str, typer.Argument(metavar="NAME|PATTERN", help="A topic, or a filter such as 'swarm/#'.")]
MaxLatency = Annotated[
    float | None,
    typer.Option(
        "--max-latency-ms",
        metavar="MS",
        help="Bound from a publisher to its farthest subscriber; 0: none.",
        rich_help_panel=FABRIC,
    ),
]
SetName = Annotated[
    str | None,
    typer.Option(
        "--set",
        metavar="NAME",
        help="The replica set that keeps these topics (`nearcast set`); they are owned and durable.",
        rich_help_panel=FABRIC,
        show_default=False,
    ),
]
TopicClass = Annotated[
    str | None, typer.Option("--class", metavar="CLASS", help="|".join(CLASSES), rich_help_panel=FABRIC, show_default=False)
]


def knows_controller(secret: str | None, token_file: str | None) -> bool:
    """Whether a user has what a controller asks for, and so perhaps wants to hear from it."""
    return secret is not None or token_file is not None or bool(os.environ.get("NEARCAST_TOKEN"))


# --- rules ----------------------------------------------------------------------------------------------------------------


def put_rule(
    controller: ControllerClient, topic: str, topic_class: str | None, max_latency_ms: float | None
) -> dict[str, Any]:
    """Give topics a class and a bound; what is not said stays as it is. Returns the rule, with ``outcome``."""
    before = rule_of(controller, topic)
    if topic_class is None:
        topic_class = "owned" if before is None else str(before["topic_class"])
    if topic_class not in CLASSES:
        raise typer.BadParameter(f"there is no class {topic_class!r}: use {', '.join(CLASSES)}")
    if max_latency_ms is None:
        max_latency_ms = 0.0
        if before is not None and topic_class == before["topic_class"]:
            max_latency_ms = float(before["max_latency_ms"])
    rule = {"topic_filter": topic, "topic_class": topic_class, "max_latency_ms": max_latency_ms}
    if before == rule:
        return {**rule, "outcome": "unchanged"}
    controller.send("PUT", "/classes", rule)
    return {**rule, "outcome": "created" if before is None else "changed"}


def put_in_set(controller: ControllerClient, topic: str, replica_set: str, retention: Retention) -> dict[str, Any]:
    """Have a replica set keep topics. Returns the rule."""
    rule = {"topic_filter": topic, "topic_class": f"set:{replica_set}", "retention": msgspec.to_builtins(retention)}
    controller.send("PUT", "/classes", rule)
    return rule


def rule_of(controller: ControllerClient, topic: str) -> dict[str, Any] | None:
    rules: list[dict[str, Any]] = controller.get("/classes")
    return next((rule for rule in rules if rule["topic_filter"] == topic), None)


def rule_words(rule: dict[str, Any]) -> str:
    """What a rule says, and whether it did so before."""
    bound = f", at most {rule['max_latency_ms']:g} ms from publisher to subscriber" if rule["max_latency_ms"] else ""
    already = " already" if rule["outcome"] == "unchanged" else " now"
    return f"{rule['topic_filter']} is {rule['topic_class']}{already}{bound}"


def set_topic(
    topic: Filter,
    max_latency_ms: MaxLatency = None,
    topic_class: TopicClass = None,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Change the latency bound, or the class, of topics in the running fabric.

    Example: nearcast topic set 'swarm/#' --max-latency-ms 60
    """
    if max_latency_ms is None and topic_class is None:
        raise typer.BadParameter("say what to set: --max-latency-ms MS, or --class CLASS")
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    if topic_class is None and rule_of(controller, topic) is None:
        raise NearcastError(f"no rule is about {topic!r}: `nearcast topic create '{topic}' --class owned` makes one")
    rule = put_rule(controller, topic, topic_class, max_latency_ms)
    if as_json:
        print_json(rule)
    else:
        typer.echo(rule_words(rule))


def remove_rule(controller: ControllerClient, topic: str) -> None:
    """Topics of this filter are what other rules say, or bridged."""
    controller.send("DELETE", f"/classes?topic_filter={urllib.parse.quote(topic, safe='')}")


# --- look -----------------------------------------------------------------------------------------------------------------


def owned_topics(controller: ControllerClient, topic_filter: str | None, violated: bool, limit: int) -> dict[str, Any]:
    """Rules of class ``owned``, and the topics that have an owner."""
    rules = [
        rule
        for rule in controller.get("/classes")
        if rule["topic_class"] == "owned" and (topic_filter is None or overlaps(rule["topic_filter"], topic_filter))
    ]
    query = {"topic_filter": topic_filter, "violated": "true" if violated else None, "limit": min(limit, 10_000)}
    page = controller.get("/topics", **query)
    return {"rules": rules, "topics": page["topics"], "total": page["total"]}


def print_owned(found: dict[str, Any]) -> None:
    console = open_console()
    if found["rules"]:
        rules = new_table("Topics", "Class", "Bound", numbers=("Bound",))
        for rule in found["rules"]:
            rules.add_row(plain(rule["topic_filter"]), rule["topic_class"], _bound(rule["max_latency_ms"]))
        console.print(rules)
    if found["topics"]:
        if found["rules"]:
            console.print()
        console.print(owned_table(found["topics"]))
        if found["total"] > len(found["topics"]):
            typer.echo(f"... and {found['total'] - len(found['topics']):,} more: name a filter, or --limit {found['total']}")


def owned_table(topics: list[dict[str, Any]]) -> Table:
    table = new_table(
        "Topic",
        "Owner",
        "Latency",
        "Bound",
        "Producers",
        "Consumers",
        "Messages/s",
        "State",
        numbers=("Latency", "Bound", "Producers", "Consumers", "Messages/s"),
    )
    for topic in topics:
        moving = f" → {topic['moving_to']}" if topic["moving_to"] else ""
        table.add_row(
            plain(topic["topic"]),
            plain(topic["owner"] + moving),
            _milliseconds(topic["latency_ms"]),
            _bound(topic["max_latency_ms"]),
            f"{topic['producers']:,}",
            f"{topic['consumers']:,}",
            f"{topic['messages_per_second']:,.0f}",
            topic["state"],
            style="red" if topic["state"] == "violated" else "",
        )
    return table


def owned_details(topic: dict[str, Any]) -> Table:
    """One topic, line by line."""
    lines = new_table("", "")
    lines.show_header = False
    moving = f", on its way to {topic['moving_to']}" if topic["moving_to"] else ""
    latency = _milliseconds(topic["latency_ms"])
    if topic["state"] == "violated":
        latency += ", above its bound"
    for label, value in (
        ("owner", f"{topic['owner']}, since {ago(topic['owned_since'])}{moving}"),
        ("latency", f"{latency} (worst case, from a publisher over the owner to a subscriber)"),
        ("bound", _bound(topic["max_latency_ms"])),
        ("rule", topic["topic_filter"] or "-"),
        ("clients", f"{counted(topic['producers'], 'producer')}, {counted(topic['consumers'], 'consumer')}"),
        ("messages", f"{topic['messages_per_second']:,.1f} a second, in and out"),
    ):
        lines.add_row(label, plain(value))
    return lines


def find_owned(controller: ControllerClient, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = controller.get("/topics/one", name=topic)
    return found


def why(
    topic: Name,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Tell why a topic is where it is: its bound, what other brokers would offer, and how it came there.

    Example: nearcast topic why swarm/7
    """
    found = ControllerClient(api, fabric_secret, token_file, ca).get("/topics/why", name=topic)
    if as_json:
        print_json(found)
        return
    console = open_console()
    console.print(plain(f"{topic}: {found['words']}"))
    decision = found["explanation"]
    if decision is not None and decision.get("alternatives"):
        console.print()
        console.print(_alternatives(decision))
    if found["history"]:
        console.print()
        table = new_table("When", "From", "To", "State", "Why")
        for past in found["history"]:
            reason = past["reason"] + (f" ({past['detail']})" if past["detail"] else "")
            table.add_row(
                ago(past["ended_at"] or past["created_at"]),
                plain(past["origin"] or "-"),
                plain(past["target"]),
                past["state"],
                plain(reason),
            )
        console.print(table)


def _alternatives(decision: dict[str, Any]) -> Table:
    table = new_table("Broker", "At most", "Verdict", numbers=("At most",))
    for alternative in decision["alternatives"]:
        table.add_row(plain(alternative["broker"]), _milliseconds(alternative["expected_ms"]), alternative["verdict"])
    return table


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _bound(value: float) -> str:
    return f"{value:g} ms" if value else "-"


# --- change ---------------------------------------------------------------------------------------------------------------


def move(
    topic: Name,
    target: Annotated[str, typer.Argument(metavar="BROKER", help="The broker that is to own it.")],
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for the outcome; 0: do not.")] = 30.0,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Hand an owned topic over to another broker. Nothing is lost, and each publisher's messages stay in order.

    The controller moves it again when its bound is violated there.

    Example: nearcast topic move swarm/7 broker-2
    """
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    ordered = controller.send("POST", "/migrations", {"topic": topic, "target": target})
    deadline = time.monotonic() + wait
    while not ordered["ended_at"] and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, wait))
        ordered = controller.get(f"/migrations/{ordered['number']}")
    if as_json:
        print_json(ordered)
    elif not ordered["ended_at"]:
        typer.echo(f"{topic} is on its way to {target}; `nearcast topic why {topic}` shows how it goes on")
    elif ordered["state"] == "done":
        took = f" in {ordered['duration_ms']:.0f} ms" if ordered["duration_ms"] else ""
        typer.echo(f"{target} owns {topic} now; {ordered['origin']} handed it over{took}")
    if ordered["ended_at"] and ordered["state"] != "done":
        verb = "was superseded" if ordered["state"] == "superseded" else ordered["state"]
        raise NearcastError(f"the move {verb}: {ordered['detail'] or 'no reason was given'}")
    if wait > 0 and not ordered["ended_at"]:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands to the group."""
    app.command("set", rich_help_panel=FABRIC, no_args_is_help=True)(set_topic)
    app.command("why", rich_help_panel=FABRIC, no_args_is_help=True)(why)
    app.command("move", rich_help_panel=FABRIC, no_args_is_help=True)(move)
