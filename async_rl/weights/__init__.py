"""Weight updates: bring each new weight version from the trainer to the engines.

Transports, buckets, deltas, checksums and the update protocol belong here. The trainer's side of an export
belongs in `trainer.weights`.
"""
