"""Writes the table of Spark settings in docs/guides/pipelines.md from ``nearcast.pipeline.settings``: each has one home."""

from __future__ import annotations

from pathlib import Path

from nearcast.pipeline.settings import JAVA_OPTIONS, SETTINGS

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "pipelines.md"
BEGIN = "<!-- settings: made by scripts/pipeline_settings.py -->"
END = "<!-- end of settings -->"


def table() -> str:
    lines = ["| setting | value | where | why |", "| --- | --- | --- | --- |"]
    for each in SETTINGS:
        where = "local" if each.local_only else "everywhere"
        lines.append(f"| `{each.key}` | `{each.value}` | {where} | {each.why} |")
    lines.append(f"| `spark.driver.extraJavaOptions` | `{' '.join(JAVA_OPTIONS)}` | everywhere | {_JAVA_WHY} |")
    return "\n".join(lines)


_JAVA_WHY = "The collector with the least memory and threads. Yours are added after it."


def main() -> None:
    text = GUIDE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    GUIDE.write_text(f"{before}\n\n{table()}\n\n{after}")


if __name__ == "__main__":
    main()
