"""A search tool over a small corpus, and a reward for answers that can be found in it.

BM25, Okapi's formula: for each word of the query that a passage has, `idf * tf * (k1 + 1) / (tf + k1 * (1 -
b + b * length / mean length))`, with `idf = ln(1 + (N - n + 0.5) / (n + 0.5))` where n of N passages have it.

**Source**: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009, eq. 3.15;
the 1 in the logarithm, which keeps it positive, is Lucene's.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from async_rl.types import Completion, Task

K1, B = 1.2, 0.75
NUM_RESULTS = 2


class Index:
    """A searchable collection of passages.

    Example:
        >>> Index(["a red door", "a blue door"]).search("blue")
        ['a blue door']
    """

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = passages
        self._counts = [Counter(words(passage)) for passage in passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean_length = sum(self._lengths) / len(passages)
        having = Counter(word for counts in self._counts for word in counts)
        self._idf = {
            word: math.log(1 + (len(passages) - number + 0.5) / (number + 0.5))
            for word, number in having.items()
        }

    def search(self, query: str, limit: int = NUM_RESULTS) -> list[str]:
        """Return the best passages, best first, without those that share no word with the query."""
        scored = [(self._score(words(query), index), -index) for index in range(len(self._passages))]
        best = sorted((pair for pair in scored if pair[0] > 0), reverse=True)[:limit]
        return [self._passages[-index] for _, index in best]

    def _score(self, query: Sequence[str], index: int) -> float:
        counts = self._counts[index]
        penalty = K1 * (1 - B + B * self._lengths[index] / self._mean_length)
        return sum(self._idf[w] * counts[w] * (K1 + 1) / (counts[w] + penalty) for w in query if w in counts)


def words(text: str) -> list[str]:
    """Return the lower-case words and numbers of a text."""
    return re.findall(r"\w+", text.lower())


_CORPUS = Path(__file__).with_name("corpus.jsonl")
_INDEX = Index([json.loads(line)["text"] for line in _CORPUS.read_text(encoding="utf-8").splitlines()])


def search(query: str) -> str:
    """Search the encyclopaedia.

    Args:
        query: Some words.
    """
    return "\n".join(_INDEX.search(query)) or "nothing found"


def reward(task: Task, completion: Completion) -> dict[str, float]:
    """Return 1 if the answer contains the reference answer; `searched` and `found` are only recorded."""
    wanted = str(task.answer).lower()
    results = [str(m["content"]).lower() for m in completion.messages if m["role"] == "tool"]
    return {
        "reward": float(wanted in completion.text.lower()),
        "searched": float(bool(results)),
        "found": float(any(wanted in result for result in results)),
    }
