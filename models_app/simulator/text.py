"""Text without a model: a reversible tokenizer, about four characters a token, and prose that depends on the prompt
alone.

The same prompt gives the same words whatever happens to the request on the way: that is how tests see that preemption,
limits and restarts change no answer.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Sequence

CHUNK_BYTES = 5
#: Token ids below this are whole pieces of the vocabulary, those above carry up to five bytes in themselves.
FIRST_RAW_ID = 1 << 12
_MASK = (1 << 64) - 1

_DETERMINERS = ("The", "A", "Every", "One", "This", "That", "Each", "Some")
_ADJECTIVES = (
    "small", "quiet", "patient", "bright", "careful", "shared", "distant", "steady",
    "curious", "plain", "warm", "early", "narrow", "gentle", "simple", "second",
)  # fmt: skip
_NOUNS = (
    "engine", "token", "page", "block", "request", "answer", "question", "river", "garden", "model", "signal", "letter",
    "window", "bridge", "lantern", "meadow",
)  # fmt: skip
_ADVERBS = ("slowly", "often", "rarely", "gladly", "always", "never", "quickly", "calmly")
_VERBS = (
    "follows", "carries", "remembers", "finds", "holds", "crosses", "keeps", "counts", "opens", "reads", "leaves",
    "turns", "draws", "brings", "watches", "mends",
)  # fmt: skip
_LINKS = ("near", "beyond", "under", "without", "before", "after", "behind", "between")
_SLOTS = (_DETERMINERS, _ADJECTIVES, _NOUNS, _ADVERBS, _VERBS, _ADJECTIVES, _NOUNS, _LINKS, _NOUNS)
_SENTENCES_A_PARAGRAPH = 5

_WORDS = sorted({word for slot in _SLOTS for word in slot})
_VOCABULARY = [prefix + word for word in _WORDS for prefix in ("", " ")]
_IDS = {word: number for number, word in enumerate(_VOCABULARY)}
_PIECES = re.compile(r" ?[A-Za-z]+|[^A-Za-z]+")


def encode(text: str) -> list[int]:
    """Token ids of a text; ``decode`` gives the text back."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        known = _IDS.get(piece)
        if known is not None:
            ids.append(known)
            continue
        raw = piece.encode()
        ids += (_raw_id(raw[start : start + CHUNK_BYTES]) for start in range(0, len(raw), CHUNK_BYTES))
    return ids


def _raw_id(chunk: bytes) -> int:
    # A leading 1 keeps the length of the chunk.
    return FIRST_RAW_ID + int.from_bytes(b"\x01" + chunk, "big")


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; ids that no text has are shown as U+FFFD."""
    raw = b"".join(_bytes_of(number) for number in ids)
    return raw.decode("utf-8", "replace")


def _bytes_of(number: int) -> bytes:
    if 0 <= number < len(_VOCABULARY):
        return _VOCABULARY[number].encode()
    value = number - FIRST_RAW_ID
    length = (value.bit_length() - 1) // 8
    if value <= 0 or not 1 <= length <= CHUNK_BYTES or value >> (8 * length) != 1:
        return "\ufffd".encode()
    return (value - (1 << (8 * length))).to_bytes(length, "big")


def seed_of(ids: Sequence[int], *extra: object) -> int:
    """A number that stands for this prompt (and ``extra``: the choice's index, a given seed); alike in every
    process.
    """
    raw = array("q", ids).tobytes() + repr(extra).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def word(seed: int, number: int) -> str:
    """The ``number``-th token of the prose that belongs to ``seed``, with its leading blank."""
    sentence, slot = divmod(number, len(_SLOTS))
    words = _SLOTS[slot]
    chosen = words[_mixed(seed ^ _mixed(number)) % len(words)]
    last = "." if slot == len(_SLOTS) - 1 else ""
    if slot or not number:
        return (" " if number else "") + chosen + last
    return ("\n\n" if sentence % _SENTENCES_A_PARAGRAPH == 0 else " ") + chosen


def natural_length(seed: int) -> int:
    """How many tokens the answer has when nobody limits it: whole sentences, 5 to 24 of them."""
    return len(_SLOTS) * (5 + _mixed(seed ^ 0x5EED) % 20)


def block_hashes(ids: Sequence[int], block_tokens: int) -> list[int]:
    """A number for each full block that stands for everything up to its end: what a prefix cache is keyed by."""
    hashes = []
    state = 0
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        state = hash((state, *ids[start : start + block_tokens]))
        hashes.append(state)
    return hashes


def unit_vector(seed: int, size: int) -> list[float]:
    """A deterministic vector of length 1."""
    raw = []
    state = seed
    for _ in range(size):
        state = _mixed(state)
        raw.append(state / 2**63 - 1.0)
    norm = sum(value * value for value in raw) ** 0.5 or 1.0
    return [round(value / norm, 8) for value in raw]
