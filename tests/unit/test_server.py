"""The simulator behind a port, over real sockets: what clients rely on, and its times."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest

from adapters.server import Server
from adapters.server.ask import DEFAULT_TOKENS
from adapters.server.faults import FAULTS
from adapters.server.tokens import TEMPLATE_TOKENS, Blocks, Vocabulary
from adapters.simulator import (
    DecodePool,
    DecodeSite,
    Disaggregated,
    Handoff,
    KvBytes,
    KvCache,
    Link,
    Pdd,
    PrefillCluster,
)
from harness import cli
from harness.errors import ConfigError
from tests.simulated import chip

KV = KvBytes(per_token=1000.0)
PREFILL_S = 0.02
STEP_S = 0.02
LATE_S = 1.0
"""Far more than any machine should need; that it is never too early is what is tested."""
SETTINGS: dict[str, Any] = {
    "host": "127.0.0.1", "port": 0, "model": "tiny", "block_tokens": 16, "context_tokens": 4096,
    "vocabulary_tokens": 1000, "known_blocks": 10_000, "faults": True,
}  # fmt: skip
IDS = list(range(100, 140))


def cluster() -> PrefillCluster:
    return PrefillCluster(8, 10_000, 1e12, chip((PREFILL_S, 0.0, 0.0)), KV)


def site(cache_bytes: float = 0.0) -> DecodeSite:
    decode = chip((0.0, 1e-4, 0.0), (STEP_S, 0.0, 0.0, 0.0))
    return DecodeSite(DecodePool(8, 1e12, decode, KV), KvCache(KV, cache_bytes))


def in_dc() -> Disaggregated:
    """Every prefill is one step, so is every token; 1 ms between."""
    return Disaggregated("in_dc", {"P": cluster()}, Link(1e15, setup_s=1e-3), {"D": site()})


def pdd() -> Pdd:
    """A prompt of 40 tokens takes 0.1 s over the WAN, five steps of the relay."""
    return Pdd(
        topology="pdd",
        prefill={"P": cluster()},
        link=Link(1e15, setup_s=0.1),
        decode={"MD": site(1e12)},
        relay=site(),
        relay_link=Link(1e15, setup_s=1e-3),
        relay_threshold_s=0.05,
        handoff=Handoff("one-shot"),
    )


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, backend: Disaggregated, **settings: Any) -> None:
        self.backend = backend
        self.server = Server(**(SETTINGS | settings))
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.server.run, args=("small", backend, self.say))

    def say(self, line: str) -> None:
        self.line = line
        self.ready.set()

    def __enter__(self) -> Self:
        self.thread.start()
        assert self.ready.wait(10)
        self.url = self.line.split()[3]
        self.client = httpx.Client(base_url=self.url, timeout=10)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["code"] == status
        return str(error["message"])

    def stream(
        self, path: str, body: dict[str, Any], fault: str | None = None
    ) -> list[tuple[float, Any]]:
        """(when it was read, payload) of each event; the last is "[DONE]"."""
        headers = {} if fault is None else {"x-relaybench-fault": fault}
        events: list[tuple[float, Any]] = []
        body = body | {"stream": True}
        with self.client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line:
                    data = line.removeprefix("data: ")
                    payload = data if data == "[DONE]" else json.loads(data)
                    events.append((time.monotonic(), payload))
        return events

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f'relaybench_{name}{{backend="small"}}')]
        assert len(found) == 1, name
        return float(found[0].split()[-1])

    def idle(self) -> None:
        """Comes to be, soon."""
        until_s = time.monotonic() + 5
        while any(self.backend.load().values()):
            assert time.monotonic() < until_s, self.backend.load()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with Running(in_dc()) as running:
        yield running


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest) -> None:
    if "small" in request.fixturenames:
        running: Running = request.getfixturevalue("small")
        running.idle()
        assert running.client.post("/reset_prefix_cache").status_code == 200


USAGE = {"include_usage": True}


# ---- shapes


def test_a_completion(small: Running) -> None:
    body = {"model": "tiny", "prompt": IDS, "max_tokens": 3, "return_token_ids": True}
    answer = small.post("/v1/completions", body).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["prompt_token_ids"] == IDS
    assert choice["text"] == "".join(f" w{token}" for token in choice["token_ids"])
    assert len(choice["token_ids"]) == 3
    assert answer["usage"] == {
        "prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_repeat_finds_its_whole_blocks_cached(small: Running) -> None:
    body = {"prompt": IDS, "max_tokens": 1}
    small.post("/v1/completions", body)
    for prompt, cached in (
        (IDS, 32),
        (IDS[:32], 31),  # the last token is always computed
        (IDS[:20] + [7] * 20, 16),
        (" ".join(f"w{token}" for token in IDS), 32),  # a text of the same tokens
        ([7, *IDS], 0),
    ):
        usage = small.post("/v1/completions", body | {"prompt": prompt}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_stream_of_completions(small: Running) -> None:
    body = {"prompt": IDS, "max_tokens": 3, "stream_options": USAGE, "return_token_ids": True}
    events = [payload for _, payload in small.stream("/v1/completions", body)]
    *tokens, last, done = events
    assert done == "[DONE]"
    assert [each["choices"][0]["finish_reason"] for each in tokens] == [None, None, "length"]
    assert tokens[0]["choices"][0]["prompt_token_ids"] == IDS
    assert all(len(each["choices"][0]["token_ids"]) == 1 for each in tokens)
    assert all("usage" not in each for each in tokens)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len({each["id"] for each in events[:-1]}) == 1
    whole = small.post("/v1/completions", {"prompt": IDS, "max_tokens": 3}).json()
    assert "".join(each["choices"][0]["text"] for each in tokens) == whole["choices"][0]["text"]


def test_a_stream_without_usage_ends_with_its_tokens(small: Running) -> None:
    events = small.stream("/v1/completions", {"prompt": "a b", "max_tokens": 2})
    assert [payload == "[DONE]" for _, payload in events] == [False, False, True]


def test_continuous_usage_counts_up(small: Running) -> None:
    options = USAGE | {"continuous_usage_stats": True}
    body = {"prompt": "a b", "max_tokens": 3, "stream_options": options}
    events = small.stream("/v1/completions", body)
    counts = [payload["usage"]["completion_tokens"] for _, payload in events[:-1]]
    assert counts == [1, 2, 3, 3]


def test_a_chat_begins_with_its_role(small: Running) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "and kind"}]},
        {"role": "assistant", "content": None},
    ]
    body = {"messages": messages, "max_completion_tokens": 2, "stream_options": USAGE}
    events = [payload for _, payload in small.stream("/v1/chat/completions", body)]
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(each["choices"][0]["delta"]["content"].startswith(" w") for each in events[1:3])
    assert events[3]["usage"]["prompt_tokens"] == 4 + 3 * TEMPLATE_TOKENS
    whole = small.post("/v1/chat/completions", body).json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"].count(" w") == 2


def test_a_chat_grows_on_its_cached_history(small: Running) -> None:
    messages = [{"role": "user", "content": "word " * 60}]
    body = {"messages": messages, "max_tokens": 20}
    text = small.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    usage = small.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens"] == 60 + 20 + 1 + 3 * TEMPLATE_TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] == 64


def test_reasoning_comes_first() -> None:
    body = {"messages": [{"role": "user", "content": "why"}], "max_tokens": 4}
    with Running(in_dc(), reasoning_tokens=3) as running:
        events = running.stream("/v1/chat/completions", body)
        message = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    deltas = [list(payload["choices"][0]["delta"]) for _, payload in events[:-1]]
    assert deltas == [["role", "content"], *[["reasoning"]] * 3, ["content"]]
    assert (message["reasoning"].count(" w"), message["content"].count(" w")) == (3, 1)


def test_what_stands_beside(small: Running) -> None:
    assert small.client.get("/health").status_code == 200
    (model,) = small.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    assert "version" in small.client.get("/version").json()
    assert small.line.endswith("(model tiny, block 16 tokens)")


def test_metrics_are_prometheus_text(small: Running) -> None:
    small.post("/v1/completions", {"prompt": IDS, "max_tokens": 3})
    response = small.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    assert "# TYPE relaybench_requests_total counter" in lines
    assert any(line.startswith("# HELP relaybench_requests_total ") for line in lines)
    assert small.metric("requests_total") == 1
    assert small.metric("decode_tokens_total") == 3
    assert small.metric("prefill_cached_blocks") == 2
    assert small.metric("requests") == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": None}, "a string or a list"),
        ({"prompt": ["a", "b"]}, "one prompt a request"),
        ({"prompt": [[1, 2]]}, "one prompt a request"),
        ({"prompt": [1, "a"]}, "from 0 to 999"),
        ({"prompt": [1.5]}, "from 0 to 999"),
        ({"prompt": [-1]}, "from 0 to 999"),
        ({"prompt": [1000]}, "1000 is not in the vocabulary of 1000"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, 1 or more, not 0"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 4095}, "maximum context length is 4096"),
        ({"prompt": [1] * 5000}, "maximum context length is 4096"),
        ({"min_tokens": 9}, "min_tokens is 9, more than max_tokens, 3"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"stream_options": 1}, "stream_options"),
        ({"n": 2}, "n must be 1"),
        ({"echo": True}, "echo is not served"),
    ],
    ids=str,
)
def test_a_bad_request_is_told_why(small: Running, changes: dict[str, Any], words: str) -> None:
    body = {"prompt": "a b", "max_tokens": 3} | changes
    assert words in small.refused("/v1/completions", body)


@pytest.mark.parametrize(
    "messages", [None, [], ["a"], [{"content": "a"}], [{"role": "user", "content": 5}]], ids=str
)
def test_bad_messages_are_refused(small: Running, messages: Any) -> None:
    small.refused("/v1/chat/completions", {"messages": messages})


def test_what_is_not_there_is_404(small: Running) -> None:
    words = small.refused("/v1/completions", {"model": "other", "prompt": "a"}, 404)
    assert "other" in words
    assert "tiny" in words
    small.refused("/v1/embeddings", {}, 404)
    assert small.client.get("/v1/completions").status_code == 405


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b""])
def test_what_is_no_json_object_is_refused(small: Running, content: bytes) -> None:
    response = small.client.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_a_body_that_is_too_large_is_413(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.server.app.MAX_BODY_BYTES", 1000)
    assert "1000 bytes" in small.refused("/v1/completions", {"prompt": "a " * 800}, 413)


def test_an_answer_has_a_length_where_none_is_asked_for(small: Running) -> None:
    usage = small.post("/v1/completions", {"prompt": "a", "ignore_eos": True}).json()["usage"]
    assert usage["completion_tokens"] == DEFAULT_TOKENS


# ---- time


def simulated(events: list[tuple[float, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = events[-2][1]["relaybench"]
    return found


def test_tokens_come_when_they_are_emitted(small: Running) -> None:
    body = {"prompt": IDS, "max_tokens": 12, "stream_options": USAGE}
    asked_s = time.monotonic()
    events = small.stream("/v1/completions", body)
    times_s = np.array([time_s for time_s, _ in events[:12]])
    said = simulated(events)
    assert asked_s <= said["asked_s"] <= said["prefill_start_s"]
    first_s = said["prefill_start_s"] + PREFILL_S + 1e-3 + STEP_S
    assert said["first_token_s"] == pytest.approx(first_s, abs=1e-6)
    wanted_s = first_s + STEP_S * np.arange(12)
    assert said["last_token_s"] == pytest.approx(wanted_s[-1], abs=1e-6)
    assert (times_s >= wanted_s - 1e-6).all()
    assert (times_s <= wanted_s + LATE_S).all()
    # One by one: the first was read well before the last was emitted.
    assert times_s[0] < wanted_s[-1]


def test_a_relayed_answer_streams_from_both_pools() -> None:
    body = {"prompt": IDS, "max_tokens": 12, "stream_options": USAGE}
    with Running(pdd()) as running:
        events = running.stream("/v1/completions", body)
        running.idle()
        told = {
            name: running.metric(name) for name in ("relay_tokens_total", "decode_tokens_total")
        }
    said = simulated(events)
    assert said["route"] == "P-RLD-MD"
    assert sum(told.values()) == 12
    assert min(told.values()) > 0
    times_s = np.array([time_s for time_s, _ in events[:12]])
    assert times_s[0] >= said["first_token_s"] >= said["prefill_end_s"] + 1e-3 + STEP_S - 1e-6
    assert times_s[0] < said["last_token_s"] <= times_s[-1]


def test_requests_share_a_batch(small: Running) -> None:
    """Ten at once take no longer than one: the small system's step costs the same."""
    body = {"prompt": IDS, "max_tokens": 10, "stream_options": USAGE}
    ends: list[float] = []
    began_s = time.monotonic()

    def ask() -> None:
        said = simulated(small.stream("/v1/completions", body))
        ends.append(said["last_token_s"] - said["first_token_s"])

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == pytest.approx([9 * STEP_S] * 10, abs=1e-6)
    assert time.monotonic() - began_s < 10 * LATE_S
    assert small.metric("decode_tokens_total") == 100


# ---- leaving


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_what_it_held(small: Running, stream: bool) -> None:
    body = json.dumps({"prompt": IDS, "max_tokens": 3000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(head.encode() + body)
        if stream:
            data = b""
            while b"data: " not in data:
                data += raw.recv(65536)
        else:
            while not small.backend.load()["decode_running"]:
                time.sleep(0.01)
        assert small.backend.load()["requests"] == 1
        response = small.client.post("/reset_prefix_cache")
        assert response.status_code == 400
        assert "under way" in response.json()["error"]["message"]
    small.idle()
    assert small.metric("decode_tokens_total") < 1000


def test_a_reset_empties_the_cache(small: Running) -> None:
    body = {"prompt": IDS, "max_tokens": 1}
    small.post("/v1/completions", body)
    assert small.client.post("/reset_prefix_cache").json() == {"success": True}
    assert small.metric("prefill_cached_blocks") == 0
    usage = small.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_server_that_stops_cuts_answers_off() -> None:
    with Running(in_dc()) as running:
        body = {"prompt": IDS, "max_tokens": 3000, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            rest = response.iter_bytes()
            assert next(rest)
            running.server.stop()
            with pytest.raises(httpx.RemoteProtocolError):
                list(rest)
        running.thread.join(10)
        assert not running.thread.is_alive()
    assert running.backend.load()["requests"] == 0


def test_a_model_that_breaks_is_an_error_event_and_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(in_dc()) as running:
        monkeypatch.setattr(running.backend, "prefilled", lambda _: 1 / 0)
        events = running.stream("/v1/completions", {"prompt": IDS})
    assert "ZeroDivisionError" in events[0][1]["error"]["message"]
    assert events[-1][1] == "[DONE]"
    assert "ZeroDivisionError" in caplog.text


# ---- faults

STREAM = {"prompt": IDS, "max_tokens": 4}


def faulty(running: Running, fault: str, **changes: Any) -> httpx.Response:
    body = STREAM | {"stream": True} | changes
    return running.post("/v1/completions", body, **{"x-relaybench-fault": fault})


def test_an_error_status(small: Running) -> None:
    response = faulty(small, "status=429; retry-after=2")
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert faulty(small, "status=503", stream=False).json()["error"]["code"] == 503


def test_an_error_under_status_200(small: Running) -> None:
    response = faulty(small, "error-200")
    assert response.status_code == 200
    assert "error" in response.json()


def test_a_head_that_comes_late(small: Running) -> None:
    began_s = time.monotonic()
    assert faulty(small, "headers-delay=0.3").text.endswith("data: [DONE]\n\n")
    assert time.monotonic() - began_s >= 0.3


def test_streams_that_end_too_early(small: Running) -> None:
    assert faulty(small, "eof-after=2").text.count("data: ") == 2
    events = small.stream("/v1/completions", STREAM, "error-after=1")
    assert [isinstance(payload, dict) and "error" in payload for _, payload in events] == [
        False,
        True,
        False,
    ]
    with pytest.raises(httpx.RemoteProtocolError):
        faulty(small, "close-after=2")
    with pytest.raises(httpx.ReadError):
        faulty(small, "reset-after=2")
    with pytest.raises(httpx.RemoteProtocolError):
        faulty(small, "close-after=0")


def test_a_stream_that_stalls(small: Running) -> None:
    got: list[bytes] = []
    with (
        small.client.stream(
            "POST",
            "/v1/completions",
            json=STREAM | {"stream": True},
            headers={"x-relaybench-fault": "stall-after=2"},
            timeout=0.5,
        ) as response,
        pytest.raises(httpx.ReadTimeout),
    ):
        got.extend(response.iter_raw())
    assert b"".join(got).count(b"data: ") == 2


def test_events_that_are_hard_to_read(small: Running) -> None:
    assert len(faulty(small, "huge-event").content) > 2_000_000
    with pytest.raises(UnicodeDecodeError):
        faulty(small, "bad-utf8").content.decode()
    assert faulty(small, "slow-chunks").text.count("data: ") == 5


def test_a_fault_that_is_not_there_is_refused(small: Running) -> None:
    for fault in ("nonesuch", "status", "status=x", "status=99", "eof-after", "eof-after=-1"):
        assert faulty(small, fault).status_code == 400, fault
    assert "needs stream" in faulty(small, "eof-after=1", stream=False).text
    assert all(name in faulty(small, "nonesuch").text for name in FAULTS)


def test_faults_are_not_heeded_unless_the_server_is_told_so() -> None:
    with Running(in_dc(), faults=False) as running:
        assert faulty(running, "status=503").status_code == 200


# ---- tokens


def test_words_are_tokens() -> None:
    vocabulary = Vocabulary(1000)
    assert vocabulary.tokens("w5  w999\nw0").tolist() == [5, 999, 0]
    others = vocabulary.tokens("w05 w1000 W5 w five \ud800").tolist()
    assert all(0 <= token < 1000 for token in others)
    assert vocabulary.tokens("five").tolist() == others[4:5]
    answer = vocabulary.answer(array("I", [1, 2]), 50)
    assert answer == vocabulary.answer(array("I", [1, 2]), 50)
    assert len(set(answer)) > 40


def test_what_is_remembered_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(4, most=100)
    seen: set[int] = set()
    for prompt in range(200):
        ((start, length),) = blocks.runs(array("I", [prompt] * 43))
        assert length == 10
        assert start not in seen
        seen.add(start)
    assert blocks._interner.known == 100
    monkeypatch.setattr("adapters.server.tokens._KNOWN_WORDS", 10)
    vocabulary = Vocabulary(1000)
    vocabulary.tokens(" ".join(map(str, range(500))))
    assert len(vocabulary) <= 10


# ---- the command


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"port": -1}, "server.port is -1"),
        ({"port": 70_000}, "server.port is 70000"),
        ({"port": "http"}, "server.port is 'http'"),
        ({"block_tokens": 0}, "server.block_tokens is 0"),
        ({"context_tokens": 1}, "server.context_tokens is 1"),
        ({"vocabulary_tokens": 1}, "server.vocabulary_tokens is 1"),
        ({"known_blocks": 0}, "server.known_blocks is 0"),
        ({"reasoning_tokens": -1}, "server.reasoning_tokens is -1"),
        ({"faults": "some"}, "server.faults is 'some'"),
        ({"host": ""}, "server.host is ''"),
        ({"model": None}, "server.model is None"),
    ],
    ids=str,
)
def test_an_impossible_server_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Server(**(SETTINGS | changes))


def test_only_simulators_are_served() -> None:
    with pytest.raises(ConfigError, match="real is no simulator"):
        Server(**SETTINGS).run("real", object(), print)


COMMAND = [sys.executable, "-m", "harness", "serve"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "backend=pdd", "server.port=0"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving pdd on http://127.0.0.1:"), process.communicate()
        assert line.endswith("(model deepseek_v4_pro, block 64 tokens)\n")
        url = line.split()[3]
        with httpx.stream(
            "POST", f"{url}/v1/completions",
            json={"prompt": IDS, "max_tokens": 5000, "stream": True},
        ) as response:  # fmt: skip
            assert next(response.iter_bytes())
            os.kill(process.pid, number)
            out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["backend=nonesuch"], 2, "nonesuch"),
        (["backend=[in_dc,pdd]"], 2, "2 backends are chosen"),
        (["backend=openai", "backend.openai.url=http://x"], 2, "openai is no simulator"),
        (["server.port=x"], 2, "server.port is 'x'"),
        (["-m", "server.port=0,1"], 2, "leave out -m"),
        (["server.port=TAKEN"], 3, "Give another server.port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        got = cli._main(["serve", *[each.replace("TAKEN", port) for each in overrides]])
    shown = capsys.readouterr()
    assert got == code, shown.err
    assert words in shown.err
    assert shown.out == ""
