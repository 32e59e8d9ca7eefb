"""Foreign programs the integration tests talk to.

``scripts/test-tools.sh`` (run by ``make test``) installs them. On a developer's machine a missing one skips its tests and
says what to install; in CI it fails them, so that a green run means they ran.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

JS_DIRECTORY = Path(__file__).parent / "js"

_ADVICE = {
    "mosquitto": "install the Debian package mosquitto",
    "mosquitto_pub": "install the Debian package mosquitto-clients",
    "mosquitto_sub": "install the Debian package mosquitto-clients",
    "mqtt.js": "install Node.js and npm, then run scripts/test-tools.sh",
    "node": "install Node.js",
    "setpriv": "install the Debian package util-linux",
    "unshare": "install the Debian package util-linux",
}


def find(tool: str) -> Path | None:
    """Where a tool is: the program, or for ``mqtt.js`` the installed package."""
    if tool == "mqtt.js":
        package = JS_DIRECTORY / "node_modules" / "mqtt"
        return package if package.is_dir() and shutil.which("node") else None
    # Debian puts daemons where only root's PATH looks.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    found = shutil.which(tool, path=path)
    return Path(found) if found else None


def require(tool: str) -> Path:
    """The tool's path; without it the calling test is skipped, or failed when ``CI`` is set."""
    found = find(tool)
    if found is not None:
        return found
    if os.environ.get("CI", "") not in ("", "0", "false"):
        pytest.fail(_reason(tool))
    pytest.skip(_reason(tool))


def optional(tool: str) -> Path:
    """The tool's path; without it the calling test is skipped, in CI as well: nothing installs this one."""
    found = find(tool)
    return found if found is not None else pytest.skip(_reason(tool))


def _reason(tool: str) -> str:
    return f"{tool} is missing: {_ADVICE.get(tool, f'install {tool}')}"
