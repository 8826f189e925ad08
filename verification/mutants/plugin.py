"""A plugin of pytest that applies the mutant that the environment names: `ASYNC_RL_MUTANT`."""

from __future__ import annotations

import os
from pathlib import Path

from verification.mutants.patching import apply_mutant
from verification.mutants.table import MUTANTS

NAME, REACHED = "ASYNC_RL_MUTANT", "ASYNC_RL_MUTANT_REACHED"
"""The mutant's name, and a file that exists once what replaces its function was called."""

# As pytest imports it, before it collects tests, so that they import what was replaced.
if name := os.environ.get(NAME):
    apply_mutant(MUTANTS[name], Path(os.environ[REACHED]).touch)
