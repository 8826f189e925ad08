"""The command line: `async-rl COMMAND`, the checks before a start and the terminal views.

Argument parsing, preflight checks, `plan`, `inspect`, `rollout` and the generated reference pages belong
here. No other package imports this one.
"""
