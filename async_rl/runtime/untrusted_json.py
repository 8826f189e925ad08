"""What decoding JSON of another program can raise."""

from __future__ import annotations

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""For JSON of another form, text that is not UTF-8, and values that are nested too deep (msgspec 0.21)."""
