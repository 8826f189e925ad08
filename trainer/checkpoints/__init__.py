"""The trainer's checkpoints: folder, manifest, background writing, loading and export to Hugging Face.

Everything that decides when a checkpoint is complete, and which one a run loads, belongs here. The file
format of tensors and their parts belong in `trainer.megatron` (`storage`, `shards`); when to save belongs in
`async_rl.run`. See docs/guide/recovering.md.
"""
