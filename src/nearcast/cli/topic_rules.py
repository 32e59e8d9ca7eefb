"""``nearcast topic create``, ``tap`` and ``delete``: which topics a broker keeps."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nearcast.cli import connection as shared
from nearcast.cli import topic_connection as common
from nearcast.cli import topic_display as display
from nearcast.cli.quantities import parse_count, parse_duration, parse_size, show_size
from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.records import TopicState
from nearcast.config import Retention, TopicRule
from nearcast.errors import NearcastError
from nearcast.topiclog.rules import RuleTable

KEEP = "What is kept"
CHANGE = "Change what is kept"

Filter = Annotated[str, typer.Argument(metavar="NAME|PATTERN", help="A topic, or a filter such as 'sensors/#'.")]
MaxRecords = Annotated[
    str | None, typer.Option(metavar="COUNT", help="Records kept of each topic: 1000, 2M.", rich_help_panel=KEEP)
]
MaxBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes of each topic: 10GB.", rich_help_panel=KEEP)]
MaxAge = Annotated[str | None, typer.Option(metavar="TIME", help="How long: 7d, 36h, 90s.", rich_help_panel=KEEP)]


def create(
    topic: Filter,
    durable: Annotated[  # said by those who like to be plain; there is nothing else to create so far
        bool,
        typer.Option(
            "--durable",
            help="Acknowledge messages once they are on disk; so without it, too.",
            show_default=False,
            rich_help_panel=KEEP,
        ),
    ] = True,
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
    """Make topics durable: keep their messages in the broker's log, each with an index.

    Without a bound everything is kept. Asked again with other bounds, those hold from then on.

    Example: nearcast topic create 'sensors/#' --durable --max-age 7d --max-bytes 10GB
    """
    rule = TopicRule(topic=topic, retention=_retention(max_records, max_bytes, max_age))
    with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
        _make(topics, rule, as_json)


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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
) -> None:
    """Delete a rule that create or tap made, and the records that no other rule keeps. Indexes are never used again.

    Example: nearcast topic delete 'sensors/#'
    """
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
