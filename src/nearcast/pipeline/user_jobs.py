"""A Python file as a job: ``def pipeline(spark, topics)`` is called, then its streaming queries run until they are ended.

Whatever the file raises is told with the line it came from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from nearcast.errors import ConfigError, PipelineError
from nearcast.pipeline.queries import await_queries, forget_queries
from nearcast.pipeline.topic_frames import TopicFrames
from nearcast.pipeline.user_code import load_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nearcast.pipeline.progress import Progress

DEFAULT_URL = "nearcast://127.0.0.1:7883"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    file: Annotated[
        str,
        msgspec.Meta(
            description="A Python file with `def pipeline(spark, topics)`.", extra={"argument": True, "metavar": "FILE.py"}
        ),
    ]
    url: Annotated[str, msgspec.Meta(description="The broker's bulk port.", extra={"metavar": "URL"})] = DEFAULT_URL
    username: Annotated[str | None, msgspec.Meta(description="Who we are, for the broker.", extra={"metavar": "NAME"})] = None
    password_file: Annotated[
        str | None, msgspec.Meta(description="A file whose first line is the password.", extra={"metavar": "FILE"})
    ] = None
    ca_file: Annotated[str | None, msgspec.Meta(description="Certificates to trust, PEM.", extra={"metavar": "FILE"})] = None
    certificate_file: Annotated[str | None, msgspec.Meta(description="Our own, PEM.", extra={"metavar": "FILE"})] = None
    key_file: Annotated[str | None, msgspec.Meta(description="Its private key, PEM.", extra={"metavar": "FILE"})] = None
    set: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="A parameter for the pipeline: `topics.parameters`.", extra={"metavar": "NAME=VALUE"}),
    ] = ()
    checkpoint: Annotated[
        str | None,
        msgspec.Meta(
            description="Where streaming queries keep how far they are (default checkpoints/<file's name>).",
            extra={"metavar": "DIR"},
        ),
    ] = None
    available_now: Annotated[bool, msgspec.Meta(description="Process what there is, then end.")] = False
    timeout: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        msgspec.Meta(description="Stop streaming queries after so many seconds.", extra={"metavar": "SECONDS"}),
    ] = None

    def __post_init__(self) -> None:
        self.parameters()

    def parameters(self) -> dict[str, str]:
        """What ``--set`` gave."""
        found = {}
        for setting in self.set:
            name, equals, value = setting.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"--set {setting}: write NAME=VALUE")
            found[name.strip()] = value.strip()
        return found


def check(options: Options) -> None:
    """What can be refused before a JVM is started."""
    _pipeline(Path(options.file))
    connection_options(options)


def run(spark: SparkSession, options: Options, progress: Progress) -> Mapping[str, object] | None:
    file = Path(options.file)
    function = _pipeline(file)
    topics = TopicFrames(
        spark,
        connection_options(options),
        checkpoints=Path(options.checkpoint or f"checkpoints/{file.stem}"),
        available_now=options.available_now,
        parameters=options.parameters(),
    )
    progress.step(file.name)
    forget_queries(spark)
    answer = function(spark, topics)
    await_queries(spark, options.timeout)
    return answer if isinstance(answer, Mapping) else None


def connection_options(options: Any) -> dict[str, str]:
    """The data source's options for where the broker is, of a job whose ``Options`` have the same names as ours."""
    found = {"url": options.url}
    if options.username is not None:
        found["username"] = options.username
    if options.password_file is not None:
        try:
            lines = Path(options.password_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--password-file {options.password_file}: {getattr(error, 'strerror', None) or error}"
            ) from error
        found["password"] = lines[0] if lines else ""
    for key, value in (
        ("caFile", options.ca_file),
        ("certificateFile", options.certificate_file),
        ("keyFile", options.key_file),
    ):
        if value is not None:
            found[key] = str(Path(value).absolute())
    return found


def _pipeline(file: Path) -> Callable[[Any, Any], object]:
    """The function of a user's file; the file runs once, when it is first asked for."""
    key = str(file.absolute())
    if key not in _loaded:
        function = getattr(load_file(file), "pipeline", None)
        if not callable(function):
            raise PipelineError(f"{file} has no function pipeline: write `def pipeline(spark, topics):`")
        try:
            inspect.signature(function).bind("spark", "topics")
        except TypeError:
            raise PipelineError(f"{file}: pipeline must take two arguments: `def pipeline(spark, topics):`") from None
        _loaded[key] = function
    return _loaded[key]


_loaded: dict[str, Callable[[Any, Any], object]] = {}
