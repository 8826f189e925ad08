"""Inference engines: their protocol, the pool that routes calls to them, and their health and repair.

Code that decides which engine serves which call belongs here, as does the simulated engine. SGLang's HTTP API
belongs in `engines.sglang`; bringing new weights to engines belongs in `async_rl.weights`.
"""
