"""What `async-rl export` writes is what a real SGLang server reads."""

import pytest

from async_rl.engine_protocol import DiskUpdate
from tests.support.engine_calls import call
from tests.support.sglang_world import SGLangWorld
from tests.support.trainers import started, trainer_config
from trainer.checkpoints.hf_export import export_checkpoint

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:::megatron"),
]

PROMPT = [40, 41, 42, 43]


async def test_the_weights_are_the_checkpoints_when_they_are_exported_in_shards(
    sglang_world: SGLangWorld, tmp_path
) -> None:
    path = sglang_world.weights[1]
    with started(trainer_config(path)) as worker:
        worker.save_checkpoint(str(tmp_path / "checkpoints"), {})
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "exported", max_shard_bytes=100_000)
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 2

    engine = sglang_world.engine()
    await engine.wait_ready()
    answers = []
    for version, folder in enumerate((path, sglang_world.weights[0], tmp_path / "exported"), start=1):
        await engine.update_weights(DiskUpdate(weight_version=version, path=str(folder)), flush=True)
        answers.append(await call(engine, PROMPT, 12))
    await engine.close()
    expected, other, exported = answers
    assert exported.log_probs == expected.log_probs != other.log_probs
    assert exported.token_ids == expected.token_ids
