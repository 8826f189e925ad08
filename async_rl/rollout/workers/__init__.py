"""Agent loops in processes of their own: rollout workers play, the driver decides and writes down.

```
 driver                                              rollout worker (as many as rollout.num_workers)
 RolloutManager: groups, slots, retries
   │ play(task, session)        ── Play ──►          AgentLoop.run(task, session), tools, rewards
   ▼                            ◄── Read, Grow ──    WorkerSession: messages, chat template, tokenizer
 DriverSession: transcript, journal,   ◄── Write ──
   routing, engine calls        ── Wrote ──►         the turn, as text
   │                            ◄── Ended ──         why it ended, rewards, notes
   ▼                            ◄── Pulse ──         alive, what its loops wait for, what it counted
 Trajectory
```

The line is drawn where a conversation becomes tokens. Whatever must be exact stays where it was, in the
driver: staleness, partial rollouts, weight updates, the journal, the ledger, routing. A worker holds nothing
that cannot be had again, so when one dies its attempts are played again in another, each from the tokens that
the driver has of it (`rollout.replay`), as after a restart of the driver.
"""
