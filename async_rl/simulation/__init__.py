"""The program in virtual time: the real orchestration on simulated engines, trainer, network and disk.

Simulated parts, faults, the invariant checker and the planned job behind `async-rl plan` belong here. Only
the command line imports this package: production code never depends on the simulation.
"""
