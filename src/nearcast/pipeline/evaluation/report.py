"""The report: one HTML page with everything in it, from the summary of an evaluation alone.

It has no scripts and loads nothing, so it can be mailed and kept. Names of runs, topics and clients are other people's words:
all of them are escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from nearcast.pipeline.evaluation import charts
from nearcast.pipeline.evaluation.charts import Bar, Line, Mark, number

MAX_LINES = 12
MAX_SITES = 40
MAX_BARS = 40

_CAUSES = {
    "lost_unexplained": "unexplained",
    "lost_away": "subscriber away",
    "lost_unacknowledged": "never acknowledged",
    "lost_qos_0": "QoS 0",
}

_STYLE = """
:root{--bg:#fff;--panel:#f6f7f9;--text:#1b1f24;--dim:#667080;--grid:#dfe3e8;--bad:#c8372d;--good:#1a7f4b;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#b58900;--c5:#56b4e9}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--panel:#1d2127;--text:#e6e9ed;--dim:#98a2b0;--grid:#323841;--bad:#ff7b6f;
--good:#4cc38a;--c0:#58a6ff;--c1:#ff9d5c;--c2:#3fcf9f;--c3:#e59ac4;--c4:#e3b341;--c5:#8fd3ff}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1400px;margin:0 auto;padding:24px}h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 10px}
h3{font-size:15px;margin:0 0 6px}p{margin:6px 0}.dim,.none{color:var(--dim)}
code{font:13px ui-monospace,monospace;word-break:break-word}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:16px;align-items:start;
margin-top:12px}
figure{margin:0;padding:14px;background:var(--panel);border-radius:8px;min-width:0}figcaption{color:var(--dim);font-size:13px}
svg{width:100%;height:auto;display:block}.grid{stroke:var(--grid);stroke-width:1}.line{fill:none;stroke-width:2;
stroke-linejoin:round;stroke-linecap:round}.mark{stroke:var(--bad);stroke-dasharray:3 4}.marked{fill:var(--bad);font-size:11px}
.tick,.axis{fill:var(--dim);font-size:11px}.label,.cell{fill:var(--text);font-size:11px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12px;color:var(--dim)}
.legend i{display:inline-block;width:18px;border-top:3px solid var(--k);margin-right:6px;vertical-align:middle}
.legend i.dashed{border-top-style:dashed}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}th,td{padding:4px 8px;text-align:right;
border-bottom:1px solid var(--grid);white-space:nowrap;font-variant-numeric:tabular-nums}
th{color:var(--dim);font-weight:500}td:first-child,th:first-child,td.text,th.text{text-align:left}
td.text{white-space:normal;overflow-wrap:anywhere;min-width:130px}td.bad{color:var(--bad);font-weight:600}td.good{color:var(--good)}
.notes{border-left:3px solid var(--c4);padding:4px 12px;margin:12px 0;background:var(--panel)}
dt{font-weight:600;margin-top:8px}dd{margin:0 0 0 16px;color:var(--dim)}
"""

Row = dict[str, Any]


def render(summary: dict[str, Any], *, title: str, command: str = "", made: str = "") -> str:
    """The page."""
    runs = summary["runs"]
    sections = [
        _head(summary, title, command, made),
        _section("At a glance", _glance(runs)),
        _section("Latency", _figures(_latency(summary))),
        _section("Violations of bounds", _violations(summary)),
        _section("Lost, twice, out of order", _losses(summary)),
        _section("Throughput", _figures(_throughput(summary))),
        _section("Brokers and excess data", _brokers(summary)),
        _section("Clients that lost their connection", _downtime(summary)),
        _section("Topics with the most violations, then the slowest", _topics(summary)),
        _section("The runs", _identities(runs)),
        _section("What the figures mean", _definitions(summary)),
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _figure(title: str, body: str, caption: str = "") -> str:
    note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{body}{note}</figure>"


def _figures(figures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>'


def _head(summary: dict[str, Any], title: str, command: str, made: str) -> str:
    names = len(summary["runs"])
    words = f"{summary['events']:,} events of {names} {'run' if names == 1 else 'runs'}"
    text = f"<h1>{escape(title)}</h1><p class='dim'>{escape(words)}{escape(f' · {made}' if made else '')}</p>"
    if command:
        text += f"<p><code>{escape(command)}</code></p>"
    if summary["notes"]:
        text += '<div class="notes">' + "".join(f"<p>{escape(note)}</p>" for note in summary["notes"]) + "</div>"
    return text


# -- tables ----------------------------------------------------------------------------------------------------------------

Show = Callable[[Any], str]


def milliseconds(value: Any) -> str:
    return "–" if value is None else (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}")


def plain(value: Any) -> str:
    return "–" if value is None else number(value)


def percent(value: Any) -> str:
    return "–" if value is None else ("0 %" if value == 0 else f"{100 * value:.3g} %")


def count(value: Any) -> str:
    return "–" if value is None else f"{value:,.0f}"


def text(value: Any) -> str:
    return "–" if value in (None, "") else str(value)


def size(value: Any) -> str:
    if value is None:
        return "–"
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def _table(
    rows: Sequence[Row], columns: Sequence[tuple[str, str, Show]], bad: Callable[[str, Row], bool] | None = None
) -> str:
    if not rows:
        return '<p class="none">None.</p>'
    head = "".join(f'<th class="{"text" if show is text else ""}">{escape(heading)}</th>' for _, heading, show in columns)
    body = ""
    for row in rows:
        cells = ""
        for key, _, show in columns:
            kind = "text" if show is text else ("bad" if bad is not None and bad(key, row) else "")
            cells += f'<td class="{kind}">{escape(show(row.get(key)))}</td>'
        body += f"<tr>{cells}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _run_column(runs: Sequence[Row]) -> list[tuple[str, str, Show]]:
    return [("run", "run", text)] if len({run["run"] for run in runs}) > 1 else []


def _glance(runs: Sequence[Row]) -> str:
    columns: list[tuple[str, str, Show]] = [("run", "run", text)]
    if any(run["strategy"] for run in runs):
        columns.append(("strategy", "strategy", text))
    columns += [
        ("duration_s", "seconds", plain),
        ("published", "published", count),
        ("delivered", "delivered", count),
        ("expected", "expected", count),
        ("lost", "lost", count),
        ("lost_unexplained", "unexplained", count),
        ("duplicates", "twice", count),
        ("out_of_order", "out of order", count),
        ("p50_ms", "p50 ms", milliseconds),
        ("p95_ms", "p95 ms", milliseconds),
        ("p99_ms", "p99 ms", milliseconds),
        ("p999_ms", "p99.9 ms", milliseconds),
        ("max_ms", "max ms", milliseconds),
        ("violation_ratio", "violations", percent),
        ("excess_share", "excess data", percent),
        ("downtime_p50_ms", "downtime p50 ms", milliseconds),
    ]
    return _table(
        runs, columns, lambda key, row: key in ("lost_unexplained", "lost", "violation_ratio") and bool(row.get(key))
    )


def _identities(runs: Sequence[Row]) -> str:
    columns: list[tuple[str, str, Show]] = [
        ("run", "run", text),
        ("scenario", "scenario", text),
        ("strategy", "strategy", text),
        ("links", "brokers", text),
        ("events", "events", count),
        ("files", "files", count),
        ("publishers", "publishers", count),
        ("subscribers", "subscribers", count),
        ("topics", "topics", count),
        ("skipped", "skipped", count),
        ("refused", "refused", count),
        ("folder", "folder", text),
        ("command", "command", text),
    ]
    return _table(runs, columns)


def _topics(summary: dict[str, Any]) -> str:
    columns: list[tuple[str, str, Show]] = [
        *_run_column(summary["runs"]),
        ("topic", "topic", text),
        ("bound_ms", "bound ms", milliseconds),
        ("deliveries", "delivered", count),
        ("violation_ratio", "violations", percent),
        ("episodes", "episodes", count),
        ("violation_ms", "in all ms", milliseconds),
        ("longest_ms", "longest ms", milliseconds),
        ("lost", "lost", count),
        ("p50_ms", "p50 ms", milliseconds),
        ("p99_ms", "p99 ms", milliseconds),
        ("max_ms", "max ms", milliseconds),
    ]
    return _table(summary["worst_topics"], columns)


# -- figures ---------------------------------------------------------------------------------------------------------------


def _by_run(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["run"], []).append(row)
    return dict(list(found.items())[:MAX_LINES])


def _bound_marks(summary: dict[str, Any]) -> list[Mark]:
    values = sorted({bound["bound_ms"] for bound in summary["bounds"]})
    return [Mark(f"bound {value:g} ms", value) for value in values[:4]]


def _latency(summary: dict[str, Any]) -> list[str]:
    figures = []
    lines = []
    for position, (run, rows) in enumerate(_by_run(summary["histogram"]).items()):
        points: list[tuple[float, float | None]] = [(max(rows[0]["from_ms"], 1e-3), 0.0)]
        points += [(max(row["to_ms"], 1e-3), row["share"]) for row in rows]
        lines.append(Line(run, points, position, dashed=position >= charts.COLOURS))
    chart = charts.line_chart(
        lines,
        x="latency (ms)",
        y="share of deliveries",
        log_x=True,
        x_marks=_bound_marks(summary),
        y_max=1.0,
        y_format=percent,
    )
    figures.append(
        _figure("How long deliveries took", chart, "First deliveries, from sending to arrival; a steep line is even.")
    )
    over_time = _by_run(summary["timeline"])
    lines = []
    for position, (run, rows) in enumerate(over_time.items()):
        several = len(over_time) > 1
        shown = (
            (("p50_ms", "p50"), ("p99_ms", "p99")) if several else (("p50_ms", "p50"), ("p95_ms", "p95"), ("p99_ms", "p99"))
        )
        for place, (key, label) in enumerate(shown):
            lines.append(
                Line(
                    f"{run} {label}" if several else label,
                    [(row["at_s"] + row["seconds"] / 2, row[key]) for row in rows],
                    position if several else place,
                    dashed=several and label == "p50",
                    thin=several and label == "p50",
                )
            )
    chart = charts.line_chart(lines, x="seconds since the first message", y="ms", log_y=True, y_marks=_bound_marks(summary))
    figures.append(_figure("Latency over time", chart, "By when messages arrived."))
    for run, rows in _by_run(summary["site_pairs"]).items():
        sites = sorted({row["publisher_site"] for row in rows})[:MAX_SITES], sorted({row["subscriber_site"] for row in rows})
        values = {(row["publisher_site"], row["subscriber_site"]): row["p99_ms"] for row in rows if row["p99_ms"] is not None}
        smallest = min((bound["bound_ms"] for bound in summary["bounds"]), default=None)
        chart = charts.heat_map(
            sites[0], sites[1][:MAX_SITES], values, mark=smallest, said="p99 in ms; rows publish, columns subscribe"
        )
        name = f"Between sites: {run}" if len(summary["runs"]) > 1 else "Between sites"
        figures.append(_figure(name, chart, "Red: above the smallest bound." if smallest is not None else ""))
    return figures


def _violations(summary: dict[str, Any]) -> str:
    if not summary["bounds"]:
        return "<p class=\"none\">No bounds: give them with --bound 50ms or --bound 'FILTER=20ms', or in the scenario.</p>"
    lines = [
        Line(
            run,
            [(row["at_s"], row["late"] / row["samples"] if row["samples"] else None) for row in rows],
            position,
            steps=True,
        )
        for position, (run, rows) in enumerate(_by_run(summary["timeline"]).items())
    ]
    chart = charts.line_chart(lines, x="seconds since the first message", y="share above the bound", y_format=percent)
    several = _run_column(summary["runs"])
    runs: list[tuple[str, str, Show]] = [
        ("run", "run", text),
        ("violation_ratio", "violations", percent),
        ("late", "late", count),
        ("lost", "lost", count),
        ("episodes", "episodes", count),
        ("violation_ms", "in all ms", milliseconds),
        ("median_violation_ms", "median ms", milliseconds),
        ("longest_violation_ms", "longest ms", milliseconds),
    ]
    longest: list[tuple[str, str, Show]] = [
        *several,
        ("topic", "topic", text),
        ("subscriber", "subscriber", text),
        ("begin_s", "from s", plain),
        ("duration_ms", "ms", milliseconds),
        ("messages", "messages", count),
        ("worst_ms", "worst ms", milliseconds),
    ]
    return _table(summary["runs"], runs) + _figures(
        [
            _figure("Late deliveries over time", chart),
            _figure("Longest episodes", _table(summary["longest_episodes"], longest)),
        ]
    )


def _losses(summary: dict[str, Any]) -> str:
    runs = summary["runs"]
    columns: list[tuple[str, str, Show]] = [("run", "run", text), ("expected", "expected", count), ("lost", "lost", count)]
    columns += [("loss_ratio", "share", percent)]
    columns += [(key, label, count) for key, label in _CAUSES.items()]
    columns += [
        ("duplicates", "twice", count),
        ("out_of_order", "out of order", count),
        ("retained", "retained", count),
        ("unexpected", "unexpected", count),
    ]
    body = _table(runs, columns, lambda key, row: key == "lost_unexplained" and bool(row[key]))
    lines = [
        Line(run, [(row["at_s"], float(row["lost"])) for row in rows], position, steps=True)
        for position, (run, rows) in enumerate(_by_run(summary["timeline"]).items())
    ]
    if any(run["lost"] for run in runs):
        bars = [Bar(run["run"], [float(run[key]) for key in _CAUSES], count(run["lost"])) for run in runs if run["lost"]]
        most: list[tuple[str, str, Show]] = [
            *_run_column(runs),
            ("topic", "topic", text),
            ("subscriber", "subscriber", text),
            ("expected", "expected", count),
            ("lost", "lost", count),
            *((key, label, count) for key, label in _CAUSES.items()),
        ]
        body += _figures(
            [
                _figure("Why", charts.bar_chart(bars[:MAX_BARS], list(_CAUSES.values()), x="deliveries", value_format=number)),
                _figure(
                    "When lost messages were sent", charts.line_chart(lines, x="seconds since the first message", y="messages")
                ),
                _figure("Who lost most", _table(summary["most_losses"], most)),
            ]
        )
    if summary["refusals"]:
        refused: list[tuple[str, str, Show]] = [
            *_run_column(runs),
            ("kind", "kind", text),
            ("reason", "reason", text),
            ("events", "events", count),
        ]
        body += _figures([_figure("Refused, skipped, not connected", _table(summary["refusals"], refused))])
    return body


def _throughput(summary: dict[str, Any]) -> list[str]:
    figures = []
    for title, unit, sent, came in (
        ("Messages per second", "messages/s", "published_per_s", "deliveries_per_s"),
        ("Payload bytes per second", "bytes/s", "published_bytes_per_s", "delivered_bytes_per_s"),
    ):
        lines = []
        several = len(summary["runs"]) > 1
        for position, (run, rows) in enumerate(_by_run(summary["timeline"]).items()):
            for place, (key, label) in enumerate(((sent, "published"), (came, "delivered"))):
                lines.append(
                    Line(
                        f"{run} {label}" if several else label,
                        [(row["at_s"], row[key]) for row in rows],
                        position if several else place,
                        dashed=several and label == "published",
                        steps=True,
                    )
                )
        figures.append(_figure(title, charts.line_chart(lines, x="seconds since the first message", y=unit)))
    return figures


def _brokers(summary: dict[str, Any]) -> str:
    rows = summary["brokers"]
    several = len(summary["runs"]) > 1
    bars = [
        Bar(
            f"{row['strategy'] or row['run']} · {row['broker']}" if several else row["broker"],
            [float(row["carried_bytes"] - row["excess_bytes"]), float(row["excess_bytes"])],
            percent(row["excess_share"]),
        )
        for row in sorted(rows, key=lambda row: (-row["excess_bytes"], -row["carried_bytes"]))[:MAX_BARS]
    ]
    columns: list[tuple[str, str, Show]] = [
        *_run_column(summary["runs"]),
        ("broker", "broker", text),
        ("published_messages", "published", count),
        ("delivered_messages", "delivered", count),
        ("carried_messages", "carried", count),
        ("carried_bytes", "carried", size),
        ("excess_messages", "excess", count),
        ("excess_bytes", "excess", size),
        ("excess_share", "share", percent),
    ]
    chart = charts.bar_chart(bars, ["for somebody there", "excess"], x="payload bytes carried", value_format=size)
    return _figures([_figure("Excess data by broker", chart), _figure("Brokers", _table(rows[:MAX_BARS], columns))])


def _downtime(summary: dict[str, Any]) -> str:
    if not summary["longest_outages"]:
        return '<p class="none">No client lost its connection.</p>'
    lines = []
    several = len(summary["runs"]) > 1
    parts = (("downtime_distribution", "connected again"), ("until_delivery_distribution", "first message after"))
    runs = [run["run"] for run in summary["runs"]]
    for place, (key, label) in enumerate(parts):
        for entry in summary[key][:MAX_LINES]:
            position = runs.index(entry["run"])
            lines.append(
                Line(
                    f"{entry['run']} {label}" if several else label,
                    [(max(value, 1e-3), step / 100) for step, value in enumerate(entry["values_ms"])],
                    position if several else place,
                    dashed=several and place == 1,
                )
            )
    chart = charts.line_chart(lines, x="ms since the connection was lost", y="share", log_x=True, y_max=1.0, y_format=percent)
    table: list[tuple[str, str, Show]] = [
        *_run_column(summary["runs"]),
        ("client", "client", text),
        ("broker_before", "from", text),
        ("broker_after", "to", text),
        ("downtime_ms", "away ms", milliseconds),
        ("until_subscribed_ms", "subscribed ms", milliseconds),
        ("until_delivery_ms", "first message ms", milliseconds),
        ("reason", "reason", text),
    ]
    totals: list[tuple[str, str, Show]] = [
        ("run", "run", text),
        ("outages", "outages", count),
        ("moves", "to another broker", count),
        ("never_back", "never back", count),
        ("downtime_p50_ms", "p50 ms", milliseconds),
        ("downtime_p90_ms", "p90 ms", milliseconds),
        ("downtime_max_ms", "max ms", milliseconds),
        ("until_delivery_p50_ms", "first message p50 ms", milliseconds),
    ]
    return _table(summary["runs"], totals) + _figures(
        [_figure("How long clients were away", chart), _figure("Longest", _table(summary["longest_outages"], table))]
    )


def _definitions(summary: dict[str, Any]) -> str:
    error = 100 * summary["relative_error"]
    entries = {
        "Latency": "From sending (handing a message to the MQTT client) to arrival, of first deliveries; retained messages "
        f"that come because of a subscription are left out. Percentiles are nearest ranks, to within {error:g} %; smallest, "
        "largest and mean are exact.",
        "Expected": "Messages that were published and not refused, for every subscriber whose subscription to a matching "
        f"filter had been confirmed when they were sent; not those sent in the last {summary['settle_s']:g} s.",
        "Lost": "Expected and never delivered. Away: the subscriber had no connection when the message was sent. Never "
        "acknowledged: the publisher had no answer at QoS 1 or 2. QoS 0: agreed between publisher and subscriber, and "
        "promises nothing. Unexplained: none of these.",
        "Twice": "Deliveries of a message that the subscriber had already.",
        "Out of order": "First deliveries of a message after one that its publisher sent later, in the same stream.",
        "Violations": "Late or lost, of what was expected under a bound. An episode: consecutive messages of a stream that "
        "came late to a subscriber, with none in time between them; from when the first was due to when the last arrived.",
        "Excess data": "Payload of messages that passed a broker where neither their publisher was connected nor anybody was "
        "subscribed to them; once per message and broker. Clients see only the brokers on the way of what arrived.",
        "Away": "From losing a connection to having one again; to the confirmed subscription, where one was made; to the next "
        "message.",
    }
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in entries.items()) + "</dl>"
    )
