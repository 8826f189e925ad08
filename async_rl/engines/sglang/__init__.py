"""The SGLang engine: its HTTP client, its server process and the launchers that patch SGLang.

Everything that knows SGLang's endpoints, flags or payloads belongs here. Pool, routing of calls and health do
not: they only know `engines.protocol`.
"""
