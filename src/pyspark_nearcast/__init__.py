"""Registers the data source ``nearcast`` with Spark, which looks for packages of this kind of name by itself."""

from nearcast.pipeline.source import NearcastDataSource as DefaultSource

__all__ = ["DefaultSource"]
