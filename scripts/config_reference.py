"""Writes docs/reference/configuration.md from the docstrings in nearcast.config, so that there is one home for each setting.

``python scripts/config_reference.py`` rewrites the page; ``--check`` only says whether it is up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/nearcast/config.py"
PAGE = ROOT / "docs/reference/configuration.md"

#: The structs a broker's file is made of, with the TOML table each one stands for.
TABLES = {
    "BrokerConfig": "top level",
    "Listener": "[[listeners]]",
    "Limits": "[limits]",
    "Security": "[security]",
    "AccessRule": "[[security.acl]]",
    "Persistence": "[persistence]",
    "Observability": "[observability]",
}
INTRODUCTION = """# Configuration

`nearcast broker --config FILE` reads TOML. Every key is optional unless it says otherwise; unknown keys are refused.
This page is made from `src/nearcast/config.py` by `scripts/config_reference.py`.
"""


def page() -> str:
    """The page as it should be."""
    classes = {node.name: node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.ClassDef)}
    parts = [INTRODUCTION]
    for name, table in TABLES.items():
        parts.append(f"## `{table}`\n" if table.startswith("[") else "## Top level\n")
        parts.append(_paragraph(ast.get_docstring(classes[name]) or "") + "\n")
        parts.extend(_fields(classes[name], classes))
    return "\n".join(parts)


def _fields(struct: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    found = []
    for field, text in _documented(struct).values():
        name = ast.unparse(field.target)
        elsewhere = re.fullmatch(r"As in :class:`(\w+)`\.", text)
        if elsewhere:
            text = _documented(classes[elsewhere.group(1)])[name][1]
        kind = ast.unparse(field.annotation).replace("|", "\\|")
        default = "required" if field.value is None else f"default `{_default(field.value)}`"
        found.append(f"**`{name}`** ({kind.replace('Literal', 'one of ')}; {default})")
        found.append(f": {_paragraph(text)}\n")
    return found


def _default(value: ast.expr) -> str:
    """A default as it stands in the source (octal stays octal), in TOML's words where they differ."""
    written = ast.get_source_segment(SOURCE.read_text(), value) or ast.unparse(value)
    return {"None": "unset", "True": "true", "False": "false", "(Listener(),)": "one of kind tcp", "()": "[]"}.get(
        written, written
    )


def _documented(struct: ast.ClassDef) -> dict[str, tuple[ast.AnnAssign, str]]:
    """The fields of a struct, each with the paragraph below it."""
    found = {}
    for field, text in zip(struct.body, struct.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            name = ast.unparse(field.target)
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)):
                raise SystemExit(f"{struct.name}.{name} has no paragraph")
            found[name] = (field, text.value.value)
    return found


def _paragraph(text: str) -> str:
    """Docstring markup as Markdown, on one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def main() -> None:
    wanted = page()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != wanted:
            raise SystemExit(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/config_reference.py")
        return
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
