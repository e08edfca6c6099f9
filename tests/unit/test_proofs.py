"""What proves disaggregation, what only seems to; and servers' answers that nobody may trust."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx
import orjson
import pytest

from adapters.dynamo import Dynamo
from adapters.fleet import Counters, Fleet, base_url
from adapters.openai import OpenAI
from adapters.prometheus import in_parts, parse
from adapters.prompts import Tokens
from adapters.sglang import Sglang
from adapters.vllm import Vllm
from harness.backend import Sample
from harness.clock import VirtualTimeLoop
from harness.errors import BackendError, BadStatus, BadStream, ConfigError, RequestTimeout

T = TypeVar("T")
Pages = Mapping[str, str | None]
"""By host; None: it cannot be read."""
NO_PROOF = "nothing proves disaggregation: "
KEY = "sk-TOPSECRET"


def asked(
    answer: Callable[[httpx.Request], httpx.Response],
    ask: Callable[[Fleet], Awaitable[T]],
    servers: Mapping[str, Any] | None = None,
) -> T:
    """What a fleet makes of these answers, on the virtual clock."""

    async def main() -> T:
        fleet = Fleet(servers)
        fleet.strike = lambda data: data.replace(KEY.encode(), b"***")
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            fleet.start(client)
            return await ask(fleet)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def doubts(backend: OpenAI, before: Pages, after: Pages) -> list[str]:
    pages = before

    def answer(request: httpx.Request) -> httpx.Response:
        page = pages[request.url.host]
        return httpx.Response(500) if page is None else httpx.Response(200, text=page)

    async def main() -> list[str]:
        nonlocal pages
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            backend.fleet.start(client)
            backend.before = Counters(await backend.fleet.scrape())
            pages = after
            return list(await backend.doubts())

    return asyncio.run(main())


def lines(counters: Mapping[str, float]) -> str:
    return "".join(f"{name} {value}\n" for name, value in counters.items())


ZERO = {"p": "", "d": ""}
BOTH = {"P": "http://p", "D": "http://d"}

# ---- vLLM


def vllm(servers: Mapping[str, Any] = BOTH) -> Vllm:
    return Vllm(url="http://h", salt="s", prompts=Tokens(), servers=servers)


def prefill(tokens: float) -> str:
    return lines({'vllm:prompt_tokens_total{engine="0"}': tokens})


def decode(  # one page of D
    external: float, local: float, requests: float, hit: float = 0.0, failed: float = 0.0
) -> str:
    source = 'vllm:prompt_tokens_by_source_total{engine="0",source="%s"}'
    return lines(
        {
            source % "external_kv_transfer": external,
            source % "local_compute": local,
            source % "local_cache_hit": hit,
            'vllm:request_prompt_tokens_count{engine="0"}': requests,
            'vllm:request_prompt_tokens_sum{engine="0"}': external + local + hit,
            'vllm:nixl_num_failed_transfers_total{engine="0"}': failed,
        }
    )


GOOD = {"p": prefill(10_000), "d": decode(9_000, 1_000, 100)}
FELL = "it fell back to local prefill"


def test_a_run_in_which_all_was_sent_is_not_doubted() -> None:
    backend = vllm()
    assert doubts(backend, ZERO, GOOD) == []
    assert backend.facts["pd_counters"]["D local_compute"] == 1_000


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        # A page that could not be read would be a history from 0, and all of it the run's.
        (
            {"p": "", "d": None},
            {"p": prefill(10_000), "d": decode(1e6, 10_000, 5_000)},
            f"{NO_PROOF}no page of D http://d before the run",
        ),
        ({"p": None, "d": ""}, GOOD, f"{NO_PROOF}no page of P http://p before the run"),
        (ZERO, GOOD | {"d": None}, f"{NO_PROOF}no page of D http://d after the run"),
        # Began again in the middle: whatever it did before is gone.
        (
            {"p": "", "d": decode(5_000, 5_000, 100)},
            {"p": prefill(10_000), "d": decode(9_000, 100, 100)},
            f"{NO_PROOF}D http://d restarted: vllm:prompt_tokens_by_source_total is lower",
        ),
        (
            {"p": prefill(20_000), "d": ""},
            GOOD,
            f"{NO_PROOF}P http://p restarted: vllm:prompt_tokens_total is lower",
        ),
        ({"p": prefill(5), "d": ""}, GOOD | {"p": "up 1\n"}, f"{NO_PROOF}P http://p restarted"),
        (ZERO, GOOD | {"d": decode(float("nan"), 0, 100)}, f"{NO_PROOF}D http://d restarted"),
        # Half of 100 short prompts prefilled at D.
        (ZERO, {"p": prefill(10_000), "d": decode(5_000, 5_000, 100)}, FELL),
        (ZERO, {"p": prefill(10**6), "d": decode(9e5, 1e5, 100)}, FELL),
        (ZERO, {"p": prefill(10_000), "d": decode(0, 10_000, 100)}, "no KV cache was transferred"),
        (ZERO, {"p": prefill(100), "d": decode(9_000, 0, 100)}, "they came from elsewhere"),
        (ZERO, {"p": prefill(0), "d": decode(9_000, 0, 100)}, "P was not used"),
        (ZERO, {"p": prefill(100), "d": decode(0, 0, 0)}, "decode answered no request"),
        (ZERO, GOOD | {"d": decode(9_000, 0, 100, failed=2)}, "2 KV transfers failed"),
        (ZERO, GOOD | {"d": "up 1\n"}, f"{NO_PROOF}P or D has no counters"),
    ],
)
def test_vllm_is_doubted(before: Pages, after: Pages, words: str) -> None:
    assert any(words in each for each in doubts(vllm(), before, after))


def test_prompts_are_as_long_as_their_sources_where_nobody_says_more() -> None:
    short = [line for line in decode(5_000, 5_000, 100).splitlines() if "tokens_sum" not in line]
    (said,) = doubts(vllm(), ZERO, {"p": prefill(10_000), "d": "\n".join(short)})
    assert said.endswith(FELL)


def test_one_decode_node_that_restarted_does_not_hide_behind_another() -> None:
    backend = vllm({"P": "http://p", "D": ["http://d", "http://e"]})
    before = {"p": "", "d": decode(500, 90_000, 10), "e": ""}
    after = GOOD | {"d": decode(0, 20, 1), "e": decode(900_000, 100_000, 10_000)}
    assert any("D http://d restarted" in each for each in doubts(backend, before, after))


# ---- SGLang


def sent(caches: float, tokens: float = 500) -> str:
    name = "sglang:kv_transfer_latency_ms_count"
    return lines({name: caches, "sglang:prompt_tokens_total": tokens})


def answered(requests: float) -> str:
    return lines({"sglang:num_requests_total": requests})


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (ZERO, {"p": sent(5), "d": answered(0)}, "D answered no request"),
        (ZERO, {"p": sent(5), "d": answered(6)}, "P sent 5 KV caches for 6 requests"),
        (ZERO, {"p": sent(0), "d": answered(6)}, "P sent 0 KV caches for 6 requests"),
        (ZERO, {"p": sent(6, 0), "d": answered(6)}, "P computed no prompt"),
        (ZERO, {"p": sent(6), "d": None}, f"{NO_PROOF}no page of D http://d after the run"),
        (
            {"p": None, "d": answered(0)},
            {"p": sent(600), "d": answered(6)},
            f"{NO_PROOF}no page of P http://p before the run",
        ),
        (
            {"p": "", "d": answered(100)},
            {"p": sent(6), "d": answered(6)},
            f"{NO_PROOF}D http://d restarted",
        ),
    ],
)
def test_sglang_is_doubted(before: Pages, after: Pages, words: str) -> None:
    backend = Sglang(url="http://h", salt="s", prompts=Tokens(), servers=BOTH)
    (said,) = doubts(backend, before, after)
    assert words in said


def test_sglang_is_believed() -> None:
    backend = Sglang(url="http://h", salt="s", prompts=Tokens(), servers=BOTH)
    assert doubts(backend, ZERO, {"p": sent(10), "d": answered(10)}) == []


# ---- Dynamo


def took(requests: float) -> str:
    return lines({'dynamo_component_requests_total{dynamo_endpoint="generate"}': requests})


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (ZERO, {"p": took(5), "d": took(0)}, "D took no request"),
        (ZERO, {"p": took(5), "d": took(6)}, "P took 5 requests, and D 6"),
        (ZERO, {"p": took(0), "d": took(6)}, "P took 0 requests, and D 6"),
        (ZERO, {"p": took(5), "d": None}, f"{NO_PROOF}no page of D http://d after the run"),
        ({"p": None, "d": ""}, {"p": took(50), "d": took(6)}, "no page of P http://p before"),
        ({"p": took(9), "d": ""}, {"p": took(8), "d": took(6)}, "P http://p restarted"),
    ],
)
def test_dynamo_is_doubted(before: Pages, after: Pages, words: str) -> None:
    backend = Dynamo(url="http://h", salt="s", prompts=Tokens(), metrics=BOTH)
    (said,) = doubts(backend, before, after)
    assert words in said


def test_dynamo_is_believed() -> None:
    backend = Dynamo(url="http://h", salt="s", prompts=Tokens(), metrics=BOTH)
    assert doubts(backend, ZERO, {"p": took(10), "d": took(10)}) == []


# ---- one server, one role


@pytest.mark.parametrize(
    ("servers", "metrics"),
    [
        ({"P": "http://a", "D": "http://a"}, {}),
        ({"P": "http://a", "D": "http://A:80/"}, {}),
        ({"P": ["http://a", "http://a"]}, {}),
        ({"router": "http://a", "D": "http://a"}, {}),
        ({}, {"P": "http://a/metrics", "D": "http://a/metrics"}),
        ({"P": "http://a"}, {"D": "http://a/metrics"}),
        ({"P": "http://a", "D": "http://b"}, {"P": "http://b/metrics", "D": "http://c/metrics"}),
        ({"router": "http://a"}, {"P": "http://a/metrics"}),
    ],
)
def test_a_server_in_two_roles_would_be_its_own_proof(
    servers: dict[str, Any], metrics: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"is named twice: each server has one role"):
        Fleet(servers, metrics)


def test_a_page_may_be_elsewhere_than_its_server_or_with_it() -> None:
    fleet = Fleet({"P": "http://a", "router": "http://r"}, {"P": "http://a:9/metrics"})
    assert fleet.pages == {"P": ["http://a:9/metrics"]}
    assert Fleet({"P": "http://a"}, {"P": "http://a/metrics"}).workers == [("P", "http://a")]
    assert set(Fleet({}, {"P": "http://a/p/metrics", "D": "http://a/d/metrics"}).pages) == {
        "P",
        "D",
    }


# ---- idle


def waited(*pages: str | None) -> float:
    """Until a server with these pages, one a poll and the last for ever, counts as idle."""
    left = list(pages)

    def answer(_: httpx.Request) -> httpx.Response:
        page = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(500) if page is None else httpx.Response(200, text=page)

    async def ask(fleet: Fleet) -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await fleet.until_idle(["running"], 5.0)
        return loop.time() - began_s

    return asked(answer, ask, {"D": "http://d"})


def test_a_server_is_idle_when_it_says_so() -> None:
    assert waited("running 0\n") == 0
    assert waited("running 2\n", "running 1\n", "running 0\n") == pytest.approx(0.2)
    assert waited(None, None, "running 0\n") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            None,
            "D http://d was not known to be idle within 5 s: its page of metrics cannot be read",
        ),
        ("<html>", "D http://d was not known to be idle within 5 s"),
        ("running 1\n", "D http://d was not idle within 5 s: running is 1"),
        ("running NaN\n", "D http://d was not idle within 5 s: running is nan"),
    ],
)
def test_a_server_that_does_not_say_so_is_waited_for_and_named(
    page: str | None, words: str
) -> None:
    with pytest.raises(BackendError, match=words):
        waited(page)


# ---- answers


class Dripping(httpx.AsyncByteStream):
    """A byte a second, for ever."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(1)


def got(response: httpx.Response) -> Any:
    return asked(lambda _: response, lambda fleet: fleet.get("http://h/v1/models"))


def test_a_server_that_drips_is_left() -> None:
    with pytest.raises(RequestTimeout, match="GET http://h/v1/models had no whole answer in 30 s"):
        got(httpx.Response(200, stream=Dripping()))


class Endless(httpx.AsyncByteStream):
    """More than anyone may read."""

    read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.read += 2**16
            yield b" " * 2**16


@pytest.mark.parametrize(("status", "most"), [(200, 2**22), (500, 2**16)])
def test_an_endless_answer_is_read_to_its_limit_and_no_further(status: int, most: int) -> None:
    body = Endless()
    with pytest.raises(BackendError, match=r"more than 4,194,304 bytes|answered 500: $"):
        got(httpx.Response(status, stream=body))
    assert most < body.read <= most + 2**17


def test_bytes_are_asked_for_plain_and_none_are_unpacked() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        headers = {"content-encoding": "gzip"}
        packed = gzip.compress(b"a 1\n" * 1_000_000)
        return httpx.Response(
            200 if "m" in request.url.path else 500,
            headers=headers,
            stream=httpx.ByteStream(packed),
        )

    with pytest.raises(BadStream, match="http://h/m answered gzip, though it was asked for plain"):
        asked(answer, lambda fleet: fleet.get("http://h/m"))
    with pytest.raises(BadStatus, match="http://h/x answered 500: gzip, though"):
        asked(answer, lambda fleet: fleet.get("http://h/x"))
    (only,) = asked(answer, lambda fleet: fleet.scrape(), {"P": "http://h"})
    assert only == Sample("P http://h", "up", "", 0.0)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b"null", b'"words"', b"<html>", b"\xff", b"[" * 10_000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BackendError, match=r"v1/models answered something that is no JSON object"):
        got(httpx.Response(200, content=body))


@pytest.mark.parametrize("status", [200, 500])
def test_json_of_a_thousand_levels_is_an_answer_like_any_other(status: int) -> None:
    body = b"[" * 1000 + b"]" * 1000
    with pytest.raises(BackendError, match="JSON of too many levels"):
        got(httpx.Response(status, content=body))


def test_a_key_that_a_server_repeats_is_struck_out_of_what_it_says() -> None:
    said = {"data": [{"id": f"of {KEY}", KEY: 1}], "n": 7, "none": None}
    assert got(httpx.Response(200, json=said)) == {
        "data": [{"id": "of ***", "***": 1}],
        "n": 7,
        "none": None,
    }


@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"error": {"message": "x" * 290 + KEY}}),
        orjson.dumps({"detail": KEY}).replace(b"T", b"\\u0054"),
        b"x" * 295 + KEY.encode(),
        KEY.encode(),
    ],
)
@pytest.mark.parametrize("status", [200, 401])
def test_a_key_is_struck_out_before_words_are_cut(body: bytes, status: int) -> None:
    body = body if status != 200 else b"[" + body + b"]"
    with pytest.raises(BackendError) as raised:
        got(httpx.Response(status, content=body))
    assert "sk-" not in str(raised.value)


def test_a_key_is_struck_out_of_errors_of_the_wire_and_out_of_labels() -> None:
    def broken(_: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError(f"not HTTP: {KEY}")

    with pytest.raises(BadStream, match=r"not HTTP: \*\*\*"):
        asked(broken, lambda fleet: fleet.post("http://h/flush", {}))
    page = f'a{{user="{KEY}"}} 1\n'
    samples = asked(
        lambda _: httpx.Response(200, text=page), lambda fleet: fleet.scrape(), {"P": "http://h"}
    )
    assert samples[1:] == [Sample("P http://h", "a", 'user="***"', 1.0)]


def test_a_page_does_not_say_of_itself_whether_it_was_read() -> None:
    samples = asked(
        lambda _: httpx.Response(200, text='up 0\nup{job="x"} 0\n'),
        lambda fleet: fleet.scrape(),
        {"P": "http://h"},
    )
    up = [("", 1.0), ('job="x"', 0.0)]
    assert [(sample.labels, sample.value) for sample in samples] == up
    assert Counters(samples).unread == []


def test_a_long_page_lets_the_loop_go_on() -> None:
    page = b"# HELP a of it\n" + b'a{engine="0",model="tiny"} 1.0\n' * 100_000
    assert len(parse(page, "P")) == 100_000
    longest_s, began_s = 0.0, time.perf_counter()
    for _ in in_parts(page, "P"):
        now_s = time.perf_counter()
        longest_s, began_s = max(longest_s, now_s - began_s), now_s
    assert longest_s < 0.1


@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 40_000])
def test_a_page_is_read_whole_wherever_it_is_parted(size: int) -> None:
    fill = b"#" + b"x" * (size - 2) + b"\n"
    page = b"a 1\n" + fill + b"b 2\r\n" + b"c" * 50_000 + b" 3\n" + b"d 4"
    assert [(sample.name, sample.value) for sample in parse(page, "P")] == [
        ("a", 1.0),
        ("b", 2.0),
        ("d", 4.0),
    ]


def test_one_endless_line_is_no_page() -> None:
    began_s = time.perf_counter()
    with pytest.raises(BackendError, match="not in Prometheus' text format"):
        parse(b"\xff" * 2**22, "P")
    assert time.perf_counter() - began_s < 0.5


# ---- addresses


@pytest.mark.parametrize(
    "url",
    [
        *("http://h:abc", "http://[::1", "http://a..b", f"http://{'a' * 64}.b", "http://1.2.3.400"),
        *("http://h:0", "http://h:99999", "http://xn--a", "http://h/\x00", "http://:80"),
    ],
)
def test_a_url_that_no_client_takes_is_refused_by_its_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"servers\.P is .*: give http://HOST:PORT"):
        base_url("servers.P", url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@h", "'http://***@h'"),
        ("http://user:secret@x@h:80/secret@y", "'http://***@y'"),
        ("user:secret@h", "***@h'"),
        (["https://user:secret@h"], "['https://***@h']"),
    ],
)
def test_a_refusal_does_not_print_what_stands_before_the_host(url: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as raised:
        base_url("url", url)
    assert str(raised.value).startswith(f"url is {shown}: give")
