"""Without root: network namespaces where the kernel and /dev/net/tun allow them to users, else loopback mode.

Run as root, which becomes somebody else in a mount namespace where that somebody may read this installation.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.emulation.wans import FAMILY, MarkedWan, marked_wan, require_namespaces, wait_until
from tests.integration.tools import optional

pytestmark = pytest.mark.integration

USER = 1000

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def wan() -> Iterator[MarkedWan]:
    """Not in pytest's own directory, which is root's alone."""
    with tempfile.TemporaryDirectory(prefix="nearcast-test-") as directory, marked_wan(Path(directory) / "user") as running:
        running.directory.mkdir()
        (running.directory / "stage").mkdir()
        Path(directory).chmod(0o755)
        yield running


def _closed_ancestors(path: Path) -> list[Path]:
    """Directories above a path that others may not enter, the outermost first."""
    return [above for above in reversed(path.parents) if not above.stat().st_mode & stat.S_IXOTH]


def _as_user(directory: Path, *, device: bool) -> tuple[str, ...]:
    """Words before a command that let an ordinary user run it, with or without a /dev/net/tun of theirs."""
    steps = ["set -e"]
    needed = {Path(sys.base_prefix), ROOT, directory}
    for number, path in enumerate(sorted(needed)):
        closed = _closed_ancestors(path)
        if closed:
            kept, inside = f"$stage/{number}", shlex.quote(str(path))
            steps += [
                f"mkdir {kept}",
                f"mount --bind {inside} {kept}",
                f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed[0]))}",
            ]
            steps += [f"mkdir -p {inside}", f"mount --bind {kept} {inside}"]
    # Some machines give everybody the device, others nobody: here it is as the test wants it.
    mode = 666 if device else 600
    steps += ["mknod $stage/tun c 10 200", f"chmod {mode} $stage/tun", "mount --bind $stage/tun /dev/net/tun"]
    setpriv = f"setpriv --reuid={USER} --regid={USER} --clear-groups --bounding-set=-all --inh-caps=-all"
    script = "\n".join([f"stage={shlex.quote(str(directory / 'stage'))}", "mount -t tmpfs none $stage", *steps])
    script += f'\ncd {shlex.quote(str(directory))}\nexec {setpriv} "$@"'
    return (str(optional("unshare")), "--mount", "--propagation", "private", "sh", "-c", script, "sh")


@pytest.mark.parametrize("device", [True, False], ids=["with a device", "without"])
def test_an_ordinary_user(wan: MarkedWan, device: bool) -> None:
    require_namespaces()
    optional("setpriv")
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    try:
        os.mknod(wan.directory / "tried", 0o600 | stat.S_IFCHR, os.makedev(10, 200))
    except OSError as error:
        pytest.skip(f"this root may not make devices: {error.strerror}")
    os.chown(wan.directory, USER, USER)
    wan.up(FAMILY, prefix=_as_user(wan.directory, device=device))
    (wan.directory / "topology.toml").chmod(0o644)
    line = wan.wait_for_line("hosts are there")
    if device and "loopback" in line:
        pytest.skip("this kernel gives users no namespaces")
    assert ("namespaces" if device else "loopback") in line
    wan.wait_for_line("is up")
    assert wan.process is not None
    wan.process.kill()
    wait_until(lambda: not wan.survivors(), "the end of every process")
    wait_until(lambda: not wan.left_behind(), "the end of every file")
