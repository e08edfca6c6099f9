"""Everything a server can do wrong, by real sockets: one record with its class, and on we go."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.openai import OpenAI
from adapters.prompts import Tokens
from harness.backend import Answer, Request
from harness.clock import WallLoop
from harness.errors import BackendError, BadStatus, BadStream, ConfigError, ConnectFailed
from harness.pacing import Closed, Recorded
from harness.record import Record
from harness.replay import Replay
from harness.seed import stream
from harness.trace import Trace
from tests.simulated import configured
from tests.unit import raw_server as raw
from tests.unit.test_replay import singles

MakeTrace = Callable[..., Trace]
STALL_S = 0.4


def backend(port: int, **settings: Any) -> OpenAI:
    values: dict[str, Any] = {"url": f"http://127.0.0.1:{port}", "stall_s": STALL_S} | settings
    return OpenAI(salt="s", prompts=Tokens(), **values)


def replayed(
    trace: Trace, scripts: dict[str, raw.Script], **settings: Any
) -> tuple[list[Record], float]:
    """The records by turn, and how long it took."""
    records: list[Record] = []

    async def main() -> None:
        async with raw.serving(scripts) as port, backend(port, **settings) as server:
            plan = Recorded().plan(trace, stream(1, "pacing"))
            await Replay(trace, plan, server, records.append).run()

    began_s = time.monotonic()
    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    assert sorted(record.turn for record in records) == list(range(len(trace)))
    return sorted(records), time.monotonic() - began_s


def three(make_trace: MakeTrace) -> Trace:
    return singles(make_trace, 3, arrival_s=[0.0, 0.05, 0.1], recorded_s=[0.0, 0.05, 0.1])


ERROR = b'{"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}'
FLAT = b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'
STREAM = raw.CHUNKED
ONE = raw.token()

FAULTS: dict[str, tuple[raw.Script, str, str, int]] = {
    # name: (what the server does, class, words, tokens that came before)
    "slow headers": (raw.silent, "RequestTimeout", "no response came for 0.4 s", 0),
    "stall mid-stream": (
        raw.then_silent(STREAM + ONE, ONE),
        "RequestTimeout",
        "nothing more came for 0.4 s",
        2,
    ),
    "bare EOF": (
        raw.writes(STREAM + ONE, ONE, raw.END),
        "BadStream",
        "the stream ended without [DONE]",
        2,
    ),
    "EOF by close": (
        raw.writes(raw.head() + b"data: {}\n\n", then="close"),
        "BadStream",
        "the stream ended without [DONE]",
        0,
    ),
    "closed in a chunk": (
        raw.writes(STREAM + ONE, b"ff\r\nhalf", then="close"),
        "BadStream",
        "the server closed the connection in the middle of its response",
        1,
    ),
    "closed without a word": (
        raw.writes(then="close"),
        "BadStream",
        "closed",
        0,
    ),
    "error event, then [DONE]": (
        raw.writes(STREAM + ONE, raw.event(ERROR), raw.DONE + raw.END),
        "BadStream",
        "EngineCore died",
        1,
    ),
    "flat error event": (
        raw.writes(STREAM, raw.event(FLAT), raw.DONE + raw.END),
        "BadStream",
        "too long",
        0,
    ),
    "aborted": (
        raw.writes(STREAM + ONE, raw.token("", "abort"), raw.DONE + raw.END),
        "BadStream",
        "the server broke the answer off: abort",
        1,
    ),
    "200 with an error": (
        raw.writes(raw.whole("200 OK", ERROR)),
        "BadStream",
        "the server answered 200 with an error: EngineCore died",
        0,
    ),
    "200 with a page": (
        raw.writes(raw.whole("200 OK", b"<html>hello</html>", kind="text/html")),
        "BadStream",
        "200 with something that is no stream: <html>hello</html>",
        0,
    ),
    "200 as a whole": (
        raw.writes(raw.whole("200 OK", b'{"choices":[{"text":"a"}]}')),
        "BadStream",
        "as a whole though it was asked to stream",
        0,
    ),
    "500 nested": (
        raw.writes(raw.whole("500 Internal Server Error", ERROR)),
        "BadStatus",
        "500: EngineCore died",
        0,
    ),
    "400 flat": (raw.writes(raw.whole("400 Bad Request", FLAT)), "BadStatus", "400: too long", 0),
    "400 invalid JSON": (
        raw.writes(raw.whole("400 Bad Request", b'{"message":"cut')),
        "BadStatus",
        '400: {"message":"cut',
        0,
    ),
    "502 without a body": (raw.writes(raw.whole("502 Bad Gateway", b"")), "BadStatus", "502: ", 0),
    "FastAPI's detail": (
        raw.writes(raw.whole("404 Not Found", b'{"detail":"Not Found"}')),
        "BadStatus",
        "404: Not Found",
        0,
    ),
    "429 with Retry-After": (
        raw.writes(raw.whole("429 Too Many Requests", b"{}", "Retry-After: 7")),
        "BadStatus",
        "429 (retry after 7)",
        0,
    ),
    "reset": (
        raw.writes(STREAM + ONE, pause_s=0.05, then="reset"),
        "BadStream",
        "the connection broke",
        1,
    ),
    "not HTTP": (raw.writes(b"SSH-2.0-OpenSSH_9.2\r\n"), "BadStream", "not HTTP/1.1", 0),
    "not JSON": (
        raw.writes(STREAM + ONE, raw.event(b"{half"), raw.DONE + raw.END),
        "BadStream",
        "not JSON: {half",
        1,
    ),
    "503 whose body breaks off": (
        raw.writes(
            raw.head("503 Busy", "application/json", "Content-Length: 99", "Retry-After: 3")
            + b'{"error":"overlo',
            then="close",
        ),
        "BadStatus",
        '503 (retry after 3): {"error":"overlo',
        0,
    ),
    "endless headers": (
        raw.writes(b"HTTP/1.1 200 OK\r\n" + b"x-a: " + b"b" * 99_000 + b"\r\n"),
        "BadStream",
        "head is longer than 65,536 bytes",
        0,
    ),
    "a count of nonsense": (
        raw.writes(STREAM + ONE, raw.usage(64, 2_000_000_000), raw.DONE + raw.END),
        "BadStream",
        "makes no sense",
        1,
    ),
    "no token": (
        raw.writes(STREAM, raw.usage(64, 0), raw.DONE + raw.END),
        "BadStream",
        "the answer ended without a token",
        0,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_record_with_its_class_and_the_run_goes_on(
    name: str, make_trace: MakeTrace
) -> None:
    script, kind, words, tokens = FAULTS[name]
    records, took_s = replayed(three(make_trace), {"-1": script})
    assert [record.status for record in records] == ["ok", "failed", "ok"]
    broken = records[1]
    assert broken.error_class == kind
    assert words in str(broken.error)
    assert (0 if broken.gaps_us is None else len(broken.gaps_us) + 1) == tokens
    assert (broken.first_token_s is None) == (tokens == 0)
    assert took_s < 5


def test_a_good_answer_says_who_stamped_it_and_what_was_served(make_trace: MakeTrace) -> None:
    (record, *_), _ = replayed(three(make_trace), {})
    assert record.stamped_by in ("kernel", "user")
    assert record.sent_s is not None
    assert record.first_byte_s is not None
    assert record.first_token_s is not None
    assert record.scheduled_s is not None
    assert record.scheduled_s <= record.sent_s <= record.first_byte_s <= record.first_token_s
    assert (record.sent_input_tokens, record.served_input_tokens) == (64, 64)
    assert (record.served_output_tokens, record.served_hit_tokens) == (3, 0)
    assert (record.timed_by, record.finish_reason) == ("token", "length")
    assert record.loop_lag_s is not None


def test_a_stream_left_open_after_its_end_is_whole(make_trace: MakeTrace) -> None:
    """And what comes after [DONE] is none of the answer."""
    late = raw.then_silent(STREAM + ONE, raw.usage(64, 1) + raw.DONE, ONE)
    cut = raw.writes(STREAM + ONE, raw.usage(64, 1) + raw.DONE, then="close")
    for script in (late, cut):
        records, took_s = replayed(three(make_trace), {"-1": script}, stall_s=30.0)
        assert [record.status for record in records] == ["ok", "ok", "ok"]
        assert records[1].served_output_tokens == 1
        assert records[1].gaps_us is not None
        assert len(records[1].gaps_us) == 0
        assert took_s < 6


def test_two_responses_at_once_cost_the_connection_and_no_request(make_trace: MakeTrace) -> None:
    whole = STREAM + ONE + raw.usage(64, 1) + raw.DONE + raw.END
    trace = singles(make_trace, 8, arrival_s=[0.05 * at for at in range(8)])
    records, took_s = replayed(trace, {"-1": raw.writes(whole + whole)})
    assert {record.status for record in records} == {"ok"}
    assert took_s < 4


def test_an_answer_before_the_request_was_whole_leaves_no_rest_for_the_next(
    make_trace: MakeTrace,
) -> None:
    """A server that refuses a long prompt by its headers, and does not read it."""
    lengths = [1_500_000, 64, 64]
    trace = singles(make_trace, 3, input_tokens=lengths, arrival_s=[0.0, 0.8, 0.9])
    records: list[Record] = []

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while lines := (await reader.readuntil(b"\r\n\r\n")).decode():
            length = int(lines.lower().partition("content-length: ")[2].split("\r\n")[0] or 0)
            if lines.startswith("GET"):
                writer.write(raw.LISTING)
            elif length > 100_000:
                writer.write(raw.whole("413 Too Large", b"{}"))
                await asyncio.sleep(0.4)
                await reader.readexactly(length)
            else:
                await reader.readexactly(length)
                await raw.good(writer)

    async def main() -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await hasty(reader, writer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(served, "127.0.0.1", 0)
        async with server, backend(server.sockets[0].getsockname()[1], stall_s=5.0) as asked:
            plan = Recorded().plan(trace, stream(1, "pacing"))
            await Replay(trace, plan, asked, records.append).run()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    records.sort()
    assert [record.status for record in records] == ["failed", "ok", "ok"]
    assert "413" in str(records[0].error)


def test_many_refusals_at_once_are_as_many_records(
    make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far away a refusal takes a while, so several are under way together."""
    records: list[Record] = []
    trace = singles(make_trace, 5, arrival_s=[0.0] * 5)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def slow(sock: Any, address: Any) -> None:
            await asyncio.sleep(0.05)
            await connect(sock, address)

        async with raw.serving({}) as port:
            server = await backend(port).__aenter__()
        monkeypatch.setattr(WallLoop, "sock_connect", lambda _, sock, address: slow(sock, address))
        plan = Recorded().plan(trace, stream(1, "pacing"))
        await Replay(trace, plan, server, records.append).run()
        await server.__aexit__(None, None, None)

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    assert [record.status for record in records] == ["failed"] * 5


def test_leaving_ends_whoever_still_waits(make_trace: MakeTrace) -> None:
    async def main() -> None:
        async with raw.serving({"-7": raw.silent}) as port:
            server = await backend(port, stall_s=30.0).__aenter__()
            request = Request(7, 0, 0, 64, 3, 64, [], "main")
            asked = asyncio.ensure_future(server.generate(request, Answer()))
            await asyncio.sleep(0.05)
            await server.__aexit__(None, None, None)
            async with asyncio.timeout(2):
                with pytest.raises(BadStream, match="the connection was closed here"):
                    await asked

    del make_trace
    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())


def test_half_a_character_is_a_token_wherever_it_is_cut(make_trace: MakeTrace) -> None:
    bad = b'data: {"choices":[{"text":"vel\xef\xbfdo"}]}\n\n'
    pieces = [raw.chunk(bad[at : at + 1]) for at in range(len(bad))]
    ending = raw.token(reason="length") + raw.usage(64, 2) + raw.DONE + raw.END
    script = raw.writes(STREAM, *pieces, ending, pause_s=0.0005)
    records, _ = replayed(three(make_trace), {"-1": script})
    assert [record.status for record in records] == ["ok", "ok", "ok"]
    assert records[1].served_output_tokens == 2


def test_an_endless_line_is_cut_off_and_not_kept(make_trace: MakeTrace) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        piece = raw.chunk(b"x" * 2**20)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()

    records, took_s = replayed(three(make_trace), {"-1": endless})
    assert [record.status for record in records] == ["ok", "failed", "ok"]
    assert "longer than 33,554,432 bytes" in str(records[1].error)
    assert took_s < 20


def test_a_refused_connection_fails_its_request_and_no_other(make_trace: MakeTrace) -> None:
    """The server goes away after the first answer and never comes back."""
    records: list[Record] = []
    trace = three(make_trace)

    async def main() -> None:
        async with raw.serving({}) as port:
            server = backend(port)
            await server.__aenter__()
        plan = Recorded().plan(trace, stream(1, "pacing"))
        await Replay(trace, plan, server, records.append).run()
        await server.__aexit__(None, None, None)

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    assert {record.status for record in records} == {"failed"}
    assert {record.error_class for record in records} <= {"ConnectFailed", "BadStream"}
    assert "Connection refused" in str(records[-1].error)


def entered(**settings: Any) -> None:
    async def main() -> None:
        async with OpenAI(salt="s", prompts=Tokens(), connect_s=2.0, **settings):
            pass

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())


def test_a_name_that_cannot_be_resolved_is_a_connection_that_failed() -> None:
    with pytest.raises(ConnectFailed, match=r"no-such-host\.invalid cannot be resolved"):
        entered(url="http://no-such-host.invalid:8000")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://h", "http://user:secret@h", "http://", "http://h?a=b", 7]
)
def test_a_url_that_cannot_be_asked_is_refused(url: Any) -> None:
    with pytest.raises(ConfigError, match="give http://HOST:PORT"):
        entered(url=url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(
        [*command, "-addext", names, "-keyout", str(key), "-out", str(made)],
        check=True,
        capture_output=True,
    )
    return key, made


def over_tls(
    trace: Trace, certificate: tuple[Path, Path], scripts: dict[str, raw.Script], **settings: Any
) -> list[Record]:
    key, made = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    records: list[Record] = []

    async def main() -> None:
        async with (
            raw.serving(scripts, context) as port,
            backend(port, url=f"https://localhost:{port}", **settings) as server,
        ):
            plan = Recorded().plan(trace, stream(1, "pacing"))
            await Replay(trace, plan, server, records.append).run()

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    return sorted(records)


def test_tls_works_and_is_stamped_by_this_process(
    certificate: tuple[Path, Path], make_trace: MakeTrace
) -> None:
    faults = {"-1": raw.then_silent(STREAM + ONE)}
    records = over_tls(three(make_trace), certificate, faults, ca_file=str(certificate[1]))
    assert [record.status for record in records] == ["ok", "failed", "ok"]
    assert {record.stamped_by for record in records} == {"user"}
    assert records[1].error_class == "RequestTimeout"


def test_a_certificate_of_nobody_is_a_connection_that_failed(
    certificate: tuple[Path, Path], make_trace: MakeTrace
) -> None:
    with pytest.raises(ConnectFailed, match="TLS with localhost"):
        over_tls(three(make_trace), certificate, {})


def test_tls_with_a_server_that_has_none_is_a_connection_that_failed() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw.whole("400 Bad Request", b""))
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, backend(port, url=f"https://localhost:{port}"):
            pass

    with (
        pytest.raises(ConnectFailed, match="TLS with localhost"),
        asyncio.Runner(loop_factory=WallLoop) as runner,
    ):
        runner.run(main())


def test_a_key_that_the_server_repeats_is_struck_out(make_trace: MakeTrace) -> None:
    long = b"x" * 290  # the key begins before what is shown ends
    said = {
        "-0": raw.writes(raw.whole("401 Unauthorized", b'{"message":"bad key sk-TOPSECRET"}')),
        "-1": raw.writes(raw.whole("401 Unauthorized", b'{"message":"' + long + b'sk-TOPSECRET"}')),
        "-2": raw.writes(
            STREAM + raw.token(reason="sk-TOPSECRET"), raw.usage(64, 1) + raw.DONE + raw.END
        ),
        "-3": raw.writes(STREAM + ONE, raw.event(b'{"error":"sk-TOPSECRET"}'), raw.DONE + raw.END),
        "-4": raw.writes(STREAM + ONE, raw.event(b"sk-TOPSECRET"), raw.DONE + raw.END),
    }
    trace = singles(make_trace, 5, arrival_s=[0.0] * 5)
    records, _ = replayed(trace, said, api_key="sk-TOPSECRET\n")
    assert records[0].error == "401: bad key ***"
    assert records[2].finish_reason == "***"
    assert "sk-" not in str(records)


@pytest.mark.parametrize("key", ["sk-a\r\nX-Evil: 1", "sk-\u2019", "sk a"])
def test_a_key_that_no_header_may_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="what no header may hold") as raised:
        backend(1, api_key=key)
    assert "sk-" not in str(raised.value)


def test_connections_are_used_again(make_trace: MakeTrace) -> None:
    """One after the other: a second connection would be a second handshake in each TTFT."""
    trace = singles(make_trace, 6)
    opened = 0

    async def main() -> None:
        nonlocal opened
        async with raw.serving({}) as port, backend(port, keepalive_s=60.0) as server:
            plan = Closed(1).plan(trace, stream(1, "pacing"))
            await Replay(trace, plan, server, lambda _: None).run()
            opened = len(server._transport._open)

    with asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())
    assert opened == 1


def test_a_long_prompt_is_sent_whole(make_trace: MakeTrace) -> None:
    """Longer than any socket's buffer, to a server that reads slowly."""
    trace = singles(make_trace, 2, input_tokens=[1_000_000, 64], arrival_s=[0.0, 0.0])
    records, _ = replayed(trace, {}, stall_s=20.0)
    assert [record.status for record in records] == ["ok", "ok"]
    assert records[0].sent_input_tokens == 1_000_000


def test_times_are_those_of_the_server_and_not_of_a_busy_client(make_trace: MakeTrace) -> None:
    """The loop is blocked while tokens arrive: the kernel's stamps do not mind."""
    gaps: list[float] = []
    trace = singles(make_trace, 1)

    async def spaced(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for at in range(3):
            await asyncio.sleep(0.03)
            writer.write(raw.token(reason="length" if at == 2 else None))
            await writer.drain()
        writer.write(raw.usage(64, 3) + raw.DONE + raw.END)

    records, _ = replayed(trace, {"-0": spaced})
    assert records[0].gaps_us is not None
    gaps = (records[0].gaps_us / 1e6).tolist()
    assert np.all(np.array(gaps) > 0.02)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"endpoint": "generate"}, ConfigError, "choose completions or chat"),
        ({"endpoint": "chat"}, ConfigError, "prompts=words"),
        ({"history": "guessed"}, ConfigError, "recorded or live"),
        ({"stall_s": 0}, ConfigError, "stall_s"),
        ({"servers": {"X": "http://h"}}, ConfigError, "no such role"),
        ({"ca_file": "/no/such"}, ConfigError, "cannot be used"),
        ({"model": "other"}, ConfigError, "does not serve 'other', but tiny"),
    ],
)
def test_a_bad_setting_is_one_message(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    async def main() -> None:
        async with raw.serving({}) as port, backend(port, **settings):
            pass

    with pytest.raises(error, match=words), asyncio.Runner(loop_factory=WallLoop) as runner:
        runner.run(main())


def test_a_server_that_is_no_openai_is_refused_at_the_door() -> None:
    async def main() -> None:
        page = raw.whole("404 Not Found", b"nothing here", kind="text/plain")
        async with raw.serving({}, listing=page) as port, backend(port):
            pass

    with (
        pytest.raises(BackendError, match="v1/models answered 404: nothing here") as raised,
        asyncio.Runner(loop_factory=WallLoop) as runner,
    ):
        runner.run(main())
    assert isinstance(raised.value, BadStatus | BadStream)


def test_no_two_backends_of_a_run_share_a_salt() -> None:
    """The second would meet what the first left in the cache of a server they share."""
    config = configured("backend=[openai,vllm,sglang,dynamo]", "salt=abc")
    salts = {str(entry.salt) for entry in config.backend.values()}
    assert salts == {"abc-openai", "abc-vllm", "abc-sglang", "abc-dynamo"}
