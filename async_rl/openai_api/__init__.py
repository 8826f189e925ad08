"""An endpoint that serves the policy to agents in OpenAI's and Anthropic's APIs.

Each trajectory has an API key, and the requests with that key become the trajectory. The HTTP server and the
translation between the APIs and sessions belong here; the agent loop that uses them is
`agent_loops.openai_agent`.

```
 agent ──POST /v1/chat/completions──► Endpoint ──► RequestHandler ──generate()──► session ──► engines
   ▲          /v1/responses              │              │ finds the conversation that the history belongs to
   │          /v1/messages               │              │ appends the new messages as tokens
   └── JSON, or events ◄─────────────────┴──────────────┘ the dialect writes the turn in its format
```

requests           requests, answers and errors of all dialects, and what a dialect is
reading            what their requests have in common, and its bounds: pure
chat_completions, responses, anthropic_messages
                   the dialects: pure
history            which conversation a request continues, repeats or begins: pure
answers            a turn's text as reasoning, content and tool calls, complete or growing: pure
request_handler    the requests of one trajectory, which run in its own task and survive lost connections
endpoint           HTTP: keys, limits, streams
"""
