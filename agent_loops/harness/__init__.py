"""Agents that are command-line programs, each in a workspace of its own: docs/guide/harness.md.

```
 source ──copied──► place (workspace, home, tmp) ──► setup ──► program ⇄ endpoint ⇄ policy
                       │                                          │ ended, with all that it had started
                       ├── collected: changes, files, outputs ────┤──► notes of the trajectory
                       └── scored: by files from outside ─────────┴──► session.report ──► harness:score
```
"""

from __future__ import annotations

from agent_loops.harness.loop import HarnessLoop
from agent_loops.harness.place import Place
from agent_loops.harness.scoring import file_tests, score

__all__ = ["HarnessLoop", "Place", "file_tests", "score"]
