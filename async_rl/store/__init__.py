"""The store of trajectories between rollouts and trainer: groups in, batches out.

Admission, staleness-bounded batching, the ledger, and everything that stores trajectories on disk (spool,
journal, archive) belongs here. Sampling and training do not.
"""
