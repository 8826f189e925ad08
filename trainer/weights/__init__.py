"""The trainer's side of weight updates: exported tensors, snapshots, manifests and checksums.

What one rank contributes to an update belongs here. Engines and transports belong in `async_rl.weights`.
"""
