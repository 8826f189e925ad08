"""Sessions: the conversation that an agent loop sees, and the token transcript below it.

Partial rollouts, branches and the routing rows of one trajectory belong here. Scheduling of trajectories does
not.
"""
