"""The shipped workload: agent sessions drawn from a seed, fitted to real ones.

A session is one task. Its first prompt is the tools' and the system's prefix and a message, or,
where an old task is resumed, a long history too. Each later prompt carries all before it and adds
what the model answered (less the thinking, which is not kept) and what a tool returned or a person
said, now and then a whole file. The delay before it is a tool's or a person's. A few turns break
the prefix: the last block is laid anew, or an edit throws a part of the history away. A session
ends when its task is done or its context is full.

What is drawn is tokens, delays and breaks; hit rates are what comes out. `docs/workload.md` holds
them beside the real ones. Session i is the same whatever the number of sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness import settings
from harness.errors import ConfigError
from harness.stream import Stream
from harness.trace import Header
from traces.weave import Path as Blocks
from traces.weave import Weaver, cut, size

_BLOCK_TOKENS = 64
_LONGEST_S = 86_400.0
_MOST_TOKENS = 1e8
"""A draw beyond is cut: heavy tails have no end, the columns do."""
_SESSIONS_AT_ONCE = 1000
"""Sessions between two takings of rows."""
_LEAST_ADDED_TOKENS = 48
"""A turn adds at least a message's frame."""


@dataclass(frozen=True)
class Draw:
    """exp(N(ln median, sigma)); with probability `rare_share` that of `rare_median`, `rare_sigma`.

    A log-normal, or a mixture of two: positive, with a heavy right tail.
    """

    median: float
    sigma: float
    rare_share: float = 0.0
    rare_median: float = 1.0
    rare_sigma: float = 0.0

    def of(self, uniform: NDArray[np.float64], normal: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values for uniform and standard normal draws of one shape."""
        rare = uniform < self.rare_share
        median = np.where(rare, self.rare_median, self.median)
        values: NDArray[np.float64] = median * np.exp(
            np.where(rare, self.rare_sigma, self.sigma) * normal
        )
        return np.minimum(values, _MOST_TOKENS)


@dataclass(frozen=True)
class Shape:
    """The distributions of a session. Each `Draw` may be given as a mapping of its fields."""

    turns_mean: float
    """Turns of a session before its context is full: gamma distributed, of shape `turns_shape`."""
    turns_shape: float
    context_limit_tokens: float
    prefix_tokens: float
    """Tools and system prompt: normal, with a spread of `prefix_spread_tokens`."""
    prefix_spread_tokens: float
    message_tokens: Draw
    """The first message."""
    resumed_share: float
    """Of sessions: those that begin with a history of `resumed_tokens`."""
    resumed_tokens: Draw
    answer_tokens: Draw
    kept_share: float
    """What the history keeps of an answer's tokens."""
    result_tokens: Draw
    """What a tool returns or a person says; rare: a whole file."""
    early_files: float
    """How many times as many files the first turns bring; fades over `early_turns`."""
    early_turns: float
    relaid_share: float
    """Of turns: those that lay the last block of the prompt before anew."""
    edited_share: float
    """Of turns: those that keep of the history only the tools and the system prompt."""
    second_edited_share: float
    """The same, of second turns: a client lays its first message anew."""
    person_share: float
    """Of turns: those that a person starts."""
    tool_delay_s: Draw
    person_delay_s: Draw
    delay_limit_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping):
                draw = Draw(**value)
                object.__setattr__(self, field.name, draw)
                for part, number in asdict(draw).items():
                    _limit(f"{field.name}.{part}", number)
            else:
                _limit(field.name, value)
        if self.turns_mean < 1 or self.turns_shape <= 0:
            raise ConfigError("trace.shape.turns_mean must be 1 or more, turns_shape above 0")
        for name in ("context_limit_tokens", "prefix_tokens", "prefix_spread_tokens"):
            settings.number(f"trace.shape.{name}", getattr(self, name), least=0, most=_MOST_TOKENS)


def _limit(name: str, value: object) -> None:
    settings.number(f"trace.shape.{name}", value, least=0, most=1 if "share" in name else inf)


def generate(
    *,
    sessions: int,
    seed: int,
    session_rate_per_s: float,
    products: int,
    nominal_s: float,
    nominal_token_s: float,
    shape: Shape,
) -> Stream:
    """So many sessions, starting as a Poisson process. Raises `ConfigError`.

    `products`: agent products, each with tools and a system prompt that its sessions share, and so
    the blocks of; 0: no two sessions share any, as in the traces of the fit, where ids are local
    to a session. `recorded_s`, which only orders the trace, takes an answer to last `nominal_s`
    and `nominal_token_s` a token.
    """
    settings.whole("trace.sessions", sessions, least=1)
    settings.whole("trace.seed", seed, least=0)
    settings.whole("trace.products", products, least=0)
    settings.number("trace.session_rate_per_s", session_rate_per_s, above=0, most=1e9)
    settings.number("trace.nominal_s", nominal_s, least=0, most=_LONGEST_S)
    settings.number("trace.nominal_token_s", nominal_token_s, least=0, most=_LONGEST_S)
    parameters = {
        "sessions": sessions,
        "seed": seed,
        "session_rate_per_s": session_rate_per_s,
        "products": products,
        "nominal_s": nominal_s,
        "nominal_token_s": nominal_token_s,
        "shape": asdict(shape),
    }
    header = Header(
        "agentic", _BLOCK_TOKENS, "floor", "global", "s", "Apache-2.0 (generated)",
        prefix_data="generated", parameters=parameters,
    )  # fmt: skip

    def tables() -> Iterator[pa.Table]:
        """The rows, given out as soon as none can come before them."""
        weaver = Weaver()
        prefixes = _product_prefixes(shape, products, seed)
        fronts: list[Blocks] = [[] for _ in prefixes]
        for front, tokens in zip(fronts, prefixes, strict=True):
            weaver.lay(front, int(tokens) // _BLOCK_TOKENS)
        start_s = 0.0
        for session in range(sessions):
            random = np.random.default_rng([seed, 1, session])
            product = int(random.integers(products)) if products else None
            turns = _draw(shape, random, None if product is None else prefixes[product])
            front = [] if product is None else fronts[product]
            _weave(weaver, session, start_s, turns, front, nominal_s, nominal_token_s)
            start_s += random.exponential(1 / session_rate_per_s)
            if session % _SESSIONS_AT_ONCE == _SESSIONS_AT_ONCE - 1:
                yield weaver.take(start_s)
        yield weaver.take()

    return Stream(header, tables())


@dataclass(frozen=True)
class _Turns:
    """One session's draws, a list entry a turn."""

    prompts: list[int]
    answers: list[int]
    kept: list[float]
    """The share of the blocks before that an edit keeps; 1 without one."""
    relaid: list[bool]
    delays_s: list[float]


def _draw(shape: Shape, random: np.random.Generator, prefix: float | None) -> _Turns:
    """Draw a session; `prefix` tokens where its product decides them."""
    turns = max(1, round(random.gamma(shape.turns_shape, shape.turns_mean / shape.turns_shape)))
    uniform = random.random((8, turns))
    normal = random.standard_normal((6, turns))
    if prefix is None:
        prefix = max(1.0, shape.prefix_tokens + shape.prefix_spread_tokens * normal[5, 0])
    answers = np.maximum(1, np.rint(shape.answer_tokens.of(uniform[0], normal[0])))
    fading = np.exp(-np.arange(turns) / max(shape.early_turns, 1e-9))
    files = uniform[1] / (1 + (shape.early_files - 1) * fading)
    added = np.maximum(
        _LEAST_ADDED_TOKENS,
        shape.result_tokens.of(files, normal[1]) + shape.kept_share * np.roll(answers, 1),
    )
    added[0] = prefix + shape.message_tokens.of(uniform[2], normal[2])[0]
    if uniform[3, 0] < shape.resumed_share:
        added[0] += shape.resumed_tokens.of(uniform[4], normal[3])[0]
    prompts = np.cumsum(np.rint(added)).astype(np.int64)
    prompts[0] = min(prompts[0], shape.context_limit_tokens)
    fit = max(1, int(np.searchsorted(prompts, shape.context_limit_tokens, side="right")))
    delays_s = np.where(
        uniform[5] < shape.person_share,
        shape.person_delay_s.of(uniform[6], normal[4]),
        shape.tool_delay_s.of(uniform[6], normal[4]),
    )
    breaks = uniform[7]
    chance = np.full(turns, shape.edited_share)
    chance[1:2] = shape.second_edited_share
    edited = breaks < chance
    return _Turns(
        prompts[:fit].tolist(),
        answers[:fit].astype(np.int64).tolist(),
        np.where(edited, prefix / np.roll(prompts, 1), 1.0)[:fit].tolist(),
        (~edited & (breaks < chance + shape.relaid_share))[:fit].tolist(),
        np.minimum(delays_s, shape.delay_limit_s).round(3)[:fit].tolist(),
    )


def _product_prefixes(shape: Shape, products: int, seed: int) -> list[float]:
    """Tokens of each product's tools and system prompt: whole blocks."""
    random = np.random.default_rng([seed, 0])
    tokens = shape.prefix_tokens + shape.prefix_spread_tokens * random.standard_normal(products)
    whole = np.maximum(1, tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS
    return [float(each) for each in whole]


def _weave(
    weaver: Weaver,
    session: int,
    start_s: float,
    turns: _Turns,
    front: Blocks,
    nominal_s: float,
    nominal_token_s: float,
) -> None:
    """One session's turns, the first on the blocks of `front`."""
    path = cut(front, turns.prompts[0] // _BLOCK_TOKENS)
    held = size(path)
    now_s = start_s
    waits: list[int] = []
    for at, tokens in enumerate(turns.prompts):
        keep = held
        if at:
            now_s += turns.delays_s[at]
            keep = max(0, int(held * turns.kept[at]) - turns.relaid[at])
        held = tokens // _BLOCK_TOKENS
        path = weaver.relay(path, keep, held)
        gate_s = turns.delays_s[at] if at else start_s
        turn = weaver.add(session, at, now_s, gate_s, waits, tokens, turns.answers[at], path)
        waits = [turn]
        now_s += nominal_s + nominal_token_s * turns.answers[at]
