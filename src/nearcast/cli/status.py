"""``nearcast status``, ``nodes``, ``move``, ``drain`` and ``class``: the controller's API on the command line."""

from __future__ import annotations

import time
import urllib.parse
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from nearcast.cli.controller_client import (
    DEFAULT_API,
    Api,
    AsJson,
    CaFile,
    ControllerClient,
    Secret,
    TokenFile,
    quoted,
)
from nearcast.cli.tables import ago, counted, new_table, open_console, plain, print_json, span
from nearcast.errors import NearcastError

POLL_SECONDS = 0.5
STATE_STYLES = {"up": "green", "suspect": "yellow", "down": "red", "left": "dim"}
MOVE_STYLES = {"done": "green", "failed": "red", "superseded": "dim"}


def status(
    moves: Annotated[int, typer.Option(min=0, max=10_000, help="Show so many of the last moves.")] = 5,
    clients: Annotated[bool, typer.Option("--clients", help="List connected clients.")] = False,
    links: Annotated[bool, typer.Option("--links", help="List measured paths.")] = False,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a fabric: its nodes, moves, and what is wrong.

    Example: nearcast status --fabric-secret secret
    """
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    summary = controller.get("/status")
    found_moves = controller.get("/moves", limit=moves) if moves > 0 else []
    found_links = controller.get("/links") if links else None
    found_clients = _all_clients(controller) if clients else None
    if as_json:
        content = {"status": summary, "moves": found_moves}
        print_json(content | ({"links": found_links} if links else {}) | ({"clients": found_clients} if clients else {}))
        return
    console = open_console()
    counts = ", ".join(counted(summary[f"{what}s"], what) for what in ("broker", "gateway", "client"))
    console.print(Text(counts, style="bold"))
    if summary["nodes_not_up"]:
        console.print(Text("not up: ", style="red") + plain(", ".join(summary["nodes_not_up"])))
    if summary["draining"]:
        console.print(Text("draining: ", style="yellow") + plain(", ".join(summary["draining"])))
    ended = ", ".join(f"{count:,} {state}" for state, count in sorted(summary["moves"].items())) or "none yet"
    console.print(Text(f"moves: {ended}; {summary['pending_moves']} pending"))
    if summary["owned_topics"] or summary["migrations"]:
        console.print(Text(_topics_line(summary)))
    looked = span(summary["reconfigured_seconds_ago"])
    console.print(Text(f"looked for better places {looked} ago, {summary['reconfigurations']:,} times", style="dim"))
    if found_moves:
        console.print()
        console.print(_moves_table(found_moves))
    if found_links is not None:
        console.print()
        console.print(_links_table(found_links))
    if found_clients is not None:
        console.print()
        console.print(_clients_table(found_clients))


def _topics_line(summary: dict[str, Any]) -> str:
    ended = ", ".join(f"{count:,} {state}" for state, count in sorted(summary["migrations"].items())) or "none yet"
    line = f"{counted(summary['owned_topics'], 'owned topic')}; migrations: {ended}; {summary['pending_migrations']:,} pending"
    return line if summary["planner"] == "own" else f"{line}; planner: {summary['planner']}"


def _all_clients(controller: ControllerClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = controller.get("/clients", after=after, limit=10_000)
        found += page["clients"]
        after = page["next"]
    return found


def _moves_table(moves: list[dict[str, Any]]) -> Table:
    table = new_table("Move", "From", "To", "Clients", "State", "When", "Why", numbers=("Clients",))
    for move in moves:
        state = Text(move["state"], style=MOVE_STYLES.get(move["state"], "yellow"))
        why = move["reason"] + (f" ({move['detail']})" if move["detail"] else "")
        who = move["client"] or move["gateway"]
        count = f"{move['moved_clients']:,}" if move["ended_at"] else "-"
        places = (plain(who), plain(move["origin"] or "-"), plain(move["target"]))
        table.add_row(*places, count, state, ago(move["created_at"]), plain(why))
    return table


def _links_table(links: list[dict[str, Any]]) -> Table:
    table = new_table(
        "From", "To", "Round trip", "Jitter", "Loss", "Queued", numbers=("Round trip", "Jitter", "Loss", "Queued")
    )
    for link in links:
        latency = "no answer" if link["latency_ms"] is None else f"{link['latency_ms']:.2f} ms"
        style = "" if link["in_use"] else "dim"
        table.add_row(
            plain(link["origin"]),
            plain(link["target"]),
            latency,
            f"{link['jitter_ms']:.2f} ms",
            f"{100 * link['loss']:.0f} %",
            f"{link['queued_messages']:,}",
            style=style,
        )
    return table


def _clients_table(clients: list[dict[str, Any]]) -> Table:
    table = new_table("Client", "User", "Gateway", "Broker", "Connected")
    for client in clients:
        gateway = plain(client["gateway"] or "-")
        user = plain(client["username"] or "-")
        since = ago(client["connected_since"]).removesuffix(" ago")
        table.add_row(plain(client["client"]), user, gateway, plain(client["broker"]), since)
    return table


def nodes(
    name: Annotated[str | None, typer.Argument(help="Only this node, in detail.")] = None,
    role: Annotated[str | None, typer.Option(help="Only broker or gateway.")] = None,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """List the brokers and gateways of a fabric.

    Example: nearcast nodes --fabric-secret secret
    """
    if role not in (None, "broker", "gateway"):
        raise typer.BadParameter(f"--role cannot be {role!r}: use broker or gateway")
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    if name is not None:
        found = controller.get(f"/nodes/{quoted(name)}")
        if as_json:
            print_json(found)
        else:
            open_console().print(_details(found))
        return
    listed = controller.get("/nodes", role=role)
    if as_json:
        print_json(listed)
        return
    if not listed:
        typer.echo("no node has registered yet: start brokers and gateways with --controller")
        return
    table = new_table(
        "Node", "Role", "State", "Site", "Clients", "In/s", "Out/s", "Uses", numbers=("Clients", "In/s", "Out/s")
    )
    for node in listed:
        state = Text(node["state"], style=STATE_STYLES[node["state"]])
        if node["draining"]:
            state += Text(f", draining ({node['clients_to_move']:,} to move)", style="yellow")
        rates = node["rates"]
        table.add_row(
            plain(node["name"]),
            node["role"],
            state,
            plain(node["site"] or "-"),
            f"{node['connections']:,}",
            f"{rates.get('messages_received', 0):,.0f}",
            f"{rates.get('messages_sent', 0):,.0f}",
            plain(node["home"] or "-"),
        )
    open_console().print(table)


def _details(node: dict[str, Any]) -> Table:
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    for key, value in node.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {amount:,}" for name, amount in value.items()) or "-"
        elif isinstance(value, list):
            shown = ", ".join(map(str, value)) or "-"
        else:
            shown = "-" if value in ("", None) else str(value)
        lines.add_row(key.replace("_", " "), plain(shown))
    return lines


def move(
    target: Annotated[str, typer.Argument(help="The broker to move to.")],
    client: Annotated[str, typer.Option("--client", help="Move this client.")] = "",
    gateway: Annotated[str, typer.Option("--gateway", help="Move all clients of this gateway.")] = "",
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long for the outcome; 0: do not.")] = 30.0,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Move a client, or all clients of a gateway, to a broker. They notice nothing.

    A gateway stays there for ten minutes; then it goes where it is best again.

    Example: nearcast move broker-2 --client sensor-17 --fabric-secret secret
    """
    if bool(client) == bool(gateway):
        raise typer.BadParameter("say which: --client NAME or --gateway NAME")
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    ordered = controller.send("POST", "/moves", {"target": target, "client": client, "gateway": gateway})
    deadline = time.monotonic() + wait
    while not ordered["ended_at"] and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS / 5, wait))
        ordered = controller.get(f"/moves/{ordered['number']}")
    if as_json:
        print_json(ordered)
    elif not ordered["ended_at"]:
        typer.echo(f"move {ordered['number']} is {ordered['state']}; `nearcast status` shows how it goes on")
    elif ordered["state"] == "done":
        clients = ordered["moved_clients"]
        gap = f", none held up for more than {ordered['longest_gap_ms']:.0f} ms" if clients else ""
        typer.echo(f"moved {counted(clients, 'client')} to {target}{gap}")
    if ordered["ended_at"] and ordered["state"] != "done":
        verb = "was superseded" if ordered["state"] == "superseded" else ordered["state"]
        raise NearcastError(f"the move {verb}: {ordered['detail'] or 'no reason was given'}")
    if wait > 0 and not ordered["ended_at"]:
        raise typer.Exit(1)


def drain(
    broker: Annotated[str, typer.Argument(help="The broker to empty.")],
    stop: Annotated[bool, typer.Option("--stop", help="End a drain: the broker gets clients again.")] = False,
    rate: Annotated[float | None, typer.Option(metavar="CLIENTS", help="Clients per second (default 100).")] = None,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait so long until it is empty; 0: do not.")] = 0.0,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Empty a broker of its gateways' clients, at a pace, and of the topics it owns, before it is stopped.

    Clients that are connected to it without a gateway stay until it stops.

    Example: nearcast drain broker-1 --wait 600 --fabric-secret secret
    """
    if stop and (rate is not None or wait):
        raise typer.BadParameter("--stop goes alone")
    if rate is not None and not 0 < rate < float("inf"):
        raise typer.BadParameter("--rate must be above 0")
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    path = f"/nodes/{quoted(broker)}"
    if stop:
        found = controller.send("DELETE", f"{path}/drain")
    else:
        found = controller.send("POST", f"{path}/drain", {"clients_per_second": rate})
    deadline = time.monotonic() + wait
    while not stop and (found["clients_to_move"] or found["topics_owned"]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        found = controller.get(path)
    direct = found["connections"] - found["gateway_connections"]
    if as_json:
        print_json(found)
    elif stop:
        typer.echo(f"{broker} gets clients again")
    elif found["clients_to_move"] or found["topics_owned"]:
        topics = f", {counted(found['topics_owned'], 'topic')} to hand over" if found["topics_owned"] else ""
        typer.echo(f"{broker} is being drained: {counted(found['clients_to_move'], 'client')} to move{topics}")
    else:
        stay = "stays" if direct == 1 else "stay"
        rest = f"; {counted(direct, 'client')} without a gateway {stay} until it stops" if direct > 0 else ""
        typer.echo(f"{broker} has no client of a gateway and gets none{rest}")
    if wait and (found["clients_to_move"] or found["topics_owned"]):
        raise typer.Exit(1)


def topic_class(
    topic_filter: Annotated[str | None, typer.Argument(help="Topics, as in a subscription; without: list all rules.")] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[CLASS]", help="bridged, local, broadcast, broadcast-filtered or owned.")
    ] = None,
    max_latency_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Class owned: bound from a publisher to its farthest subscriber.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the rule of these topics.")] = False,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show which topics are of which class, or change it in the running fabric.

    bridged: a message goes to every broker that has a subscriber. local: it never leaves the broker it was published at.
    broadcast: it goes to every broker of the group, and to other groups through the cloud broker (`nearcast groups`).
    broadcast-filtered: the same, but inside the group only to brokers that have a subscriber. owned: one broker at a time
    orders its messages, and the controller places it (`nearcast topic` has more for these).

    Example: nearcast class 'machines/+/raw/#' local --fabric-secret secret
    """
    if remove and (topic_filter is None or name is not None):
        raise typer.BadParameter("--remove takes the topics of a rule, and nothing else")
    if topic_filter is not None and name is None and not remove:
        raise typer.BadParameter("say which class: bridged, local, broadcast, broadcast-filtered or owned, or --remove")
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    if topic_filter is None:
        rules = controller.get("/classes")
    elif remove:
        rules = controller.send("DELETE", f"/classes?topic_filter={urllib.parse.quote(topic_filter, safe='')}")
    else:
        rule = {"topic_filter": topic_filter, "topic_class": name, "max_latency_ms": max_latency_ms or 0.0}
        rules = controller.send("PUT", "/classes", rule)
    if as_json:
        print_json(rules)
        return
    if not rules:
        typer.echo("no rules: every topic is bridged")
        return
    bounded = any(rule["max_latency_ms"] for rule in rules)
    table = new_table("Topics", "Class", *(("Bound",) if bounded else ()))
    for rule in rules:
        bound = f"{rule['max_latency_ms']:g} ms" if rule["max_latency_ms"] else "-"
        table.add_row(plain(rule["topic_filter"]), rule["topic_class"], *((bound,) if bounded else ()))
    open_console().print(table)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("status")(status)
    app.command("nodes")(nodes)
    app.command("move")(move)
    app.command("drain")(drain)
    app.command("class")(topic_class)
