"""The divisors of a number: what a degree can be that has to divide the GPUs, or a micro-batch the batch."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """All divisors of a number above zero, ascending."""
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
