"""Functions in real worker processes: what they return, and every way in which they can go wrong."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import msgspec
import pytest

from nearcast.functionconfig import Function
from nearcast.functions.runner import FunctionBroken, Message, MessageFailed, Runner
from nearcast.functions.wire import Ask, Found, Output

pytestmark = pytest.mark.integration


def in_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def function(source: str, entry: str = "f", **settings: object) -> Function:
    made: dict[str, object] = {"name": "f", "topic": "t/#", "entry": entry, "files": {"main.py": source.encode()}, **settings}
    return msgspec.convert(made, Function)


def messages(*payloads: bytes, first: int = 1) -> list[Message]:
    return [Message(first + at, 1_700_000_000_000_000 + at, payload) for at, payload in enumerate(payloads)]


def nothing(ask: Ask) -> Found:
    return Found(None, 0)


@asynccontextmanager
async def runner(made: Function, look_up: Callable[[Ask], Found] = nothing) -> AsyncIterator[tuple[Runner, list[str]]]:
    said: list[str] = []
    found = Runner(made, look_up, said.append)
    try:
        yield found, said
    finally:
        await found.close()


@in_a_loop
async def test_outputs_and_state_of_a_batch() -> None:
    source = """
def f(topic, index, data, ctx):
    ctx.state["sum"] = ctx.state.get("sum", 0) + int(data)
    ctx.publish("sums", str(ctx.state["sum"]))
    ctx.publish("json", {"topic": topic, "index": index}, qos=0, retain=True)
"""
    async with runner(function(source)) as (made, _):
        done = await made.run("t/a", messages(b"1", b"2"), msgspec.msgpack.encode({"sum": 10}))
        assert [output.payload for output in done.outputs if output.topic == "sums"] == [b"11", b"13"]
        assert done.outputs[1] == Output("json", b'{"topic":"t/a","index":1}', 0, True)
        assert done.state is not None
        assert msgspec.msgpack.decode(done.state) == {"sum": 13}
        again = await made.run("t/a", messages(b"0", first=3), b"")
        assert again.state is None
        assert made.starts == 1


@in_a_loop
async def test_history_is_asked_for_while_a_batch_runs() -> None:
    source = """
def f(topic, index, data, ctx):
    ctx.publish("out", ctx.get(topic, 1) + b"%d" % ctx.latest_index(topic))
"""

    def look_up(ask: Ask) -> Found:
        return Found(b"first", 1) if ask.index else Found(None, 7)

    async with runner(function(source), look_up) as (made, _):
        done = await made.run("t/a", messages(b"x"), b"")
        assert done.outputs[0].payload == b"first7"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(topic, index, data, ctx):\n    if data == b'bad': raise KeyError('no such thing')\n", "KeyError"),
        ("def f(topic, index, data, ctx):\n    ctx.publish('a/#', b'')\n", "no topic to publish to"),
        ("def f(topic, index, data, ctx):\n    ctx.state['x'] = object()\n", "object"),
        ("def f(topic, index, data, ctx):\n    ctx.state['x'] = 'y' * 100_000\n", "bytes"),
        ("def f(topic, index, data, ctx):\n    ctx.publish('a', b'x' * 9_000_000)\n", "bytes of output"),
        ("import os\ndef f(topic, index, data, ctx):\n    os._exit(3)\n", "ended with 3"),
        ("import os\ndef f(topic, index, data, ctx):\n    os.kill(os.getpid(), 11)\n", "SIGSEGV"),
        ("import sys\ndef f(topic, index, data, ctx):\n    sys.exit(1)\n", "SystemExit"),
        ("def f(topic, index, data, ctx):\n    x = b'x' * 2_000_000_000\n", "MemoryError"),
        ("def f(topic, index, data, ctx):\n    while True: pass\n", "takes more than"),
    ],
)
@in_a_loop
async def test_a_message_that_fails_leaves_nothing_behind(source: str, reason: str) -> None:
    async with runner(function(source, timeout_seconds=0.5)) as (made, _):
        with pytest.raises(MessageFailed) as failed:
            await made.run("t/a", messages(b"bad"), b"")
        assert reason in failed.value.reason
        with pytest.raises(MessageFailed):
            await made.run("t/a", messages(b"bad"), b"")
        assert made.starts == 2


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("this is no Python", "SyntaxError"),
        ("import nothing_like_that", "nothing_like_that"),
        ("def g(): pass", "no function 'f'"),
        ("import os\nos._exit(1)", "ended with 1"),
    ],
)
@in_a_loop
async def test_a_function_that_cannot_be_loaded_is_broken(source: str, reason: str) -> None:
    async with runner(function(source)) as (made, _):
        with pytest.raises(FunctionBroken, match=reason):
            await made.run("t/a", messages(b"x"), b"")


@in_a_loop
async def test_a_long_batch_of_short_messages_is_not_given_up() -> None:
    source = "import time\ndef f(topic, index, data, ctx):\n    time.sleep(0.05)\n"
    async with runner(function(source, timeout_seconds=0.4)) as (made, _):
        await made.run("t/a", messages(*[b"x"] * 30), b"")


@in_a_loop
async def test_what_it_prints_is_heard() -> None:
    source = "import sys\ndef f(topic, index, data, ctx):\n    print('hello', data)\n    sys.stderr.write('oh')\n"
    async with runner(function(source)) as (made, said):
        await made.run("t/a", messages(b"x"), b"")
        assert said == ["hello b'x'", "oh"] or "".join(said).startswith("hello")


@in_a_loop
async def test_a_package_of_several_files() -> None:
    parts = b"def f(t, i, d, ctx): ctx.publish('o', d)"
    files = {"main.py": b"from parts.one import f", "parts/__init__.py": b"", "parts/one.py": parts}
    made_function = Function(name="f", topic="t", entry="f", files=files)
    async with runner(made_function) as (made, _):
        assert (await made.run("t", messages(b"x"), b"")).outputs == [Output("o", b"x")]


@in_a_loop
async def test_a_program_by_the_papers_template() -> None:
    program = b'#!/bin/sh\nread line\nprintf \'out/%s\\t%s:%s\\n\' "$1" "$2" "$line"\n'
    made_function = Function(name="f", topic="t", entry="program", native=True, files={"program": program})
    async with runner(made_function) as (made, _):
        done = await made.run("t", messages(b"hello\n", first=9), b"")
        assert done.outputs == [Output("out/t", b"9:hello")]
    failing = Function(name="f", topic="t", entry="program", native=True, files={"program": b"#!/bin/sh\nexit 4\n"})
    async with runner(failing) as (made, _):
        with pytest.raises(MessageFailed, match="ended with 4"):
            await made.run("t", messages(b"x"), b"")


@in_a_loop
async def test_its_process_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARCAST_TOKEN", "secret")
    source = "import os\ndef f(topic, index, data, ctx):\n    ctx.publish('o', os.environ.get('NEARCAST_TOKEN', 'none'))\n"
    async with runner(function(source)) as (made, _):
        assert (await made.run("t", messages(b"x"), b"")).outputs == [Output("o", b"none")]


@in_a_loop
async def test_cancelling_ends_the_process() -> None:
    source = "import time\ndef f(topic, index, data, ctx):\n    time.sleep(100)\n"
    async with runner(function(source, timeout_seconds=200.0)) as (made, _):
        task = asyncio.get_running_loop().create_task(made.run("t", messages(b"x"), b""))
        while made._process is None:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        process = made._process
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert process.returncode is not None
