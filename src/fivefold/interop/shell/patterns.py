"""Shell patterns on texts: * ? and [...], without the blow-up that a regular expression could have."""

from __future__ import annotations

_LONGEST, _LONGEST_CUT = 1024, 256


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches. In time pattern x text; long texts match only themselves."""
    if pattern == text:
        return True
    if len(text) > _LONGEST or len(pattern) > _LONGEST:
        return False
    at, here, star, resume = 0, 0, -1, 0
    while here < len(text):
        width, hit = _one(pattern, at, text[here])
        if width and hit:
            at, here = at + width, here + 1
        elif at < len(pattern) and pattern[at] == "*":
            star, resume, at = at, here, at + 1
        elif star >= 0:
            resume += 1
            at, here = star + 1, resume
        else:
            return False
    return not pattern[at:].strip("*")


def _one(pattern: str, at: int, char: str) -> tuple[int, bool]:
    """Width of the pattern's element at `at` (0 for * and the end), and whether it takes `char`."""
    if at >= len(pattern) or pattern[at] == "*":
        return 0, False
    if pattern[at] == "?":
        return 1, True
    if pattern[at] == "\\" and at + 1 < len(pattern):
        return 2, pattern[at + 1] == char
    if pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
        inside = pattern[at + 1 : end]
        negated = inside[:1] in ("!", "^")
        return end + 1 - at, _in_set(inside[negated:], char) != negated
    return 1, pattern[at] == char


def _in_set(inside: str, char: str) -> bool:
    at = 0
    while at < len(inside):
        if at + 2 < len(inside) and inside[at + 1] == "-":
            if inside[at] <= char <= inside[at + 2]:
                return True
            at += 3
        else:
            if inside[at] == char:
                return True
            at += 1
    return False


def without_prefix(text: str, pattern: str, *, longest: bool) -> str:
    """${text#pattern}, or with longest ${text##pattern}."""
    if len(text) > _LONGEST_CUT:
        return text
    ends = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((text[end:] for end in ends if matches(pattern, text[:end])), text)


def without_suffix(text: str, pattern: str, *, longest: bool) -> str:
    """${text%pattern}, or with longest ${text%%pattern}."""
    if len(text) > _LONGEST_CUT:
        return text
    starts = range(len(text) + 1) if longest else range(len(text), -1, -1)
    return next((text[:start] for start in starts if matches(pattern, text[start:])), text)
