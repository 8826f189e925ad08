"""An OpenAI-compatible endpoint that serves the policy to agents.

Each trajectory has an API key, and the requests with that key become the trajectory. The HTTP server and the
translation between OpenAI's API and sessions belong here; the agent loop that uses them is
`agent_loops.openai_agent`.

```
 agent ──POST /v1/chat/completions──► Endpoint ──► RequestHandler ──generate()──► session ──► engines
   ▲      Bearer <key of a trajectory>   │              │ finds the conversation that the history belongs to
   │                                     │              │ appends the new messages as tokens
   └── JSON, or chunks by SSE ◄──────────┴──────────────┘ translates the turn to OpenAI's format
```

chat_completions   requests, answers, chunks and errors in OpenAI's format: pure
history            which conversation a request continues, repeats or begins: pure
answers            a turn's text as reasoning, content and tool calls, complete or growing: pure
request_handler    the requests of one trajectory, which run in its own task and survive lost connections
endpoint           HTTP: keys, limits, streams
"""
