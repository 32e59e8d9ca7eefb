"""Starts a keeper so that nothing of its WAN outlives it, whatever dies first. ``python -m nearcast.emulation.launcher``.

Three processes, each able to clean up after the other two::

    starter (the command, or a Python program)        sees the keeper's connection end: removes the directory
      └─ launcher                                     sees the keeper end: kills what is left, removes the directory
           └─ keeper, PID 1 of its own PID namespace  sees its launcher or starter end: takes the WAN down, removes the
           directory
                └─ router, the topology's processes   killed by the kernel with PID 1, with all they started

Should all three be killed at once, the kernel still ends every process, namespace and device; the directory stays, is
recognised by its free lock, and goes with the next ``nearcast wan`` command.

Without root, the namespaces are made in a user namespace in which the keeper has the same user and all capabilities; where the
kernel does not allow even that, there is no PID namespace, and the launcher adopts and kills what the keeper leaves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from nearcast.emulation import syscalls
from nearcast.emulation.directories import WanDirectory

_NAMESPACES = syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS

#: Longest that taking a WAN down may take, in seconds: processes get their ``stop_timeout_s`` within it. Then all is killed.
TEARDOWN_SECONDS = 60


def main(arguments: list[str]) -> int:
    """``DIRECTORY OWNER_FD LOCK_FD DETACHED STARTER_PID``: descriptors and process numbers are the starter's."""
    directory = WanDirectory(Path(arguments[0]))
    owner, lock, detached, starter = (int(argument) for argument in arguments[1:])
    for descriptor in (owner, lock):
        os.set_inheritable(descriptor, False)
    # Signals wait until there is somebody to pass them on to.
    passed_on = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    if detached:
        if os.fork() != 0:
            os._exit(0)  # nobody's child: the starter need not wait for it
    else:
        syscalls.signal_when_parent_dies(signal.SIGTERM)
        if os.getppid() != starter:
            directory.release(lock)
            return 1  # it died before the line above
    with contextlib.suppress(OSError):
        syscalls.adopt_orphans()
    own_pids = _own_pid_namespace()
    keeper = os.fork()
    if keeper == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        os._exit(_keep(directory, owner, lock, own_pids, detached=bool(detached)))
    os.close(owner)
    _pass_on_signals(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = _wait_for(keeper)
    _kill_adopted()
    directory.release(lock)
    return code


def _own_pid_namespace() -> bool:
    """Whether the next child will be PID 1 of its own namespace, with mounts of its own."""
    try:
        syscalls.unshare(_NAMESPACES)
    except OSError:
        if not _tried(_enter_user_namespace):
            return False
        _enter_user_namespace()
    return True


def _enter_user_namespace() -> None:
    """Be the same user with all capabilities over namespaces of one's own. Programs executed in there are nobody special."""
    user, group = os.geteuid(), os.getegid()
    syscalls.unshare(_NAMESPACES | syscalls.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _tried(attempt: Callable[[], None]) -> bool:
    """Whether something works, tried in a process that ends with it: half a user namespace could not be left again."""
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _keep(directory: WanDirectory, owner: int, lock: int, own_pids: bool, *, detached: bool) -> int:
    """The keeper's process, to its end."""
    # By SIGTERM, not SIGKILL: the keeper then takes everything down in order and removes its directory.
    syscalls.signal_when_parent_dies(signal.SIGTERM)
    if own_pids:
        if os.getpid() != 1:
            return 1
        try:
            syscalls.make_mounts_private()
            syscalls.mount_proc()
        except OSError as error:
            # A container that hides parts of /proc forbids a fresh one. Programs that look for themselves in /proc then fail.
            print(f"nearcast: the WAN's programs see the machine's /proc ({error})", file=sys.stderr)  # noqa: T201
    else:
        with contextlib.suppress(OSError):
            syscalls.adopt_orphans()
    from nearcast.emulation.keeper import run

    return run(directory, owner, lock, detached=detached)


def _pass_on_signals(keeper: int) -> None:
    """Ask the keeper to end; if it has not in time, kill it: as PID 1 it takes everything with it."""

    def ask(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGTERM)
        signal.alarm(TEARDOWN_SECONDS)

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    signal.signal(signal.SIGALRM, end)


def _wait_for(keeper: int) -> int:
    """The exit code of the keeper; others' children that came to this process are reaped meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == keeper:
            return os.waitstatus_to_exitcode(status)


def _kill_adopted() -> None:
    """Kill every child there is: what a keeper without a PID namespace left behind, generation after generation."""
    while True:
        children = _children(os.getpid())
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if code >= 0 else 128 - code)
