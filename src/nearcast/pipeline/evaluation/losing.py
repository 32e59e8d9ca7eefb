"""Which expected messages never came, and what may explain it; and when clients that had been away heard something again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nearcast.pipeline.evaluation.places import FOR_EVER
from nearcast.pipeline.evaluation.reading import NONE
from nearcast.recording.schema import arrow

if TYPE_CHECKING:
    from nearcast.pipeline.evaluation.judging import Numbers, Part, Table


def losses(part: Part) -> tuple[Table, dict[str, Numbers]]:
    """A row for each lost message and subscriber; and, by flow, how many have which cause."""
    from nearcast.pipeline.evaluation.judging import CAUSES, PAIRS_AT_A_TIME, count, names, optional

    pyarrow = arrow()
    suspects = np.flatnonzero(part.lost > 0)
    got_flow, got_message = part.flow[part.got], part.message_of[part.rows][part.got]
    suspected = np.isin(got_flow, suspects)
    got = np.sort(got_flow[suspected] * part.messages + got_message[suspected])
    flows: list[Numbers] = [np.zeros(0, dtype=np.int64)]
    messages: list[Numbers] = [np.zeros(0, dtype=np.int64)]
    reached = np.cumsum(part.expected[suspects])
    for piece in np.split(
        suspects, np.searchsorted(reached, np.arange(PAIRS_AT_A_TIME, reached[-1], PAIRS_AT_A_TIME)) if len(suspects) else []
    ):
        lengths = part.expected[piece]
        flow = np.repeat(piece, lengths)
        begins = np.repeat(part.expects_from[piece] - (np.cumsum(lengths) - lengths), lengths)
        message = part.due[begins + np.arange(len(flow))]
        key = flow * part.messages + message
        at = np.minimum(np.searchsorted(got, key), max(len(got) - 1, 0))
        missed = got[at] != key if len(got) else np.ones(len(key), dtype=np.bool_)
        flows.append(flow[missed])
        messages.append(message[missed])
    flow, message = np.concatenate(flows), np.concatenate(messages)
    row = part.published_at[message]
    qos = part.qos[row].astype(np.int64)
    agreed = np.minimum(qos, part.granted[flow])
    away = _away(part, flow, part.sent_ns[row])
    acknowledged = part.acknowledged[message]
    cause = np.select([away, (qos > 0) & ~acknowledged, agreed == 0], [0, 1, 2], 3)
    sequence = part.sequence[row]
    table = pyarrow.table(
        {
            **names(part, part.flow_stream[flow], part.flow_subscriber[flow]),
            "message_id": part.message_id[row],
            "sequence": optional(sequence, sequence != NONE),
            "sent_ns": part.sent_ns[row],
            "qos": agreed.astype(np.int32),
            "away": away,
            "acknowledged": acknowledged,
            "cause": pyarrow.array(CAUSES).take(pyarrow.array(cause)),
        }
    )
    return table, {name: count(flow, part.flows, cause == number) for number, name in enumerate(CAUSES)}


def _by_client(part: Part, run: Numbers, subscriber: Numbers) -> list[tuple[int, list[tuple[int, Any]], Numbers]]:
    """``run, outages with their numbers, rows`` of each client that was ever away."""
    absent: list[dict[str, list[tuple[int, Any]]]] = []
    for each in part.question.runs:
        found: dict[str, list[tuple[int, Any]]] = {}
        for number, outage in enumerate(each.clients.outages):
            found.setdefault(outage.client, []).append((number, outage))
        absent.append(found)
    codes = {name: code for code, name in enumerate(part.subscribers)}
    width = len(codes) + 1
    key = run.astype(np.int64) * width + subscriber
    order = np.argsort(key, kind="stable")
    result = []
    for number, clients in enumerate(absent):
        for client, outages in clients.items():
            if client in codes:
                low, high = np.searchsorted(
                    key, [number * width + codes[client], number * width + codes[client] + 1], sorter=order
                )
                if high > low:
                    result.append((number, outages, order[low:high]))
    return result


def _away(part: Part, flow: Numbers, sent_ns: Numbers) -> Numbers:
    """Whether the subscriber had no connection then."""
    away = np.zeros(len(flow), dtype=np.bool_)
    for _, outages, rows in _by_client(part, part.stream_run[part.flow_stream[flow]], part.flow_subscriber[flow]):
        gone = np.array([outage.gone_ns for _, outage in outages], dtype=np.int64)
        back = np.array([FOR_EVER if outage.back_ns is None else outage.back_ns for _, outage in outages], dtype=np.int64)
        at = np.searchsorted(gone, sent_ns[rows], side="right") - 1
        away[rows] = (at >= 0) & (sent_ns[rows] < back[np.maximum(at, 0)])
    return away


def heard(part: Part) -> Table:
    """``run_code, outage, first_ns``: the first delivery after a client came back, before it was gone again."""
    found: dict[str, list[int]] = {"run_code": [], "outage": [], "first_ns": []}
    received = part.received_ns[part.rows]
    for run, outages, rows in _by_client(part, part.run[part.rows], part.flow_subscriber[part.flow]):
        times = np.sort(received[rows])
        for number, outage in outages:
            if outage.back_ns is None:
                continue
            at = int(np.searchsorted(times, outage.back_ns))
            if at < len(times) and times[at] < (FOR_EVER if outage.gone_again_ns is None else outage.gone_again_ns):
                found["run_code"].append(run)
                found["outage"].append(number)
                found["first_ns"].append(int(times[at]))
    return arrow().table({name: arrow().array(values, arrow().int64()) for name, values in found.items()})
