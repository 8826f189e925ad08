"""Evaluation: the validation sets answered at a pinned weight version, and what the answers are worth.

```
 weight version ──► service: an engine is lent out, with its weights ──► examiner: answers, rewards
                                                                            │
            evaluations.jsonl, metrics, trackers, page ◄── records ◄── estimates: pass@k, intervals
```

`examiner` is the same in a run (`service`) and alone (`alone`, `async-rl evaluate`).
"""
