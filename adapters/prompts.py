"""Block ids into prompts: what makes a prefix cache hit exactly where the trace says it would.

A block of the trace becomes `block_tokens` tokens that depend on its id and the run's salt and on
nothing else, so prompts share a prefix exactly as far as their blocks do. Two blocks of one run
never agree: the first tokens of each spell its (mixed) id. In a block with no room for that (fewer
than 64 / log2(count) tokens) they differ but for chance, one in count ** tokens. The salt is new
for each run unless it is set, so that no run meets what another left in a cache. Tokens after the
last whole block are the turn's own. Nothing is drawn at random: the same salt and trace give the
same prompts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from math import ceil, log2
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from harness.backend import Request
from harness.errors import ConfigError
from harness.settings import whole

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_COMMON = (
    "the and for that with this from have not are you was but all can had her his one our out day "
    "get has him how man new now old see two way who boy did its let put say she too use time "
    "year people work life hand part child eye place week case point group number world house "
    "area money story fact month lot right study book word business issue side kind head far "
    "water room mother night home game line end member law car city name team minute idea body "
    "back parent face level office door health person art war history party result change morning "
    "reason girl moment air force "
)
"""Words that are one token each, after a space, in the vocabularies in common use; a backend
measures on its server that they are."""


class Prompts(Protocol):
    """Makes what is sent out of a request."""

    kind: Literal["tokens", "text"]

    def salted(self, salt: str) -> None:
        """From here on. Raises `ConfigError`."""
        ...

    def indices(self, request: Request) -> NDArray[np.int64]:
        """One number a token of the prompt: (input tokens,), each below the vocabulary's size."""
        ...


class _Salted:
    """Numbers below `count` for blocks and tails."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.salted("")

    def salted(self, salt: str) -> None:
        digest = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._blocks_key, self._tails_key = np.frombuffer(digest, np.uint64)

    def indices(self, request: Request) -> NDArray[np.int64]:
        size = request.block_tokens
        parts = [self._block(start, length, size) for start, length in request.runs]
        covered = size * sum(length for _, length in request.runs)
        if covered < request.input_tokens:
            parts.append(self._tail(request.turn, request.input_tokens - covered))
        return np.concatenate(parts)[: request.input_tokens]

    def _block(self, start: int, length: int, size: int) -> NDArray[np.int64]:
        """The blocks from `start` on: (length * size,)."""
        ids = np.arange(start, start + length, dtype=np.uint64)
        mixed = _mix(ids * _GOLDEN + self._blocks_key)
        places = np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN
        tokens = _mix(mixed[:, None] + places[None, :]) % np.uint64(self.count)
        rest = mixed
        for digit in range(min(size, ceil(64 / log2(self.count)))):
            tokens[:, digit] = rest % np.uint64(self.count)
            rest //= np.uint64(self.count)
        return tokens.ravel().astype(np.int64)

    def _tail(self, turn: int, size: int) -> NDArray[np.int64]:
        """What no other turn has: (size,)."""
        key = _mix(np.array([turn], np.uint64) * _GOLDEN + self._tails_key)
        places = np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN
        return (_mix(key + places) % np.uint64(self.count)).astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX1
    values = (values ^ (values >> np.uint64(27))) * _MIX2
    return values ^ (values >> np.uint64(31))


class Tokens(_Salted):
    """Token ids `first` to `first + count - 1`: choose a range without special tokens.

    Most vocabularies keep theirs below 1,000 or at the very end.
    """

    kind: Literal["tokens", "text"] = "tokens"

    def __init__(self, first: int = 1000, count: int = 15_000) -> None:
        whole("prompts.first", first, least=0)
        whole("prompts.count", count, least=2)
        self.first = first
        super().__init__(count)

    def token_ids(self, request: Request) -> NDArray[np.int64]:
        """The prompt: (input tokens,)."""
        return self.indices(request) + self.first


class Words(_Salted):
    """Text of words that are one token each: for servers that take no token ids.

    `words`: the list, or None for common English words. `prefix` and `count` make one instead:
    `w` and 600 give w0 to w599.
    """

    kind: Literal["tokens", "text"] = "text"

    def __init__(
        self,
        words: Sequence[str] | None = None,
        prefix: str | None = None,
        count: int | None = None,
    ) -> None:
        if prefix is not None:
            whole("prompts.count", count, least=2)
            words = [f"{prefix}{number}" for number in range(count or 0)]
        self.words = list(dict.fromkeys(words or _COMMON.split()))
        if len(self.words) < 2 or any(not word or word.split() != [word] for word in self.words):  # noqa: PLR2004 - one word would tell no two blocks apart
            raise ConfigError("prompts.words: give two or more words without a space in them")
        super().__init__(len(self.words))

    def text(self, request: Request, count: int) -> str:
        """The prompt's first `count` words; more than it has tokens are made up for the turn."""
        indices = self.indices(request)[:count]
        if len(indices) < count:
            indices = np.concatenate((indices, self._tail(request.turn, count - len(indices))))
        words = self.words
        return " ".join([words[index] for index in indices.tolist()])


class Histories:
    """Live answers in the history: what the server said is what the next turn carries.

    Kept by session: the prompts as sent and the answers to them. A later prompt that begins with
    the blocks of one of them gets its front, and the answer after it, in place of the recorded
    tokens. Bounded: the least recently used sessions are forgotten beyond `most_tokens`.
    """

    _EACH = 8

    def __init__(self, most_tokens: int = 200_000_000) -> None:
        self._most = most_tokens
        self._held = 0
        self._sessions: OrderedDict[int, list[tuple[Request, NDArray[np.int64]]]] = OrderedDict()

    def apply(self, request: Request, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """`tokens`, with the longest history that it extends put in.

        Of one that it leaves half-way, as after an edit, the front that both share. An answer for
        which the recorded prompt has no room is cut.
        """
        front: NDArray[np.int64] = tokens[:0]
        for earlier, history in self._sessions.get(request.session, ()):
            shared = _shared_blocks(request, earlier)
            left_early = shared < earlier.input_tokens // earlier.block_tokens
            usable = history[: shared * earlier.block_tokens] if left_early else history
            if shared and len(front) < min(len(usable), len(tokens)):
                front = usable[: len(tokens)]
        return np.concatenate((front, tokens[len(front) :])) if len(front) else tokens

    def keep(self, request: Request, sent: NDArray[np.int64], answer: Sequence[int]) -> None:
        """What was sent and what came back."""
        history = np.concatenate((sent, np.array(answer, np.int64)))
        kept = self._sessions.setdefault(request.session, [])
        self._sessions.move_to_end(request.session)
        kept.append((request, history))
        self._held += len(history)
        while len(kept) > self._EACH:
            self._held -= len(kept.pop(0)[1])
        while self._held > self._most and len(self._sessions) > 1:
            _, gone = self._sessions.popitem(last=False)
            self._held -= sum(len(each) for _, each in gone)


def _shared_blocks(request: Request, earlier: Request) -> int:
    """How many whole blocks both prompts begin with."""
    most = min(request.input_tokens, earlier.input_tokens) // earlier.block_tokens
    shared = 0
    for (start, length), (other, others) in zip(
        _front(request, most), _front(earlier, most), strict=False
    ):
        if start != other:
            break
        shared += min(length, others)
        if length != others:
            break
    return shared


def _front(request: Request, blocks: int) -> list[tuple[int, int]]:
    """The first `blocks` blocks as runs, joined where they continue each other."""
    front: list[tuple[int, int]] = []
    for start, length in request.runs:
        taken = min(length, blocks)
        if taken <= 0:
            break
        blocks -= taken
        if front and sum(front[-1]) == start:
            front[-1] = (front[-1][0], front[-1][1] + taken)
        else:
            front.append((start, taken))
    return front
