"""Real SGLang servers that work differently: what they say of a model's routing is the same.

The model has a dense layer between two with experts. The servers run one after the other, each asked the
same; the later ones end a text with a token that the first one's answer came to. Further servers have too
small a cache, or are started by `async-rl rollout`.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from async_rl.cli.main import main
from async_rl.engine_protocol import Engine, SamplingParams
from async_rl.engines.sglang.http_client import SGLangHttpClient
from async_rl.types import Trajectory
from tests.support.engine_calls import Call, call, request
from tests.support.sessions import PROMPT, Bench
from tests.support.sglang_world import VOCAB_SIZE, SGLangWorld
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.trajectories import verify, verify_rows
from tests.support.watched_engine import WatchedEngine

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = [[40, 41, 42, 43, 44, 45, 46], list(range(30, 80)), list(range(250, 150, -1))]
SAMPLED = 12
EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"extra_args": ["--chunked-prefill-size=16"]},
    "chunked, no overlap, narrow": {
        "narrow_routing": True,
        "extra_args": ["--chunked-prefill-size=16", "--disable-overlap-schedule"],
    },
}


class Answers(msgspec.Struct, frozen=True, eq=False):
    """What one server said."""

    calls: list[Call]
    """Of `PROMPTS`, in order."""
    later: Call
    """A call of the last prompt, with routing from its end on."""
    stopped: Call
    """A call of the first prompt, stopped by a string."""
    info: dict


class Variants:
    """Asks one server after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.end_token = VOCAB_SIZE - 1
        self.stop_string = "never said"

    async def ask(self, index: int, extra_args: tuple[str, ...] = (), **variant: Any) -> Answers:
        end = f'--json-model-override-args={{"eos_token_id": {self.end_token}}}'
        build, folder = partial(build_tiny_qwen3_moe, dense_layers=(1,)), self.folder / str(index)
        world = SGLangWorld(folder, build, index=index, extra_args=[*extra_args, end], **variant)
        server, engine = world.server, world.engine()
        http = SGLangHttpClient("engine-0", server.url, server.api_key, server.admin_key, timeout_s=60.0)

        async def call(prompt: list[int], start: int = 0, stop: tuple[str, ...] = ()) -> Call:
            sampling = SamplingParams(temperature=0.0, stop=stop)
            asked = msgspec.structs.replace(request(prompt, SAMPLED), routing_start=start, sampling=sampling)
            return await Call(engine, asked).run()

        await server.start()
        try:
            await engine.wait_ready()
            return Answers(
                calls=[await call(prompt) for prompt in PROMPTS],
                later=await call(PROMPTS[-1], start=len(PROMPTS[-1])),
                stopped=await call(PROMPTS[0], stop=(self.stop_string,)),
                info=await http.get_info("server_info", dict),
            )
        finally:
            await http.close()
            await engine.close()
            await server.stop()

    def learn(self, plain: Answers) -> None:
        """Choose what later servers stop at, from what the first one said."""
        from transformers import PreTrainedTokenizerFast

        decode = PreTrainedTokenizerFast.from_pretrained(self.folder / "0" / "weights_0").decode
        first, *others = [call.token_ids for call in plain.calls]
        said = {token for tokens in others for token in tokens}
        new = [t for i, t in enumerate(first) if i >= 2 and t not in first[:i] and t not in said]
        readable = [t for t in new if decode([t]).isascii()]
        self.stop_string = decode([readable[0]])
        self.end_token = next(t for t in new if first.index(t) > first.index(readable[0]))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    variants, found = Variants(tmp_path_factory.mktemp("variants")), {}
    with ThreadPoolExecutor(1) as thread:  # with a loop of its own, beside the tests'
        for index, (name, variant) in enumerate(VARIANTS.items()):
            found[name] = thread.submit(asyncio.run, variants.ask(index, **variant)).result()
            if not index:
                variants.learn(found[name])
                found["end"] = variants.end_token
    return found


@pytest.mark.case(6)
@pytest.mark.parametrize("name", ["chunked", "chunked, no overlap, narrow"])
def test_sets_and_counts_are_the_same_when_prefill_is_chunked_or_nothing_overlaps(answers, name: str) -> None:
    plain, other = answers["plain"], answers[name]
    assert plain.info["chunked_prefill_size"] > max(len(prompt) for prompt in PROMPTS)
    assert other.info["chunked_prefill_size"] == 16
    assert not plain.info["disable_overlap_schedule"]
    assert other.info["disable_overlap_schedule"] == ("no overlap" in name)
    assert len(other.later.trace.rows) == SAMPLED - 1
    assert np.array_equal(other.later.expert_sets, other.calls[-1].expert_sets[len(PROMPTS[-1]) :])
    for left, right in zip(plain.calls[1:], other.calls[1:], strict=True):
        assert left.token_ids == right.token_ids
        assert left.finish.routing.num_rows == right.finish.routing.num_rows == len(left.sequence) - 1
        verify_rows(right.trace, len(right.sequence), right.trace.moe_layers)
        assert np.array_equal(left.expert_sets, right.expert_sets)
        # The control: rows one off are others.
        assert (left.expert_sets[1:] == right.expert_sets[:-1]).mean() < 0.9


@pytest.mark.case(7)
@pytest.mark.parametrize("name", ["chunked", "chunked, no overlap, narrow"])
def test_rows_are_one_less_than_tokens_when_a_string_or_the_end_of_text_stops_a_call(
    answers, name: str
) -> None:
    free = answers["plain"].calls[0]
    ended, stopped = answers[name].calls[0], answers[name].stopped
    assert free.finish.reason == "length"
    assert ended.finish.reason == stopped.finish.reason == "stop"
    assert ended.token_ids[-1] == answers["end"]
    assert 3 <= len(stopped.token_ids) < len(ended.token_ids) <= SAMPLED
    for one in (ended, stopped):
        count = len(one.token_ids)
        assert one.token_ids == free.token_ids[:count]
        verify_rows(one.trace, len(one.sequence), one.trace.moe_layers)
        assert np.array_equal(one.expert_sets, free.expert_sets[: len(one.sequence) - 1])


def test_fewer_bytes_mean_the_same_when_the_engine_narrows(answers) -> None:
    wide, narrow = answers["plain"].calls[1], answers["chunked, no overlap, narrow"].calls[1]
    assert wide.trace.moe_layers == narrow.trace.moe_layers == (0, 2)
    assert wide.trace.rows.dtype == narrow.trace.rows.dtype == np.uint8
    assert np.array_equal(wide.expert_sets, narrow.expert_sets)
    # 3 layers of int32 against 2 of uint8.
    assert len(wide.finish.routing.data) == pytest.approx(6 * len(narrow.finish.routing.data), rel=0.02)


async def test_rows_before_a_retraction_are_marked_when_calls_do_not_fit_the_cache(tmp_path: Path) -> None:
    calls, new_tokens = 4, 150
    admits_too_many = ["--schedule-conservativeness=0.01"]
    cache = 400  # what two of the calls need, and a little more
    world = SGLangWorld(tmp_path, max_total_tokens=cache, extra_args=admits_too_many)
    engine = WatchedEngine(world.engine())

    async def answer() -> tuple[Bench, Trajectory]:
        limits = {"max_context_tokens": 512, "max_new_tokens": new_tokens}
        bench = Bench(cast(Engine, engine), facts=world.facts, top_k=1, **limits)
        await bench.begin()
        return bench, await bench.finish()

    with world:
        await engine.wait_ready()
        ended = await asyncio.gather(*(answer() for _ in range(calls)))
        retractions = [each for finish in engine.ends for each in finish.retractions]
        assert retractions
        assert all(1 <= each.at_least <= each.at_most < new_tokens for each in retractions)
        counted = sum(bench.counted("engine_retractions_total", engine="engine-0") for bench, _ in ended)
        assert counted == sum(each.count for each in retractions)
        ends = {PROMPT + finish.retractions[-1].at_most - 1 for finish in engine.ends if finish.retractions}
        assert {trajectory.trace.recomputed for _, trajectory in ended} - {()} == {
            ((0, end),) for end in ends
        }
        fresh = (await call(engine, ended[0][1].token_ids.tolist(), 0)).expert_sets
        for _, trajectory in ended:
            assert np.array_equal(trajectory.token_ids, ended[0][1].token_ids)
            verify(trajectory.trace, trajectory.token_ids, world.facts.moe_layers)
            assert trajectory.trace.valid.all()
            assert np.array_equal(np.sort(trajectory.trace.rows, axis=-1), fresh)
        await engine.close()


def test_an_untrained_model_writes_trajectories_with_routing_when_nothing_runs_yet(
    calculator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"model.path={calculator / 'model'}", f"data.path={calculator / 'data' / 'tasks.jsonl'}"]
    assert main(["rollout", str(EXAMPLE), *arguments, "--n", "3", "--json"]) == 0
    captured = capsys.readouterr()
    views = [json.loads(line) for line in captured.out.splitlines()]
    assert len(views) == 3
    for view in views:
        assert view["error"] is None
        assert view["weight_versions"] == [0]
        assert view["trained_tokens"] > 0
        assert view["routing"]["invalid"] == 0
        assert view["log_probs"]["mean"] < -1, "an untrained model is sure of nothing"
    assert "starting an SGLang server" in captured.err
