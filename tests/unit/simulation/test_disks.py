"""The simulated disk: what a process sees, and what is left after a kill and after a power cut."""

from __future__ import annotations

import pytest

from nearcast.errors import StorageUnavailable
from nearcast.simulation import Disk, World
from nearcast.simulation.disks import DEFAULT_SYNC_S
from nearcast.simulation.tracing import Tracer
from tests.unit.simulation.worlds import make_world, recorder


def disk_of(world: World) -> Disk:
    return world.hosts[0].disk


def flush(world: World) -> None:
    disk_of(world).sync()
    world.run(world.now + 1.0)


class TestFiles:
    def test_append_write_truncate_read(self) -> None:
        disk = disk_of(make_world())
        disk.append("log", b"one")
        disk.append("log", b"two")
        assert (disk.read("log"), disk.length("log")) == (b"onetwo", 6)
        disk.truncate("log", 4)
        assert disk.read("log") == b"onet"
        disk.write("log", b"new")
        assert disk.read("log") == b"new"
        assert disk.used_bytes == 3

    def test_rename_replaces_and_remove_removes(self) -> None:
        disk = disk_of(make_world())
        disk.write("new", b"new")
        disk.write("old", b"older")
        disk.rename("new", "old")
        assert disk.list() == ["old"]
        assert disk.read("old") == b"new"
        assert disk.used_bytes == 3
        disk.remove("old")
        assert disk.list() == []
        assert disk.used_bytes == 0

    def test_list_is_sorted_and_takes_a_prefix(self) -> None:
        disk = disk_of(make_world())
        for name in ("b-2", "a", "b-1"):
            disk.append(name, b"")
        assert disk.list() == ["a", "b-1", "b-2"]
        assert disk.list("b") == ["b-1", "b-2"]
        assert disk.exists("a")
        assert not disk.exists("c")

    @pytest.mark.parametrize("name", ["read", "remove", "length"])
    def test_no_such_file(self, name: str) -> None:
        with pytest.raises(StorageUnavailable, match="nothing: no such file"):
            getattr(disk_of(make_world()), name)("nothing")

    def test_a_cut_beyond_the_end(self) -> None:
        disk = disk_of(make_world())
        disk.append("f", b"abc")
        with pytest.raises(ValueError, match="f has 3 bytes and cannot be cut to 4"):
            disk.truncate("f", 4)

    def test_a_full_disk_refuses_and_keeps_what_it_has(self) -> None:
        disk = disk_of(make_world())
        disk.append("f", b"abc")
        disk.full = True
        for attempt in (disk.append, disk.write):
            with pytest.raises(StorageUnavailable, match="no space left"):
                attempt("f", b"d")
        assert disk.read("f") == b"abc"
        disk.truncate("f", 1)
        disk.remove("f")

    def test_capacity(self) -> None:
        disk = disk_of(make_world())
        disk.capacity_bytes = 10
        disk.append("f", bytes(10))
        with pytest.raises(StorageUnavailable, match="holds 10 bytes"):
            disk.append("g", b"x")
        disk.write("f", bytes(5))
        disk.append("g", bytes(5))


class TestFlushing:
    def test_takes_its_time_and_is_told(self) -> None:
        world = make_world()
        disk_of(world).append("f", b"abc")
        disk_of(world).sync(7)
        world.run(1.0)
        assert recorder(world, 0).told[-1] == (DEFAULT_SYNC_S, "synced", 7)

    def test_one_after_the_other(self) -> None:
        world = make_world()
        disk_of(world).sync_s = 0.5
        for token in range(3):
            disk_of(world).sync(token)
        world.run(10.0)
        assert [(at, token) for at, what, token in recorder(world, 0).told if what == "synced"] == [
            (0.5, 0),
            (1.0, 1),
            (1.5, 2),
        ]

    def test_a_kill_does_not_stop_it_and_nobody_is_told(self) -> None:
        world = make_world()
        disk_of(world).append("f", b"abc")
        disk_of(world).sync(1)
        world.hosts[0].kill()
        world.hosts[0].boot()
        world.run(1.0)
        assert recorder(world, 0).what() == ["start"]
        world.hosts[0].crash()
        world.hosts[0].boot()
        assert disk_of(world).read("f") == b"abc"

    def test_a_power_cut_stops_it(self) -> None:
        lost = 0
        for seed in range(20):
            world = make_world(seed=seed)
            disk_of(world).append("f", b"abc")
            disk_of(world).sync(1)
            world.hosts[0].crash()
            world.hosts[0].boot()
            world.run(1.0)
            assert recorder(world, 0).what() == ["start"]
            lost += not disk_of(world).exists("f")
        assert 0 < lost < 20

    def test_a_machine_that_is_off_does_not_say_that_its_data_are_safe(self) -> None:
        tracer = Tracer()
        world = make_world(tracer=tracer)
        disk_of(world).append("f", b"abc")
        disk_of(world).sync(1)
        world.hosts[0].crash()
        world.run(1.0)
        assert [line.text for line in tracer.lines[0]] == ["starts"]

    def test_it_covers_what_was_written_before_it_only(self) -> None:
        lengths = set()
        for seed in range(30):
            world = make_world(seed=seed)
            disk_of(world).append("f", b"before")
            disk_of(world).sync()
            disk_of(world).append("f", b"after")
            world.run(1.0)
            world.hosts[0].crash()
            lengths.add(disk_of(world).length("f"))
        assert min(lengths) == 6
        assert len(lengths) > 3


class TestPowerCut:
    def test_a_kill_loses_nothing(self) -> None:
        world = make_world()
        disk_of(world).append("f", b"abc")
        world.hosts[0].kill()
        world.hosts[0].boot()
        assert disk_of(world).read("f") == b"abc"

    def test_tears_inside_a_write(self) -> None:
        found = set()
        for seed in range(60):
            world = make_world(seed=seed)
            disk_of(world).append("f", b"")
            flush(world)
            disk_of(world).append("f", b"0123")
            disk_of(world).append("f", b"4567")
            world.hosts[0].crash()
            found.add(disk_of(world).read("f"))
        assert found == {b"01234567"[:length] for length in range(9)}

    def test_a_rename_without_a_flush_before_may_show_half_a_file(self) -> None:
        """The mistake that every write-then-rename without a flush makes."""
        found = set()
        for seed in range(100):
            world = make_world(seed=seed)
            disk_of(world).write("config", b"old")
            flush(world)
            disk_of(world).write("config.new", b"new!")
            disk_of(world).rename("config.new", "config")
            world.hosts[0].crash()
            found.add(disk_of(world).read("config"))
        assert {b"old", b"new!", b""} < found

    def test_a_rename_after_a_flush_is_old_or_new(self) -> None:
        found = set()
        for seed in range(40):
            world = make_world(seed=seed)
            disk_of(world).write("config", b"old")
            disk_of(world).write("config.new", b"new!")
            flush(world)
            disk_of(world).rename("config.new", "config")
            world.hosts[0].crash()
            disk = disk_of(world)
            found.add((disk.read("config"), disk.exists("config.new")))
        assert found == {(b"old", True), (b"new!", False)}

    def test_removals_and_cuts_may_be_undone(self) -> None:
        removed, cut = set(), set()
        for seed in range(40):
            world = make_world(seed=seed)
            disk_of(world).append("gone", b"gone")
            disk_of(world).append("cut", b"abcdef")
            flush(world)
            disk_of(world).remove("gone")
            disk_of(world).truncate("cut", 2)
            world.hosts[0].crash()
            removed.add(disk_of(world).exists("gone"))
            cut.add(disk_of(world).read("cut"))
        assert removed == {True, False}
        assert cut == {b"abcdef", b"ab"}

    def test_the_same_seed_loses_the_same(self) -> None:
        def left(seed: int) -> list[bytes]:
            world = make_world(seed=seed)
            found = []
            for _ in range(5):
                disk_of(world).append("f", bytes(1000))
                world.hosts[0].crash()
                world.hosts[0].boot()
                found.append(disk_of(world).read("f") if disk_of(world).exists("f") else b"")
            return found

        assert left(1) == left(1)
        assert left(1) != left(2)
