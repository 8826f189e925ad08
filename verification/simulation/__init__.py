"""The program in virtual time: the real orchestration on simulated engines, trainer, network and disk.

Simulated parts, faults, the invariant checker and the soak belong here.
"""
