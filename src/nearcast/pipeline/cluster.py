"""Running on a cluster: our package goes along, as the plain Python it is."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import nearcast

if TYPE_CHECKING:
    from pyspark import SparkContext


def zip_package(path: Path) -> Path:
    """All Python files of ``nearcast`` (and of ``pyspark_nearcast``, by which Spark finds the data source) as one archive."""
    root = Path(nearcast.__file__).parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (root, root.parent / "pyspark_nearcast"):
            for source in sorted(package.rglob("*")):
                if source.suffix in (".py", ".toml") and source.is_file():
                    archive.write(source, source.relative_to(root.parent))
    return path


def ship_package(context: SparkContext, directory: Path) -> None:
    """Give every executor our package."""
    context.addPyFile(str(zip_package(directory / "nearcast.zip")))
