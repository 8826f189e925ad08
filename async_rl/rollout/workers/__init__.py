"""Rollout workers: sessions in processes of their own, which call the engines that the driver grants them.

```
 driver                                                rollout worker (as many as rollout.num_workers)
 RolloutManager: groups, slots, retries
   │ run_attempt(attempt)         ── StartAttempt ──►  LocalBackend: agent loop, tools, rewards
   ▼                              ◄─ AttemptEnded ───    │ RolloutSession, Transcript, routing rows
 WorkerBackend                                           ▼
   │ WorkerGrants                 ── GrantEngines ──►  WorkerEngines ──── HTTP ────► engines
   ▼                              ◄─ load ───────────    which engine serves which call
 EnginePool: states, updates, repair
 progress, waits, metrics         ◄─ Heartbeat ──────  JournalEntry, waits, increments ──► journal
```

What goes over the link between the driver and a worker belongs here; how worker processes are placed belongs
in `async_rl.placement`. A worker sees tokens and engine calls, the driver sees trajectories and engines. A
worker holds nothing that cannot be restored, except for the tokens since the last write of its journal: when
it ends, its attempts run again in other workers, which read it (`session/restore.py`), as after a restart of
the driver.
docs/design/control-and-data-plane.md describes grants and failures.
"""
