"""The command ``everstep``, called within this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from everstep.cli import app


def invoke(*args: object, columns: int | None = None) -> Result:
    """Runs the command in this process; nothing but an exit may come out of it."""
    env = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner(env=env).invoke(app, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result


def document(*args: object, status: int = 0) -> dict[str, Any]:
    """The one JSON document that the command prints."""
    result = invoke(*args, "--json")
    assert result.exit_code == status, result.output
    assert "\x1b" not in result.stdout
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found
