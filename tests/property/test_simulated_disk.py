"""Whatever is done to a simulated disk: what was flushed survives a power cut, and of the rest each file keeps a prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nearcast.simulation import World
from tests.unit.simulation.worlds import make_world

Step = tuple[str, str, bytes]

names = st.sampled_from(["a", "b"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), names, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("flush"), names, st.just(b"")),
        st.tuples(st.just("crash"), names, st.just(b"")),
        st.tuples(st.just("kill"), names, st.just(b"")),
    ),
    max_size=30,
)


@given(steps, st.integers(0, 2**32))
def test_appended_files(steps: list[Step], seed: int) -> None:
    """Files that only grow, as journals do."""
    world = make_world(seed=seed)
    visible = {"a": b"", "b": b""}
    flushed = dict(visible)
    for kind, name, data in steps:
        disk = world.hosts[0].disk
        if kind == "append":
            disk.append(name, data)
            visible[name] += data
        elif kind == "flush":
            disk.sync()
            world.run(world.now + 0.1)
            flushed = dict(visible)
        else:
            if kind == "crash":
                world.hosts[0].crash()
            else:
                world.hosts[0].kill()
            world.hosts[0].boot()
            for each in visible:
                left = disk.read(each) if disk.exists(each) else b""
                if kind == "kill":
                    assert left == visible[each]
                assert left.startswith(flushed[each])
                assert visible[each].startswith(left)
                visible[each] = left
            # What has survived one power cut survives the next.
            flushed = dict(visible) if kind == "crash" else flushed
        assert disk.used_bytes == sum(disk.length(each) for each in disk.list())


operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "write", "truncate", "rename", "remove", "flush", "crash"]),
        names,
        st.binary(min_size=1, max_size=6),
    ),
    max_size=40,
)


@given(operations, st.integers(0, 2**32))
def test_any_operations(operations: list[Step], seed: int) -> None:
    """After a flush and a power cut everything is as it was; after a power cut alone the disk is some whole state."""
    world = make_world(seed=seed)
    for kind, name, data in operations:
        disk = world.hosts[0].disk
        if kind == "append":
            disk.append(name, data)
        elif kind == "write":
            disk.write(name, data)
        elif kind == "flush":
            before = state(world)
            disk.sync()
            world.run(world.now + 0.1)
            world.hosts[0].crash()
            world.hosts[0].boot()
            assert state(world) == before
        elif kind == "crash":
            world.hosts[0].crash()
            world.hosts[0].boot()
        elif disk.exists(name):
            if kind == "truncate":
                disk.truncate(name, disk.length(name) // 2)
            elif kind == "rename":
                disk.rename(name, "b" if name == "a" else "a")
            else:
                disk.remove(name)
        assert disk.used_bytes == sum(disk.length(each) for each in disk.list())


def state(world: World) -> dict[str, bytes]:
    disk = world.hosts[0].disk
    return {name: disk.read(name) for name in disk.list()}
