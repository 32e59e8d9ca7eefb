"""``nearcast topic create``, ``tap`` and ``delete``: which topics a broker keeps, and which are of which class."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nearcast.cli import connection as shared
from nearcast.cli import topic_connection as common
from nearcast.cli import topic_display as display
from nearcast.cli import topic_owned as owned
from nearcast.cli.controller_client import DEFAULT_API, Api, ControllerClient, Secret, TokenFile
from nearcast.cli.quantities import parse_count, parse_duration, parse_size, show_size
from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.records import TopicState
from nearcast.config import Retention, TopicRule
from nearcast.errors import NearcastError
from nearcast.topiclog.rules import RuleTable

KEEP = "What is kept"
CHANGE = "Make and delete"

Filter = Annotated[str, typer.Argument(metavar="NAME|PATTERN", help="A topic, or a filter such as 'sensors/#'.")]
MaxRecords = Annotated[
    str | None, typer.Option(metavar="COUNT", help="Records kept of each topic: 1000, 2M.", rich_help_panel=KEEP)
]
MaxBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes of each topic: 10GB.", rich_help_panel=KEEP)]
MaxAge = Annotated[str | None, typer.Option(metavar="TIME", help="How long: 7d, 36h, 90s.", rich_help_panel=KEEP)]


def create(
    topic: Filter,
    durable: Annotated[
        bool,
        typer.Option(
            "--durable",
            help="Acknowledge messages once they are on disk; so without --class, too.",
            show_default=False,
            rich_help_panel=KEEP,
        ),
    ] = False,
    max_records: MaxRecords = None,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    topic_class: owned.TopicClass = None,
    max_latency_ms: owned.MaxLatency = None,
    replica_set: owned.SetName = None,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
) -> None:
    """Make topics durable (a broker keeps their messages, each with an index), or give them a class in the fabric.

    Without a bound everything is kept. Asked again with other bounds, those hold from then on. Topics of class owned have one
    broker at a time that orders their messages; the controller moves them so that --max-latency-ms holds.

    Example: nearcast topic create 'sensors/#' --durable --max-age 7d --max-bytes 10GB

    Example: nearcast topic create 'swarm/#' --class owned --max-latency-ms 40

    Example: nearcast topic create 'orders/#' --class owned --durable --set eu --max-age 30d
    """
    kept = max_records is not None or max_bytes is not None or max_age is not None
    if max_latency_ms is not None and topic_class is None:
        raise typer.BadParameter("--max-latency-ms is for topics of --class owned")
    if replica_set is not None:
        if topic_class not in (None, "owned") or max_latency_ms is not None:
            raise typer.BadParameter("topics of a replica set are of class owned, and its members stay where they are")
        retention = _retention(max_records, max_bytes, max_age)
        kept_by = owned.put_in_set(ControllerClient(api, fabric_secret, token_file, ca), topic, replica_set, retention)
        if as_json:
            common.print_json(kept_by)
        else:
            typer.echo(f"{topic} is kept by replica set {replica_set}")
        return
    if topic_class is None or durable:
        rule = TopicRule(topic=topic, retention=_retention(max_records, max_bytes, max_age))
        with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
            _make(topics, rule, as_json and topic_class is None)
    elif kept:
        raise typer.BadParameter("--max-records, --max-bytes and --max-age are about --durable topics")
    if topic_class is not None:
        made = owned.put_rule(ControllerClient(api, fabric_secret, token_file, ca), topic, topic_class, max_latency_ms)
        if as_json:
            common.print_json(made)
        else:
            typer.echo(owned.rule_words(made))


def tap(
    topic: Filter,
    max_records: MaxRecords = None,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
) -> None:
    """Copy what passes on plain topics into the log, without making their publishers wait.

    A crash may cost the log the last of it; what is acknowledged does not depend on the log.

    Example: nearcast topic tap 'telemetry/+' --max-records 1M
    """
    rule = TopicRule(topic=topic, mode="tap", retention=_retention(max_records, max_bytes, max_age))
    with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
        _make(topics, rule, as_json)


def delete(
    topic: Filter,
    keep_records: Annotated[
        bool, typer.Option("--keep-records", help="Only stop keeping new messages; leave those in the log.")
    ] = False,
    class_rule: Annotated[
        bool,
        typer.Option("--class", help="Take away their class instead: the controller's rule.", rich_help_panel=owned.FABRIC),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
) -> None:
    """Delete a rule that create or tap made, and the records that no other rule keeps. Indexes are never used again.

    Example: nearcast topic delete 'sensors/#'

    Example: nearcast topic delete 'swarm/#' --class
    """
    if class_rule:
        if keep_records:
            raise typer.BadParameter("--keep-records is about durable topics, --class is not")
        owned.remove_rule(ControllerClient(api, fabric_secret, token_file, ca), topic)
        if as_json:
            common.print_json({"topic": topic, "outcome": "deleted"})
        else:
            typer.echo(f"no rule gives {topic} a class any more")
        return
    with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
        gone = [] if keep_records else _kept_by_nothing_else(topics, topic)
        records = sum(state.count for state in gone)
        if records and not yes:
            size = show_size(sum(state.bytes for state in gone))
            _confirm(f"Delete {common.counted(records, 'record')} of {common.counted(len(gone), 'topic')} ({size})?")
        topics.delete_topic(topic, keep_records=keep_records)
    if as_json:
        common.print_json({"topic": topic, "outcome": "deleted", "records": records})
    else:
        typer.echo(f"deleted {topic}" + (f" and {common.counted(records, 'record')}" if records else ""))


def _kept_by_nothing_else(topics: BlockingTopics, topic: str) -> list[TopicState]:
    left = RuleTable(rule for rule in topics.rules() if rule.topic != topic)
    return [state for state in topics.topics(topic) if state.count and left.match(state.topic.encode()) is None]


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise NearcastError(f"{question} Say --yes to do it without being asked")
    if not typer.confirm(question, err=True):
        raise NearcastError("nothing was deleted")


def _make(topics: BlockingTopics, rule: TopicRule, as_json: bool) -> None:
    before = next((other for other in topics.rules() if other.topic == rule.topic), None)
    changed = (
        topics.create_topic(rule.topic, rule.retention) if rule.mode == "durable" else topics.tap(rule.topic, rule.retention)
    )
    outcome = "unchanged" if not changed else "created" if before is None else "changed"
    if as_json:
        common.print_json({**display.rule_fields(rule), "outcome": outcome})
        return
    kept = display.retention_words(rule.retention)
    if outcome == "unchanged":
        typer.echo(f"{rule.topic} is {_as_what(rule)} already, keeping {kept}")
    elif outcome == "created":
        typer.echo(f"{rule.topic} is {_as_what(rule)} now, keeping {kept}")
    else:
        was = "" if before is None else f" (before: {_as_what(before)}, {display.retention_words(before.retention)})"
        typer.echo(f"{rule.topic} is {_as_what(rule)}, keeping {kept}{was}")


def _as_what(rule: TopicRule) -> str:
    return "durable" if rule.mode == "durable" else "tapped"


def _retention(max_records: str | None, max_bytes: str | None, max_age: str | None) -> Retention:
    try:
        return Retention(
            max_records=0 if max_records is None else parse_count(max_records),
            max_bytes=0 if max_bytes is None else parse_size(max_bytes),
            max_age_seconds=0.0 if max_age is None else parse_duration(max_age),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def register(app: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (create, tap, delete):
        app.command(rich_help_panel=CHANGE, no_args_is_help=True)(command)
