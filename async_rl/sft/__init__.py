"""`async-rl sft`: supervised training on conversations, on the trainer's own model, packing and checkpoints.

```
 file ──rows──► tokens and masks ──plan──► batches of whole conversations ──► ranks ──► Hugging Face folder
      (rows: the chat format of rollouts)  (order, learning rate)  (trainer.sft; in this process, or on Ray)
```
"""
