"""Sampling on a CPU, compiled: rows are divided among threads, and no row is sorted."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import njit, prange

_PART = 1024  # logits per part: only the part with the highest logit is searched for its index
GOLDEN, MIX1, MIX2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


@njit(nogil=True, parallel=True, cache=True)
def likeliest(pieces: int, logits: np.ndarray, out: np.ndarray, nothing: int) -> None:
    """Write the id of each row's highest logit, the first of equal ones; `nothing` if no logit is above -inf."""
    for piece in prange(pieces):
        _likeliest(logits, out, nothing, piece, pieces)


@njit(nogil=True)
def _likeliest(logits: np.ndarray, out: np.ndarray, nothing: int, piece: int, pieces: int) -> None:
    rows, vocabulary = logits.shape
    for row in range(piece, rows, pieces):
        best, found = numba.float32(-np.inf), 0
        for start in range(0, vocabulary, _PART):
            peak = _peak(logits[row, start : start + _PART])
            if peak > best:
                best, found = peak, start
        if best > -np.inf:
            while logits[row, found] != best:
                found += 1
            out[row] = found
        else:
            out[row] = nothing


@njit(nogil=True, fastmath={"reassoc", "nsz"})
def _peak(x: np.ndarray) -> Any:
    """Return the highest value, ignoring NaN."""
    best = numba.float32(-np.inf)
    for value in x:
        best = max(best, value)
    return best


@njit(nogil=True, parallel=True, cache=True)
def uniform(pieces: int, keys: np.ndarray, out: np.ndarray) -> None:
    """Write the numbers of sampling.uniform_reference."""
    for piece in prange(pieces):
        _uniform(keys, out, piece, pieces)


@njit(nogil=True)
def _uniform(keys: np.ndarray, out: np.ndarray, piece: int, pieces: int) -> None:
    rows, vocabulary = out.shape
    for row in range(rows):
        first, second = numba.uint32(keys[row, 0]), numba.uint32(keys[row, 1])
        for i in range(vocabulary * piece // pieces, vocabulary * (piece + 1) // pieces):
            x = numba.uint32(numba.uint32(i) * numba.uint32(GOLDEN)) ^ first
            x = numba.uint32((x ^ (x >> numba.uint32(16))) * numba.uint32(MIX1))
            x = numba.uint32(x + second)
            x = numba.uint32((x ^ (x >> numba.uint32(15))) * numba.uint32(MIX2))
            x = x ^ (x >> numba.uint32(16))
            out[row, i] = (numba.float32(x >> numba.uint32(9)) + numba.float32(0.5)) * numba.float32(2.0**-23)


@njit(nogil=True, parallel=True, cache=True)
def penalize(
    pieces: int,
    logits: np.ndarray,
    which: np.ndarray,
    history: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    repetition: np.ndarray,
    presence: np.ndarray,
    frequency: np.ndarray,
) -> None:
    """Compute sampling.penalize_reference_, visiting only the tokens of the history."""
    for piece in prange(pieces):
        _penalize(
            logits, which, history, prompt_lengths, lengths, repetition, presence, frequency, piece, pieces
        )  # fmt: skip


@njit(nogil=True)
def _penalize(
    logits: np.ndarray,
    which: np.ndarray,
    history: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    repetition: np.ndarray,
    presence: np.ndarray,
    frequency: np.ndarray,
    piece: int,
    pieces: int,
) -> None:
    is_seen = np.zeros(logits.shape[1], np.bool_)
    counts = np.zeros(logits.shape[1], np.int32)
    for row in range(piece, which.size, pieces):
        tokens = history[row, : lengths[row]]
        for i in range(prompt_lengths[row], tokens.size):
            counts[tokens[i]] += 1
        for token in tokens:
            if is_seen[token]:
                continue
            is_seen[token] = True
            x = logits[which[row], token]
            x = x / repetition[row] if x > 0 else x * repetition[row]
            if counts[token]:
                x -= frequency[row] * numba.float32(counts[token])
                x -= presence[row]
            logits[which[row], token] = x
        for token in tokens:
            is_seen[token], counts[token] = False, 0


@njit(nogil=True, parallel=True, cache=True)
def keep_likeliest(pieces: int, logits: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> None:
    """Write -inf to the tokens that min_p, top_k (0: all) or top_p drops; of equal logits the lowest ids are kept."""
    for piece in prange(pieces):
        _keep_likeliest(logits, top_k, top_p, min_p, piece, pieces)


@njit(nogil=True)
def _keep_likeliest(
    logits: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, piece: int, pieces: int
) -> None:
    rows, vocabulary = logits.shape
    values, weights = np.empty(vocabulary, np.float32), np.empty(vocabulary)
    for row in range(piece, rows, pieces):
        x = logits[row]
        if min_p[row] > 0:
            _cut(x, _peak(x) + np.log(min_p[row]), vocabulary)
        if 0 < top_k[row] < vocabulary:
            count = _gather(x, values)
            weights[:count] = 1.0
            if count > top_k[row]:
                _cut(x, *_find_cut(values, weights, count, float(top_k[row])))
        if top_p[row] < 1:
            count = _gather(x, values)
            peak = _peak(values[:count])
            total = 0.0
            for i in range(count):
                weights[i] = np.exp(values[i] - peak)
                total += weights[i]
            if count:
                _cut(x, *_find_cut(values, weights, count, float(top_p[row]) * total))


@njit(nogil=True)
def _gather(x: np.ndarray, values: np.ndarray) -> int:
    """Copy the values above -inf and return their number."""
    count = 0
    for value in x:
        if value > -np.inf:
            values[count] = value
            count += 1
    return count


@njit(nogil=True)
def _find_cut(values: np.ndarray, weights: np.ndarray, count: int, goal: float) -> tuple[Any, int]:
    """Find the value at which the summed weight of the highest values reaches `goal`, and how many equal ones to keep.

    Quickselect: partition as in quicksort, then continue in one part only, in linear time.
    """
    first, end, above = 0, count, 0.0
    while True:
        pivot = _median(values[first], values[(first + end) // 2], values[end - 1])
        # [first, left) is higher than the pivot, [left, at) equal to it, [right, end) lower
        left, at, right = first, first, end
        higher, equal = 0.0, 0.0
        while at < right:
            value, weight = values[at], weights[at]
            if value > pivot:
                values[at], weights[at] = values[left], weights[left]
                values[left], weights[left] = value, weight
                higher += weight
                left += 1
                at += 1
            elif value < pivot:
                right -= 1
                values[at], weights[at] = values[right], weights[right]
                values[right], weights[right] = value, weight
            else:
                equal += weight
                at += 1
        if left > first and above + higher >= goal:
            end = left
        elif right == end or above + higher + equal >= goal:
            alike = right - left
            each = equal / alike
            needed = np.ceil((goal - above - higher) / each) if each > 0 else 1.0
            return pivot, int(min(max(needed, 1.0), alike))
        else:
            above += higher + equal
            first = right


@njit(nogil=True)
def _median(a: Any, b: Any, c: Any) -> Any:
    return max(min(a, b), min(max(a, b), c))


@njit(nogil=True)
def _cut(x: np.ndarray, lowest: Any, needed: int) -> None:
    """Write -inf to all values below `lowest`, and to those equal to it after the first `needed`."""
    for i in range(x.size):
        if x[i] == lowest and needed > 0:
            needed -= 1
        elif not x[i] > lowest:
            x[i] = -np.inf
