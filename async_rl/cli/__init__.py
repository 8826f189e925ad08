"""The command line: `async-rl COMMAND`, the checks before a start and the terminal views.

```
 main ─► commands ─► train, plan, evaluate, metrics_reference, new_loop, inspection
```

Argument parsing, `plan`, `inspect`, `rollout` and the generated reference pages belong here. No other package
imports this one.
"""
