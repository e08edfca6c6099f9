"""Pages of metrics into samples."""

from __future__ import annotations

import math
import time

import pytest

from adapters.prometheus import parse
from harness.backend import Sample
from harness.errors import BackendError

PAGE = b"""\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 4620.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7961e+09
# TYPE up gauge
up 1
"""


def one(line: bytes) -> tuple[str, str, float]:
    (sample,) = parse(line, "P http://h")
    return sample.name, sample.labels, sample.value


def test_every_sample_is_read_but_the_times_of_creation() -> None:
    assert parse(PAGE, "P http://h") == [
        Sample("P http://h", "vllm:prompt_tokens_total", 'engine="0",model_name="tiny"', 4620.0),
        Sample("P http://h", "up", "", 1.0),
    ]


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        (b"a 1", ("a", "", 1.0)),
        (b"a{} 1", ("a", "", 1.0)),
        (b"a\t1", ("a", "", 1.0)),
        (b"a 1 1796175940114", ("a", "", 1.0)),
        (b"a 1 -3", ("a", "", 1.0)),
        (b"a 1 \r\n", ("a", "", 1.0)),
        (b"a -1.5e-3", ("a", "", -0.0015)),
        (b"a +Inf", ("a", "", math.inf)),
        (b"_a:b_2 1", ("_a:b_2", "", 1.0)),
        (b'a{le="+Inf"} 3', ("a", 'le="+Inf"', 3.0)),
        (b'a{x="} 5"} 3', ("a", 'x="} 5"', 3.0)),
        (b'a{x="a \\"quoted\\" word"} 3', ("a", 'x="a \\"quoted\\" word"', 3.0)),
        (b'a{x="# no comment"} 3', ("a", 'x="# no comment"', 3.0)),
        (b'a{x="vel\xef\xbf"} 3', ("a", 'x="vel\N{REPLACEMENT CHARACTER}"', 3.0)),
    ],
)
def test_every_form_of_a_sample(line: bytes, sample: tuple[str, str, float]) -> None:
    assert one(line) == sample


def test_a_value_that_is_not_a_number_is_one_that_says_so() -> None:
    assert math.isnan(one(b'a{quantile="0.5"} NaN')[2])


@pytest.mark.parametrize("line", [b"a one", b"a", b"2a 1", b'a{x="1"', b"a 1 2 3", b"# a 1"])
def test_a_line_that_is_no_sample_costs_itself_only(line: bytes) -> None:
    page = line + b"\nup 1\n" + line
    assert parse(page, "P") == [Sample("P", "up", "", 1.0)]


@pytest.mark.parametrize(
    "page", [b"", b"\n", b"# TYPE a counter\n# HELP a of nothing yet\n\n", b"a_created 1\n"]
)
def test_a_server_that_has_counted_nothing_yet_has_an_empty_page(page: bytes) -> None:
    assert parse(page, "P") == []


@pytest.mark.parametrize(
    "page", [b"<html><body>Not Found</body></html>", b'{"detail":"Not Found"}', b"\xff\xfe\x00"]
)
def test_what_is_no_page_of_metrics_is_refused(page: bytes) -> None:
    with pytest.raises(BackendError, match="P http://h: its metrics page is not in Prometheus'"):
        parse(page, "P http://h")


@pytest.mark.parametrize(
    "line", [b"a{" + b"}" * 20_000, b"a" * 20_000, b"a" + b" " * 20_000 + b"{"]
)
def test_no_line_takes_long(line: bytes) -> None:
    began_s = time.perf_counter()
    parse(line + b"\nup 1\n", "P")
    assert time.perf_counter() - began_s < 2
