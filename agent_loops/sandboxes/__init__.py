"""Sandboxes for whole trajectories: a shell and files, on this machine, in containers or at a service.

`Sandboxes` lends them, `agent_loops.sandboxes.tools:Shell` gives the policy one: docs/guide/sandboxes.md. A
sandbox that runs Python programs only is `agent_loops.sandbox`.
"""

from agent_loops.sandboxes.opener import Sandboxes
from agent_loops.sandboxes.protocol import ExecResult, ShellSandbox

__all__ = ["ExecResult", "Sandboxes", "ShellSandbox"]
