"""An OpenAI-compatible endpoint whose model is the policy.

Each trajectory has a key, and what is asked with that key becomes the trajectory.

```
 agent ──POST /v1/chat/completions──► server ──► desk ──generate()──► session ──► engines
   ▲      Bearer <key of a trajectory>   │         │ which conversation does the history belong to?
   │                                     │         │ what is new is appended as tokens
   └── JSON, or chunks by SSE ◄──────────┴─────────┘ what the policy wrote goes out in OpenAI's form
```

wire      requests, answers, chunks and errors in OpenAI's form: pure
history   which conversation a request continues, repeats or begins: pure
answers   from what the policy wrote to reasoning, content and tool calls, whole or growing: pure
desk      one trajectory's calls; they run in the trajectory's own task, whatever becomes of a connection
server    HTTP: keys, limits, streams
"""
