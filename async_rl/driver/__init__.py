"""What the driver of a run does itself, in parts that the orchestrator wires.

```
 trainer_starts ──► a trainer at its newest checkpoint, at first and after each failure
                         │
 train_loop   take ─► train ─► settle ─► sync ─► advance ─► write down     until the life ends
                                 │                              │
 checkpoints  written beside the training      chronicle  what the run writes down: phases, steps, evaluations
                                                                │
                                              pulse      what it shows between two steps: page, health, gauges
```

Train loop and checkpoints are of one life, which ends with its trainer; the others are of the run.
"""
