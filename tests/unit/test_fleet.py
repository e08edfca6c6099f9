"""Counters of many servers, asked by role; and the addresses that can be asked."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.fleet import Counters, base_url
from harness.backend import Sample
from harness.errors import ConfigError

SAMPLES = [
    Sample("P http://a:1", "tokens", 'engine="0",source="local"', 10.0),
    Sample("P http://a:1", "tokens", 'engine="0",source="external"', 1.0),
    Sample("P http://b:1", "tokens", 'engine="0",source="local"', 200.0),
    Sample("D http://c:1", "tokens", 'engine="0",source="local"', 4000.0),
    Sample("D http://c:1", "tokens_other", "", 7.0),
    Sample("router http://r", "requests", "", 3.0),
]


def test_a_total_is_over_all_servers_of_its_roles() -> None:
    now = Counters(SAMPLES)
    assert now.total("P", "tokens") == 211
    assert now.total(("P", "D"), "tokens") == 4211
    assert now.total("P", "tokens", source="local") == 210
    assert now.total("P", "tokens", source="local", engine="0") == 210
    assert now.total("router", "requests") == 3


def test_a_counter_that_nobody_has_is_none_and_not_zero() -> None:
    now = Counters(SAMPLES)
    assert now.total("RLD", "tokens") is None
    assert now.total("P", "token") is None
    assert now.total("P", "tokens", source="loca") is None
    assert now.total("P", "tokens", engine="1") is None
    assert Counters([]).total("P", "tokens") is None


def test_growth_is_since_before_and_from_zero_for_what_is_new() -> None:
    before = Counters([SAMPLES[0]._replace(value=4.0), SAMPLES[2]])
    now = Counters(SAMPLES)
    assert now.grown(before, "P", "tokens") == 211 - 204
    assert now.grown(before, "P", "tokens", source="external") == 1
    assert now.grown(before, ("D", "MD"), "tokens") == 4000
    assert now.grown(before, "MD", "tokens") is None
    assert before.grown(now, "D", "tokens") is None


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://h.example/llm/v1/", "https://h.example/llm/v1"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_a_url_loses_its_last_slash(given: str, url: str) -> None:
    assert base_url("servers.P", given) == url


@pytest.mark.parametrize(
    "given",
    [
        *("", "h:80", "//h", "ftp://h", "http://", "http:///path", "HTTP//h", " http://h"),
        *("http://h ", "http://h/a b", "http://h?a=b", "http://h/#a", "http://me:key@h", None, 7),
        ["http://h"],
    ],
)
def test_a_url_that_cannot_be_asked_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"servers\.P is .*: give http://HOST:PORT"):
        base_url("servers.P", given)
