"""The ngram drafter: prompt lookup, in a sequence's own tokens and then in recent answers with the same salt."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from chairlift.core.drafting import NOTHING, Drafter, Proposal
from chairlift.core.request import Sequence

_LEAST = 3  # tokens of a match; two or one only where there is none
_MOST = 32  # tokens that are compared: a longer match is not better
_TRIED = 16  # earlier places that are compared
_BUCKETS = 1 << 12  # of the hash table of one text
_AT_ONCE = 2048  # tokens indexed in one call, so that a long prompt does not delay a step
_END = -1  # a token that matches none: the end of an answer, or of a prediction
_SHARED = 1 << 14  # tokens of recent answers in one generation of an index
_SALTS = 64  # with an index of recent answers
_GRADES = (6, 10, 16)  # lengths of a match at which a proposal's grade rises
_PAIR, _SINGLE = 8, 9  # grades of matches of two tokens and of one
_AFTER_PAIR, _AFTER_SINGLE = 4, 2  # drafts after them: few, which pay where another token costs almost no time


class Text:
    """A growing list of tokens in which the places of every n-gram are found by hash, the latest first.

    The index is that of LZ77: for each hash the last place, and for each place the one before with the same hash.
    """

    __slots__ = ("_before", "_last", "_pairs", "_singles", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._last = array("i", (-1,)) * _BUCKETS
        self._before = array("i")  # the place before, of each indexed place: a place is that of an n-gram's last token
        # The last places of two tokens and of one, without those at the end of the text.
        self._pairs = array("i", (-1,)) * _BUCKETS
        self._singles = array("i", (-1,)) * _BUCKETS

    def index(self) -> bool:
        """Index the next tokens; return whether all are indexed."""
        tokens, last, before = self.tokens, self._last, self._before
        pairs, singles = self._pairs, self._singles
        begin = len(before)
        end = min(len(tokens), begin + _AT_ONCE)
        a, b = (tokens[begin - 2], tokens[begin - 1]) if begin > 1 else (_END, _END)
        if begin == 1:
            b = tokens[0]
        for place in range(begin, end):
            c = tokens[place]
            bucket = (a * 2654435761 ^ b * 40503 ^ c * 69069) >> 3 & _BUCKETS - 1
            before.append(last[bucket])
            last[bucket] = place
            pairs[(a * 40503 ^ b * 69069) >> 3 & _BUCKETS - 1] = place - 1
            singles[b & _BUCKETS - 1] = place - 1
            a, b = b, c
        return end == len(tokens)

    def find(self, own: list[int], end: int) -> tuple[int, int]:
        """Return the place behind the longest match with the tail of `own`, and its length; (0, 0) if there is none.

        Only places before `end` count. Of equally long matches, the latest.
        """
        tokens = self.tokens
        a, b, c = own[-3], own[-2], own[-1]
        place = self._last[(a * 2654435761 ^ b * 40503 ^ c * 69069) >> 3 & _BUCKETS - 1]
        best = found = tried = 0
        while place >= 0 and tried < _TRIED:
            if place < end:
                tried += 1
                if place > 1 and tokens[place] == c and tokens[place - 1] == b and tokens[place - 2] == a:
                    length = _LEAST
                    most = min(_MOST, place + 1, len(own))
                    while length < most and tokens[place - length] == own[-1 - length]:
                        length += 1
                    if length > best:
                        best, found = length, place + 1
                        if length == _MOST:
                            break
            place = self._before[place]
        return found, best

    def find_short(self) -> tuple[int, int]:
        """Return the place behind the last earlier occurrence of the text's last two tokens, or of its last one."""
        tokens = self.tokens
        b, c = tokens[-2], tokens[-1]
        place = self._pairs[(b * 40503 ^ c * 69069) >> 3 & _BUCKETS - 1]
        if place > 0 and tokens[place] == c and tokens[place - 1] == b:
            return place + 1, 2
        place = self._singles[c & _BUCKETS - 1]
        return (place + 1, 1) if place >= 0 and tokens[place] == c else (0, 0)


class NgramDrafter(Drafter):
    """Proposes the tokens behind the longest earlier match of a sequence's last tokens. It runs on the host alone."""

    seconds = 1e-5

    def __init__(self) -> None:
        self._texts: dict[Sequence, Text] = {}
        self._shared: OrderedDict[str, list[Text]] = OrderedDict()  # by salt: the present generation and the one before

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """Look the last tokens up in the sequence's own text, then in recent answers."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Text(_opening(sequence))
        tokens, known = text.tokens, sequence.tokens
        # What is behind the opening is the sequence itself.
        tokens += known[len(tokens) - _opened(sequence) :]
        if not text.index() or len(known) < _LEAST:
            return NOTHING
        place, length = text.find(known, len(tokens) - 1)
        if length:
            return Proposal(_continued(tokens, place, most), _grade(length))
        for shared in self._shared.get(sequence.request.salt, ()):
            place, length = shared.find(known, len(shared.tokens) - 1)
            if length:
                return Proposal(_cut(shared.tokens[place : place + most]), _grade(length) + 4)
        place, length = text.find_short()
        if not length:
            return NOTHING
        grade, best = (_PAIR, _AFTER_PAIR) if length == 2 else (_SINGLE, _AFTER_SINGLE)
        return Proposal(_continued(tokens, place, min(most, best)), grade)

    def ended(self, sequence: Sequence) -> None:
        """Index the answer for later requests with the same salt."""
        if self._texts.pop(sequence, None) is None:
            return
        salt = sequence.request.salt
        generations = self._shared.setdefault(salt, [Text([])])
        self._shared.move_to_end(salt)
        if len(generations[0].tokens) >= _SHARED:
            generations[:] = [Text([]), generations[0]]
        first = generations[0]
        # The prompt's last tokens tell where an answer begins.
        start = max(sequence.prompt_length - _LEAST, len(sequence.tokens) - _AT_ONCE + 1, 0)
        first.tokens += [*sequence.tokens[start:], _END]
        first.index()
        if len(self._shared) > _SALTS:
            self._shared.popitem(last=False)


def _opening(sequence: Sequence) -> list[int]:
    """Return the client's prediction of the answer, behind the prompt's last tokens: there it is to be found."""
    predicted = sequence.request.prediction
    return [*sequence.request.prompt[-_LEAST:], *predicted, _END] if predicted else []


def _opened(sequence: Sequence) -> int:
    predicted = sequence.request.prediction
    return min(_LEAST, sequence.prompt_length) + len(predicted) + 1 if predicted else 0


def _continued(tokens: list[int], place: int, most: int) -> list[int]:
    """Return the tokens from `place` on; at the text's end, those from `place` on again: it may repeat itself."""
    found = tokens[place : place + most]
    while len(found) < most:
        found += found[: most - len(found)]
    return _cut(found)


def _cut(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(_END)] if _END in tokens else tokens


def _grade(length: int) -> int:
    return sum(length >= each for each in _GRADES)
