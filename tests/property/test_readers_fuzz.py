"""Whatever a file holds, a reader gives a sound trace or says in a `TraceError` what is wrong.

Each begins with a small valid file (`tests.property.pieces`), which is changed in what it says,
value by value, and then as bytes. `RELAYBENCH_FUZZ` is how many files of each are tried.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from harness.errors import ConfigError, TraceError
from harness.trace import SCHEMA, Trace
from tests.property import pieces
from traces import (
    azure,
    burstgpt,
    canonical,
    dynamo,
    kv_cache_tester,
    mooncake,
    mooncake_agentic,
    otel,
    qwen_bailian,
    sharegpt,
    sketch,
    tensorrt_llm,
    tracelab,
)
from traces.faults import gathering

EXAMPLES = int(os.environ.get("RELAYBENCH_FUZZ", "150"))
HANG_S = 20.0
"""A file of a few lines is read in milliseconds, on however busy a machine."""

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# ---- what is read


@dataclass(frozen=True)
class Format:
    """A way to read a file, and a valid file as values. `form` says how those are written."""

    read: Callable[[Path], Any]
    piece: Any
    form: str
    name: str = "trace"

    def __repr__(self) -> str:
        return self.name


def words(folder: Path) -> Path:
    """A tokenizer: a word a token."""
    path = folder / "words"
    if not path.exists():
        made = Tokenizer(WordLevel({word: at for at, word in enumerate("abc")}, "a"))
        made.pre_tokenizer = Whitespace()
        made.save(str(path))
    return path


def read_chats(path: Path) -> Trace:
    return sharegpt.read(path, words(path.parent), 2)


FORMATS = {
    "mooncake": Format(mooncake.read, pieces.MOONCAKE, "jsonl"),
    "mooncake whole": Format(
        partial(mooncake.read, turns="whole"), pieces.MOONCAKE_SESSIONS, "jsonl"
    ),
    "mooncake added": Format(
        partial(mooncake.read, turns="added"), pieces.MOONCAKE_SESSIONS, "jsonl"
    ),
    "mooncake_agentic": Format(mooncake_agentic.read, pieces.MOONCAKE_AGENTIC, "jsonl"),
    "dynamo": Format(dynamo.read, pieces.DYNAMO, "jsonl"),
    "kv_cache_tester": Format(kv_cache_tester.read, pieces.KV_CACHE_TESTER, "json"),
    "tracelab": Format(tracelab.read, pieces.TRACELAB, "jsonl"),
    "tensorrt_llm": Format(tensorrt_llm.read, pieces.TENSORRT_LLM, "json"),
    "otel": Format(otel.read, pieces.OTEL, "json"),
    "qwen_bailian": Format(qwen_bailian.read, pieces.QWEN_BAILIAN, "jsonl"),
    "azure": Format(azure.read, pieces.AZURE, "csv"),
    "burstgpt": Format(burstgpt.read, pieces.BURSTGPT, "csv"),
    "burstgpt keep": Format(partial(burstgpt.read, failures="keep"), pieces.BURSTGPT, "csv"),
    "sharegpt list": Format(read_chats, pieces.SHAREGPT, "json"),
    "sharegpt lines": Format(read_chats, pieces.SHAREGPT, "jsonl"),
    "canonical": Format(canonical.read, pieces.CANONICAL, "jsonl"),
    "canonical Parquet": Format(canonical.read, pieces.CANONICAL, "parquet"),
}

# ---- values that are not what is wanted

VERBATIM = {
    "1e400": "1e400",
    "-1e400": "-1e400",
    "5000 digits": "9" * 5000,
    "-0": "-0",
    "-0.0": "-0.0",
    "1E2": "1E2",
    "1e-320": "1e-320",
    "lists in lists": "[" * 3000 + "]" * 3000,
    "some lists in lists": "[" * 400 + "]" * 400,
    "objects in objects": '{"a":' * 3000 + "1" + "}" * 3000,
    "a name twice": '{"a": 1, "a": 2}',
    "no JSON": "undefined",
}
"""JSON that `json.dumps` does not write, by name."""
MARK = "verbatim:"

ODD: list[Any] = [
    *(None, True, False, "", [], {}, [[]], [None], [{}], {"": None}),
    *(0, 1, -1, 0.5, -0.5, 1e-9, 1e9, 1e15, 1e18, 1e308, float("nan"), float("inf")),
    *(2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1),
    *(2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 315_576_000, 315_576_001),
    *("5", "NaN", "é", "\ud800", "\U0001f600", "\0", "a\nb", 'a"b', "a,b", "x" * 300, " ", "٣"),
    *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999-23:59", "2024-02-30 00:00:00"),
    *("1677-01-01 00:00:00", "2300-01-01 00:00:00.123456789", "2024-01-01T00:00:00Z"),
    *("0" * 200 + "7", "9" * 18, "9" * 30, "1.", ".5", "1e5", "+5", "1_000", "0x10"),
    *(MARK + name for name in VERBATIM),
]

Place = tuple[Any, Any]
"""A list or object, and which of its values."""


def places(value: Any) -> Iterator[Place]:
    """Each value inside, from the top."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in inner:
            yield value, key
            yield from places(each)


def put_odd(draw: st.DrawFn, place: Place, _: list[Place]) -> None:
    holder, key = place
    holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))


def put_other(draw: st.DrawFn, place: Place, every: list[Place]) -> None:
    """What stands elsewhere, under the same name where there is one: so ids meet, and cycle."""
    holder, key = place
    same = [each for each in every if type(each[1]) is str and each[1] == key]
    alike = bool(same) and draw(st.booleans())
    other, other_key = draw(st.sampled_from(same if alike else every))
    holder[key] = copy.deepcopy(other[other_key])


def delete(_: st.DrawFn, place: Place, __: list[Place]) -> None:
    holder, key = place
    del holder[key]


def repeat(_: st.DrawFn, place: Place, __: list[Place]) -> None:
    holder, key = place
    again = copy.deepcopy(holder[key])
    if isinstance(holder, list):
        holder.insert(key, again)
    else:
        holder[f"{key}2"] = again


def nest(draw: st.DrawFn, place: Place, _: list[Place]) -> None:
    holder, key = place
    holder[key] = [holder[key]] if draw(st.booleans()) else {"a": holder[key]}


def reorder(draw: st.DrawFn, place: Place, _: list[Place]) -> None:
    holder, key = place
    if isinstance(holder[key], list):
        holder[key] = draw(st.permutations(holder[key]))
    elif isinstance(holder, list):
        holder[:] = draw(st.permutations(holder))


def rename(_: st.DrawFn, place: Place, __: list[Place]) -> None:
    holder, key = place
    if isinstance(holder, dict):
        holder[key.upper()] = holder.pop(key)


def reckon(draw: st.DrawFn, place: Place, _: list[Place]) -> None:
    """Another number, or the same as another type."""
    holder, key = place
    value = holder[key]
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if type(value) in {int, float}:
        ways: list[Callable[[Any], Any]] = [
            lambda number: number + 1,
            lambda number: number - 1,
            lambda number: -number,
            lambda number: number * 1000,
            lambda number: number / 3,
            lambda number: number * 2**31,
            float,
            str,
        ]
        holder[key] = draw(st.sampled_from(ways))(value)


CHANGES = [put_odd, put_odd, put_other, put_other, delete, repeat, nest, reorder, rename, reckon]


@st.composite
def changed(draw: st.DrawFn, piece: Any) -> Any:
    """The piece with a few of its values changed, or none."""
    whole = [copy.deepcopy(piece)]
    for _ in range(draw(st.integers(0, 4))):
        every = list(places(whole))
        if every:
            draw(st.sampled_from(CHANGES))(draw, draw(st.sampled_from(every)), every)
    return whole[0] if whole else []


# ---- files


def dumped(value: Any, indent: int | None = None) -> str:
    text = json.dumps(value, indent=indent)
    return re.sub(f'"{MARK}([^"]*)"', lambda match: VERBATIM.get(match[1], match[0]), text)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def written(value: Any, form: str, indent: int | None = None) -> bytes:
    """A file that says so."""
    if form == "parquet":
        return as_parquet(value)
    if form == "json":
        return dumped(value, indent).encode()
    if form == "jsonl":
        return "".join(dumped(row) + "\n" for row in listed(value)).encode()
    lines = (",".join(map(str, listed(row))) for row in listed(value))
    return "".join(line + "\n" for line in lines).encode(errors="surrogatepass")


def as_parquet(rows: Any) -> bytes:
    """What of these rows a column can hold: of SCHEMA's type, else of any, else nothing."""
    header, *rows = rows if isinstance(rows, list) and rows else [{}]
    rows = [row for row in rows if isinstance(row, dict)]
    fields, columns = [], []
    for field in SCHEMA:
        values = [as_column(field.name, row) for row in rows]
        for kind in (field.type, None):
            try:
                column = pa.array(values, kind)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                continue
            nullable = field.nullable or column.null_count > 0
            fields.append(field.with_type(column.type).with_nullable(nullable))
            columns.append(column)
            break
    text = dumped(header.get("relaybench") if isinstance(header, dict) else header)
    schema = pa.schema(fields, {"relaybench.header": text})
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), sink)
    except (pa.ArrowException, OSError):
        return b""
    data: bytes = sink.getvalue().to_pybytes()
    return data


def as_column(name: str, row: dict[str, Any]) -> Any:
    part = {"run_starts": 0, "run_lengths": 1}.get(name)
    if part is None:
        return row.get(name)
    runs = row.get("runs")
    if not isinstance(runs, list) or not all(isinstance(r, list) and len(r) > 1 for r in runs):
        return runs
    return [run[part] for run in runs]


PASTED = [
    *(b"\0", b"\n", b"\r\n", b"\r", b'"', b",", b"{", b"}", b"[", b"]", b"\\", b"\xff", b"\xc3"),
    *(b"null", b"NaN", b"\xef\xbb\xbf", b"\x1f\x8b", b"PAR1", b"\xed\xa0\x80", b" ", b"\x0b"),
    *(b"\n\n", b"\0" * 100, b"9" * 40, b"\x85", b"\xe2\x80\xa8", b"\n \t\n"),
]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The file with some of its bytes changed."""
    at = draw(st.integers(0, max(0, len(data) - 1)))
    until = draw(st.integers(at, min(len(data), at + 40)))
    pasted = draw(st.sampled_from(PASTED))
    bit = draw(st.integers(0, 7))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + data[until:],
        lambda: data[:at] + pasted + data[at:],
        lambda: data[:at] + pasted + data[until:],
        lambda: data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] if data else b"",
        lambda: data[:until] + data[at:],
        lambda: pasted + data,
        lambda: data + pasted,
        lambda: data + data,
        data.rstrip,
        lambda: data.replace(b"\n", b"\r\n"),
        lambda: data.replace(b"\n", b"\r"),
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode(errors="replace").encode("utf-16"),
        lambda: LFS,
        lambda: gzip.compress(data, mtime=0),
        lambda: gzip.compress(data, mtime=0)[:-at] if at else data,
        lambda: gzip.compress(data, mtime=0) + pasted,
    ]
    return draw(st.sampled_from(ways))()


@st.composite
def files(draw: st.DrawFn, made: Format) -> bytes:
    """A file near the valid one."""
    value = draw(changed(made.piece))
    data = written(value, made.form, draw(st.sampled_from([None, 1])))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        data = draw(damaged(data))
    return data


# ---- the law


@contextmanager
def within_time() -> Iterator[None]:
    """Fails what does not end."""

    def end(_: int, __: FrameType | None) -> None:
        pytest.fail(f"still reading after {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_or_refuse(read: Callable[[Path], Any], path: Path) -> tuple[Any, TraceError | None]:
    """What was read, or why not. Anything but a `TraceError` goes through."""
    try:
        return read(path), None
    except TraceError as error:
        return None, error


def assert_sound(trace: Trace, folder: Path) -> None:
    assert len(trace) > 0
    assert (trace.input_tokens >= 1).all()
    assert (trace.output_tokens >= 1).all()
    assert (np.diff(trace.column("recorded_s")) >= 0).all()
    assert (trace.ideal_hit_tokens >= 0).all()
    assert (trace.ideal_hit_tokens <= trace.input_tokens).all()
    assert sum(len(session.turns) for session in trace.by_session()) == len(trace)
    for form in ("jsonl", "parquet"):
        path = folder / f"kept.{form}"
        canonical.save(trace, path)
        assert canonical.read(path).digest == trace.digest


def assert_lawful(made: Format, path: Path) -> None:
    with within_time():
        trace, error = read_or_refuse(made.read, path)
        if trace is not None:
            assert_sound(trace, path.parent)
        else:
            assert error is not None
            assert path.name in str(error.path)
            assert error.problem
            assert error.do
        again = None
        with gathering() as faults:
            again = made.read(path)
        with gathering(1) as first:
            made.read(path)
    assert (faults.count > 0) == (error is not None) == first.full
    assert sum(kind.count for kind in faults.kinds.values()) == faults.count
    if trace is not None:
        assert again is not None
        assert again.digest == trace.digest
        assert again.header == trace.header


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all files: each is written over the one before."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", FORMATS)
def test_the_pieces_are_valid(folder: Path, name: str) -> None:
    made = FORMATS[name]
    path = folder / made.name
    path.write_bytes(written(made.piece, made.form))
    assert len(made.read(path)) > 1
    assert_lawful(made, path)


@pytest.mark.parametrize("name", FORMATS)
@fuzzed
@given(data=st.data())
def test_a_file_is_read_soundly_or_refused(folder: Path, name: str, data: st.DataObject) -> None:
    made = FORMATS[name]
    path = folder / made.name
    path.write_bytes(data.draw(files(made)))
    assert_lawful(made, path)


def edited(name: str, old: str, new: str) -> bytes:
    """A valid file with one thing in it put otherwise."""
    text = written(FORMATS[name].piece, FORMATS[name].form).decode()
    assert text.count(old) == 1
    return text.replace(old, new).encode("latin-1")


FOUND = {
    "a short row that is not UTF-8": ("azure", "0,27\n", "0,27\n\x85\n"),
    "a carriage return inside a row": ("azure", "0,27\n", "0,2\r7\n"),
    "a session of a huge number": ("canonical", '"session": 1', '"session": 2147483647'),
    "blocks of a huge size": ("canonical", '"block_tokens": 64', '"block_tokens": 2147483648'),
}


def test_parquet_with_a_header_that_nests_too_deep_is_refused(folder: Path) -> None:
    made = FORMATS["canonical Parquet"]
    nested = copy.deepcopy(made.piece)
    nested[0]["relaybench"]["parameters"] = MARK + "lists in lists"
    path = folder / made.name
    path.write_bytes(written(nested, made.form))
    assert_lawful(made, path)
    with pytest.raises(TraceError, match="a header that cannot be understood"):
        made.read(path)


def test_parquet_with_block_ids_that_do_not_add_up_in_64_bits_is_refused(folder: Path) -> None:
    made = FORMATS["canonical Parquet"]
    large = copy.deepcopy(made.piece)
    large[2]["runs"] = [[2**63 - 1, 2]]
    path = folder / made.name
    path.write_bytes(written(large, made.form))
    assert_lawful(made, path)
    with pytest.raises(TraceError, match="run_starts: 9223372036854775807 is above"):
        made.read(path)


@pytest.mark.parametrize("what", FOUND)
def test_what_was_once_read_otherwise_is_refused(folder: Path, what: str) -> None:
    name, old, new = FOUND[what]
    made = FORMATS[name]
    path = folder / made.name
    path.write_bytes(edited(name, old, new))
    assert_lawful(made, path)
    with pytest.raises(TraceError):
        made.read(path)


# ---- what is read beside traces


@pytest.fixture(scope="module")
def drawn_from(folder: Path) -> Any:
    """The sketch of a small trace with sub-agents, as it is in a file."""
    made = FORMATS["dynamo"]
    path = folder / made.name
    path.write_bytes(written(made.piece, made.form))
    return json.loads(json.dumps(sketch.to_json(sketch.fit(made.read(path)))))


@fuzzed
@given(data=st.data())
def test_a_sketch_is_loaded_or_refused(folder: Path, drawn_from: Any, data: st.DataObject) -> None:
    path = folder / "sketch.json"
    path.write_bytes(data.draw(files(Format(sketch.load, drawn_from, "json"))))
    with within_time():
        loaded, error = read_or_refuse(sketch.load, path)
        with gathering() as faults:
            sketch.load(path)
    assert (faults.count > 0) == (error is not None)
    if loaded is not None:
        again = sketch.to_json(loaded)
        path.write_text(json.dumps(again))
        assert sketch.to_json(sketch.load(path)) == again


@fuzzed
@given(data=st.data())
def test_a_tokenizer_is_used_or_refused(folder: Path, data: st.DataObject) -> None:
    chats = folder / "chats"
    chats.write_bytes(written(pieces.SHAREGPT, "json"))
    path = folder / "tokenizer.json"

    def read(path: Path) -> Trace:
        return sharegpt.read(chats, path, 2)

    valid = json.loads(words(folder).read_text())
    path.write_bytes(data.draw(files(Format(read, valid, "json"))))
    with within_time():
        try:
            made = read(path)
        except ConfigError:
            return
        assert_sound(made, folder)


def test_a_tokenizer_without_a_token_for_unknown_words_is_refused(folder: Path) -> None:
    chats = folder / "chats"
    chats.write_bytes(written(pieces.SHAREGPT, "json"))
    path = folder / "tokenizer.json"
    path.write_text(words(folder).read_text().replace('"a":0,', "").replace('"a": 0,', ""))
    with pytest.raises(ConfigError, match=r"tokenizer\.json, which is not usable"):
        sharegpt.read(chats, path, 2)


# ---- memory


LARGE = [2**24, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 1e300]
SPARE_BYTES = 1 << 30


def enlarged(piece: Any) -> Iterator[Any]:
    """The piece with one of its numbers, or all of one name, very large."""
    numbers = [at for at, (holder, key) in enumerate(places(piece)) if is_number(holder[key])]
    named = sorted({str(key) for holder, key in places(piece) if is_number(holder[key])})
    for large in LARGE:
        for at in numbers:
            changed = copy.deepcopy(piece)
            holder, key = list(places(changed))[at]
            holder[key] = large
            yield changed
        for name in named:
            changed = copy.deepcopy(piece)
            for holder, key in list(places(changed)):
                if str(key) == name and is_number(holder[key]):
                    holder[key] = large
            yield changed


def is_number(value: Any) -> bool:
    return type(value) in {int, float} or (isinstance(value, str) and value.isdigit())


def read_enlarged(folder: str) -> None:
    """Read them all in not much more memory than now; this process is for nothing else."""
    path = Path(folder) / "trace"
    for made in FORMATS.values():  # whatever is loaded but once
        path.write_bytes(written(made.piece, made.form))
        made.read(path)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for name, made in FORMATS.items():
        for piece in enlarged(made.piece):
            path.write_bytes(written(piece, made.form))
            try:
                with within_time():
                    read_or_refuse(made.read, path)
            except BaseException:
                print(name, path.read_bytes())  # noqa: T201 - what the test shows
                raise


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to ask for memory")
def test_large_numbers_take_no_memory(tmp_path: Path) -> None:
    code = f"from {__name__} import read_enlarged; read_enlarged({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
