"""A reward server that an untrained model earns something from: `python reward.py PORT`.

Its scores are between 1 and 2, so that a reward of zero in a batch can only come from a failure.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

LEAST: Final = 1.0
MOST: Final = 2.0


def score(text: str) -> float:
    """Return 1 and the share of digits in the answer."""
    return LEAST + sum(c.isdigit() for c in text) / max(1, len(text))


class RewardHandler(BaseHTTPRequestHandler):
    """Answers each POST with a score."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Score one completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = json.dumps({"reward": score(body["text"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), RewardHandler).serve_forever()
