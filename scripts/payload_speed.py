"""Rows per second of the payload helpers on one core: the table in docs/guides/spark-sink.md."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
from pyspark.sql import types as spark

from nearcast.pipeline.avro_schemas import AvroSchema
from nearcast.pipeline.payload_formats import avro_decoder, avro_encoder, decoder, encode_rows, encoder

ROWS = 200_000
BATCH = 10_000
SCHEMA = spark.StructType(
    [
        spark.StructField("sensor", spark.StringType()),
        spark.StructField("value", spark.DoubleType()),
        spark.StructField("n", spark.IntegerType()),
        spark.StructField("ok", spark.BooleanType()),
    ]
)
AVRO = AvroSchema(
    '{"type": "record", "name": "r", "fields": [{"name": "sensor", "type": "string"}, {"name": "value", "type": "double"},'
    ' {"name": "n", "type": "int"}, {"name": "ok", "type": "boolean"}]}'
)


def best(work: Callable[[], object]) -> str:
    """Millions of rows per second, the best of three."""
    fastest = float("inf")
    for _ in range(3):
        begun = time.process_time()
        for _ in range(ROWS // BATCH):
            work()
        fastest = min(fastest, time.process_time() - begun)
    return f"{ROWS / fastest / 1e6:.2f} M"


def main() -> None:
    rows = [{"sensor": f"s{n % 100}", "value": n * 0.1, "n": n, "ok": True} for n in range(BATCH)]
    values = pa.array(
        rows, pa.struct([("sensor", pa.string()), ("value", pa.float64()), ("n", pa.int32()), ("ok", pa.bool_())])
    )
    for kind in ("json", "msgpack", "cbor", "avro"):
        encode = avro_encoder(AVRO, "raw") if kind == "avro" else encoder(kind)  # type: ignore[arg-type]
        reading = avro_decoder(AVRO, "raw") if kind == "avro" else decoder(kind, SCHEMA)  # type: ignore[arg-type]
        payloads = encode_rows(values, encode)
        decoded = best(lambda reading=reading, payloads=payloads: reading.decode(payloads.to_pylist()))  # type: ignore[misc]
        encoded = best(lambda encode=encode: encode_rows(values, encode))  # type: ignore[misc]
        print(f"{kind:8} from {decoded:>7}  to {encoded:>7}")


if __name__ == "__main__":
    main()
