"""``nearcast groups``: which brokers form broadcast groups, from the controller or from brokers themselves.

A controller knows all groups. A broker knows its own, and the leaders of others that it hears of at the cloud
(:class:`~nearcast.fabric.group_facts.GroupFacts`, in ``/healthz``); what several brokers say is put together. Both become the
same picture: groups as the controller's API has them, with ``None`` for what is not known, and ``size`` beside those members
that are.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from nearcast.cli.controller_client import (
    DEFAULT_API,
    TIMEOUT_SECONDS,
    Api,
    AsJson,
    CaFile,
    ControllerClient,
    Secret,
    TokenFile,
)
from nearcast.cli.tables import counted, new_table, open_console, plain, print_json
from nearcast.errors import ConfigError, NearcastError
from nearcast.fabric.group_facts import GroupFacts

RELAY_STYLES = {"live": "green", "catching up": "yellow", "held": "yellow", "no cloud": "red"}

Group = dict[str, Any]


def groups(
    broker: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Ask this broker (its --http-port) instead of a controller; may be repeated."),
    ] = None,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show broadcast groups: who leads, who belongs to whom, how far, and what waits for the cloud.

    A controller is asked, or with --broker one or more brokers: each knows its own group and the leaders of others.

    Example: nearcast groups --broker http://127.0.0.1:9100
    """
    if not broker and fabric_secret is None and token_file is None and not os.environ.get("NEARCAST_TOKEN"):
        raise ConfigError(
            "say whom to ask: --broker http://HOST:PORT (its --http-port), or --fabric-secret FILE for a controller"
        )
    if broker:
        found = merged([_ask_broker(url) for url in broker])
    else:
        found = ControllerClient(api, fabric_secret, token_file, ca).get("/groups")
        for group in found:
            group["size"] = len(group["members"])
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("no broadcast groups: brokers form them when they are started with --cloud URL")
        return
    console = open_console()
    brokers = sum(group["size"] for group in found)
    console.print(Text(f"{counted(len(found), 'group')} of {counted(brokers, 'broker')}", style="bold"))
    console.print()
    console.print(groups_table(found))
    for member in (member for group in found for member in group["members"]):
        if member["cloud_problem"]:
            console.print()
            what = " and the cloud: " if member["cloud_state"] == "connected" else " has no cloud: "
            console.print(plain(member["name"]) + Text(what, style="red") + plain(member["cloud_problem"]))


def _ask_broker(url: str) -> dict[str, Any]:
    """What a broker says of its group."""
    if "://" not in url:
        url = f"http://{url}"
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no address of a broker: write http://HOST:PORT, as of its --http-port")
    place = f"{parts.scheme}://{parts.netloc}"
    try:
        try:
            answer = urllib.request.urlopen(f"{place}/healthz", timeout=TIMEOUT_SECONDS)  # noqa: S310  # the scheme was checked
        except urllib.error.HTTPError as error:
            if error.code != 503:  # a broker that is stopping still says how it is
                raise
            answer = error
        with answer:
            health = json.load(answer)
        if not isinstance(health, dict) or "version" not in health:
            raise ValueError("no broker")
    except urllib.error.HTTPError as error:
        error.close()
        raise NearcastError(f"what answers at {place} is no broker (HTTP {error.code}): is it its --http-port?") from error
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise NearcastError(f"no broker answers at {place}: {reason}; start it with --http-port PORT") from error
    except OSError as error:
        raise NearcastError(f"no broker answers at {place}: {error}; start it with --http-port PORT") from error
    except (ValueError, http.client.HTTPException) as error:
        raise NearcastError(f"what answers at {place} is no broker: is it its --http-port?") from error
    facts = health.get("groups")
    if not isinstance(facts, dict):
        raise NearcastError(f"the broker at {place} forms no groups: start it with --cloud URL")
    try:
        found: dict[str, Any] = msgspec.to_builtins(msgspec.convert(facts, GroupFacts))
    except msgspec.ValidationError as error:
        raise NearcastError(f"the broker at {place} is of another version: {error}") from error
    return found


def merged(told: list[dict[str, Any]]) -> list[Group]:
    """What brokers say of themselves, as groups: the largest first, each with its leader first."""
    by_name = {facts["name"]: facts for facts in told}
    found: dict[str, Group] = {}
    for facts in by_name.values():
        group = found.setdefault(facts["leader"], _group_of(facts))
        members = {member["name"]: member for member in group["members"]}
        members[facts["name"]] = _member(facts)
        for fellow in facts["fellows"]:
            if fellow["name"] not in by_name:
                members.setdefault(fellow["name"], _fellow(fellow, facts))
        group["members"] = sorted(members.values(), key=lambda member: (not member["leads"], member["name"]))
        if facts["leader"] == facts["name"] or not group["told_by_leader"]:
            group |= {key: facts[key] for key in ("threshold_ms", "leave_threshold_ms", "region")}
            group["told_by_leader"] = facts["leader"] == facts["name"]
        found[facts["leader"]] = group
    in_a_group = {member["name"] for group in found.values() for member in group["members"]}
    for facts in by_name.values():
        for leader in facts["leaders"]:
            # Whoever is known to belong to a leader is none, whatever was announced a moment ago.
            if leader["name"] not in found and leader["name"] not in in_a_group:
                found[leader["name"]] = _announced(leader, facts)
    for group in found.values():
        del group["told_by_leader"]
        group["size"] = max(group["size"], len(group["members"]))
    return sorted(found.values(), key=lambda group: (-group["size"], group["leader"]))


def _group_of(facts: dict[str, Any]) -> Group:
    return {
        "leader": facts["leader"],
        "region": facts["region"],
        "cloud": facts["cloud"],
        "threshold_ms": facts["threshold_ms"],
        "leave_threshold_ms": facts["leave_threshold_ms"],
        "settled": None,
        "size": 0,
        "members": [],
        "told_by_leader": False,
    }


def _member(facts: dict[str, Any]) -> dict[str, Any]:
    """A broker by its own word."""
    leads = facts["leader"] == facts["name"]
    shown = {key: facts[key] for key in ("name", "lcm", "relay", "cloud_state", "cloud_problem", "waiting_messages")}
    return shown | {"leads": leads, "state": "up", "site": None, "latency_ms": None if leads else facts["latency_ms"]}


def _fellow(fellow: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A broker by the word of another one of its group. How far it is from its leader is known if either of them was asked."""
    leads = fellow["name"] == facts["leader"]
    return {
        "name": fellow["name"],
        "leads": leads,
        "state": "up" if fellow["up"] else "down",
        "site": None,
        "latency_ms": fellow["latency_ms"] if facts["leader"] == facts["name"] else None,
        "lcm": None,
        "relay": fellow["relay"],
        "cloud_state": None,
        "cloud_problem": None,
        "waiting_messages": None,
    }


def _announced(leader: dict[str, Any], facts: dict[str, Any]) -> Group:
    """A group of which only its leader's announcement is known."""
    member = {
        "name": leader["name"],
        "leads": True,
        "state": "up",
        "site": None,
        "latency_ms": None,
        "lcm": leader["lcm"],
        "relay": "-",
        "cloud_state": "connected",  # or nobody would hear of it
        "cloud_problem": "",
        "waiting_messages": None,
    }
    return {
        "leader": leader["name"],
        "region": facts["region"],
        "cloud": facts["cloud"],
        "threshold_ms": leader["threshold_ms"],
        "leave_threshold_ms": None,
        "settled": None,
        "size": leader["size"],
        "members": [member],
        "told_by_leader": True,
    }


def groups_table(found: list[Group]) -> Table:
    """All groups, a broker on each line."""
    table = new_table(
        "Broker", "Role", "To leader", "Threshold", "LCM", "Cloud", "Relay", "Waiting", numbers=("To leader", "LCM", "Waiting")
    )
    for group in found:
        for member in group["members"]:
            table.add_row(*_row(group, member))
        unknown = group["size"] - len(group["members"])
        if unknown > 0:
            table.add_row(Text(f"  {unknown:,} more", style="dim"))
    return table


def _row(group: Group, member: dict[str, Any]) -> list[Text]:
    leads = member["leads"]
    name = plain(member["name"]) if leads else Text("  ") + plain(member["name"])
    if leads:
        name.stylize("bold")
    role = Text("leads" if leads else "member")
    if leads and group["settled"] is False:
        role += Text(", forming", style="yellow")
    if member["state"] != "up":
        role += Text(f", {member['state']}", style="red")
    relay = member["relay"]
    return [
        name,
        role,
        Text("-" if leads else _milliseconds(member["latency_ms"])),
        Text(_thresholds(group) if leads else ""),
        Text("-" if member["lcm"] is None else f"{member['lcm']:,.0f}"),
        Text(member["cloud_state"] or "-", style="red" if member["cloud_state"] == "connecting" else ""),
        Text(relay, style=RELAY_STYLES.get(relay, "")),
        Text("-" if member["waiting_messages"] is None else f"{member['waiting_messages']:,}"),
    ]


def _milliseconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f} ms"


def _thresholds(group: Group) -> str:
    """Below which brokers join, above which they leave."""
    leave = group["leave_threshold_ms"]
    return f"{group['threshold_ms']:g} ms" + ("" if leave is None else f" (leave {leave:g})")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("groups")(groups)
