"""docs/reference/telemetry.md says what the records are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.fabric.telemetry import NAMES, PREFIX
from nearcast.telemetry import records

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/telemetry.md"
RECORDS = ["BrokerReport", "TopicReport", "TopicSummary", "Crowd", "Place", "ClientReport", "ClientSample"]


def section(name: str) -> str:
    found = re.search(rf"^##+ {name}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, f"{PAGE.name} has no section on {name}"
    return found.group(1)


def words(kind: Any) -> str:
    """A field's type, as the page writes it."""
    if isinstance(kind, msgspec.inspect.UnionType):
        (one,) = [item for item in kind.types if not isinstance(item, msgspec.inspect.NoneType)]
        return f"{words(one)} or none"
    if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        inner = words(kind.item_type)
        return f"list of {inner}" + ("s" if inner == "number" else "")
    if isinstance(kind, msgspec.inspect.StructType):
        return f"`{kind.cls.__name__}`"
    return {msgspec.inspect.StrType: "text"}.get(type(kind), "number")


@pytest.mark.parametrize("name", RECORDS)
def test_fields_are_told_in_their_order_with_their_types(name: str) -> None:
    info = msgspec.inspect.type_info(getattr(records, name))
    assert isinstance(info, msgspec.inspect.StructType)
    told = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", section(name), re.MULTILINE)
    assert told == [(field.encode_name, words(field.type)) for field in info.fields]


def test_no_record_is_left_out() -> None:
    structs = [name for name, item in vars(records).items() if isinstance(item, type) and issubclass(item, msgspec.Struct)]
    assert sorted(structs) == sorted(RECORDS)


@pytest.mark.parametrize("name", ["BrokerReport", "TopicReport", "ClientReport"])
def test_examples_are_such_records_and_use_every_field(name: str) -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```", section(name), re.DOTALL | re.MULTILINE)
    record = getattr(records, name)
    read = msgspec.json.decode(example, type=record, strict=True)
    assert msgspec.json.decode(msgspec.json.encode(read), type=record) == read
    for field in msgspec.structs.fields(record):
        assert f'"{field.encode_name}"' in example


def test_topics_are_those_that_are_published() -> None:
    told = re.findall(r"^\| `(\$nearcast/telemetry/\w+)/<name>` \|", PAGE.read_text(), re.MULTILINE)
    assert told == [PREFIX + name for name in NAMES]


def test_metrics_are_those_there_are() -> None:
    source = (PAGE.parents[2] / "src/nearcast/broker/reporting.py").read_text()
    told = {name.removesuffix("_total") for name in re.findall(r"`nearcast_(\w+)`", section("Metrics"))}
    assert told == set(re.findall(r'^            "(\w+)": \(', source, re.MULTILINE))
