"""Environments as agent loops: the policy acts, the environment answers and rewards.

```
 task ─► reset ─► prompt ─► turn of the policy ─► step ─► observation ─► turn ─► … ─► end
                              ▲ tokens             └ reward of the turn               └ outcome
```

docs/guide/environments.md describes them. `base` is the interface of an environment, `loop` the agent loop
that plays one. Each other module adapts the environments of one package and imports that package only when
it is used.
"""

from agent_loops.environment.base import Environment, Observation
from agent_loops.environment.loop import EnvironmentLoop, environment_reward

__all__ = ["Environment", "EnvironmentLoop", "Observation", "environment_reward"]
