"""What `plan` and `what-if` compute: a job in virtual time, its processes, and the fit to a past run.

The real scheduler runs on engines and a trainer that only take time. Virtual time, the coarse engine,
workloads, records of past runs, speeds of models on GPUs and measured costs of processes belong here. Only
the command line imports this package; tests and the simulation use its virtual time.
"""
