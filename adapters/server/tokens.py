"""What stands for a tokenizer: one token a word, and token 123 is the word `w123`.

Text is split at white space. `w123` is token 123 where the vocabulary has so many; any other word
is a token by its checksum. So an answer's text, put into the next prompt, is as many tokens as were
generated, and the same ones. A chat message costs `TEMPLATE_TOKENS` more, which name its role.
"""

from __future__ import annotations

import re
from array import array
from zlib import crc32

from harness.interner import Interner
from harness.prefix import Runs

TEMPLATE_TOKENS = 4
"""Of each chat message, before its words."""
_KNOWN_WORDS = 200_000
_WORD = re.compile(r"w(0|[1-9]\d{0,9})", re.ASCII)
_ODD = 2_654_435_761


class Vocabulary(dict[str, int]):
    """Token ids of words, below `size`. What it has looked up is a cache, and bounded."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __missing__(self, word: str) -> int:
        if len(self) >= _KNOWN_WORDS:
            self.clear()
        found = _WORD.fullmatch(word)
        number = int(found[1]) if found else self.size
        if number >= self.size:
            number = crc32(word.encode("utf-8", "surrogatepass")) % self.size
        self[word] = number
        return number

    def tokens(self, text: str) -> array[int]:
        """Token ids of a text."""
        return array("I", map(self.__getitem__, text.split()))

    def message(self, role: str, text: str) -> array[int]:
        """Token ids of one chat message."""
        return array("I", [self[role]] * TEMPLATE_TOKENS) + self.tokens(text)

    def answer(self, prompt: array[int], count: int) -> list[int]:
        """What is "generated": the same for the same prompt, on any server."""
        seed = crc32(prompt)
        return [(seed + at * _ODD) % 2**32 % self.size for at in range(1, count + 1)]


def word(token: int) -> str:
    """The text of a token of an answer."""
    return f" w{token}"


class Blocks:
    """The block runs of prompts, by what their tokens are.

    It knows the last `most` blocks that were used, some 50 bytes each, whatever the simulated
    caches hold: a prompt that has not been asked for so long is a new one.
    """

    def __init__(self, block_tokens: int, most: int) -> None:
        self.block_tokens = block_tokens
        self._interner = Interner(most)

    def clear(self) -> None:
        """Know nothing; ids that were given are not given again."""
        self._interner.new_scope()

    def runs(self, prompt: array[int]) -> Runs:
        """Of its whole blocks."""
        data = prompt.tobytes()
        size = self.block_tokens * prompt.itemsize
        whole = len(data) // size * size
        ids = [hash(data[at : at + size]) for at in range(0, whole, size)]
        return list(zip(*self._interner.runs(ids), strict=True))
