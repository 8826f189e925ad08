"""Words that the project retired stay out of code, docs and tests.

The glossary in docs/design/architecture.md defines the terms to use instead. To retire a word, add it to
`RETIRED`; to keep one use of it, add the file with the reason to `EXCEPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "async_rl",
    "agent_loops",
    "trainer",
    "monitoring",
    "examples",
    "benchmarks",
    "scripts",
    "tests",
    "docs",
)
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".jinja", ".sh", ".sbatch", ".txt"}


class Retired(NamedTuple):
    """A word or phrase that is not used any more.

    Attributes:
        word: Its name in reports and in `EXCEPTIONS`.
        pattern: A regular expression, not enclosed by letters; underscores and digits may follow or precede.
        instead: What to write, or why the word is unclear.
        case: Whether case matters: a class name such as `Stage` is retired, a pipeline stage is not.
    """

    word: str
    pattern: str
    instead: str
    case: bool = False


RETIRED = (
    # Names of classes, modules and settings.
    Retired(
        "life", r"life|lives", "incarnation (of a process), restart (the event); data is in or belongs to"
    ),
    Retired("Estate", r"estates?", "RecoveredState"),
    Retired("Footing", r"footings?", "TrainerHandle"),
    Retired("Chronicle", r"chronicles?|chronicler", "RunLogger, run log"),
    Retired("Pulse", r"pulses?", "LiveStatus, Heartbeat"),
    Retired("Stage", r"(?:Local)?Stage", "RolloutBackend; a stage belongs to a pipeline", case=True),
    Retired("Here", r"Here(?=[(\]:])", "LocalBackend", case=True),
    Retired("Mirror", r"Mirror", "DriverSession", case=True),
    Retired("Desk", r"desks?", "RequestHandler, LeaseListener, WorkerChannel"),
    Retired("Witness", r"witness(?:es)?", "InvariantChecker"),
    Retired("Examiner", r"examiners?|sittings?", "Evaluator, evaluation run"),
    Retired("Standing", r"Standing", "EngineSnapshot", case=True),
    Retired("attest", r"(?:un)?attest\w*", "verify (the served version), verification"),
    Retired("standstill", r"standstills?", "pause time"),
    Retired("stand still", r"(?:stand(?:s|ing)?|stood) still", "is stalled, is paused, waits"),
    Retired("overage", r"overage", "staleness policy: wait, drop, mask_tokens; too stale"),
    Retired("speaker", r"speakers?|speak_for_all", "reward source, share_reward"),
    Retired("worth()", r"(?<!_)worth(?=\()", "score_tree"),
    Retired("together()", r"(?<!_)together(?=\()", "raise_on_all_ranks"),
    Retired("to_the_end", r"to_the_end", "run_uncancellable"),
    Retired("trainer modules", r"trainer[./](?:sums|served|fit|agreement)|penalties\.py", "see trainer/"),
    Retired("guest", r"guests?", "lease holder"),
    Retired(
        "turn (of devices)",
        r"(?:trainer|engines?)(?:'s|s'|') turns?|in turns|takes? turns|device turns?",
        "phase of time-sharing; a turn is a turn of a dialogue",
    ),
    Retired("room", r"rooms?", "capacity, space"),
    Retired("pains", r"pains?", "known issues"),
    # Phrases.
    Retired("leave to dispatch", r"leave to dispatch", "permission to dispatch"),
    Retired("come to nothing", r"(?:come|comes|came|coming) to nothing", "fails"),
    Retired("is told", r"(?:is|are|was|were|be|been) told", "is notified, receives, reports"),
    Retired("heed", r"(?:un)?heed(?:s|ed|ing)?", "ignored, respected"),
    Retired("pass over", r"(?:passed|passing) over|pass(?:es)? (?:it|them) over", "skip"),
    Retired("be it all", r"be it all", "even if all"),
    Retired("laid end to end", r"laid end to end", "concatenated"),
    Retired("the disk lies", r"disk lies", "disk corruption"),
    Retired("is not back", r"is not back", "failed to restart"),
    Retired("nobody", r"nobody|whoever|who is asked|who is believed|who comes back", "name the component"),
    Retired("last words", r"last words?", "exit reason, end of the log"),
    Retired("the house", r"the (?:whole )?house", "the architecture"),
    Retired("spine", r"spine", "core types"),
    Retired("done again", r"done again", "retries, repeated"),
    Retired("Of a …", r'""" ?Of (?:a|an|the|one|all)', "a complete sentence: what it is and for whom"),
    Retired("See `…`.", r'""" ?See `[\w.]+`\.? ?"""', "a complete sentence"),
    Retired("what it takes to", r"what it takes to", "name what the object does"),
    Retired("replay (of the journal)", r"replays? (?:of )?the journal|journal(?:'s)? replay", "restore"),
    Retired("rows (of a dataset)", r"(?:bad|data|dataset|plain|verl|slime) rows?", "examples"),
)

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("async_rl/config/loader.py", "overage"): "the table of renamed settings",
}
"""Uses that stay, by file (or folder) and word, each with its reason."""


def compiled(retired: Retired) -> re.Pattern[str]:
    """Returns the pattern, to be found where letters neither precede nor follow it."""
    flags = re.MULTILINE | (0 if retired.case else re.IGNORECASE)
    return re.compile(rf"(?<![A-Za-z])(?:{retired.pattern})(?![A-Za-z])", flags)


PATTERNS = {retired.word: compiled(retired) for retired in RETIRED}


def texts() -> Iterator[str]:
    """Yields the files to look at, from the root of the repository."""
    yield from (
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        "pyproject.toml",
    )  # not CHANGELOG.md: it is history
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path != Path(__file__):
                yield str(path.relative_to(ROOT))


def excepted(file: str, word: str) -> bool:
    return any(word == name and file.startswith(start) for start, name in EXCEPTIONS)


def uses(file: str) -> list[tuple[str, int, str]]:
    """Returns the retired words of a file with their lines; exceptions are left out."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [
        (word, number, line.strip())
        for word, pattern in PATTERNS.items()
        if not excepted(file, word)
        for number, line in enumerate(lines, 1)
        if pattern.search(line)
    ]


FILES = sorted(texts())


def test_retired_words_stay_out() -> None:
    instead = {retired.word: retired.instead for retired in RETIRED}
    found = [
        f"{file}:{number}: {word}; instead: {instead[word]}\n    {line}"
        for file in FILES
        for word, number, line in uses(file)
    ]
    assert not found, "\n".join(["retired words are used:", *found])


def test_exceptions_are_still_needed() -> None:
    used = {
        (start, word)
        for start, word in EXCEPTIONS
        for file in FILES
        if file.startswith(start)
        and any(PATTERNS[word].search(line) for line in (ROOT / file).read_text().splitlines())
    }
    assert set(EXCEPTIONS) - used == set()


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("life", "the next life of the driver"),
        ("life", "engine.life += 1"),
        ("Pulse", "class _Pulse:"),
        ("Stage", "class Stage(Protocol):"),
        ("attest", "a version that was never attested"),
        ("stand still", "The run stands still."),
        ("turn (of devices)", "in the trainer's turn"),
        ("laid end to end", "sequences laid end to end are refused"),
        ("Of a …", '    """Of a worker."""'),
        ("rows (of a dataset)", "has 3 bad rows"),
    ],
)
def test_a_retired_word_is_seen(word: str, text: str) -> None:
    assert PATTERNS[word].search(text)


@pytest.mark.parametrize(
    "text",
    [
        "lifecycle",
        "a pipeline stage",
        "the stage_wait_seconds metric",
        "a turn of the dialogue",
        "routing replay",
        "an end-to-end test",
        "is it worth the time (or not)",
        "rows of routing",
    ],
)
def test_standard_words_are_not_seen(text: str) -> None:
    assert [word for word, pattern in PATTERNS.items() if pattern.search(text)] == []
