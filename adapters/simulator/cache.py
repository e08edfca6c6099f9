"""What is kept of past prompts, and of the answers to them, where prefill or decoding happens."""

from __future__ import annotations

from collections import OrderedDict

from adapters.simulator.costs import KvBytes, require
from harness.backend import Request
from harness.prefix import PrefixCache, Runs
from harness.settings import number


class KvCache:
    """A prefix cache of `cache_bytes`, looked up in tokens. One of 0 bytes keeps nothing.

    With `keeps_answers` it keeps the KV of generated tokens, too. The ids of their blocks are not
    known until the session's next prompt carries them, so of each session it remembers its last
    prompt and how long that was with its answer. Assumed: a prompt of the session that begins with
    the whole blocks of that one carries the answer verbatim, and the answer is held as long as
    they are. Until then answers, short beside their prompts, take no room of the cache.
    """

    MOST_SESSIONS = 65_536
    """Of so many sessions it remembers the answer: of those answered last."""

    def __init__(self, kv: KvBytes, cache_bytes: float, keeps_answers: bool = False) -> None:
        require(isinstance(kv, KvBytes), "cache.kv", kv, "a model's KV bytes")
        number("cache.cache_bytes", cache_bytes, least=0)
        require(
            isinstance(keeps_answers, bool), "cache.keeps_answers", keeps_answers, "true or false"
        )
        self.kv = kv
        self.cache_bytes = cache_bytes
        self.keeps_answers = keeps_answers
        self.clear()

    def clear(self) -> None:
        """Cold."""
        self._start_anew(0)

    @property
    def held(self) -> int:
        """Blocks now in it."""
        return self._blocks.held

    @property
    def evicted(self) -> int:
        """Blocks pushed out since it was cold."""
        return self._blocks.evicted

    def look_up(self, request: Request) -> int:
        """Tokens at the front of the prompt that are here. Does not count as a use."""
        if request.block_tokens != self._block_tokens:
            self._start_anew(request.block_tokens)
        held = self._blocks.match(request.runs)
        if request.session in self._answers:
            held = max(held, self._with_answer(request, held))
        return min(held * request.block_tokens, request.input_tokens)

    def once_held(self, request: Request) -> int:
        """Tokens at the front of the prompt that are here, or were and have been evicted."""
        held = self.look_up(request)
        once = self._blocks.once_held(request.runs)
        return max(held, min(once * request.block_tokens, request.input_tokens))

    def keep(self, request: Request) -> None:
        """The KV of the prompt is here."""
        if request.block_tokens != self._block_tokens:
            self._start_anew(request.block_tokens)
        if self.cache_bytes:
            self._blocks.insert(request.runs)

    def keep_answer(self, request: Request, tokens: int) -> None:
        """The KV of the prompt and of the `tokens` generated after it is here."""
        if not self.keeps_answers:
            return
        self.keep(request)
        whole = request.input_tokens // request.block_tokens
        answers = self._answers
        answers.pop(request.session, None)
        answers[request.session] = (
            whole, _block_id(request.runs, whole), request.input_tokens + tokens
        )  # fmt: skip
        if len(answers) > self.MOST_SESSIONS:
            answers.popitem(last=False)

    def _start_anew(self, block_tokens: int) -> None:
        """Cold, for blocks of this size."""
        self._block_tokens = block_tokens
        capacity = self.kv.blocks(self.cache_bytes, block_tokens) if block_tokens else 0
        self._blocks = PrefixCache(capacity)
        self._answers: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        """Session: whole blocks of its last prompt, id of the last, tokens with the answer."""

    def _with_answer(self, request: Request, held: int) -> int:
        """Blocks held, those of the session's last answer included."""
        whole, last_id, tokens = self._answers[request.session]
        if not 0 < whole <= held or _block_id(request.runs, whole) != last_id:
            return held
        return max(held, min(tokens, request.input_tokens) // request.block_tokens)


def _block_id(runs: Runs, number: int) -> int:
    """The id of a prompt's block, numbered from 1; -1 where it has no such block."""
    for start, length in runs:
        if number <= length:
            return start + number - 1
        number -= length
    return -1
