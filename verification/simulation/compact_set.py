"""A set of counted ids in one bit each, so that checks over a long run take no memory."""

from __future__ import annotations

from collections.abc import Iterable


class CompactSet:
    """Numbers, and names that are hexadecimal numbers as the simulation counts them; others are kept whole.

    Example:
        >>> seen = CompactSet()
        >>> seen.update([f"{7:032x}"])
        >>> f"{7:032x}" in seen, len(seen)
        (True, 1)
    """

    def __init__(self) -> None:
        self._bits = bytearray()
        self._others: set[str] = set()
        self._count = 0

    def add(self, member: str | int) -> None:
        """Add a member."""
        number = _number(member)
        if number is None:
            self._count += member not in self._others
            self._others.add(str(member))
            return
        byte, bit = divmod(number, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        if not self._bits[byte] >> bit & 1:
            self._bits[byte] |= 1 << bit
            self._count += 1

    def discard(self, number: int) -> None:
        """Remove a number if it is a member."""
        if number in self:
            self._bits[number // 8] &= ~(1 << number % 8)
            self._count -= 1

    def update(self, members: Iterable[str | int]) -> None:
        """Add many."""
        for member in members:
            self.add(member)

    def __contains__(self, member: str | int) -> bool:
        number = _number(member)
        if number is None:
            return member in self._others
        byte, bit = divmod(number, 8)
        return byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def __len__(self) -> int:
        return self._count


def _number(member: str | int) -> int | None:
    """The number of a member; None for the name of a branch, `00a1.2`."""
    if isinstance(member, int):
        return member
    return None if "." in member else int(member, 16)
