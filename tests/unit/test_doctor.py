"""What `relaybench doctor` says of a machine, of this client and of servers good and bad."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit import raw_server as raw


def doctor(*arguments: str) -> tuple[int, dict[str, str], str]:
    """(exit code, what was said of each thing with its grade in front, all that was said)."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = {line[6:20].strip(): line[:4] + line[20:] for line in done.stdout.splitlines()}
    return done.returncode, said, done.stdout + done.stderr


@pytest.mark.slow
def test_the_machine_and_the_client_are_measured_on_our_own_server() -> None:
    code, said, words = doctor("doctor.lasts_s=1", "doctor.answer_tokens=8")
    assert code == 0, words
    assert {"descriptors", "clock", "stamps", "client"} == set(said), words
    assert "50 requests at 50/s x 8 events: sent late by P50" in said["client"]
    assert "us of CPU an event" in said["client"]


def test_a_server_that_counts_wrong_fails() -> None:
    ending = raw.usage(256, 1) + raw.DONE + raw.END
    answer = raw.writes(raw.CHUNKED, raw.token(reason="length"), ending)
    with raw.in_thread(answer) as url:
        code, said, words = doctor(url, "doctor.self_test=false")
    assert code == 3, words
    assert said["reach"] == f"ok   {url}: model tiny, context_tokens 4096"
    assert said["counts"] == "FAIL (in, out) asked (256, 16), served (256, 1)"
    assert said["cold start"].startswith("warn by salt only")
    assert said["streaming"].startswith("warn 1 moments for 1 tokens")
    assert said["hits"].startswith("warn a prompt sent twice had 0 of 256 tokens cached")


def test_nobody_there_fails() -> None:
    code, said, words = doctor("doctor.self_test=false", "http://127.0.0.1:1")
    assert code == 3, words
    assert said["server"] == "FAIL ConnectFailed: 127.0.0.1:1: Connection refused"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor.requests_per_s=0"], "doctor.requests_per_s is 0"),
        (["doctor.self_test=perhaps"], "give true or false"),
        (["http://user:pw@host", "doctor.self_test=false"], "give http://HOST:PORT"),
        (["backend=[openai,vllm]"], "look at one"),
        (["backend=pdd", "doctor.self_test=false"], "this backend is no server"),
        (["127.0.0.1:8000"], "neither a setting nor a URL: give http://HOST:PORT"),
        (["backend=nobody"], "nobody"),
    ],
)
def test_a_bad_setting_is_one_message(arguments: list[str], words: str) -> None:
    code, _, said = doctor(*arguments)
    assert code == 2
    assert words in said
    assert "Traceback" not in said
