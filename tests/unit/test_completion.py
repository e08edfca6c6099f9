"""Streams into answers, event by event: OpenAI's form, `/generate`, and Dynamo's `nvext`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.completion import Completion, is_error, message_of
from adapters.dynamo import Extended
from adapters.sglang import Generated
from harness.backend import Answer
from harness.errors import BadStream

DONE = b"data: [DONE]\n\n"


def event(**payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(words: str, reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": words, "finish_reason": reason} | more
    return event(choices=[choice])


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event(choices=[], usage=counts | more)


def generated(total: int, ids: list[int], reason: Any = None, **more: Any) -> bytes:
    meta = {"prompt_tokens": 9, "completion_tokens": total, "finish_reason": reason}
    return event(output_ids=ids, meta_info=meta | more)


def reading(*reads: bytes, by: Completion | None = None) -> Completion:
    """Read number `at` comes at `at` s; all of them and no end."""
    completion = by or Completion(Answer())
    for at, data in enumerate(reads):
        completion.sink(float(at), at, data)
    return completion


def read(*reads: bytes, by: Completion | None = None) -> Answer:
    completion = reading(*reads, by=by)
    completion.finish()
    return completion.answer


def test_a_whole_answer() -> None:
    answer = read(
        text("a"),
        text(" b"),
        text(" c", "length"),
        usage(64, 3, prompt_tokens_details={"cached_tokens": 48}),
        DONE,
    )
    assert list(answer.times_s) == [0, 1, 2]
    assert (answer.timed_by, answer.first_answer_s, answer.shared_reads) == ("token", 0, 0)
    assert answer.finish_reason == "length"
    served = answer.served
    assert (served.input_tokens, served.output_tokens, served.hit_tokens) == (64, 3, 48)


def test_what_the_server_does_not_say_stays_none() -> None:
    answer = read(text("a"), text("", "stop"), DONE)
    served = answer.served
    assert (served.input_tokens, served.output_tokens, served.hit_tokens) == (None, None, None)
    assert (list(answer.times_s), answer.timed_by) == ([0], "event")


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}, {"audio_tokens": 0}])
def test_no_word_of_cached_tokens_is_not_zero(details: dict[str, Any] | None) -> None:
    answer = read(text("a"), usage(64, 1, prompt_tokens_details=details), DONE)
    assert answer.served.hit_tokens is None


def test_usage_that_is_null_takes_nothing_back() -> None:
    answer = read(text("a"), usage(64, 1), event(choices=[], usage=None), DONE)
    assert answer.served.input_tokens == 64


@pytest.mark.parametrize(
    "prelude",
    [
        delta(role="assistant"),
        delta(role="assistant", content=""),
        delta(role="assistant", content=None, reasoning_content=None, tool_calls=None),
        delta(),
        text(""),
        event(choices=[]),
        event(choices=[], usage={"prompt_tokens": 5}),
        event(id="x"),
        b"data: 7\n\n",
        b"data: []\n\n",
        b": ping\n\n",
    ],
)
def test_a_prelude_is_no_token(prelude: bytes) -> None:
    answer = read(prelude, delta(content="a"), delta("stop"), usage(5, 1), DONE)
    assert (list(answer.times_s), answer.first_answer_s) == ([1], 1)
    assert answer.timed_by == "token"


def test_a_finish_reason_alone_is_no_token() -> None:
    answer = read(delta(content="a"), delta("length"), text("", "length"), usage(5, 1), DONE)
    assert list(answer.times_s) == [0]


def test_an_empty_text_is_a_token_of_a_server_that_sends_it_for_tokens_only() -> None:
    """vLLM keeps half a character back; the last of its tokens may be one."""
    vllm = Completion(Answer(), empty_is_token=True)
    answer = read(text(""), text("é"), text("", "length"), usage(5, 3), DONE, by=vllm)
    assert list(answer.times_s) == [0, 1, 2]
    assert (answer.first_answer_s, answer.timed_by) == (0, "token")


def test_an_empty_text_that_breaks_off_is_no_token() -> None:
    vllm = Completion(Answer(), empty_is_token=True)
    reading(text("a"), text("", "abort"), DONE, by=vllm)
    assert list(vllm.answer.times_s) == [0]


def test_an_empty_choice_of_chat_is_no_token_even_there() -> None:
    vllm = Completion(Answer(), empty_is_token=True)
    answer = read(delta(role="assistant", content=""), delta(content="a"), DONE, by=vllm)
    assert list(answer.times_s) == [1]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_a_token_and_no_answer(field: str) -> None:
    answer = read(
        delta(role="assistant", content=""),
        delta(**{field: "hm"}),
        delta(**{field: "so"}),
        delta(content="a"),
        usage(5, 3),
        DONE,
    )
    assert (list(answer.times_s), answer.first_answer_s) == ([1, 2, 3], 3)


def test_a_call_of_a_tool_is_an_answer() -> None:
    answer = read(delta(tool_calls=[{"index": 0, "function": {"name": "ls"}}]), DONE)
    assert answer.first_answer_s == 0


def test_token_ids_say_how_many_tokens_an_event_carries() -> None:
    completion = reading(
        text("", token_ids=[168, 169]),
        text("", token_ids=[170]),
        text("a", "length", token_ids=[171, 172, 173]),
        DONE,
    )
    completion.finish()
    answer = completion.answer
    assert list(answer.times_s) == [0, 0, 1, 2, 2, 2]
    assert (answer.timed_by, answer.served.output_tokens) == ("token", 6)
    assert completion.token_ids == [168, 169, 170, 171, 172, 173]


def test_continuous_usage_says_how_many_tokens_an_event_carries() -> None:
    def so_far(words: str, count: int) -> bytes:
        choice = {"text": words, "finish_reason": None}
        return event(choices=[choice], usage={"prompt_tokens": 5, "completion_tokens": count})

    answer = read(so_far("a", 1), so_far("b c d", 4), so_far("e", 5), usage(5, 5), DONE)
    assert (list(answer.times_s), answer.timed_by) == ([0, 1, 1, 1, 2], "token")


def test_16_tokens_in_one_event_are_one_event() -> None:
    answer = read(text("a " * 16, "length"), usage(5, 16), DONE)
    assert (list(answer.times_s), answer.timed_by) == ([0], "event")
    assert answer.served.output_tokens == 16


def test_events_read_together_bear_one_time() -> None:
    answer = read(text("a"), text("b") + text("c") + text("d"), usage(5, 4) + DONE)
    assert (list(answer.times_s), answer.shared_reads) == ([0, 1, 1, 1], 2)


def test_what_had_come_is_kept_when_nothing_more_comes() -> None:
    completion = reading(text("a"), text("b"))
    completion.settle()
    completion.settle()
    assert (list(completion.answer.times_s), completion.answer.timed_by) == ([0, 1], "event")


# ---- ends and errors


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (b"", "ended without [DONE]"),
        (b"data: [DONE]\n", "ended without [DONE]"),
        (event(error={"message": "EngineCore died", "code": 500}) + DONE, "^EngineCore died$"),
        (event(message="died", code=500) + DONE, "^died$"),
        (event(object="error", message="too long", type="BadRequestError"), "^too long$"),
        (event(detail="Not Found") + DONE, "^Not Found$"),
        (b'event: error\ndata: "worker lost"\n\n' + DONE, "^worker lost$"),
        (b'event: error\ndata: {"choices":[]}\n\n' + DONE, "choices"),
        (event(error="a") + event(error="b") + DONE, "^a$"),
        (text("", "abort") + DONE, "broke the answer off: abort"),
        (text("", "error") + DONE, "broke the answer off: error"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_and_its_tokens_are_kept(
    last: bytes, words: str
) -> None:
    completion = reading(text("a"), last)
    with pytest.raises(BadStream, match=words.replace("[", r"\[")):
        completion.finish()
    assert list(completion.answer.times_s) == [0]


@pytest.mark.parametrize(
    "data",
    [
        b"data: {half\n\n",
        b"data: \n\n",
        b"event: error\ndata: worker lost\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
    ],
)
def test_what_is_no_json_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(BadStream, match="not JSON"):
        reading(data)


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [7]},
        {"choices": {"text": "a"}},
        {"choices": 7},
        {"choices": [{"delta": "a"}]},
        {"choices": [{"text": "", "token_ids": ["x"]}]},
        {"choices": [{"text": "a", "token_ids": 3}]},
        {"usage": 7},
        {"usage": {"prompt_tokens": "64"}},
        {"usage": {"completion_tokens": -1}},
        {"usage": {"completion_tokens": 1e3}},
        {"usage": {"completion_tokens": 2**31}},
        {"usage": {"prompt_tokens_details": [1]}},
    ],
)
def test_json_of_no_known_form_fails_its_request_only(payload: dict[str, Any]) -> None:
    """Anything but a `BackendError` would stop the run."""
    with pytest.raises(BadStream, match=r"makes no sense: \{"):
        reading(event(**payload))


def test_a_finish_reason_is_words_whatever_it_is() -> None:
    answer = read(event(choices=[{"text": "a", "finish_reason": {"type": "stop"}}]), DONE)
    assert answer.finish_reason == "{'type': 'stop'}"


def test_bytes_that_are_no_utf8_are_a_token() -> None:
    answer = read(b'data: {"choices":[{"text":"vel\xef\xbfdo"}]}\n\n', usage(5, 1), DONE)
    assert (list(answer.times_s), answer.timed_by) == ([0], "token")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"no such model","code":404}}', "no such model"),
        (b'{"object":"error","message":"too long","code":400}', "too long"),
        (b'{"message":"Route not found","type":"Not Found","code":404}', "Route not found"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body"],"msg":"m"}]}', "[{'loc': ['body'], 'msg': 'm'}]"),
        (b'{"error":"a string"}', "a string"),
        (b'{"error":{"message":{"error":{"message":"deep"}}}}', "deep"),
        (b'{"error":{"code":5}}', '{"code": 5}'),
        (b"{}", "{}"),
        (b'"words"', "words"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"  two\n lines ", "two lines"),
        (b"vel\xef\xbfdo", "vel\N{REPLACEMENT CHARACTER}do"),
        (b"", ""),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_an_error_of_any_form_says_its_words(body: bytes, words: str) -> None:
    assert message_of(body) == words


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"error": {"message": "m"}}, True),
        ({"message": "m", "code": 400}, True),
        ({"object": "error", "message": "m"}, True),
        ({"detail": "Not Found"}, True),
        ({"error": None, "choices": []}, False),
        ({"choices": [], "detail": "of something"}, False),
        ({"message": "hello"}, False),
        ({}, False),
        (["error"], False),
        (None, False),
    ],
)
def test_an_error_is_told_from_an_answer(payload: Any, expected: bool) -> None:
    assert is_error(payload) is expected


# ---- /generate of SGLang


@pytest.mark.parametrize(
    "ids",
    [
        ([5], [5, 6, 7], [5, 6, 7, 8]),  # so far
        ([5], [6, 7], [8]),  # new, with --incremental-streaming-output
    ],
)
def test_generated_counts_are_those_of_meta_info(ids: tuple[list[int], ...]) -> None:
    completion = reading(
        generated(1, ids[0], cached_tokens=4),
        generated(3, ids[1], cached_tokens=4),
        generated(4, ids[2], {"type": "length", "length": 4}, cached_tokens=4),
        DONE,
        by=Generated(Answer()),
    )
    completion.finish()
    answer = completion.answer
    assert (list(answer.times_s), answer.timed_by) == ([0, 1, 1, 2], "token")
    assert completion.token_ids == [5, 6, 7, 8]
    served = answer.served
    assert (served.input_tokens, served.output_tokens, served.hit_tokens) == (9, 4, 4)
    assert (answer.finish_reason, answer.first_answer_s) == ("length", 0)


def test_generated_tokens_without_ids_are_counted() -> None:
    """As when an event was lost between the detokenizer and us, or ids are not asked for."""
    completion = reading(
        generated(1, []), generated(4, [8]), generated(5, [9]), DONE, by=Generated(Answer())
    )
    completion.finish()
    assert len(completion.token_ids) == completion.answer.served.output_tokens == 5
    assert completion.token_ids[-1] == 9


def test_generated_nothing_new_is_no_token() -> None:
    answer = read(
        generated(0, []),
        generated(1, [5]),
        generated(1, [5], {"type": "stop"}),
        DONE,
        by=Generated(Answer()),
    )
    assert (list(answer.times_s), answer.finish_reason) == ([1], "stop")
    assert answer.served.hit_tokens is None


def test_generated_200_that_was_aborted_is_an_error() -> None:
    reason = {"type": "abort", "message": "Decode handshake failed", "status_code": 500}
    completion = reading(generated(0, [], reason), DONE, by=Generated(Answer()))
    with pytest.raises(BadStream, match=r"^aborted: Decode handshake failed$"):
        completion.finish()
    assert list(completion.answer.times_s) == []


@pytest.mark.parametrize(
    "payload", [{"meta_info": 7}, {"meta_info": {"completion_tokens": "3"}}, {"output_ids": 3}]
)
def test_generated_json_of_no_known_form_fails_its_request_only(payload: dict[str, Any]) -> None:
    meta = {"meta_info": {"completion_tokens": 1}}
    with pytest.raises(BadStream, match="makes no sense"):
        reading(event(**meta | payload), by=Generated(Answer()))


# ---- nvext of Dynamo

WORKERS = {"prefill_worker_id": 1, "decode_worker_id": 2}
ALONE = {"prefill_worker_id": 1, "decode_worker_id": 1}


def extended(prompt: int, rate: float | None, workers: Any, block_tokens: int = 16) -> Answer:
    choice = {"text": "a", "finish_reason": "length"}
    return read(
        event(choices=[choice], nvext={"worker_id": workers, "timing": {"kv_hit_rate": rate}}),
        usage(prompt, 1, prompt_tokens_details={"cached_tokens": 0}),
        DONE,
        by=Extended(Answer(), block_tokens),
    )


@pytest.mark.parametrize(
    ("prompt", "rate", "block_tokens", "hit"),
    [
        (200, 12 / 13, 16, 192),  # a last block of 8 tokens is a block
        (125, 7 / 8, 16, 112),
        (200, 1.0, 16, 200),
        (200, 0.0, 16, 0),
        (208, 12 / 13, 16, 192),
        (200, 3 / 4, 64, 192),
        (10, 1.0, 64, 10),
        (200, 1.7, 16, 200),
        (200, -1.0, 16, 0),
    ],
)
def test_extended_hits_are_whole_blocks_of_the_router(
    prompt: int, rate: float, block_tokens: int, hit: int
) -> None:
    assert extended(prompt, rate, WORKERS, block_tokens).served.hit_tokens == hit


def test_extended_routes_are_by_who_prefilled() -> None:
    assert extended(200, 0.5, WORKERS).served.route == "P-D"
    assert extended(200, 0.5, ALONE).served.route == "PD"
    assert extended(200, 0.5, None).served.route is None
    assert extended(200, 0.5, {"decode_worker_id": 2}).served.route is None


def test_extended_zero_cached_tokens_of_a_disaggregated_answer_are_not_believed() -> None:
    assert extended(200, None, WORKERS).served.hit_tokens is None
    assert extended(200, None, ALONE).served.hit_tokens == 0


@pytest.mark.parametrize("nvext", [7, {"worker_id": 7}, {"timing": {"kv_hit_rate": "most"}}])
def test_extended_json_of_no_known_form_fails_its_request_only(nvext: Any) -> None:
    with pytest.raises(BadStream, match="makes no sense"):
        reading(event(choices=[], nvext=nvext), by=Extended(Answer()))
