"""Figures of a node, read again and again."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from nearcast.experiments.sampling import Sample, parse, rates, read_samples, sample

PAGE = """# HELP nearcast_messages_sent_total PUBLISH packets sent.
# TYPE nearcast_messages_sent_total counter
nearcast_messages_sent_total{qos="0"} 5.0
nearcast_messages_sent_total{qos="1"} 7.0
nearcast_connected_clients 3.0
nearcast_messages_sent_created 1.7e9
"""


def test_sums_over_labels() -> None:
    assert parse(PAGE) == {"nearcast_messages_sent_total": 12.0, "nearcast_connected_clients": 3.0}


def test_rates_begin_anew_with_the_counter() -> None:
    second = 10**9
    samples = [Sample(0, {"n": 10.0}), Sample(second, {"n": 30.0}), Sample(2 * second, {}), Sample(3 * second, {"n": 4.0})]
    assert rates(samples, "n") == [(second, 20.0)]
    assert rates([samples[1], samples[3]], "n") == [(3 * second, 2.0)], "a restarted node counts from zero"


def test_a_node_that_comes_late_is_waited_for_and_a_half_line_left_out(tmp_path: Path) -> None:
    stop = threading.Event()
    served = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal served
            served += 1
            if served == 1:
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())
            if served == 3:
                stop.set()

        def log_message(self, *_: object) -> None: ...

    path = tmp_path / "samples.jsonl"
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sample(f"http://127.0.0.1:{server.server_port}/metrics", path, 0.01, stop)
        server.shutdown()
    with path.open("a") as file:
        file.write('{"at_ns": 1')
    found = read_samples(path)
    assert [each.values for each in found] == [parse(PAGE)] * 2
    assert read_samples(tmp_path / "none") == []


@pytest.mark.parametrize("line", ["nearcast_connected_clients 1e3", 'nearcast_connected_clients{a="b c"} 1000'])
def test_forms_of_a_line(line: str) -> None:
    assert parse(line) == {"nearcast_connected_clients": 1000.0}
