"""`relaybench trace check`: all faults of a file, in every format, and what to know before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from harness.errors import ConfigError, TraceError
from harness.trace import Header, Trace
from tests.unit import test_traces_dynamo as dynamo_rows
from tests.unit import test_traces_kv_cache_tester as kv_rows
from tests.unit import test_traces_mooncake_agentic as agentic_rows
from tests.unit import test_traces_otel as otel_rows
from tests.unit import test_traces_tensorrt_llm as trt_rows
from tests.unit import test_traces_tracelab as lab_rows
from tests.unit.conftest import HEADER, MakeTrace
from tests.unit.test_cli import relaybench
from tests.unit.test_traces_qwen_bailian import ROW as CHAT
from traces import (
    azure,
    burstgpt,
    canonical,
    check,
    dynamo,
    kv_cache_tester,
    mooncake,
    mooncake_agentic,
    otel,
    qwen_bailian,
    tensorrt_llm,
    tracelab,
)
from traces.faults import gathering

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"

READERS: dict[str, Callable[[Path], Trace]] = {
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "canonical": canonical.read,
    "dynamo": dynamo.read,
    "kv_cache_tester": kv_cache_tester.read,
    "mooncake": mooncake.read,
    "mooncake_agentic": mooncake_agentic.read,
    "otel": otel.read,
    "qwen_bailian": qwen_bailian.read,
    "tensorrt_llm": tensorrt_llm.read,
    "tracelab": tracelab.read,
}

Kinds = list[tuple[str | None, int, list[int] | list[str]]]


def rows(*values: Any) -> str:
    """A line each; text as it is."""
    lines = (each if isinstance(each, str) else json.dumps(each) for each in values)
    return "".join(line + "\n" for line in lines)


def request(arrival_ms: float, **more: Any) -> dict[str, Any]:
    """A row of Mooncake."""
    return {
        "timestamp": arrival_ms,
        "input_length": 600,
        "output_length": 5,
        "hash_ids": [1, 2],
    } | more


def misnamed(arrival_ms: float) -> dict[str, Any]:
    row = request(arrival_ms)
    row["output_len"] = row.pop("output_length")
    return row


def chat(number: int, **more: Any) -> dict[str, Any]:
    return CHAT | {"chat_id": number} | more


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


BURST = "5,GPT-4,472,18,490,API log"
BURST_NAMES = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
DAY = "2024-05-12 00:00:0"
OWN = {"relaybench": json.loads(HEADER.to_json())}
TURN = {
    "session": 0,
    "turn_index": 0,
    "parents": [],
    "recorded_s": 0.0,
    "arrival_s": 0.0,
    "input_tokens": 128,
    "output_tokens": 2,
    "runs": [[0, 2]],
    "agent": "main",
}

SOUND: dict[str, tuple[str, str]] = {
    "azure": (
        "a.csv",
        rows(azure_names := "TIMESTAMP,ContextTokens,GeneratedTokens", f"{DAY}1,9,9"),
    ),
    "burstgpt": ("a.csv", rows(BURST_NAMES, BURST)),
    "canonical": ("a.jsonl", rows(OWN, TURN)),
    "dynamo": ("a.jsonl", rows(dynamo_rows.request("a", 1000, 2500))),
    "kv_cache_tester": ("a.json", json.dumps(kv_rows.session(kv_rows.request(5)))),
    "mooncake": ("a.jsonl", rows(request(0), request(100))),
    "mooncake_agentic": ("a.jsonl", rows(agentic_rows.HEADER, agentic_rows.row("a"))),
    "otel": ("a.json", json.dumps({"spans": [otel_rows.span("a", 1, 2)]})),
    "qwen_bailian": ("a.jsonl", rows(chat(0))),
    "tensorrt_llm": (
        "a.trace.json",
        json.dumps({"trace_id": "a", "events": [trt_rows.answer(50, 5)]}),
    ),
    "tracelab": ("a.jsonl", rows(lab_rows.turn(0, 0, 50, lab_rows.event("text", 1)))),
}

FAULTY: dict[str, tuple[str, str, Kinds]] = {
    "azure": (
        "a.csv",
        rows(
            azure_names,
            f"{DAY}1,9,9",
            "yesterday,1,1",
            f"{DAY}2,-5,1",
            "2024-02-30 00:00:00,1,1",
            f"{DAY}3,1",
            "",
            f"{DAY}4,1,1.5",
            f"{DAY}5,9999999999999999999999,1",
            "tomorrow,1,1",
        ),
        [
            ("TIMESTAMP", 3, [3, 10, 5]),
            ("ContextTokens", 1, [4]),
            ("ContextTokens", 1, [9]),
            ("GeneratedTokens", 1, [8]),
            (None, 1, [6]),
        ],
    ),
    "burstgpt": (
        "a.csv",
        rows(
            BURST_NAMES,
            BURST,
            "6,,472,18,490,API log",
            "-7,GPT-4,472,18,490,chat",
            BURST,
            "8,GPT-4,many,some,490,API log",
            "9,GPT-4,few,18,490,API log",
            BURST,
            BURST,
        )
        + "10,GPT-4",
        [
            ("Model", 1, [3]),
            ("Log Type", 1, [4]),
            ("Request tokens", 2, [6, 7]),
            ("Response tokens", 1, [6]),
            ("Timestamp", 1, [4]),
            (None, 1, [10]),
        ],
    ),
    "canonical": (
        "a.jsonl",
        rows(
            OWN, TURN, TURN | {"agent": 1}, TURN | {"session": -1}, "{", TURN | {"agent": 2}, TURN
        ),
        [("agent", 2, [3, 6]), ("session", 1, [4]), (None, 1, [5])],
    ),
    "dynamo": (
        "a.jsonl",
        rows(
            dynamo_rows.request("a", 1000, 2000),
            dynamo_rows.request("b", 3000, 4000, input_length="x"),
            dynamo_rows.request("c", 5000, 6000, session="child", parent="root"),
            dynamo_rows.request("d", 7000, 8000, session="child", parent="other"),
            {"event_type": "tool_begin"},
            dynamo_rows.request("e", 9000, 9500, input_sequence_hashes=[1, 2, 3, 4]),
            dynamo_rows.request("f", 9600, 9700, input_length=-1),
        ),
        [
            ("request.replay.input_length", 1, [2]),
            ("agent_context.parent_session_id", 1, [4]),
            ("event_type", 1, [5]),
            ("request.replay.input_length", 1, [7]),
            ("request.replay.input_sequence_hashes", 1, [6]),
        ],
    ),
    "kv_cache_tester": (
        "a.json",
        json.dumps(
            kv_rows.session(
                kv_rows.request(1),
                kv_rows.request(-2),
                kv_rows.request(3, type="x"),
                kv_rows.agent(9, 1000, kv_rows.request(0), kv_rows.request(0.5) | {"out": "y"}),
                kv_rows.request(10, hash_ids=[1, 2, 3]),
                kv_rows.request(11) | {"t": "z"},
                kv_rows.request(12, hash_ids=[1, 2, 3, 4]),
                7,
            )
        ),
        [
            ("requests[7]", 1, ["requests[7]"]),
            ("requests[1].t", 1, ["requests[1].t"]),
            ("requests[2].type", 1, ["requests[2].type"]),
            ("requests[5].t", 1, ["requests[5].t"]),
            ("requests[3].requests[1].out", 1, ["requests[3].requests[1].out"]),
            (
                *("requests[4].hash_ids", 2),
                ["requests[4].hash_ids", "requests[6].hash_ids"],
            ),
        ],
    ),
    "mooncake": (
        "a.jsonl",
        rows(
            request(0), misnamed(1), request(2, hash_ids=[1, 2, 3]), "{1}", misnamed(4), request(5)
        )
        + '{"timestamp": 6, "inp',
        [
            ("output_length", 2, [2, 5]),
            ("hash_ids", 1, [3]),
            (None, 1, [4]),
            (None, 1, [7]),
        ],
    ),
    "mooncake_agentic": (
        "a.jsonl",
        rows(
            agentic_rows.HEADER,
            agentic_rows.row("a"),
            agentic_rows.row("b", agentic_rows.after("a", -1)),
            agentic_rows.row("c", agentic_rows.after("b", trigger="start")),
            agentic_rows.row("a"),
            agentic_rows.row("d", output_length="x"),
            agentic_rows.row("e", agentic_rows.after("a", "x")),
            agentic_rows.row("f", agentic_rows.after("b"), hash_ids=[1, 2, 3]),
        ),
        [
            ("dependencies[0].delay_ms", 1, [3]),
            ("dependencies[0].trigger", 1, [4]),
            ("request_id", 1, [5]),
            ("output_length", 1, [6]),
            ("dependencies[0].delay_ms", 1, [7]),
            ("hash_ids", 1, [8]),
        ],
    ),
    "otel": (
        "a.json",
        json.dumps(
            {
                "spans": [
                    otel_rows.span("a", 1, 2),
                    otel_rows.span("b", 4, 3),
                    otel_rows.span("c", 5, 6, "many"),
                    otel_rows.span("a", 7, 8),
                    without(otel_rows.span("d", 9, 10), "end_time"),
                    otel_rows.span("e", 11, 12, parent_span_id="f"),
                    otel_rows.span("f", 11, 13, parent_span_id="e"),
                    otel_rows.span("g", 14, 15, "few"),
                ]
            }
        ),
        [
            ("spans[3].span_id", 1, ["spans[3].span_id"]),
            ("spans[4].end_time", 1, ["spans[4].end_time"]),
            ("spans[1].end_time", 1, ["spans[1].end_time"]),
            (
                "spans[2].attributes.gen_ai.usage.input_tokens",
                2,
                [
                    "spans[2].attributes.gen_ai.usage.input_tokens",
                    "spans[7].attributes.gen_ai.usage.input_tokens",
                ],
            ),
            ("spans[5].parent_span_id", 1, ["spans[5].parent_span_id"]),
        ],
    ),
    "qwen_bailian": (
        "a.jsonl",
        rows(
            chat(0),
            chat(1, timestamp="noon"),
            chat(0, timestamp=5),
            "[]",
            chat(2, parent_chat_id=1, hash_ids=[1, 2, 3]),
            chat(3, hash_ids=[1, 2, 3, 4]),
            chat(4, type=" "),
            without(chat(5), "turn"),
        ),
        [
            ("timestamp", 1, [2]),
            ("chat_id", 1, [3]),
            (None, 1, [4]),
            ("turn", 1, [8]),
            ("hash_ids", 2, [5, 6]),
            ("type", 1, [7]),
        ],
    ),
    "tensorrt_llm": (
        "a.trace.json",
        json.dumps(
            {
                "trace_id": "a",
                "events": [
                    trt_rows.message("user", 40),
                    trt_rows.message("bard", 4),
                    {"event_type": "sing"},
                    trt_rows.answer(50, 5),
                    trt_rows.answer(60, 5, 3),
                    trt_rows.tool(-1),
                    trt_rows.message("bard", 4),
                    trt_rows.fork("many"),
                    # Of branches that would have been opened: no faults.
                    trt_rows.answer(60, 5, 0),
                    trt_rows.JOIN,
                ],
            }
        ),
        [
            ("events[1].role", 2, ["events[1].role", "events[6].role"]),
            ("events[2].event_type", 1, ["events[2].event_type"]),
            ("events[4].branch_path", 1, ["events[4].branch_path"]),
            ("events[5].duration_ms", 1, ["events[5].duration_ms"]),
            ("events[7].num_branches", 1, ["events[7].num_branches"]),
        ],
    ),
    "tracelab": (
        "a.jsonl",
        rows(
            lab_rows.turn(0, 0, 50, lab_rows.event("text", 1)),
            without(lab_rows.turn(1, 50, 9), "tools"),
            lab_rows.turn(0, 0, 50, session="only faults", output_tokens=None),
            lab_rows.turn(2, 0, 50, {"event_type": "text", "timestamp": "noon"}),
            lab_rows.turn(3, 0, 50, lab_rows.event("text", 5)),
            lab_rows.turn(3, 0, 50, lab_rows.event("text", 6)),
            without(lab_rows.turn(4, 50, 9), "tools"),
            lab_rows.turn(3, 0, 50, lab_rows.event("text", 7)),
        ),
        [
            ("tools", 2, [2, 7]),
            ("output_tokens", 1, [3]),
            ("timing_events[0].timestamp", 1, [4]),
            ("round_index", 2, [6, 8]),
        ],
    ),
}


def found(reader: str, path: Path) -> Kinds:
    with gathering() as faults:
        READERS[reader](path)
    assert faults.count == sum(kind.count for kind in faults.kinds.values())
    kinds = faults.kinds.values()
    return [(kind.first.field, kind.count, kind.lines or kind.fields) for kind in kinds]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def told(readers: dict[str, check.Read], path: str | None) -> tuple[int, str]:
    """(exit code, all that was said)."""
    lines: list[str] = []
    code = check.check(readers, path, lines.append)
    return code, "\n".join(lines)


# ---- readers


@pytest.mark.parametrize("reader", FAULTY)
def test_exactly_the_faults_of_a_file_are_gathered(reader: str, tmp_path: Path) -> None:
    """So a fault is found behind another, and nothing is told that follows from one."""
    name, text, kinds = FAULTY[reader]
    assert found(reader, write(tmp_path, name, text)) == kinds


@pytest.mark.parametrize("reader", FAULTY)
def test_the_first_fault_is_raised_as_ever(reader: str, tmp_path: Path) -> None:
    name, text, _ = FAULTY[reader]
    path = write(tmp_path, name, text)
    with gathering() as faults:
        READERS[reader](path)
    firsts = [str(kind.first) for kind in faults.kinds.values()]
    with pytest.raises(TraceError) as caught:
        READERS[reader](path)
    assert str(caught.value) in firsts


@pytest.mark.parametrize("reader", SOUND)
def test_a_sound_file_has_no_faults(reader: str, tmp_path: Path) -> None:
    name, text = SOUND[reader]
    path = write(tmp_path, name, text)
    assert found(reader, path) == []
    with gathering() as faults:
        trace = READERS[reader](path)
    assert faults.count == 0
    assert trace.digest == READERS[reader](path).digest


def test_every_choice_of_a_reader_is_tested() -> None:
    with initialize_config_module("conf", version_base="1.3"):
        choices = GlobalHydra.instance().config_loader().get_group_options("trace")
    others = {"agentic", "constant", "targets", "twin", "sharegpt"}
    assert {*choices} - others == {*SOUND} == {*FAULTY} == {*READERS}


@pytest.mark.parametrize(
    "reader", ["dynamo", "kv_cache_tester", "otel", "tensorrt_llm", "tracelab"]
)
def test_one_bad_file_of_a_folder_does_not_hide_the_faults_of_the_others(
    reader: str, tmp_path: Path
) -> None:
    name, text, kinds = FAULTY[reader]
    end = name.removeprefix("a")
    write(tmp_path, f"0{end}", '{"cut')
    write(tmp_path, name, text)
    (tmp_path / f"z{end}").write_bytes(text.encode("utf-16"))
    told_of = found(reader, tmp_path)
    assert (None, 1, [1]) in told_of, "the file that is cut off"
    assert (None, 1, []) in told_of, "the file that is no UTF-8"
    assert [each for each in told_of if each[0] is not None] == kinds


def test_a_line_that_is_not_utf8_is_one_fault_among_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [request(0), request(1), misnamed(2)]
    first, second, third = (json.dumps(each).encode() + b"\n" for each in lines)
    path.write_bytes(first + b"\xe9\n" + second + third)
    assert found("mooncake", path) == [(None, 1, [2]), ("output_length", 1, [4])]


def test_a_file_without_one_sound_line_has_only_their_faults(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", rows("so", "it", "goes"))
    for reader in ("canonical", "dynamo", "mooncake", "mooncake_agentic", "qwen_bailian"):
        assert found(reader, path) == [(None, 3, [1, 2, 3])], reader


def test_an_open_quote_ends_a_csv_file_and_the_faults_before_it_are_told(tmp_path: Path) -> None:
    lines = (azure_names, f"{DAY}1,9", f"{DAY}1,9,9", f'{DAY}1,"9,9', f"{DAY}1,9,9")
    path = write(tmp_path, "a.csv", rows(*lines))
    assert found("azure", path) == [(None, 1, [2]), (None, 1, [4])]


def test_every_orphan_is_told_where_all_rows_are_sound(tmp_path: Path) -> None:
    after, row = agentic_rows.after, agentic_rows.row
    orphans = [row("a"), row("b", after("x")), row("c", after("a"), after("y")), row("d")]
    path = write(tmp_path, "a.jsonl", rows(agentic_rows.HEADER, *orphans))
    expected: Kinds = [("dependencies[0].request_id", 2, [3, 4])]
    assert found("mooncake_agentic", path) == expected
    path = write(tmp_path, "a.jsonl", rows(agentic_rows.HEADER, *orphans, row("e", turn=1), "{"))
    assert found("mooncake_agentic", path) == [(None, 1, [7])], "x may be the row at fault"


def test_each_orphaned_session_of_a_log_is_told(tmp_path: Path) -> None:
    made = dynamo_rows.request
    path = write(
        tmp_path,
        "a.jsonl",
        rows(
            made("a", 1000, 2000, session="a", parent="gone"),
            made("b", 1000, 2000, session="b", parent="lost"),
            made("c", 1000, 2000, session="c", parent="a"),
        ),
    )
    assert found("dynamo", path) == [("agent_context.parent_session_id", 2, [1, 2])]


# ---- which reader


def ways(path: Path) -> dict[str, check.Read]:
    def way(name: str) -> check.Read:
        return lambda: READERS[name](path)

    return {name: way(name) for name in READERS}


@pytest.mark.parametrize("reader", SOUND)
def test_a_sound_file_is_recognised(reader: str, tmp_path: Path) -> None:
    path = write(tmp_path, *SOUND[reader])
    code, said = told(ways(path), str(path))
    assert code == 0, said
    assert said.startswith(f"Read as {reader}; trace=NAME chooses another reader\nTrace ")
    assert "No faults." in said


@pytest.mark.parametrize("reader", FAULTY)
def test_a_file_with_some_faults_is_recognised(reader: str, tmp_path: Path) -> None:
    name, text, kinds = FAULTY[reader]
    path = write(tmp_path, name, text)
    code, said = told(ways(path), str(path))
    assert code == 2, said
    assert said.startswith(f"Read as {reader};")
    for field, _, _ in kinds:
        assert field is None or f"{field}: " in said


def test_a_file_with_many_faults_is_recognised_by_its_sound_rows(tmp_path: Path) -> None:
    many = [each for at in range(100) for each in (request(at), request(at), misnamed(at))]
    path = write(tmp_path, "a.jsonl", rows(*many))
    code, said = told(ways(path), str(path))
    assert code == 2
    assert said == (
        "Read as mooncake; trace=NAME chooses another reader\n"
        "100 faults in 300 rows:\n"
        "  a.jsonl: output_length: missing; the closest field is 'output_len'\n"
        "    100 times, lines 3, 6, 9, 12, 15, 18, 21, 24, 27, 30 and 90 more. Give timestamp, "
        "input_length, output_length, hash_ids, session_id, delay, delay_ms, request_id\n"
        "What reading changes, and what to know before a replay, is told once these are mended"
    )


def unrecognised(path: Path) -> list[str]:
    """What is said of a file that no reader fits, line by line."""
    with pytest.raises(ConfigError, match="no reader fits: choose one with trace=NAME") as caught:
        check.check(ways(path), str(path), print, untried={"sharegpt": ["trace.tokenizer"]})
    return str(caught.value).splitlines()


def test_what_no_reader_fits_is_refused_with_what_the_nearest_said(tmp_path: Path) -> None:
    renamed = [{"input_len": 5} | without(request(at), "input_length") for at in range(3)]
    first, mooncake_said, *others, untried = unrecognised(
        write(tmp_path, "a.jsonl", rows(*renamed))
    )
    assert first.endswith("The nearest:")
    assert mooncake_said == (
        "  mooncake: line 1: input_length: missing; the closest field is 'input_len'"
    )
    assert [line.split(":")[0] for line in others] == ["  qwen_bailian", "  dynamo"]
    assert untried == "Not tried: sharegpt, which needs trace.tokenizer"


def test_columns_are_compared_with_the_csv_readers(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", rows("TIMESTAMP,ContextTokens,Generated", "1,2,3"))
    assert unrecognised(path)[1].startswith("  azure: line 1: GeneratedTokens: missing; ")


def test_what_many_readers_say_is_said_once(tmp_path: Path) -> None:
    lines = unrecognised(write(tmp_path, "a.json", "[1, 2]\n"))
    assert len(lines) == 5
    assert "more: line 1: a list, where a JSON object is wanted" in "\n".join(lines)
    (tmp_path / "folder").mkdir()
    lines = unrecognised(tmp_path / "folder")
    assert "a folder, where one file is wanted" in lines[1]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "human", "value": "hi"}]}, "trace=sharegpt trace.tokenizer="),
        ({"messages": [{"role": "user", "content": "hi"}]}, "trace=sharegpt trace.tokenizer="),
        (request(0, session_id="a"), "trace=mooncake, and trace.turns=whole where a row"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_a_format_that_needs_settings_is_named(
    row: dict[str, Any], words: str, listed: bool, tmp_path: Path
) -> None:
    lines = unrecognised(
        write(tmp_path, "a.jsonl", json.dumps([row], indent=1) if listed else rows(row, row))
    )
    assert words in lines[-1]
    assert len(lines) <= 6


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "binary data"),
        (b"a.jsonl" + bytes(93) + b"0000644\n", "binary data, .* Unpack it"),
        (b"\xe9\xe9\n", "is not UTF-8"),
        (b"\x28\xb5\x2f\xfd....", "compressed with zstd"),
    ],
)
def test_a_file_that_is_no_text_is_said_once(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=words) as caught:
        told({name: way for name, way in ways(path).items() if name != "canonical"}, str(path))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(TraceError, match=words):
        told(ways(path), str(path))


def test_what_two_readers_fit_is_not_guessed(tmp_path: Path) -> None:
    path = write(tmp_path, *SOUND["mooncake"])
    twice = {"one": lambda: mooncake.read(path), "two": lambda: mooncake.read(path)}
    with pytest.raises(ConfigError, match="one and two fit equally well"):
        told(twice, str(path))


def test_no_file_is_no_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        told(ways(tmp_path / "gone"), str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("place", "reader"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", "azure"),
        ("burstgpt/sample_rows.csv", "burstgpt"),
        ("dynamo/mooncake_tiny.jsonl", "mooncake"),
        ("dynamo/pi_request_trace.jsonl.gz", "dynamo"),
        ("dynamo/fixtures/agentic-mooncake.jsonl", "mooncake_agentic"),
        ("kv-cache-tester/raw_samples", "kv_cache_tester"),
        ("kv-cache-tester/raw_samples/trace_0026.json", "kv_cache_tester"),
        ("mooncake/conversation_trace.jsonl", "mooncake"),
        ("otel-inference-perf/advanced", "otel"),
        ("otel-inference-perf/simple/simple_chain.json", "otel"),
        ("qwen-bailian/sample_rows.jsonl", "qwen_bailian"),
        ("tracelab/example_sessions/sanitized", "tracelab"),
        ("trtllm-blog27", "tensorrt_llm"),
    ],
)
def test_published_files_are_recognised_and_sound(place: str, reader: str) -> None:
    path = SHARED / place
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to look at")
    code, said = told(ways(path), str(path))
    assert code == 0, said
    assert said.startswith(f"Read as {reader};")


# ---- what to know


def said_of(trace: Trace) -> str:
    code, said = told({"it": lambda: trace}, None)
    assert code == 0
    return said


def header(**more: Any) -> Header:
    given: dict[str, Any] = {
        "format": "hand",
        "block_tokens": 64,
        "partial_block": "floor",
        "id_scope": "global",
        "time_unit": "s",
        "licence": "none",
    }
    return Header(**given | more)


def test_a_trace_without_surprises_needs_no_words(make_trace: MakeTrace) -> None:
    said = said_of(make_trace())
    assert said.endswith("\nNo faults.")
    assert said.startswith("Trace hand: 4 requests in 2 sessions; ")


def test_what_was_changed_is_explained(make_trace: MakeTrace) -> None:
    said = said_of(make_trace(header(changes={"blank_lines_skipped": 3, "mine": 1234})))
    assert said.endswith(
        "No faults.\nChanged on reading:\n"
        "  blank_lines_skipped 3: lines with nothing in them\n  mine 1,234"
    )


def test_every_change_of_a_reader_has_a_meaning() -> None:
    folder = Path(check.__file__).parent
    text = "".join(each.read_text() for each in folder.glob("*.py"))
    named = re.findall(r'(?:count\(|changes\[|changes\.append\()\s*"([a-z0-9_]+)"', text)
    assert len(named) > 40
    assert set(named) <= set(check.MEANINGS)


def test_long_delays_and_prompts_are_told(make_trace: MakeTrace) -> None:
    said = said_of(
        make_trace(
            delay_s=[None, None, 7200.0, 3600.0],
            input_tokens=[128, 128, 131_072, 200_000],
            run_lengths=[[2], [2], [2048], [3125]],
            run_starts=[[0], [10_000], [0], [0]],
        )
    )
    assert "  1 delay above 1 h, the longest 2.0 h: transform=[cap_delays]" in said
    assert "  1 prompt above 131,072 tokens, the longest 200,000: " in said


def test_what_cannot_be_claimed_is_told(make_trace: MakeTrace) -> None:
    made = header(prefix_data="absent", session_starts="unknown")
    said = said_of(make_trace(made, run_starts=[[]] * 4, run_lengths=[[]] * 4))
    assert said.startswith(
        "Trace hand: 4 requests in 2 sessions; no prefix data, so no hit rates\n"
    )
    assert "  No prefix data: " in said
    assert "give pacing=poisson or pacing=closed" in said


def test_prompts_with_too_few_blocks_are_counted(make_trace: MakeTrace) -> None:
    """Of 191 tokens two whole blocks have an id, of 320 five."""
    said = said_of(
        make_trace(
            input_tokens=[191, 192, 256, 320],
            run_starts=[[0], [10], [0], []],
            run_lengths=[[2], [2], [4], []],
        )
    )
    assert "  2 prompts with ids for fewer blocks than there are: " in said
    assert "coarse clock" not in said


def one_turn_each(make_trace: MakeTrace, arrivals_s: list[float]) -> Trace:
    turns = len(arrivals_s)
    return make_trace(
        session=[*range(turns)],
        turn_index=[0] * turns,
        parents=[[]] * turns,
        recorded_s=arrivals_s,
        arrival_s=arrivals_s,
        delay_s=[None] * turns,
        input_tokens=[63] * turns,
        output_tokens=[3] * turns,
        run_starts=[[]] * turns,
        run_lengths=[[]] * turns,
        agent=["main"] * turns,
    )


@pytest.mark.parametrize(
    ("arrivals_s", "words"),
    [
        ([0.0, 0.0, 0.0, 3.0, 3.0, 6.0], "6 sessions start at 3 different times, mostly 3 s apart"),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "All 6 sessions start at once"),
        ([0.0, 0.0, 1.0, 2.0, 3.0, 4.0], "No faults."),
    ],
)
def test_a_coarse_clock_is_told(make_trace: MakeTrace, arrivals_s: list[float], words: str) -> None:
    said = said_of(one_turn_each(make_trace, arrivals_s))
    assert words in said
    assert ("up to 3 at once" in said) == ("coarse" in said)


def test_times_of_a_larger_unit_are_told(make_trace: MakeTrace) -> None:
    """Of s that were taken for ms; a coarse clock is not told too, as its tick is wrong."""
    arrivals_s = [at // 3 * 0.003 for at in range(1200)]
    said = said_of(one_turn_each(make_trace, arrivals_s))
    assert "  1,200 sessions start within 1.2 s, 1,003 a second: " in said
    assert "transform=[scale_time] transform.scale_time.factor=1000" in said
    assert "coarse clock" not in said
    mended = said_of(one_turn_each(make_trace, [1000 * each for each in arrivals_s]))
    assert "scale_time" not in mended
    few = said_of(one_turn_each(make_trace, arrivals_s[:90]))
    assert "scale_time" not in few


def test_many_kinds_are_not_all_printed(tmp_path: Path) -> None:
    many = [request(at, **{"x" * (at + 1): 1}) for at in range(50)]
    path = write(tmp_path, "a.jsonl", rows(*many))
    code, said = told({"mooncake": lambda: mooncake.read(path)}, None)
    assert code == 2
    assert said.startswith("50 faults of 50 kinds in 50 rows:\n")
    *lines, last, _ = said.splitlines()
    assert last == "  and 30 more kinds"
    assert len(lines) == 1 + 2 * 20


# ---- the command


def test_the_command_reads_a_file_and_says_how(tmp_path: Path) -> None:
    name, text, _ = FAULTY["mooncake"]
    write(tmp_path, name, text)
    done = relaybench("trace", "check", name, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(
        "Read as mooncake; trace=NAME chooses another reader\n5 faults of 4 kinds in 7 rows:\n"
    )
    assert "    Line 7. Fetch the file again" in done.stdout
    assert done.stdout.splitlines()[1:] == (
        relaybench(
            "trace", "check", "trace=mooncake", f"trace.path={name}", cwd=tmp_path
        ).stdout.splitlines()
    )


def test_the_command_takes_a_folder_and_settings(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    write(folder, *SOUND["kv_cache_tester"])
    done = relaybench("trace", "check", "a=b", "transform=[anonymise]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Read as kv_cache_tester" in done.stdout
    assert "turns_of_agents_without_their_names 1" in done.stdout
    done = relaybench("trace", "check", "trace=otel", "a=b", cwd=tmp_path)
    assert done.returncode == 2
    assert "a.json: block_size, requests: a trace of another format" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "check which trace? Give a file, or trace=mooncake trace.path=FILE"),
        (["transform=[anonymise]"], "check which trace?"),
        (["gone.jsonl"], "gone.jsonl: no such file"),
        (["gone.jsonl", "trace=agentic"], "trace=agentic reads no file: leave out gone.jsonl"),
        (["trace=mooncake"], "trace.path has no value"),
        (["gone.jsonl", "-m"], "one trace at a time"),
        (["gone.jsonl", "other.jsonl"], "one trace at a time: leave out other.jsonl"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    done = relaybench("trace", "check", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
