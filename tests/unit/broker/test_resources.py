"""What a broker uses of what it may use, with files of our own in the place of the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearcast.broker.resources import Resources, granted, resident_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


class Clocks:
    def __init__(self) -> None:
        self.now = 100.0
        self.thread = 5.0
        self.process = 7.0

    def resources(self, root: Path) -> Resources:
        return Resources(lambda: self.now, lambda: self.thread, lambda: self.process, root)

    def pass_time(self, wall: float, thread: float, process: float) -> None:
        self.now += wall
        self.thread += thread
        self.process += process


def test_limits_of_version_2_groups_count_with_those_of_their_ancestors(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/tenant/broker\n",
            "sys/fs/cgroup/tenant/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/tenant/memory.max": f"{GIB // 2}\n",
            "sys/fs/cgroup/tenant/broker/cpu.max": "max 100000\n",
            "sys/fs/cgroup/tenant/broker/memory.max": "max\n",
        },
    )
    limits = granted(tmp_path)
    assert (limits.cores, limits.memory_bytes) == (0.5, GIB // 2)


def test_limits_of_version_1_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "25000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB // 4}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    limits = granted(tmp_path)
    assert (limits.cores, limits.memory_bytes) == (0.25, GIB // 4)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "nonsense\n::\n0::/../../etc\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "x y\n", "sys/fs/cgroup/memory.max": "many\n"},
        {"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"},
    ],
)
def test_without_limits_the_machine_is_the_limit(files: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, files)
    limits = granted(tmp_path)
    assert limits.cores == len(os.sched_getaffinity(0))
    assert limits.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_thread_that_serves_clients_has_one_core_however_many_there_are(tmp_path: Path) -> None:
    clocks = Clocks()
    resources = clocks.resources(tmp_path)
    clocks.pass_time(10.0, 9.0, 9.5)
    resources.sample()
    assert resources.cpu == pytest.approx(0.9)
    clocks.pass_time(10.0, 1.0, 1.0)
    resources.sample()
    assert resources.cpu == pytest.approx(0.1), "since the last sample"


def test_all_threads_share_what_a_control_group_grants(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    clocks = Clocks()
    resources = clocks.resources(tmp_path)
    clocks.pass_time(10.0, 2.0, 4.0)
    resources.sample()
    assert resources.cpu == pytest.approx(0.8)
    clocks.pass_time(10.0, 9.0, 9.0)
    resources.sample()
    assert resources.cpu == 1.0, "a share is at most all of it"


def test_memory_is_that_of_this_process_over_its_limit(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/statm": "9000 1000 300 1 0 500 0\n",
            "sys/fs/cgroup/memory.max": f"{4000 * page}\n",
        },
    )
    resources = Clocks().resources(tmp_path)
    resources.sample()
    assert resources.memory == pytest.approx(0.25)


def test_a_system_that_does_not_say_is_no_failure(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path) == 0
    resources = Clocks().resources(tmp_path)
    resources.sample()
    assert (resources.cpu, resources.memory) == (0.0, 0.0)


def test_this_process_has_memory() -> None:
    assert resident_bytes() > 1 << 20
