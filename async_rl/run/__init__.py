"""One training run in the driver: start-up, the train loop, recovery, checkpoints, the run log and shutdown.

Code that composes the other packages into a run belongs here. It starts no processes: `async_rl.placement`
(Ray) and the simulation (virtual time, outside this package) implement its `cluster` protocol.
"""
