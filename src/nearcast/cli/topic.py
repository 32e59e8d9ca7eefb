"""``nearcast topic``: durable topics and taps from the command line: make them, look at them, read them, write to them.

What is kept goes through a broker's bulk port; :class:`nearcast.client.blocking_topics.BlockingTopics` does the same from
Python. Who owns a topic is the controller's to say (:mod:`nearcast.cli.topic_owned`): ``list`` and ``show`` ask it as well, if
the user has what it asks for. Results go to stdout, words for people to stderr, so that either can be piped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from nearcast.cli import connection as shared
from nearcast.cli import topic_connection as common
from nearcast.cli import topic_display as display
from nearcast.cli import topic_owned as owned
from nearcast.cli import topic_rules
from nearcast.cli.controller_client import DEFAULT_API, Api, ControllerClient, Secret, TokenFile
from nearcast.cli.quantities import parse_time
from nearcast.cli.topic_sources import Sources
from nearcast.client import Properties
from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.records import KeptRule, Place, Record, TopicState
from nearcast.config import TopicRule
from nearcast.errors import ConfigError, NearcastError, TopicUnknown
from nearcast.mqtt.topics import overlaps
from nearcast.topiclog.conversation import MissingRecords
from nearcast.topiclog.rules import RuleTable

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
topic_rules.register(app)
owned.register(app)

LOOK = "Look"
WRITE = "Write"

MAX_LINE_BYTES = 16_777_216

CHUNK_BYTES = 262_144
"""What is read of standard input, and published, at once."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A topic.")]


# --- look -----------------------------------------------------------------------------------------------------------------


@app.command("list", rich_help_panel=LOOK)
def list_topics(
    topic: Annotated[str | None, typer.Argument(metavar="[FILTER]", help="Only what this filter matches.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Topics shown.")] = 100,
    durable: Annotated[bool, typer.Option("--durable", help="Only what the broker's log keeps.")] = False,
    only_owned: Annotated[bool, typer.Option("--owned", help="Only topics that have an owner.")] = False,
    violated: Annotated[bool, typer.Option("--violated", help="Only owned topics above their latency bound.")] = False,
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
    """List the rules by which topics are kept, and the topics in the log; with the fabric's secret, owned topics, too.

    Example: nearcast topic list 'sensors/#'

    Example: nearcast topic list --owned --fabric-secret secret
    """
    only_owned = only_owned or violated
    if durable and only_owned:
        raise typer.BadParameter("--durable and --owned do not go together: without them, both are listed")
    sources = Sources(only_owned=only_owned, only_kept=durable, secret=fabric_secret, token_file=token_file)

    def ask_log() -> tuple[list[KeptRule], list[TopicState]]:
        with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
            rules: list[KeptRule] = topics.rules()
            states = topics.topics(*([topic] if topic is not None else []))
        # A topic that was deleted leaves its name, by which its index goes on: that is nothing to look at.
        table = RuleTable(rules)
        states = [state for state in states if state.count or table.match(state.topic.encode()) is not None]
        rules = [rule for rule in rules if topic is None or overlaps(rule.topic, topic)]
        return rules, sorted(states, key=lambda state: state.topic)

    def ask_controller() -> dict[str, Any]:
        return owned.owned_topics(ControllerClient(api, fabric_secret, token_file, ca), topic, violated, limit)

    kept = sources.log(ask_log)
    found = sources.controller(ask_controller)
    sources.finish()
    if as_json:
        content: dict[str, Any] = {}
        if kept is not None:
            content["rules"] = [display.rule_fields(rule) for rule in kept[0]]
            content["topics"] = [display.state_fields(item) for item in kept[1]]
        if found is not None:
            content["owned"] = found
        common.print_json(content)
        return
    any_kept = kept is not None and bool(kept[0] or kept[1])
    any_owned = found is not None and bool(found["rules"] or found["topics"])
    if kept is not None and any_kept:
        _print_kept(*kept, limit)
    if any_kept and any_owned:
        typer.echo()
    if found is not None and any_owned:
        owned.print_owned(found)
    if not any_kept and not any_owned:
        typer.echo(_nothing(topic, owned=only_owned, violated=violated))


def _nothing(topic: str | None, *, owned: bool, violated: bool) -> str:
    of = "" if topic is None else f" of `{topic}`"
    if violated:
        return f"no topic{of} is above its bound"
    if owned:
        return f"no topic{of} is owned: `nearcast topic create {topic or 'NAME'} --class owned` changes that"
    what = f"nothing{of}" if of else "no topics"
    return f"the log keeps {what}: `nearcast topic create {topic or 'NAME'} --durable` changes that"


def _print_kept(rules: list[KeptRule], states: list[TopicState], limit: int) -> None:
    console = common.console()
    if rules:
        console.print(display.rules_table(rules))
    if rules and states:
        console.print()
    if states:
        console.print(display.topics_table(states[:limit], common.now()))
        if len(states) > limit:
            typer.echo(f"... and {len(states) - limit:,} more: name a filter, or --limit {len(states)}")
    elif rules:
        typer.echo("nothing was published to these yet")


@app.command(rich_help_panel=LOOK, no_args_is_help=True)
def show(
    topic: Name,
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
    """Show a topic: its indexes, size, rate, times and the rule that keeps it; with the fabric's secret, its owner, too.

    Example: nearcast topic show sensors/door
    """
    common.refuse_wildcards(topic, "show", "`nearcast topic list` takes filters")
    sources = Sources(only_owned=False, only_kept=False, secret=fabric_secret, token_file=token_file)
    now = common.now()

    def ask_log() -> tuple[TopicState, TopicRule | None, int]:
        with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
            rule = RuleTable(topics.rules()).match(topic.encode())
            state = next((item for item in topics.topics(topic) if item.topic == topic), None)
            if state is None and rule is None:
                raise TopicUnknown(topic, common.not_kept(topic))
            if state is None:
                state = TopicState(topic, 1, 1, 0, 0, 0)
            minute_ago = topics.indexes_at(topic, int((now.timestamp() - 60) * 1_000_000)).get(topic, state.next_index)
        return state, rule, max(0, state.next_index - minute_ago)

    def ask_controller() -> dict[str, Any]:
        return owned.find_owned(ControllerClient(api, fabric_secret, token_file, ca), topic)

    kept = sources.log(ask_log)
    found = sources.controller(ask_controller)
    sources.finish(quietly=True)  # most topics are only kept, or only owned
    if as_json:
        content: dict[str, Any] = {"topic": topic}
        if kept is not None:
            state, rule, last_minute = kept
            content |= {
                **display.state_fields(state),
                "records_last_minute": last_minute,
                "records_per_second": display.average_rate(state),
                "rule": None if rule is None else display.rule_fields(rule),
            }
        if found is not None:
            content["owned"] = found
        common.print_json(content)
        return
    if kept is not None:
        common.console().print(display.topic_details(*kept, now))
    if kept is not None and found is not None:
        typer.echo()
    if found is not None:
        common.console().print(owned.owned_details(found))


@app.command(rich_help_panel=LOOK, no_args_is_help=True)
def get(
    topic: Name,
    index: Annotated[str, typer.Argument(metavar="INDEX", help="An index, `earliest` or `latest`.")],
    raw: Annotated[bool, typer.Option("--raw", help="The payload's bytes, and nothing else.")] = False,
    as_hex: Annotated[bool, typer.Option("--hex", help="The payload as a hex dump.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all about the record before its payload.")] = False,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
) -> None:
    """Print one record's payload: as text if it is some, else as a hex dump.

    Example: nearcast topic get sensors/door 17 -v
    """
    common.refuse_wildcards(topic, "get", "`nearcast topic tail --no-follow` takes filters")
    if raw + as_hex + as_json > 1:
        raise typer.BadParameter("--raw, --hex and --json do not go together")
    with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
        record = topics.get(topic, _index(topics, topic, index))
    if as_json:
        common.print_json(display.record_fields(record))
        return
    output = sys.stdout.buffer
    if verbose:
        output.write(display.record_details(record, common.now()).encode("utf-8", "replace") + b"\n")
    text = display.as_text(record.payload)
    if raw or (text is None and not as_hex and not verbose and not sys.stdout.isatty()):
        output.write(record.payload)
    elif as_hex or text is None:
        output.write(display.hex_dump(record.payload).encode() + b"\n")
    else:
        output.write(record.payload + (b"" if text.endswith("\n") else b"\n"))
    output.flush()


def _index(topics: BlockingTopics, topic: str, index: str) -> int:
    if index in ("earliest", "latest"):
        state = next((item for item in topics.topics(topic) if item.topic == topic), None)
        if state is None:
            raise TopicUnknown(topic, common.nothing_of(topics, topic))
        return state.first_index if index == "earliest" else topics.latest_index(topic)
    if not index.isascii() or not index.isdigit():
        raise typer.BadParameter(f"{index!r} is no index: use a number from 1 on, earliest or latest")
    return int(index)


@app.command(rich_help_panel=LOOK, no_args_is_help=True)
def tail(
    filters: Annotated[list[str], typer.Argument(metavar="NAME|FILTER...", help="Topics, or filters such as 'sensors/#'.")],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            "-f",
            metavar="PLACE",
            help="earliest, latest, an index, a time (2026-11-16T09:30) or how long ago (10m).",
        ),
    ] = "latest",
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after so many records.")] = None,
    no_follow: Annotated[bool, typer.Option("--no-follow", help="Stop at the newest record there is now.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Payloads only, each followed by a newline.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all about each record.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per record.")] = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
) -> None:
    """Print records as they are committed, until Ctrl-C; with --from, those that are there first.

    A record is shown as time, topic, index and payload. When the broker restarts, reading goes on where it was.

    Example: nearcast topic tail 'sensors/#' --from 10m
    """
    if raw + verbose + as_json > 1:
        raise typer.BadParameter("--raw, --verbose and --json do not go together")
    place = _place(start)
    patience = 10.0 if no_follow else float("inf")
    with common.connected(url, user, password_file, ca, certificate, key, insecure, reconnect_seconds=patience) as topics:
        _explain_silence(topics, filters)
        if place == "latest" and not no_follow and sys.stderr.isatty():
            typer.secho(
                "waiting for new records; Ctrl-C ends, --from earliest begins with those there are", dim=True, err=True
            )
        read = topics.read if no_follow else topics.follow
        shown = 0
        for batch in read(list(filters), place, on_gap=_tell_gap):
            now = common.now()
            for record in batch.records():
                _write_record(record, now, raw=raw, verbose=verbose, as_json=as_json)
                shown += 1
                if shown == count:
                    break
            sys.stdout.buffer.flush()  # once for all that came together
            if shown == count:
                break


def _write_record(record: Record, now: datetime, *, raw: bool, verbose: bool, as_json: bool) -> None:
    output = sys.stdout.buffer
    if raw:
        output.write(record.payload + b"\n")
    elif as_json:
        output.write(json.dumps(display.record_fields(record), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    elif verbose:
        lines = f"{display.record_details(record, now)}\n{display.one_line(record.payload)}\n\n"
        output.write(lines.encode("utf-8", "replace"))
    else:
        output.write(display.tail_line(record, now).encode("utf-8", "replace") + b"\n")


def _place(text: str) -> Place:
    if text in ("earliest", "latest"):
        return "earliest" if text == "earliest" else "latest"
    if text.isascii() and text.isdigit():
        return int(text)
    found = parse_time(text, common.now())
    if found is None:
        raise typer.BadParameter(
            f"--from {text!r}: use earliest, latest, an index, a time like 2026-11-16T09:30, or how long ago, like 10m"
        )
    return found


def _tell_gap(missing: MissingRecords) -> None:
    gone = f"records {missing.first_index} to {missing.next_index - 1} of {display.printable(missing.topic)}"
    typer.secho(f"nearcast: {gone} are gone: retention removed them", fg=typer.colors.YELLOW, err=True)


def _explain_silence(topics: BlockingTopics, filters: list[str]) -> None:
    """Somebody who waits for what can never come is told so."""
    rules = topics.rules()
    for topic in filters:
        if any(overlaps(rule.topic, topic) for rule in rules):
            continue
        if not any(state.count for state in topics.topics(topic)):
            typer.secho(f"nearcast: {common.not_kept(topic)}", fg=typer.colors.YELLOW, err=True)


# --- write ----------------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=WRITE, no_args_is_help=True)
def publish(
    topic: Name,
    message: Annotated[str | None, typer.Option("--message", "-m", help="The message.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File to send as one message.")] = None,
    stdin_lines: Annotated[bool, typer.Option("--stdin-lines", "-l", help="Each line of standard input.")] = False,
    retain: Annotated[bool, typer.Option("--retain", "-r", help="Keep as the topic's last message.")] = False,
    user_property: Annotated[
        list[str] | None, typer.Option("--property", "-p", metavar="KEY=VALUE", help="User property.")
    ] = None,
    content_type: Annotated[str | None, typer.Option("--content-type", help="MIME type of the payload.")] = None,
    as_json: common.AsJson = False,
    url: common.Url = common.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
) -> None:
    """Publish to a durable topic; prints the index once the message is on disk. Subscribers get it as ever.

    Any MQTT client can publish to a durable topic as well, but does not learn the index.

    Example: nearcast topic publish sensors/door -m open
    """
    if (message is not None) + (file is not None) + stdin_lines != 1:
        raise typer.BadParameter("say what to publish: one of --message, --file or --stdin-lines")
    properties = _properties(user_property or [], content_type)
    with common.connected(url, user, password_file, ca, certificate, key, insecure) as topics:
        published, first, last = 0, 0, 0
        for payloads in _payloads(message, file):
            first_index = topics.publish_many(topic, payloads, properties=properties, retain=retain)
            first, last = first or first_index, first_index + len(payloads) - 1
            published += len(payloads)
    if as_json:
        common.print_json({"topic": topic, "published": published, "first_index": first, "last_index": last})
    elif published:
        typer.echo(f"{topic} {first}" if published == 1 else f"{topic} {first} to {last}")


def _properties(pairs: list[str], content_type: str | None) -> Properties | None:
    if not pairs and content_type is None:
        return None
    user_properties = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--property {pair!r}: write it as KEY=VALUE")
        user_properties.append((name, value))
    return Properties(user_properties=user_properties or None, content_type=content_type)


def _payloads(message: str | None, file: Path | None) -> Iterator[list[bytes]]:
    """What is to be published, in pieces that go together."""
    if message is not None:
        yield [message.encode("utf-8", "surrogateescape")]
    elif file is not None:
        try:
            yield [file.read_bytes()]
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    else:
        # As much as there is at a time: a person's lines go one by one, a file's by the thousand.
        descriptor = sys.stdin.fileno()
        rest = b""
        while chunk := os.read(descriptor, CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise NearcastError(f"a line on standard input is longer than {MAX_LINE_BYTES:,} bytes: use --file")
            if lines:
                yield [line.removesuffix(b"\r") for line in lines]
        if rest:
            yield [rest]
