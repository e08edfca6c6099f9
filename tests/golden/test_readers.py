"""Each reader on the real piece that there is of its format: the table of docs/traces.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.trace import Trace
from tests.golden.conftest import SHARED
from traces import (
    azure,
    burstgpt,
    dynamo,
    mooncake,
    mooncake_agentic,
    otel,
    qwen_bailian,
    tensorrt_llm,
    tracelab,
)
from traces.profile import profile

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"

READ: dict[str, Callable[[Path], Trace]] = {
    "mooncake/conversation_trace.jsonl": mooncake.read,
    "mooncake/mooncake_trace_1000.jsonl": mooncake.read,
    "dynamo/pi_request_trace.jsonl.gz": dynamo.read,
    "dynamo/fixtures/agentic-mooncake.jsonl": mooncake_agentic.read,
    "tracelab/example_sessions/sanitized/round_trace.jsonl": tracelab.read,
    "trtllm-blog27": tensorrt_llm.read,
    "otel-inference-perf/simple": otel.read,
    "otel-inference-perf/advanced": otel.read,
    "qwen-bailian/sample_rows.jsonl": qwen_bailian.read,
    "azure-llm-2023/AzureLLMInferenceTrace_code.csv": azure.read,
    "burstgpt/sample_rows.csv": burstgpt.read,
}


def row(name: str, trace: Trace) -> str:
    """The line of the table: requests, sessions, changes, ideal hits."""
    changes = ", ".join(f"{each} {count:,}" for each, count in trace.header.changes.items())
    if trace.header.prefix_data == "absent":
        hits = "no prefix data"
    else:
        found = profile(trace)
        hits = f"{found.ideal_hit_token_weighted:.1%}; {found.ideal_hit_mean:.1%}"
        hits += f"; {found.above_95:.1%}; {found.decoded_above_95:.1%}"
    return f"| {name} | {len(trace):,} | {trace.sessions:,} | {changes or 'nothing'} | {hits} |"


def rows_in_the_page() -> dict[str, str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return {
        match[1]: line for line in lines if (match := re.match(r"\| (\S+/?\S*) \| [0-9]", line))
    }


@pytest.mark.parametrize("name", READ)
def test_the_table_is_what_the_reader_reads(name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    assert rows_in_the_page()[name] == row(name, READ[name](path))


def test_agent_sessions_in_the_table(real_sessions: Trace) -> None:
    name = "kv-cache-tester/agentic_mix_le50turns_le128k"
    line = row(name, real_sessions)
    assert rows_in_the_page()[name] == line
    assert line.endswith("| 92.8%; 90.0%; 74.3%; 78.2% |")


def test_sub_agents_in_the_table(with_subagents: Trace) -> None:
    name = "kv-cache-tester/raw_samples/trace_0277.json"
    assert rows_in_the_page()[name] == row(name, with_subagents)


def test_the_first_thousand_arxiv_rows() -> None:
    path = SHARED / "mooncake" / "mooncake_trace_1000.jsonl"
    if not path.exists():
        pytest.skip("../shared is absent: no published traces to compare with")
    assert f"{mooncake.read(path).ideal_hit_token_weighted:.1%}" == "39.1%"
