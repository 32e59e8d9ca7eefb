"""Running a job: a session, the job in a thread, and an orderly end, whatever happens.

The job runs beside the main thread because a signal that interrupts a call into the JVM leaves that thread's connection
between question and answer; the main thread, which only watches, can still ask Spark to cancel and stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nearcast.errors import NearcastError, PipelineError
from nearcast.pipeline.failures import in_one_line, whole_story
from nearcast.pipeline.jobs import JobModule
from nearcast.pipeline.queries import stop_queries
from nearcast.pipeline.session import LOCAL, build_session, require_pyspark, stop_session
from nearcast.pipeline.watching import Watcher

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nearcast.pipeline.progress import Progress

_LOOK_SECONDS = 0.25
_STOP_SECONDS = 20.0
_LOG_BYTES = 200_000


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a job runs."""

    master: str = LOCAL
    settings: dict[str, str] = {}
    java_home: str | None = None
    cache_directory: Path | None = None
    log_file: Path | None = None


class JobFailed(PipelineError):
    """A job ended with an error; the message is one line, ``log_file`` has the rest."""

    def __init__(self, message: str, log_file: Path | None) -> None:
        super().__init__(message if log_file is None else f"{message} (log: {log_file})")
        self.log_file = log_file


def run_job(
    name: str,
    module: JobModule,
    options: msgspec.Struct,
    where: Where,
    progress: Progress,
    look: Callable[[Watcher], None] | None = None,
) -> Mapping[str, object] | None:
    """Run a job to its end and return what it returns. ``look`` is called now and then with what there is to see.

    ``KeyboardInterrupt`` in the calling thread (the main one) stops queries, jobs and the session, and is raised again. A
    failure is a :class:`JobFailed`.
    """
    require_pyspark()
    check = getattr(module, "check", None)
    if check is not None:
        check(options)
    own = getattr(module, "settings", None)
    settings = {**(own(options) if own is not None else {}), **where.settings}
    progress.step("starting Spark")
    try:
        session = build_session(
            f"nearcast {name}",
            where.master,
            java_home=where.java_home,
            cache_directory=where.cache_directory,
            log_file=where.log_file,
            settings=settings,
        )
    except NearcastError:
        raise
    except Exception as error:  # noqa: BLE001  # the edge: Spark raises many kinds, the user gets one line
        raise _failed(error, options, where.log_file) from None
    work = _Work(module, session, options, progress, where.log_file)
    try:
        work.start()
        watcher = Watcher(session)
        while not work.done.wait(_LOOK_SECONDS):
            if look is not None:
                _look(look, watcher)
        if look is not None and work.failed is None:
            _look(look, watcher)
    except BaseException:
        _cancel(session, work)
        raise
    finally:
        stop_session(session)
    if work.failed is not None:
        raise work.failed
    return work.result


class _Work:
    """The job's thread. A daemon: code of a user that does not end must not keep the process."""

    def __init__(
        self, module: JobModule, session: SparkSession, options: msgspec.Struct, progress: Progress, log_file: Path | None
    ) -> None:
        self.done = threading.Event()
        self.failed: JobFailed | None = None
        self.result: Mapping[str, object] | None = None
        self._module, self._session, self._options, self._progress = module, session, options, progress
        self._log_file = log_file
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            # Java's side of this thread knows no session, and writing a stream looks for data sources in that one.
            jvm: Any = self._session._jvm
            jvm.SparkSession.setActiveSession(self._session._jsparkSession)
            self.result = self._module.run(self._session, self._options, self._progress)
        except BaseException as error:  # noqa: BLE001  # the edge of the thread; the main one raises it
            # Told here, while there is a JVM that can be asked about it.
            self.failed = _failed(error, self._options, self._log_file)
        finally:
            self.done.set()


def _look(look: Callable[[Watcher], None], watcher: Watcher) -> None:
    try:
        look(watcher)
    except BrokenPipeError:
        raise
    except Exception:  # noqa: BLE001, S110  # a JVM that is ending answers with anything; the job's own error says more
        pass


def _cancel(session: SparkSession, work: _Work) -> None:
    """Let the job end early: its queries and its tasks, in a thread of its own, for the JVM may not answer any more."""

    def stop() -> None:
        try:
            stop_queries(session)
            session.sparkContext.cancelAllJobs()
        except Exception:  # noqa: BLE001, S110  # the session is stopped in any case
            pass

    stopping = threading.Thread(target=stop, name="stopping", daemon=True)
    stopping.start()
    stopping.join(_STOP_SECONDS)
    work.done.wait(_STOP_SECONDS)


def _failed(error: BaseException, options: msgspec.Struct, log_file: Path | None) -> JobFailed:
    file = getattr(options, "file", None)
    line = in_one_line(error, Path(file) if isinstance(file, str) else None, _tail(log_file))
    if log_file is not None:
        try:
            with log_file.open("a") as log:
                log.write(f"\n{whole_story(error)}")
        except OSError:
            log_file = None
    return JobFailed(line, log_file)


def _tail(log_file: Path | None) -> str:
    if log_file is None:
        return ""
    try:
        with log_file.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _LOG_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
