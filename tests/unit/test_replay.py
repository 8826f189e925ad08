"""A session after a restart: what the journal has is given back, what it has not is sampled, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from async_rl.engine_protocol import Engine, EngineFacts
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.types import Context, Sampled, Trajectory
from tests.support.journals import continue_journals, reopen_entry
from tests.support.scripted import Script, ScriptedEngine, sampled
from tests.support.sessions import PROMPT, Bench

NAME = "0" * 32
ONE_LAYER = EngineFacts(
    num_layers=1, moe_layers=(0,), num_experts=8, top_k=2, vocab_size=512, context_length=1024
)


class Killed(BaseException):
    """Stands for the end of the process: nothing after it is run."""


def make_bench(scripts: Sequence[Script], entry: JournalEntry, **changes: Any) -> Bench:
    made = Bench(cast(Engine, ScriptedEngine(scripts=scripts)), replay="off", entry=entry, **changes)
    made.start()
    return made


async def run_first(folder: Path, scripts: Sequence[Script], *turns: Callable[[Bench], None]) -> None:
    """Turns until the process is killed; what happens between two of them is given."""
    journal = Journal(folder / "000001")
    entry = journal.open_entry(NAME)

    def kill(request: Any) -> list[Any]:
        def events() -> Any:
            yield from sampled(3, "stop", 0, prompt=0, rows=False, first=300)[:1]
            journal.write_entries()  # the tick before the kill
            raise Killed

        return events()

    with pytest.raises(Killed):
        await play(make_bench([*scripts, kill], entry), turns)
    journal.close()


async def play(bench: Bench, between_turns: Sequence[Callable[[Bench], None]], **budget: Any) -> None:
    """Generate a turn, and another one after each of the given events."""
    await bench.session.generate()
    for before_turn in between_turns:
        before_turn(bench)
        await bench.session.generate(**budget)


def left_in(folder: Path) -> tuple[Journal, JournalledTrajectory]:
    journal, left = continue_journals(folder, [NAME])
    return journal, left[NAME]


def say(*contents: str) -> Callable[[Bench], None]:
    messages = [{"role": "tool", "content": content} for content in contents]
    return lambda bench: bench.session.add_messages(messages)


def turn(count: int, first: int = 100) -> Script:
    return lambda request: sampled(count, "stop", 0, prompt=0, rows=False, first=first)


def written(trajectory: Trajectory) -> list[int]:
    return trajectory.token_ids[trajectory.response_mask].tolist()


async def run_after_restart(
    folder: Path, scripts: Sequence[Script], *turns: Callable[[Bench], None], **budget: Any
) -> tuple[Trajectory, Bench]:
    journal, left = left_in(folder)
    bench = make_bench(scripts, reopen_entry(journal, left))
    await play(bench, turns, **budget)
    journal.write_entries()
    journal.close()
    return await bench.finish(), bench


async def test_sampling_goes_on_from_the_tokens_seen_when_the_driver_was_killed(tmp_path: Path) -> None:
    await run_first(tmp_path, [turn(4)], say("4"))
    trajectory, bench = await run_after_restart(tmp_path, [turn(2, first=400)], say("4"))
    assert written(trajectory) == [100, 101, 102, 103, 300, 301, 302, 400, 401]
    assert [type(s) for s in trajectory.segments] == [Context, Sampled, Context, Sampled, Sampled]
    (request,) = cast(ScriptedEngine, bench.engines[0]).requests
    assert request.input_ids.tolist() == trajectory.token_ids[:-2].tolist()
    assert request.max_new_tokens == 16 - 3
    assert trajectory.rollout_log_probs[trajectory.response_mask].tolist() == [-0.5] * 9
    assert trajectory.outcome.num_turns == 2
    assert trajectory.outcome.num_resumes == trajectory.outcome.num_interruptions == 1
    assert bench.counted("resumed_tokens_total") == 7
    assert bench.counted("sampled_tokens_total") == 2
    assert bench.counted("resume_discarded_tokens_total") == 0


@pytest.mark.parametrize("budget", [{}, {"stop": ["never"]}, {"max_new_tokens": 5}])
async def test_the_journal_is_cut_where_the_loop_takes_another_course(
    tmp_path: Path, budget: dict[str, Any]
) -> None:
    await run_first(tmp_path, [turn(4)], say("4"))
    answer = say("4") if budget else say("four", "!")
    trajectory, bench = await run_after_restart(tmp_path, [turn(2, first=400)], answer, **budget)
    assert written(trajectory) == [100, 101, 102, 103, 400, 401]
    assert bench.counted("resume_discarded_tokens_total") == 3
    assert bench.counted("resumed_tokens_total") == 4
    _, left = left_in(tmp_path)  # what was thrown away is gone from the journal as well
    assert np.concatenate([s.token_ids for s in left.segments]).tolist() == trajectory.token_ids.tolist()


async def test_all_is_thrown_away_when_the_prompt_is_another(tmp_path: Path) -> None:
    await run_first(tmp_path, [])
    journal, left = left_in(tmp_path)
    bench = Bench(
        cast(Engine, ScriptedEngine(scripts=[turn(2)])), replay="off", entry=reopen_entry(journal, left)
    )
    bench.chat.prompt_ids = lambda *_, **__: np.arange(5, dtype=np.int32)  # type: ignore[method-assign]
    await bench.begin()
    assert written(await bench.finish()) == [100, 101]
    assert bench.counted("resume_discarded_tokens_total") == 3
    journal.close()


async def test_a_turn_is_over_when_its_last_token_was_seen_but_not_its_end(tmp_path: Path) -> None:
    await run_first(tmp_path, [])
    journal, left = left_in(tmp_path)
    last = left.segments[-1]
    assert isinstance(last, Sampled)
    last.token_ids[-1] = 2  # the stop token
    bench = make_bench([], reopen_entry(journal, left))
    first = await bench.session.generate()
    assert (first.finish_reason, first.token_ids.tolist()) == ("stop", [300, 301, 2])
    journal.close()


async def test_rows_of_the_whole_are_fetched_when_nothing_is_left_to_sample(tmp_path: Path) -> None:
    await run_first(tmp_path, [turn(4)], say("4"))
    journal, left = left_in(tmp_path)
    complete = left.turns[0]
    assert complete.end == PROMPT + 4

    def recover(request: Any) -> list[Any]:
        return sampled(0, "length", 0, prompt=len(request.input_ids))

    engine = ScriptedEngine(scripts=[recover])
    bench = Bench(cast(Engine, engine), facts=ONE_LAYER, entry=reopen_entry(journal, left))
    await bench.begin()
    trace = (await bench.finish()).trace
    assert trace is not None
    assert trace.valid.all()
    assert [request.max_new_tokens for request in engine.requests] == [0]
    journal.close()
