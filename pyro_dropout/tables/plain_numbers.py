"""A whole column of plain numbers, such as -2.5e3, parsed at once, and how its texts look.

Eight digits are read with a few operations on one 64-bit word, as in simdjson. A number with at most 19 digits is then
m / 10^k with whole m and k. Its nearest float64 is the quotient q plus what is left of the division, which is computed
exactly; where that is too close to the middle between two numbers, and for all other texts, Python decides.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyro_dropout.tables.cells import EXACT
from pyro_dropout.tables.notation import fits

Bytes = NDArray[np.character]  # bytes_ would say that the texts have no length, for a checker of types at run time
_Words = NDArray[np.uint64]
_Bytes = NDArray[np.uint8]

_PADDED = re.compile(rb"[-+]?0[0-9]+")
_FEW = 100  # texts that are looked at one by one before all of them
_CHUNK = 2**14  # texts that are parsed at once: what is computed of them stays in the cache
_DIGITS = 19  # that fit into 64 bits
_ONES = np.uint64(0x0101010101010101)  # times a byte: that byte eight times
_HIGH = np.uint64(0x8080808080808080)
_POWERS = 10 ** np.arange(_DIGITS + 1, dtype=np.uint64)
_TENS = np.array([float(10**k) for k in range(23)])  # those that float64 holds exactly
_HALF = 2.0**27 + 1  # splits a float64 into two halves, whose products are exact (Veltkamp)


def plain_numbers(array: Bytes) -> NDArray[np.float64] | None:
    """Return texts as numbers, if all of them are plain numbers that float64 holds exactly; else None.

    Args:
        array: the texts, filled up with zeros to a multiple of eight bytes.

    Example:
        >>> plain_numbers(np.array([b"2.50", b"-1e3"], "S8")), plain_numbers(np.array([b"1_000"], "S8"))
        (array([    2.5, -1000. ]), None)
    """
    if _by_python(array[:_FEW]) is None:
        return None
    values, sure = np.empty(len(array)), np.empty(len(array), np.bool_)
    for start in range(0, len(array), _CHUNK):
        some = slice(start, start + _CHUNK)
        values[some], sure[some] = _decimals(array[some])
    rest = np.flatnonzero(~sure)
    if len(rest):
        others = _by_python(array[rest])
        if others is None:
            return None
        values[rest] = others
    return values if bool((np.abs(values) < EXACT).all()) else None


def _by_python(array: Bytes) -> NDArray[np.float64] | None:
    if bool((array.view(np.uint8) == ord("_")).any()):  # 1_000 is a number only in Python
        return None
    try:
        return array.astype(np.float64)
    except ValueError:
        return None


# --- digits with a point ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Of each text: its words, whether it begins with a sign, where its first point is (its end if none), its end."""

    words: _Words
    signed: NDArray[np.bool_]
    point: _Bytes
    end: _Bytes


def _layout(array: Bytes) -> _Layout:
    """Return how texts in ASCII look."""
    words = np.ascontiguousarray(array.view("<u8").reshape(len(array), array.itemsize // 8).T)
    begin = words[0] & np.uint64(0xFF)
    point, end = np.zeros(len(array), np.uint8), np.zeros(len(array), np.uint8)
    for word in words[::-1]:
        other = word ^ _eight_times(".")
        found = (other - _ONES) & ~other & _HIGH  # the lowest bit is in the first byte that is zero
        place = np.bitwise_count((found & -found) - np.uint64(1)) >> 3  # 8 if none is
        point = np.where(place == 8, point + np.uint8(8), place)
        end += np.bitwise_count((word + (_HIGH - _ONES)) & _HIGH)
    return _Layout(words, (begin == ord("-")) | (begin == ord("+")), np.minimum(point, end), end)


def _decimals(array: Bytes) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the numbers of texts that are a sign, digits and a point, and which of the texts are."""
    look = _layout(array)
    if np.bitwise_or.reduce(look.words, axis=None) & _HIGH:  # other letters than those of ASCII
        return np.zeros(len(array)), np.zeros(len(array), np.bool_)
    after = look.end - look.point
    part = np.maximum(after, 1) - np.uint8(1)  # digits after the point
    count = look.end - (after > 0) - look.signed
    digits = _digits_only(look)
    sure = (count > 0) & (count - (digits[0] & np.uint64(0xFF) == ord("0")) <= _DIGITS)
    m = np.zeros(len(array), np.uint64)
    for place, word in enumerate(digits):
        here = np.minimum(count, 8 * place + 8) - np.minimum(count, 8 * place)
        number, good = _eight(word, here.astype(np.uint64))
        m = m * _POWERS[here] + number if place else number
        sure &= good
    values = m.astype(np.float64) / _TENS[np.minimum(part, len(_TENS) - 1)]
    long = np.flatnonzero(sure & (m >= np.uint64(EXACT)))
    if len(long):
        values[long], sure[long] = _divided(m[long], _TENS[part[long]])
    np.negative(values, out=values, where=look.words[0] & np.uint64(0xFF) == ord("-"))
    return values, sure


def _digits_only(look: _Layout) -> _Words:
    """Return the words of texts without their sign and their point; what follows them moves up."""
    after = np.append(look.words[1:], np.zeros_like(look.words[:1]), axis=0)
    moved = (look.words >> np.uint64(8)) | (after << np.uint64(56))
    bits = (
        np.stack([np.maximum(look.point, 8 * place) - 8 * place for place in range(len(moved))]).astype(np.uint64) * 8
    )
    before: _Words = np.left_shift(np.uint64(1), bits) - np.uint64(1)  # a shift by 64 bits leaves nothing
    digits: _Words = moved ^ ((look.words ^ moved) & before)
    if not look.signed.any():
        return digits
    sign = look.signed.astype(np.uint64) * np.uint64(8)
    after = np.append(digits[1:], np.zeros_like(digits[:1]), axis=0)
    unsigned: _Words = (digits >> sign) | np.left_shift(after, np.uint64(64) - sign)
    return unsigned


def _eight(word: _Words, count: _Words) -> tuple[_Words, NDArray[np.bool_]]:
    """Return the numbers that the first digits of words make, at most eight, and whether all of them are digits."""
    digits = (word ^ _eight_times("0")) << (np.uint64(64) - count * np.uint64(8))
    good = ((digits + _ONES * np.uint64(0x76)) | digits) & _HIGH == 0
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    every = np.uint64(0x000000FF000000FF)
    fours = (pairs & every) * np.uint64(0x000F424000000064)
    fours += ((pairs >> np.uint64(16)) & every) * np.uint64(0x0000271000000001)
    return fours >> np.uint64(32), good


def _eight_times(letter: str) -> np.uint64:
    return _ONES * np.uint64(ord(letter))


def _divided(m: _Words, tens: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the float64 nearest to whole numbers divided by powers of ten, and where it is certain."""
    high = m.astype(np.float64)
    low = (m - high.astype(np.uint64)).view(np.int64).astype(np.float64)
    q = high / tens
    q_high, tens_high = (x * _HALF - (x * _HALF - x) for x in (q, tens))
    q_low, tens_low = q - q_high, tens - tens_high
    product = q * tens
    error = ((q_high * tens_high - product) + q_high * tens_low + q_low * tens_high) + q_low * tens_low
    more = (((high - product) - error) + low) / tens  # what q leaves, up to three roundings
    doubt = np.abs(more) * 2.0**-50
    return q + more, q + (more - doubt) == q + (more + doubt)


# --- how they are written ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """How the texts of a column of plain numbers look.

    Attributes:
        padded: whether some whole numbers begin with a zero, as codes do.
        marked: the first place with a point; None if there is none.
        pointed: whether all points may separate thousands, as in 1.200.
    """

    padded: bool
    marked: int | None
    pointed: bool


def written(array: Bytes) -> Written:
    """Return how plain numbers are written.

    Example:
        >>> written(np.array([b"007", b"1.200"], "S8"))
        Written(padded=True, marked=1, pointed=True)
    """
    marked, pointed = None, True
    for start in range(0, len(array), _CHUNK):
        look = _layout(array[start : start + _CHUNK])
        has = look.point < look.end
        if marked is None and has.any():
            marked = start + int(has.argmax())
        pointed = pointed and _pointed(array[start : start + _CHUNK], look, has)
        if marked is not None and not pointed:
            break
    return Written(_padded(array), marked, pointed)


def _padded(array: Bytes) -> bool:
    words = array.view("<u8")[:: array.itemsize // 8]
    for start in range(0, len(array), _CHUNK):
        word = words[start : start + _CHUNK]
        signed = (word & np.uint64(0xFF) == ord("-")) | (word & np.uint64(0xFF) == ord("+"))
        begin = word >> (signed * np.uint64(8))
        second = (begin >> np.uint64(8)) & np.uint64(0xFF)
        zeros = (begin & np.uint64(0xFF) == ord("0")) & (second >= ord("0")) & (second <= ord("9"))
        if any(_PADDED.fullmatch(array[start + place]) for place in np.flatnonzero(zeros).tolist()):
            return True
    return False


def _pointed(array: Bytes, look: _Layout, has: NDArray[np.bool_]) -> bool:
    if bool(((array.view(np.uint8) | 32) == ord("e")).any()):
        return all(fits(text.decode(), ",", ".") for text in array.tolist())
    first = (look.words[0] >> (look.signed * np.uint64(8))) & np.uint64(0xFF)
    before, after = look.point - look.signed, look.end - look.point
    groups = (before >= 1) & (before <= 3) & (first != ord("0")) & (after == 4)
    return bool((groups | ~has).all())
