"""Candidate regions for the matches of a regular expression: around literal words that every match contains.

Searching for words is fast and matching patterns is slow, so a rule for secrets is applied only around its words, which
are derived from the rule itself. A rule without such words is applied to the whole text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from re import _constants as codes, _parser as parser  # type: ignore[attr-defined]  # isort: skip

MOST_WORDS, MOST_IN_A_CLASS = 60, 8
REACH = 1200  # characters from a word to either end of a match of unbounded length

Words = frozenset[str]
EMPTY: Words = frozenset({""})


@dataclass(frozen=True)
class Anchors:
    """The words of a rule.

    Args:
        words: Every match contains at least one of them; None if there are no such words.
        reach: Maximum number of characters from a word to either end of the match.
        ignores_case: Whether the words are compared in lower case.
    """

    words: Words | None
    reach: int
    ignores_case: bool

    def regions(self, text: str, lowered: str) -> Iterator[tuple[int, int]]:
        """Yield the regions of a text that can contain a match.

        Args:
            text: The text to search.
            lowered: The same text in lower case, with the same positions.
        """
        if self.words is None:
            yield 0, len(text)
            return
        within = lowered if self.ignores_case else text
        found = sorted(region for word in self.words for region in self._regions_of(word, within))
        start, end = 0, -1
        for left, right in found:
            if left > end:
                if end >= 0:
                    yield start, end
                start, end = left, right
            else:
                end = max(end, right)
        if end >= 0:
            yield start, end

    def _regions_of(self, word: str, text: str) -> Iterator[tuple[int, int]]:
        first = text.find(word)
        while first >= 0:
            last = first
            while (further := text.rfind(word, last + 1, last + self.reach + len(word))) > last:
                last = further
            yield max(0, first - self.reach), last + len(word) + self.reach
            first = text.find(word, last + 1)


def anchors_of(pattern: re.Pattern[str], reach: int = REACH) -> Anchors:
    """Return the words of a rule.

    Args:
        pattern: The compiled rule.
        reach: Limit for matches of unbounded length.
    """
    parsed = parser.parse(pattern.pattern, pattern.flags)
    words = _words(parsed)
    ignores_case = bool(pattern.flags & re.IGNORECASE) or "(?i" in pattern.pattern
    if words is not None and ignores_case:
        words = frozenset(word.lower() for word in words)
    return Anchors(words, min(int(parsed.getwidth()[1]), reach) + 2, ignores_case)


def lower(text: str) -> str:
    """Return a text in lower case as `re.IGNORECASE` compares it, with the position of every character unchanged."""
    # The first is the only letter whose lower case is two characters; rules also take the others for i and s.
    return text.replace("\u0130", "i").replace("\u0131", "i").replace("\u017f", "s").lower()


def _words(parsed: Any) -> Words | None:
    """Return words of which every match contains one: from the part of a sequence whose shortest word is longest."""
    best, current = None, EMPTY
    for operation, argument in parsed:
        whole = _literals(operation, argument)
        if whole is not None and len(current) * len(whole) <= MOST_WORDS:
            current = _joined(current, whole)
            continue
        for words in (current, whole, _joined(current, _beginnings(operation, argument)), _inside(operation, argument)):
            best = _better(best, words)
        current = EMPTY
    return _better(best, current)


def _inside(operation: Any, argument: Any) -> Words | None:
    if operation is codes.SUBPATTERN:
        return _words(argument[-1])
    if operation is codes.BRANCH:
        branches = [words for words in map(_words, argument[1]) if words is not None]
        return frozenset().union(*branches) if len(branches) == len(argument[1]) else None
    if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT) and argument[0] > 0:
        return _words(argument[2])
    return None


def _literals(operation: Any, argument: Any) -> Words | None:
    """Return every text that a part matches; None if there are many."""
    if operation is codes.LITERAL:
        return frozenset({chr(argument)})
    if operation in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
        return EMPTY
    if (
        operation is codes.IN
        and len(argument) <= MOST_IN_A_CLASS
        and all(kind is codes.LITERAL for kind, _ in argument)
    ):
        return frozenset(chr(letter) for _, letter in argument)
    if operation is codes.BRANCH:
        branches = [words for words in map(_literals_of, argument[1]) if words is not None]
        return frozenset().union(*branches) if len(branches) == len(argument[1]) else None
    if operation is codes.SUBPATTERN:
        return _literals_of(argument[-1])
    if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT) and argument[1] == 1:
        words = _literals_of(argument[2])
        return words if words is None or argument[0] == 1 else words | EMPTY
    return None


def _literals_of(parsed: Any) -> Words | None:
    texts = EMPTY
    for operation, argument in parsed:
        more = _literals(operation, argument)
        if more is None or len(texts) * len(more) > MOST_WORDS:
            return None
        texts = _joined(texts, more)
    return texts


def _beginnings(operation: Any, argument: Any) -> Words:
    """Return prefixes such that every match of a part begins with one of them."""
    branches = argument[1] if operation is codes.BRANCH else [argument[-1]] if operation is codes.SUBPATTERN else []
    found: Words = frozenset() if branches else EMPTY
    for branch in branches:
        texts = EMPTY
        for part in branch:
            whole = _literals(*part)
            if whole is None:
                texts = _joined(texts, _beginnings(*part))
                break
            texts = _joined(texts, whole)
        found |= texts
    return found


def _joined(one: Words, other: Words) -> Words:
    return frozenset(first + second for first in one for second in other)


def _better(one: Words | None, other: Words | None) -> Words | None:
    if other is None or not all(other):
        return one
    other = frozenset(word for word in other if not any(part != word and part in word for part in other))
    if len(other) > MOST_WORDS:
        return one
    return other if one is None or min(map(len, other)) > min(map(len, one)) else one
