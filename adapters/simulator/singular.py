"""Singular traffic: requests that the relay would finish before their KV cache had crossed.

Long inputs with few hits and very short outputs would fill the WAN for nothing. Which they are
must be known before the output is: its length is *predicted*, from the outputs seen before.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log
from typing import Protocol

from adapters.simulator.costs import require
from harness.backend import Request
from harness.settings import number


class Predictor(Protocol):
    """Guesses how many tokens a request will be answered with."""

    def clear(self) -> None:
        """Forget what was seen."""
        ...

    def predict(self, request: Request) -> float:
        """Output tokens expected; infinite where nothing is known yet."""
        ...

    def learn(self, request: Request, tokens: int) -> None:
        """It was answered with so many."""
        ...


class RecentOutputs:
    """The geometric mean of the outputs seen, the recent ones weighing most.

    Of the session's own outputs, drawn towards those of its agent type as long as it has few:
    the agent's mean counts as `prior` outputs. Each new output moves a mean by `weight` at least.
    """

    MOST_SESSIONS = 65_536
    """So many are remembered: those seen last."""

    def __init__(self, weight: float = 0.1, prior: float = 4.0) -> None:
        number("singular.predictor.weight", weight, above=0, most=1)
        number("singular.predictor.prior", prior, above=0, most=1e9)
        self.weight = weight
        self.prior = prior
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._agents: dict[str, tuple[float, float]] = {}
        self._sessions: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def predict(self, request: Request) -> float:
        """Output tokens expected; infinite where no request of its agent type has ended."""
        agent = self._agents.get(request.agent)
        if agent is None:
            return float("inf")
        seen, mean = self._sessions.get(request.session, (0.0, 0.0))
        return exp((seen * mean + self.prior * agent[1]) / (seen + self.prior))

    def learn(self, request: Request, tokens: int) -> None:
        """It was answered with so many."""
        value, sessions = log(max(1, tokens)), self._sessions
        self._agents[request.agent] = self._moved(self._agents.get(request.agent), value)
        sessions[request.session] = self._moved(sessions.pop(request.session, None), value)
        if len(sessions) > self.MOST_SESSIONS:
            sessions.popitem(last=False)

    def _moved(self, known: tuple[float, float] | None, value: float) -> tuple[float, float]:
        """(how many count, their mean) with one more."""
        seen, mean = known or (0.0, 0.0)
        seen = min(seen + 1, 1 / self.weight)
        return seen, mean + (value - mean) / seen


class OracleOutputs:
    """Reads the answer's length in the trace: what no system can. An upper bound, named as one."""

    def clear(self) -> None:
        """Nothing to forget."""

    def predict(self, request: Request) -> float:
        """The output tokens themselves."""
        return request.output_tokens

    def learn(self, request: Request, tokens: int) -> None:
        """Nothing to learn."""


class SingularFilter:
    """A request is singular if the relay is expected to be done within `share` of its transfer.

    It then stays at the relay, and its KV cache is not sent, except where the guess was wrong: one
    that is not done after `patience` times what its transfer would have taken is sent after all.
    """

    def __init__(self, predictor: Predictor, share: float = 0.5, patience: float = 2.0) -> None:
        for name in ("predict", "learn"):
            require(hasattr(predictor, name), "singular.predictor", predictor, "a Predictor")
        number("singular.share", share, above=0, most=1e6)
        number("singular.patience", patience, above=0, most=1e6)
        self.predictor = predictor
        self.share = share
        self.patience = patience

    def is_singular(self, request: Request, token_s: float, transfer_s: float) -> bool:
        """At `token_s` a token at the relay, and with a transfer expected to take so long."""
        return self.predictor.predict(request) * token_s < self.share * transfer_s
