"""`async-rl sft`: supervised training on conversations, with the trainer's own model, packing and
checkpoints.

```
 file ──examples──► tokens and masks ──order──► batches of whole conversations ──► ranks ──► Hugging Face
 folder
```

`examples` reads conversations with the chat format of rollouts, `schedule` plans batches and learning rates,
`sft_ranks` runs `trainer.sft` in this process or on Ray.
"""
