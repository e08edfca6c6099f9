"""Every captured stream of real servers, however it is split, against a naive reading of it whole.

What to expect comes from the request (how many tokens were asked for) and from the JSON of each
line that begins with `data`; and for the telling ones from a table written by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import httptools
import numpy as np
import pytest
from numpy.typing import NDArray

from adapters.completion import Completion, is_error, message_of
from adapters.dynamo import Extended
from adapters.prometheus import parse
from adapters.sglang import Generated
from harness.backend import Answer
from harness.errors import BadStream

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "captures"
pytestmark = pytest.mark.skipif(
    not CAPTURES.exists(), reason="../shared is absent: no captured streams to compare with"
)
CONTEXT_TOKENS = 2048
"""Of the model that every server served."""
HEAD_BYTES = 40_000
"""One capture is the head and the tail of a longer one."""


class Seen(NamedTuple):
    """What an answer says, whichever way its bytes came."""

    times: int
    timed_by: str
    input_tokens: int | None
    output_tokens: int | None
    hit_tokens: int | None
    finish_reason: str | None
    token_ids: list[int]
    route: str | None
    error: str | None


def named(*patterns: str) -> list[str]:
    found = {
        path.relative_to(CAPTURES).as_posix()
        for pattern in patterns
        for path in CAPTURES.glob(pattern)
        if not path.name.endswith(".meta.json")
    }
    return sorted(found)


def asked(name: str) -> dict[str, Any]:
    """The request, its status and its reads, where they were written down; else nothing."""
    path = CAPTURES / f"{name.rsplit('.', 1)[0]}.meta.json"
    meta: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    request: dict[str, Any] = meta.get("request", {})
    return meta | request


def raw(name: str) -> bytes:
    return (CAPTURES / name).read_bytes()


def reads(name: str) -> NDArray[np.float64]:
    """When each read came, and how many bytes there were then: (reads, 2). None, if not all."""
    times_s, sizes = np.array(asked(name).get("reads", ()), float).reshape(-1, 2).T
    ends = np.cumsum(sizes)
    whole = len(ends) > 0 and ends[-1] == len(raw(name))
    return np.stack((times_s, ends), axis=1)[: len(ends) if whole else 0]


def status(name: str) -> int:
    return int(asked(name).get("status") or 0)


STREAMS = [
    name
    for name in named("*/*.sse", "*/extra/*.txt")
    if raw(name).startswith(b"data") and status(name) in (0, 200)
]
RESPONSES = named("sglang-pdd-failures/*.http", "vllm-midstream-death/*.txt")
REFUSALS = [name for name in named("*/err_*", "*/extra/*.txt") if status(name) >= 400]
WHOLE = [name for name in named("*/*nonstream*.json") if status(name) == 200]
PAGES = [name for name in named("*/metrics*.txt", "*/prometheus*.txt") if raw(name)[:1] == b"#"]


def body(name: str) -> bytes:
    """The stream. A response that has its head yet is taken apart; some are dechunked already."""
    data = raw(name)
    if not data.startswith(b"HTTP/"):
        return data
    _, _, after = data.partition(b"\r\n\r\n")
    if after.startswith(b"data"):
        return after
    pieces: list[bytes] = []

    class Parts:
        def on_body(self, piece: bytes) -> None:
            pieces.append(piece)

    httptools.HttpResponseParser(Parts()).feed_data(
        data[:HEAD_BYTES] if "head_tail" in name else data
    )
    return b"".join(pieces)


def style(name: str) -> str:
    """How the stream is to be read."""
    engine = name.split("-", 1)[0]
    path = asked(name).get("path", "")
    if path.endswith("generate") or "fanout" in name or "generate" in name or "D_dead" in name:
        return "generate"
    if engine == "vllm" and "chat" not in path:
        return "vllm"
    return "dynamo" if engine == "dynamo" else "openai"


def reader(name: str) -> Completion:
    answer = Answer()
    if style(name) == "generate":
        return Generated(answer)
    if style(name) == "dynamo":
        return Extended(answer)
    return Completion(answer, empty_is_token=style(name) == "vllm")


def seen(name: str, reads: Sequence[tuple[float, bytes]]) -> tuple[Seen, Answer]:
    completion = reader(name)
    error = None
    try:
        for at, (time_s, data) in enumerate(reads):
            completion.sink(time_s, at, data)
        completion.finish()
    except BadStream as wrong:
        error = str(wrong)
    answer, served = completion.answer, completion.answer.served
    found = Seen(
        len(answer.times_s),
        answer.timed_by,
        served.input_tokens,
        served.output_tokens,
        served.hit_tokens,
        answer.finish_reason,
        completion.token_ids,
        served.route,
        error,
    )
    return found, answer


def split(data: bytes, size: int) -> list[tuple[float, bytes]]:
    """Pieces of so many bytes, one a second."""
    starts = range(0, len(data), size)
    return [(float(at), data[start : start + size]) for at, start in enumerate(starts)]


# ---- a naive reading


class Part(NamedTuple):
    """An event that carries tokens."""

    ends: int
    """Bytes of the stream up to its end, the blank line included."""
    tokens: int | None
    """How many; None: it does not say."""


@cache
def events(data: bytes) -> list[tuple[int, Any]]:
    """(where it ends, its JSON; None for [DONE]) of each event: in all captures one line is one."""
    found = []
    at = 0
    for line in data.split(b"\n\n")[:-1]:
        at += len(line) + 2
        rest = line.strip().removeprefix(b"data:").strip()
        payload = None if rest == b"[DONE]" else json.loads(rest.decode("utf-8", "replace"))
        found.append((at, payload))
    return found


def carries(name: str, payload: dict[str, Any], before: dict[str, Any]) -> int | None:
    """How many tokens an event carries: 0: none; None: some, it does not say how many."""
    if style(name) == "generate":
        now, then = payload["meta_info"], before.get("meta_info", {})
        return int(now["completion_tokens"] - then.get("completion_tokens", 0))
    if "error" in payload or not payload["choices"]:
        return 0
    choice = payload["choices"][0]
    words = choice["delta"].get("content") if "delta" in choice else choice["text"]
    if not words and not choice.get("token_ids") and style(name) != "vllm":
        return 0
    if choice.get("token_ids"):
        return len(choice["token_ids"])
    if payload.get("usage"):
        then = (before.get("usage") or {}).get("completion_tokens", 0)
        return int(payload["usage"]["completion_tokens"] - then)
    return None


def parts(name: str, data: bytes) -> list[Part]:
    found = []
    before: dict[str, Any] = {}
    for ends, payload in events(data):
        if payload:
            count = carries(name, payload, before)
            found += [] if count == 0 else [Part(ends, count)]
            before = payload
    return found


def naive(name: str, data: bytes) -> Seen:
    payloads = [payload for _, payload in events(data) if payload]
    done = any(payload is None for _, payload in events(data))
    ended = data.endswith(b"\n\n")
    carriers = parts(name, data)
    metas = [each["meta_info"] for each in payloads if "meta_info" in each]
    usages = [each["usage"] for each in payloads if each.get("usage")]
    choices = [each["choices"][0] for each in payloads if each.get("choices")]
    errors = [each["error"]["message"] for each in payloads if "error" in each]
    if metas:
        last = metas[-1]
        given = last["finish_reason"]
        reason = given and given["type"]
        if reason == "abort":
            errors.append(f"aborted: {given['message']}")
        counts = (last["prompt_tokens"], last["completion_tokens"] or None)
        hits = last.get("cached_tokens")
        news = [each["output_ids"] for each in payloads]
        ids = (
            news[-1]
            if len(news[-1]) == last["completion_tokens"]
            else [each for new in news for each in new]
        )
    else:
        reasons = [each["finish_reason"] for each in choices if each.get("finish_reason")]
        reason = reasons[-1] if reasons else None
        last = usages[-1] if usages else {}
        counts = (last.get("prompt_tokens"), last.get("completion_tokens"))
        hits = (last.get("prompt_tokens_details") or {}).get("cached_tokens")
        ids = [each for choice in choices for each in choice.get("token_ids") or ()]
    route, hits = extras(payloads, counts[0], hits)
    known = all(part.tokens is not None for part in carriers) and bool(carriers)
    by_token = known or len(carriers) == counts[1]
    return Seen(
        sum(part.tokens or 1 for part in carriers) if known else len(carriers),
        "token" if by_token else "event",
        *counts,
        hits,
        reason,
        ids,
        route,
        errors[0] if errors else None if done else NO_DONE + ("" if ended else IN_AN_EVENT),
    )


def extras(
    payloads: list[Any], prompt: int | None, hits: int | None
) -> tuple[str | None, int | None]:
    """(route, hit tokens) by Dynamo's `nvext`, where there is one."""
    every = [each["nvext"] for each in payloads if each.get("nvext")]
    if not every or prompt is None:
        return None, hits
    workers = every[-1]["worker_id"]
    apart = workers["prefill_worker_id"] != workers["decode_worker_id"]
    blocks = every[-1]["timing"]["kv_hit_rate"] * math.ceil(prompt / 16)
    assert blocks == pytest.approx(round(blocks))
    return "P-D" if apart else "PD", 16 * round(blocks)


# ---- every stream


def test_there_are_as_many_captures_as_there_were() -> None:
    """So that a table that finds nothing cannot pass."""
    counts = [len(each) for each in (STREAMS, RESPONSES, REFUSALS, WHOLE, PAGES)]
    assert min(np.subtract(counts, [263, 8, 139, 35, 21])) >= 0


@pytest.mark.parametrize("name", STREAMS + RESPONSES)
def test_a_stream_says_the_same_however_it_is_split(name: str) -> None:
    data = body(name)
    wanted = naive(name, data)
    carriers = parts(name, data)
    counts = [part.tokens if part.tokens and wanted.timed_by == "token" else 1 for part in carriers]
    for size in (1, 7, 1000):
        found, answer = seen(name, split(data, size))
        assert found == wanted, size
        ends = [(part.ends - 1) // size for part in carriers]
        assert list(answer.times_s) == np.repeat(ends, counts).tolist()
        assert answer.shared_reads == len(ends) - len(set(ends))
        assert answer.first_answer_s == (ends[0] if ends else None)


@pytest.mark.parametrize("name", [name for name in STREAMS if len(reads(name)) > 0])
def test_tokens_bear_the_time_of_the_read_that_ends_them(name: str) -> None:
    """Split as the reads were when it was captured."""
    data = body(name)
    times_s, ends = reads(name).T
    starts = [0, *ends[:-1].astype(int)]
    pieces = [data[start:end] for start, end in zip(starts, ends.astype(int), strict=True)]
    found, answer = seen(name, list(zip(times_s.tolist(), pieces, strict=True)))
    assert found == naive(name, data)
    wanted_s = [times_s[np.searchsorted(ends, part.ends)] for part in parts(name, data)]
    assert sorted(set(answer.times_s)) == sorted(set(wanted_s))


@pytest.mark.parametrize("name", [name for name in STREAMS if asked(name)])
def test_as_many_tokens_come_as_were_asked_for(name: str) -> None:
    sent = asked(name)["body"]
    limits = sent | sent.get("sampling_params", {})
    names = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    (limit,) = [limits[each] for each in names if each in limits]
    found, _ = seen(name, split(body(name), 1000))
    if found.error is not None:
        assert (found.times, found.output_tokens) == (0, None)
        return
    several = limit * sent.get("n", 1)
    room = CONTEXT_TOKENS - (found.input_tokens or 0)
    if found.output_tokens is None:
        assert (found.timed_by, found.times <= several) == ("event", True)
    elif found.finish_reason == "length":
        assert found.output_tokens in (max(0, min(limit, room)), several)
    else:
        assert 0 < found.output_tokens <= several
    if found.timed_by == "token":
        assert found.times == found.output_tokens
    else:
        assert found.times < (found.output_tokens or math.inf)


# ---- the telling ones, by hand

DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
NO_DONE = "the stream ended without [DONE]"
IN_AN_EVENT = ", in the middle of an event"
NO_ROOM = (
    "Invalid request: Disaggregated request received without bootstrap room id. "
    "req.rid='e1cbcf33215e41e2952a7e23a368c5a8'"
)
NO_KV = (
    "aborted: Decode handshake failed for request rank=0 "
    "decode_req.req.rid='63678c1d8b4745708a91db0cf0f68d41' decode_req.req.bootstrap_room=77 with "
    "exception KVTransferError(bootstrap_room=77): Aborted by AbortReq."
)

TELLING: dict[str, Seen] = {
    # times, timed by, input, output, hit tokens, finish reason, first ids, route, error
    # The event of the role comes first and is no token.
    "vllm-cpu-agg/chat_stream_usage.sse": Seen(6, "token", 191, 6, 160, "length", [], None, None),
    "sglang-cpu-agg/chat_stream_usage.sse": Seen(6, "token", 191, 6, 190, "length", [], None, None),
    # The event of the finish reason is behind the last token, and its text is empty.
    "guidellm-mock/completions_stream_usage_1.sse": Seen(
        6, "token", 360, 6, None, "stop", [], None, None
    ),
    # Many tokens in an event: 6 in one; 2 and 8 in three; 300 in 57; by ids it is known which.
    "vllm-pdd-router/completions_min_tokens.sse": Seen(
        1, "event", 462, 6, 448, "length", [], None, None
    ),
    "vllm-prefill-direct/err_too_long_with_max_tokens.sse": Seen(
        3, "event", 2038, 10, 0, "length", [], None, None
    ),
    "vllm-pdd-router/chat_stream_natural_eos.sse": Seen(
        57, "event", 21, 300, 0, "length", [], None, None
    ),
    "vllm-pdd-router/completions_token_ids.sse": Seen(
        6, "token", 200, 6, 0, "length", [168, 168, 168], None, None
    ),
    # Half a character is a token whose text is empty, the last one of an answer too.
    "vllm-pdd-toyproxy/completions_n2.sse": Seen(6, "token", 462, 6, 448, "length", [], None, None),
    # Nobody says how many tokens there were.
    "vllm-cpu-agg/completions_stream_nousage.sse": Seen(
        6, "event", None, None, None, "length", [], None, None
    ),
    # An error, and then [DONE] all the same, behind a head that said 200.
    "vllm-cpu-agg/err_bad_token_id.sse": Seen(
        *(0, "event", None, None, None, None, [], None),
        "Token id 999999999 is out of vocabulary",
    ),
    "vllm-midstream-death/decode_direct_raw_http.txt": Seen(
        326, "event", None, None, None, None, [], None, DIED
    ),
    "vllm-midstream-death/router_raw_http.txt": Seen(
        324, "event", None, None, None, None, [], None, DIED
    ),
    "sglang-pdd-failures/direct_D_nobootstrap.http": Seen(
        0, "token", 6, 0, 0, None, [], None, NO_ROOM
    ),
    "dynamo-mocker-vllm-agg/err_too_long.sse": Seen(
        0, "event", None, None, None, None, [], None, "Internal server error"
    ),
    # No error at all, and no [DONE].
    "sglang-pdd-failures/midstream_decode_killed_completions.http": Seen(
        701, "event", None, None, None, None, [], None, NO_DONE
    ),
    "sglang-pdd-failures/midstream_decode_killed_generate.head_tail.http": Seen(
        58, "token", 200, 58, 0, None, [2473, 662, 452], None, NO_DONE + IN_AN_EVENT
    ),
    # 200, [DONE], and aborted.
    "sglang-pdd-failures/D_dead_bootstrap.http": Seen(
        0, "event", 4, None, 0, "abort", [], None, NO_KV
    ),
    # /generate: ids so far, and new ones only.
    "sglang-cpu-agg/generate_sglang_stream.sse": Seen(
        6, "token", 180, 6, 179, "length", [22, 3009, 3347], None, None
    ),
    "dynamo-mocker-sglang-agg/extra/sgl_generate.txt": Seen(
        4, "token", 200, 4, None, "length", [1979, 1175, 1769], None, None
    ),
    # 12 of 13 blocks, by the router, who knows it where the engine says nothing, or 0.
    "dynamo-mocker-vllm-agg/extra/prompt_ids_again_nvext.txt": Seen(
        4, "token", 200, 4, 192, "length", [], "PD", None
    ),
    "dynamo-mocker-vllm-disagg/extra/prompt_ids_again_nvext.txt": Seen(
        4, "token", 200, 4, 192, "length", [], "P-D", None
    ),
    "dynamo-mocker-sglang-disagg/extra/prompt_ids_again_nvext.txt": Seen(
        4, "token", 200, 4, 192, "length", [], "P-D", None
    ),
    "dynamo-mocker-vllm-disagg/extra/chat_nvext.txt": Seen(
        4, "token", 125, 4, 0, "length", [], "P-D", None
    ),
}


@pytest.mark.parametrize("name", TELLING)
def test_the_telling_ones(name: str) -> None:
    found, _ = seen(name, split(body(name), 7))
    assert found._replace(token_ids=found.token_ids[:3]) == TELLING[name]


# ---- errors that are no stream


def words(said: bytes) -> str:
    """By each form that servers have."""
    try:
        payload = json.loads(said)
    except ValueError:
        return said.decode()
    error = payload.get("error", payload)
    if isinstance(error, dict):
        error = error.get("error") or error.get("message") or error["detail"]
    return str(error)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_why(name: str) -> None:
    said = raw(name)
    assert message_of(said) == " ".join(words(said).split())[:300]
    if said.startswith(b"{"):
        assert is_error(json.loads(said))


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_is_no_error(name: str) -> None:
    assert not is_error(json.loads(raw(name)))


REFUSED = {
    "vllm-cpu-agg/err_unknown_model.json": (
        "The model `no-such-model` does not exist. Valid aliases: tiny."
    ),
    "vllm-cpu-agg/err_404.json": "Not Found",
    "sglang-cpu-agg/err_too_long.json": (
        "The input (2098 tokens) is longer than the model's context length (2048 tokens)."
    ),
    "dynamo-mocker-vllm-agg/err_404.json": "Route not found: POST /v1/nope",
    "xpyd-sim/err_too_long.json": "Input length 2098 exceeds max_model_len 2048",
    "guidellm-mock/err_bad_json.json": "Failed when parsing body as json",
    "vllm-pdd-toyproxy/err_too_long.txt": "Internal Server Error",
    "vllm-pdd-router/err_missing_prompt.txt": (
        "Failed to deserialize the JSON body into the target type: missing field `prompt` at "
        "line 1 column 34"
    ),
    "sglang-pdd-router/err_404.txt": "",
    # A stream by its head, which is 400, and cut short.
    "sglang-pdd-router/err_empty_prompt.sse": (
        """data: {'error': {"message":{"object":"error","message":"Prompt cannot be empty","""
        """"type":"BadRequestErro"""
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_by_hand(name: str) -> None:
    assert message_of(raw(name)) == REFUSED[name]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_metrics_loses_no_sample(name: str) -> None:
    lines = [line for line in raw(name).decode().splitlines() if line and line[0] != "#"]
    found = parse(raw(name), "P")
    names = [line.split("{", 1)[0].split(" ", 1)[0] for line in lines]
    values = [float(line.rsplit(" ", 1)[1]) for line in lines]
    created = [each.endswith("_created") for each in names]
    assert [sample.name for sample in found] == list(compress(names, np.logical_not(created)))
    wanted = np.array(values)[np.logical_not(created)]
    assert np.array_equal([sample.value for sample in found], wanted, equal_nan=True)
