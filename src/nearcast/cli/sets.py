"""``nearcast set``: replica sets, the brokers that keep durable topics together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from nearcast.cli.controller_client import DEFAULT_API, Api, AsJson, CaFile, ControllerClient, Secret, TokenFile, quoted
from nearcast.cli.tables import new_table, open_console, plain, print_json

app = typer.Typer(no_args_is_help=True)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="What the set is to be called.")],
    members: Annotated[
        str | None, typer.Option(metavar="BROKERS", help="Which brokers: their names, with commas. Without: chosen by site.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=15, help="How many brokers, if they are chosen.")] = 3,
    placement: Annotated[
        Literal["colocated", "distributed"],
        typer.Option(help="colocated: all at one site, which answers fast; distributed: one a site, which outlives a site."),
    ] = "distributed",
    site: Annotated[str, typer.Option(help="Where they are to be (colocated), or where the first is (distributed).")] = "",
    preferred: Annotated[str, typer.Option(metavar="BROKER", help="The member that leads while it can.")] = "",
    write_quorum: Annotated[
        int, typer.Option(min=0, metavar="N", help="Disks that must have a message before it is acknowledged; 0: a majority.")
    ] = 0,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Have several brokers keep topics together: what they acknowledge is on a quorum of their disks.

    Example: nearcast set create eu --members berlin,vienna,paris --preferred berlin

    Example: nearcast set create lab --replicas 3 --placement colocated --site lab
    """
    controller = ControllerClient(api, fabric_secret, token_file, ca)
    request = {
        "name": name,
        "members": [] if members is None else [member.strip() for member in members.split(",") if member.strip()],
        "replicas": replicas,
        "placement": placement,
        "site": site,
        "preferred": preferred,
        "write_quorum": write_quorum,
    }
    made = controller.send("POST", "/sets", request)
    if as_json:
        print_json(made)
    else:
        typer.echo(
            f"{made['name']} is {', '.join(made['members'])}; topics come to it with"
            f" `nearcast topic create FILTER --class owned --durable --set {made['name']}`"
        )


@app.command("list")
def list_sets(
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show all replica sets, and which topics they keep.

    Example: nearcast set list
    """
    found: list[dict[str, Any]] = ControllerClient(api, fabric_secret, token_file, ca).get("/sets")
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("no replica sets: `nearcast set create` makes one")
        return
    table = new_table("Set", "Members", "Preferred", "Quorum", "Topics")
    for each in found:
        quorum = str(each["write_quorum"]) if each["write_quorum"] else "majority"
        table.add_row(
            plain(each["name"]),
            plain(", ".join(each["members"])),
            plain(each["preferred"] or "-"),
            quorum,
            plain(", ".join(each["topics"]) or "-"),
        )
    open_console().print(table)


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="Which set.")],
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget a replica set that keeps no topics. What its members have on disk stays there.

    Example: nearcast set remove lab
    """
    left = ControllerClient(api, fabric_secret, token_file, ca).send("DELETE", f"/sets/{quoted(name)}")
    if as_json:
        print_json(left)
    else:
        typer.echo(f"{name} is no replica set any more")
