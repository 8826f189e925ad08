"""Keep warnings of installed packages out of the logs of a run, which are for the run's user."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = frozenset({"site-packages", "dist-packages"})


def hide_package_warnings() -> None:
    """Show, from now on, only warnings about code that is not in an installed package.

    Megatron-Core, torch and SGLang warn of packages that they could use and of functions of one another,
    about which the user of a run can do nothing. Errors, and what packages log, stay.
    """
    show = warnings.showwarning

    def show_own(
        message: Warning | str, category: type[Warning], filename: str, *details: Any, **more: Any
    ) -> None:
        if not _PACKAGES & set(Path(filename).parts):
            show(message, category, filename, *details, **more)

    warnings.showwarning = show_own
