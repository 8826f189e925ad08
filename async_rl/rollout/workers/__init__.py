"""Rollout workers: agent loops in processes of their own, while the driver writes the tokens.

```
 driver                                                   rollout worker (as many as rollout.num_workers)
 RolloutManager: groups, slots, retries
   │ run_attempt(task, session)       ── StartAttempt ──► AgentLoop.run(task, session), tools, rewards
   ▼                                  ◄─ AppendContext ── WorkerSession: messages, chat template, tokenizer
 DriverSession: transcript, journal,  ◄─ WriteTurn ──────   RemoteWriter: a copy of the tokens
   routing, engine calls              ── TurnWritten ───► the turn, as text
   │                                  ◄─ AttemptEnded ─── stop reasons, rewards, metadata
   ▼                                  ◄─ Heartbeat ────── waits, metric increments
 Trajectory
```

What goes over the link between the driver and a worker belongs here; how worker processes are placed belongs
in `async_rl.placement`. Everything that must be exact stays in the driver: staleness, partial rollouts,
weight updates, the journal, the ledger, routing. A worker holds nothing that cannot be restored: when one
ends, its attempts run again in another worker, from the tokens that the driver has (`session/restore.py`), as
after a restart of the driver.
"""
