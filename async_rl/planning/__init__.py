"""What `async-rl plan` computes: a configured job in virtual time, and what its processes cost.

The real scheduler runs on engines and a trainer that only take time. Virtual time, the coarse engine,
workloads, speeds of models on GPUs and measured costs of processes belong here. Only the command line imports
this package; tests and the simulation use its virtual time.
"""
