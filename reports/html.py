"""Pages of HTML: one file each, without scripts, and nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa

from harness.errors import ResultError
from reports.units import DASH, number, percent, seconds

_TEMPLATES = Path(__file__).with_name("templates")


def template(name: str) -> jinja2.Template:
    """The template of this name; whatever it is given is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds, "percent": percent, "data_uri": _data_uri}
    environment.filters |= {"rows": _rows}
    return environment.get_template(f"{name}.html.j2")


def write(html: str, path: Path) -> Path:
    """The page into a file, whatever odd characters are in it. Raises `ResultError`."""
    try:
        path.write_bytes(html.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _rows(numbers: pa.Table) -> list[list[str]]:
    """A figure's numbers as text: units stand in the column names."""
    columns = [[_text(value) for value in column.to_pylist()] for column in numbers.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _text(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
