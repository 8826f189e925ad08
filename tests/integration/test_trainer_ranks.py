"""Two and four ranks on Gloo give what one rank gives, in every layout, with routing replayed."""

import asyncio
import gc
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import GroupInvite
from async_rl.engines.sglang.server import free_port
from async_rl.errors import AlignmentError, AsyncRLError
from async_rl.store.frames import read_trajectories
from async_rl.store.kept_batches import load_batch, load_result
from async_rl.types import SamplingMask
from async_rl.weights.weight_folder import WeightFolder
from tests.support.checker import RouterWitness, distinct_rows, expected_deliveries, hidden_states
from tests.support.ranks import run_ranks
from tests.support.stored_batches import store_batch
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    critic_gradients,
    differing,
    gathered_gradients,
    place,
    started,
    stored_weights,
    trainer_config,
    trial,
    weights,
)
from tests.support.weight_receiver import digest_of, receive_weights
from trainer.collectives import all_gather_bytes, raise_on_all_ranks
from trainer.megatron import model as megatron_model
from trainer.megatron.packing import make_targets
from trainer.megatron.replay import TopKRouter, local_rows
from trainer.worker import TrainerWorker, UpdateInputs

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(900),  # processes come up often, for all tests
]

LAYOUTS = {
    "data": ({}, "none"),
    "expert": ({"ep": 2}, "full"),
    "tensor and sequence": ({"tp": 2, "etp": 2}, "full"),
    "tensor, sequence and expert": ({"tp": 2, "ep": 2}, "selective"),
    "pipeline": ({"pp": 2}, "full"),
    "interleaved pipeline": ({"pp": 2, "vpp": 2}, "full"),
    "context": ({"cp": 2}, "selective"),
    "context and expert": ({"cp": 2, "ep": 2}, "full"),
    "uneven pipeline": ({"pp": 2, "first_stage_layers": 1}, "none"),
    "data, summed in the backward pass": ({}, "none"),
}
"""Of two ranks: what they share out, and what they recompute."""

QUADS = {
    "four: tensor, pipeline and expert": ({"tp": 2, "pp": 2, "ep": 2}, "full"),
    "four: tensor, interleaved pipeline": ({"tp": 2, "pp": 2, "vpp": 2, "etp": 2}, "full"),
    "four: tensor, data and expert": ({"tp": 2, "ep": 4}, "selective"),
    "four: context, pipeline": ({"cp": 2, "pp": 2}, "full"),
    "four: tensor, expert and expert tensor": ({"tp": 2, "ep": 2, "etp": 2}, "none"),
}
"""Of four ranks."""

IN_TEST_REAL = {"tensor, sequence and expert", "data", "interleaved pipeline", "context"}
"""Each kind of parallelism. `make test-long` has the other layouts."""

ONE_STEP = {
    "context and expert",
    "uneven pipeline",
    "four: tensor, expert and expert tensor",
}
"""Their optimizer and its second step are those of a layout that takes two."""

RECORDED = [
    "data",
    "tensor and sequence",
    "pipeline",
    "interleaved pipeline",
    "context",
    "four: tensor, pipeline and expert",
    "four: tensor, interleaved pipeline",
]
"""Where routing is recorded: each way to share out tokens and layers. Where experts lie does not matter."""

OVER_ALL = ["data", "context", "four: context, pipeline"]
"""Where the loss is over whole answers."""

RESUMED = [
    "data",
    "expert",
    "tensor and sequence",
    "tensor, sequence and expert",
    "pipeline",
    "interleaved pipeline",
]
"""Where weights are exported and the checkpoint comes back: each way to share out weights."""

GUARDED = ["data", "pipeline"]
"""Where something is not finite that only one rank sees."""

MICRO_BATCH_TOKENS = 36
"""The longest trajectory is longer: it stands alone, also where context parallelism shares it out."""

BUCKET_BYTES = 16 << 10

OVER_ANSWERS = {
    "objective": "gspo",
    "aggregate": "sequence_mean",
    "importance": {"level": "geometric", "high": 0.42},
    "reject": {"geometric_low": 0.3},
    "kl": {"coefficient": 0.01, "where": "reward"},
    "advantages": "dr_grpo",
}
"""A loss that needs sums over whole answers and log-probs of all ranks."""

BY_CRITIC = {"loss": {"advantages": "gae"}, "critic": {"gamma": 0.9, "gae_lambda": 0.7}}

EXPERTS, TOP_K = 12, 4
MOE_LAYERS = [2, 3, 4]
"""The first of four layers is dense: interleaved, one chunk has no router at all."""


def batches():
    """An odd number of trajectories, so that one data-parallel rank has an empty micro-batch."""
    lengths = (13, 7, 30, 19, 5, 22, 37)
    return [
        with_masks(
            distinct_rows(
                random_batch(seed, layers=(1, 2, 3), lengths=lengths, group_size=7),
                3,
                EXPERTS,
                TOP_K,
                seed=seed,
            ),
            seed,
        )
        for seed in (0, 1)
    ]


def with_masks(batch, seed):
    """Every other trajectory was sampled from six tokens at each position, anywhere in the vocabulary."""
    rng = np.random.default_rng(seed)
    kept, log_probs = [[]] * batch.num_tokens, batch.rollout_log_probs.copy()
    for index in range(0, batch.num_trajectories, 2):
        for position in range(batch.offsets[index], batch.offsets[index + 1]):
            if batch.loss_mask[position]:
                token = int(batch.token_ids[position])
                kept[position] = sorted({token, *rng.integers(0, 96, 5).tolist()})
                log_probs[position] += np.float32(
                    2.77
                )  # as much as the mean log-prob among six instead of 96
    return msgspec.structs.replace(batch, sampling_mask=SamplingMask.of(kept), rollout_log_probs=log_probs)


def broken():
    """One token of the fifth trajectory is not finite."""
    batch = batches()[0]
    log_probs = batch.rollout_log_probs.copy()
    log_probs[batch.offsets[5] - 1] = float("nan")
    return msgspec.structs.replace(batch, rollout_log_probs=log_probs)


def without_rows(batch):
    none = {"routed_experts": None, "routing_valid": None, "num_experts": 0, "moe_layers": ()}
    return msgspec.structs.replace(batch, **none)


def config_of(model, layout, recompute, ranks, replay="r3", **trainer):
    config = trainer_config(
        Path(model),
        replay=replay,
        **trainer,
        num_ranks=ranks,
        layout=layout,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        recompute=recompute,
    )
    return config | {"routing": config["routing"] | {"probe_every": 2}}


def step(worker, batch):
    return {"metrics": worker.train_on(batch, 1).metrics, "gradients": gathered_gradients(worker)}


def run_rank(rank, model, hidden, out, names):
    """Go through the layouts of as many ranks."""
    found = {}
    for name in names:
        look = _Look(rank, num_ranks(name), name, model, hidden, out)
        found[name] = look.training()
        if name in RESUMED:
            found[name]["again"] = look.resuming()
    return found


class _Look:
    """What one rank does in one layout."""

    def __init__(self, rank, ranks, name, model, hidden, out):
        self.rank, self.ranks, self.name, self.out, self.hidden = rank, ranks, name, out, hidden
        self.layout, self.recompute = (LAYOUTS | QUADS)[name]
        self.model = model

    def config(self, replay: str = "r3", **trainer):
        trainer |= {"overlap_grad_reduce": "summed in the backward pass" in self.name}
        return config_of(self.model, self.layout, self.recompute, self.ranks, replay, **trainer)

    def start(self, purpose: str, checkpoints: str | None = None):
        gc.collect()  # threads of earlier process groups wake a hundred times a second, hundreds of them
        # Files, not ports: a port that was free when it was picked may be taken when it is its turn.
        address = f"file://{self.out}/{self.name} {purpose}"
        worker = TrainerWorker(self.config(), self.rank, self.ranks, address)
        self.state = worker.setup(checkpoints)
        return worker

    def training(self):
        """What leaves the weights as they are, then two steps and their checkpoint."""
        worker, seen = self.start("train"), {}
        if self.name in RECORDED:
            with trial(worker, self.config("r2")):
                seen["r2"] = self.recording(worker)
        if self.name in OVER_ALL:
            with trial(worker, self.config(loss=OVER_ANSWERS)):
                seen["over answers"] = step(worker, batches()[0])
        with trial(worker, self.config(**BY_CRITIC)):
            seen["critic"] = step(worker, batches()[0]) | {"of critic": critic_gradients(worker)}
        with trial(worker, self.config(loss={"check_old_log_probs_every": 0})):
            seen["stored"] = self.stored(worker)
        seen["r3"] = self.replaying(worker)
        if self.name in GUARDED:
            seen["broken"] = worker.train_on(broken(), 3).metrics
            seen["stayed"] = not differing(weights(worker), seen["r3"]["weights"])
            worker.num_steps -= 1
        if self.name in RESUMED:
            worker.save_checkpoint(f"{self.out}/checkpoints {self.name}", {})
            self.trained = seen["r3"]["weights"]
            seen["sent"] = self.sending(worker)
        worker.close()
        return seen

    def stored(self, worker):
        """The same batch in memory and as stored trajectories, of which each rank opens its own only."""
        batch = batches()[0]
        folder = Path(self.out) / f"spool {self.name} {self.rank}"
        taken = store_batch(folder, batch)
        own = set(worker.needed_trajectories(taken))
        for index, trajectory in enumerate(taken.trajectories):
            if index not in own:
                Path(trajectory.path).unlink()
        results = {}
        kept = msgspec.structs.replace(taken, kept_in=f"{self.out}/kept {self.name}")
        for name, step in (
            ("memory", lambda: worker.train_on(batch, 1)),
            ("stored", lambda: worker.read_batch(taken) or worker.train_step(kept, 1)),
        ):
            result = step()
            results[name] = {
                "metrics": {key: value for key, value in result.metrics.items() if key != "step_s"},
                "extremes": result.extremes,
                "gradients": gathered_gradients(worker),
            }
        return results | {"own": sorted(own), "trajectories": len(taken.trajectories), "kept": kept.kept_in}

    def replaying(self, worker):
        """R3: who got which row, also when rows are cut wrongly; metrics, gradients and weights."""
        batch, second = batches()
        shift = int(self.name not in ("pipeline", "interleaved pipeline"))

        def cut_wrongly(rows, valid, source, columns, device):
            moved = slice(0, columns.stop - columns.start)  # every stage takes the first layers' rows
            source = torch.from_numpy(source).roll(shift).numpy()  # or every token its neighbour's
            return local_rows(rows, valid, source, columns if shift else moved, device)

        with pytest.MonkeyPatch.context() as wrong, RouterWitness().watching(worker) as control:
            wrong.setattr(megatron_model, "local_rows", cut_wrongly)
            worker.compute_old_log_probs(place(worker, batch), batch.num_tokens)
        with RouterWitness().watching(worker) as checker:
            first = worker.train_on(batch, 1)
        metrics = [first.metrics]
        gradients = gathered_gradients(worker)
        left = [r.layer_number for r in worker.model.replay.routers if r.replay_backward_list]
        if self.name not in ONE_STEP:
            metrics.append(worker.train_on(second, 2).metrics)
        return {
            "metrics": metrics,
            "extremes": [(e.trajectory_id, e.position, e.lag) for e in first.extremes],
            "gradients": gradients,
            "weights": weights(worker),
            "deliveries": checker.deliveries(batch, self.hidden),
            "control": control.deliveries(batch, self.hidden),
            "left": left,
        }

    def recording(self, worker):
        """R2 without rows: which choices are replayed after the routers were changed; then an honest step."""
        batch = without_rows(batches()[0])
        placed = place(worker, batch)
        with RouterWitness().watching(worker) as recorded:
            old, placed = worker.compute_old_log_probs(placed, batch.num_tokens)
        routers = [m for c in worker.model.chunks for m in c.modules() if isinstance(m, TopKRouter)]
        kept = [router.weight.data.clone() for router in routers]
        for router in routers:
            router.weight.data.copy_(router.weight.data.flip(0))
        wanted = make_targets(batch)
        goal = UpdateInputs(
            targets=wanted,
            advantages=batch.rewards[wanted.trajectory],
            attempt=batch.attempt_index.astype(np.int64)[wanted.trajectory],
            left_out=np.zeros(batch.num_tokens, np.float32),
            old_log_probs=old,
            reference_log_probs=None,
            teacher_log_probs=None,
        )
        with RouterWitness().watching(worker) as replayed:
            worker.accumulate_gradients(placed, range(batch.num_trajectories), goal)
        with RouterWitness().watching(worker) as changed:
            worker.compute_old_log_probs(placed, batch.num_tokens)
        for router, weight in zip(routers, kept, strict=True):
            router.weight.data.copy_(weight)
        return {
            "metrics": worker.train_on(batch, 1).metrics,
            "recorded": recorded.maps(),
            "replayed": replayed.maps(),
            "changed": changed.maps(),
        }

    def resuming(self):
        """The checkpoint comes back; rows of another model are refused; a folder is left."""
        worker = self.start("again", checkpoints=f"{self.out}/checkpoints {self.name}")
        same = not differing(weights(worker), self.trained)
        refusal = ""
        if self.name == "data":
            broken = msgspec.structs.replace(batches()[0], num_experts=200)
            try:
                worker.train_on(broken, 3)
            except AlignmentError as e:
                refusal = str(e)
        worker.weights.owners()  # names and owners are exchanged once
        with mock.patch.object(c10d, "_object_to_tensor", wraps=c10d._object_to_tensor) as pickles:
            worker.publish(f"{self.out}/hf {self.name}", 2)
            self.write_delta(worker)
            sent = self.sharing(worker)
            worker.take_snapshot(2)
        for chunk in worker.model.chunks:
            for parameter in chunk.parameters():
                parameter.data.zero_()  # as a step would, at its worst
        if self.rank == 0:
            worker.publish(f"{self.out}/copy {self.name}", 2)  # an exchange with the other one would hang
        worker.close()
        seen = {"step": self.state.step, "same": same, "refusal": refusal, "pickles": pickles.call_count}
        return seen | sent

    def sending(self, worker):
        """Both ranks broadcast to an engine: the bytes of each, what they should be, and what is received.

        A bucket has a few tensors: a rank that sends waits for the other one's, and that one for its shards.
        """
        sending = msgspec.structs.replace(worker.config.weights, transport="distributed", senders=2)
        worker.config = msgspec.structs.replace(worker.config, weights=sending)
        worker.model.bridge._owners, worker.model.bridge._num_senders = None, 2  # it was made for one
        plan = worker.plan_buckets(BUCKET_BYTES)
        ports = all_gather_bytes(str(free_port("127.0.0.1")).encode())
        invites = [
            GroupInvite(
                group_name=f"test {self.name}",
                sender=sender,
                backend="gloo",
                host="127.0.0.1",
                port=int(port),
                world_size=2,
                rank_offset=1,
            )
            for sender, port in enumerate(ports)
        ]
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(asyncio.run, receive_weights(invites, plan)) if self.rank == 0 else None
            for invite in invites:
                worker.open_weight_group(invite)
            worker.send_weights([invites[0].group_name], BUCKET_BYTES)
            worker.close_weight_group(invites[0].group_name)
        return {
            "bytes": [sum(each.num_bytes for each in plan if each.sender == rank) for rank in (0, 1)],
            "digest": digest_of(plan, dict(self.trained)),
            "received": received and received.result(),
        }

    def write_delta(self, worker):
        """Write the delta to version 3, which has the opposite of all weights."""
        path = f"{self.out}/delta {self.name}"
        assert not worker.publish_delta(path, None, 2)
        for sign in (-1, 1):
            if sign == 1:
                assert worker.publish_delta(path, 2, 3)
            for chunk in worker.model.chunks:
                for parameter in chunk.parameters():
                    parameter.data.neg_()

    def sharing(self, worker):
        """Weights into shared memory, bucket by bucket: what rank 0 puts there, and what all ranks hold."""
        plan = worker.plan_buckets(BUCKET_BYTES)
        worker.share_bucket(0, BUCKET_BYTES, [0])  # left in the middle: the next one starts anew
        found, counts = {}, set()
        for number, bucket in enumerate(plan):
            counts.add(len(worker.share_bucket(number, BUCKET_BYTES, [0, 0])))
            if self.rank == 0:
                buffer, end = worker.weights.shared_buffers[number % 2], 0
                for spec in bucket.tensors:
                    begin, end = end, end + spec.num_bytes
                    data = buffer[begin:end].view(getattr(torch, spec.dtype))
                    found[spec.name] = data.view(spec.shape).clone()
        return {"shared": found, "buckets": len(plan), "payloads": counts}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What a single rank gives, and what its routers see."""
    out = tmp_path_factory.mktemp("ranks")
    model = build_tiny_qwen3_moe(
        out / "model", num_layers=4, dense_layers=(0,), num_experts=EXPERTS, top_k=TOP_K
    )
    result = {"out": out, "model": model}
    config = partial(trainer_config, model, micro_batch_tokens=MICRO_BATCH_TOKENS)
    with started(config()) as worker:
        with trial(worker, trainer_config(model, micro_batch_tokens=10_000)):
            result["hidden"] = hidden_states(worker, batches()[0])
        with trial(worker, config(loss=OVER_ANSWERS)):
            result["over answers"] = step(worker, batches()[0])
        with trial(worker, config(**BY_CRITIC)):
            result["critic"] = step(worker, batches()[0])
            result["critic"]["of critic"] = {key: part for key, _, part in critic_gradients(worker)}
        first = worker.train_on(batches()[0], 1)
        result["extremes"] = [(e.trajectory_id, e.position, e.lag) for e in first.extremes]
        result["gradients"] = gathered_gradients(worker)
        result["weights"] = [weights(worker)]
        second = worker.train_on(batches()[1], 2)
        result["weights"].append(weights(worker))
        result["metrics"] = [first.metrics, second.metrics]
    with started(config(replay="off")) as worker:
        result["native"] = worker.train_on(without_rows(batches()[0]), 1).metrics
    return result


@pytest.fixture(scope="module")
def several(one, request):
    """Results by layout and rank, of the layouts that the selected tests look at."""
    out = one["out"]
    selected = {
        item.callspec.params.get("layout")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    found = {}
    for ranks, layouts in ((2, LAYOUTS), (4, QUADS)):
        if names := [name for name in layouts if name in selected]:
            of_ranks = run_ranks(run_rank, one["model"], one["hidden"], out, names, ranks=ranks)
            found |= {name: [rank[name] for rank in of_ranks] for name in names}
    return found


def num_ranks(name):
    return 2 if name in LAYOUTS else 4


def of_layouts(names):
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(name, marks=pytest.mark.real if name in IN_TEST_REAL else pytest.mark.long)
            for name in names
        ],
    )


EVERY = of_layouts([*LAYOUTS, *QUADS])


def close(actual, expected):
    for key in expected.keys() - {"step_s"}:
        assert actual[key] == pytest.approx(expected[key], abs=2e-5, rel=1e-4, nan_ok=True), key


def equal_gradients(actual, expected):
    assert set(actual) == set(expected)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.case(30, 32)
@EVERY
def test_ranks_equal_one_when_laid_out(one, several, layout):
    for rank in several[layout]:
        seen = rank["r3"]
        steps = 1 if layout in ONE_STEP else 2
        assert len(seen["metrics"]) == steps
        for actual, expected in zip(seen["metrics"], one["metrics"], strict=False):
            close(actual, expected)
        assert seen["extremes"] == one["extremes"]
        equal_gradients(seen["gradients"], one["gradients"])
        trained = one["weights"][steps - 1]
        assert set(seen["weights"]) == set(trained)
        torch.testing.assert_close(seen["weights"], trained, atol=2e-4, rtol=0)
        assert not seen["left"]
        if steps == 2:  # in which routing is probed
            probed, other = seen["metrics"][1], several[layout][0]["r3"]["metrics"][1]
            assert probed["routing_probe_tokens"] > 0
            assert all(probed[key] == value for key, value in other.items() if "rout" in key)


@EVERY
def test_a_step_is_the_same_when_each_rank_reads_its_own_trajectories(one, several, layout):
    """Also the same as the single rank's, which computes old log-probs in a pass of their own."""
    ranks = [result["stored"] for result in several[layout]]
    for result in ranks:
        memory, stored = result["memory"], result["stored"]
        assert repr(stored["metrics"]) == repr(memory["metrics"])  # NaN where there are no such tokens
        assert stored["extremes"] == memory["extremes"]
        close(memory["metrics"] | {"step_s": 0, "old_log_prob_abs_diff": 0.0}, one["metrics"][0])
        assert math.isnan(memory["metrics"]["old_log_prob_abs_diff"])  # no such pass was made
        equal_gradients(memory["gradients"], one["gradients"])
        for name, gradient in memory["gradients"].items():
            assert torch.equal(stored["gradients"][name], gradient), name
    kept, batch = Path(ranks[0]["kept"]), batches()[0]
    found = read_trajectories(load_batch(kept))
    assert sum(path.stat().st_size for path in kept.glob("*.bin")) < 2 * load_batch(kept).nbytes
    assert np.array_equal(found.token_ids, batch.token_ids)
    assert np.array_equal(
        found.routed_experts[batch.routing_valid], batch.routed_experts[batch.routing_valid]
    )
    assert load_result(kept).metrics["grad_norm"] == ranks[0]["stored"]["metrics"]["grad_norm"]
    everything = set(range(ranks[0]["trajectories"]))
    assert set().union(*(result["own"] for result in ranks)) == everything
    if layout == "data":
        assert set(ranks[0]["own"]).isdisjoint(ranks[1]["own"])


@of_layouts(OVER_ALL)
def test_ranks_equal_one_when_the_loss_is_over_whole_answers(one, several, layout):
    expected = one["over answers"]
    assert 0 < expected["metrics"]["importance_truncated_fraction"] < 1
    assert 0 < expected["metrics"]["importance_rejected_fraction"] < 1
    for rank in several[layout]:
        close(rank["over answers"]["metrics"], expected["metrics"])
        equal_gradients(rank["over answers"]["gradients"], expected["gradients"])


@EVERY
def test_the_critics_of_ranks_equal_that_of_one_when_laid_out(one, several, layout):
    expected = one["critic"]
    assert expected["metrics"]["value_explained_variance"] < 1
    seen = Counter()
    for rank in several[layout]:
        close(rank["critic"]["metrics"], expected["metrics"])
        equal_gradients(rank["critic"]["gradients"], expected["gradients"])
        for key, offset, gradient in rank["critic"]["of critic"]:
            part = tuple(slice(at, at + size) for at, size in zip(offset, gradient.shape, strict=True))
            whole = expected["of critic"][key]
            torch.testing.assert_close(gradient, whole[part], atol=1e-6, rtol=1e-4, msg=key)
            seen[key] = max(seen[key], offset[0] + gradient.shape[0] if offset else 1)
    assert seen == {key: whole.shape[0] for key, whole in expected["of critic"].items()}
    assert expected["of critic"]["output_layer.weight"].abs().max() > 1e-2


@of_layouts(GUARDED)
def test_all_ranks_skip_the_update_when_one_has_a_loss_that_is_not_finite(several, layout):
    for rank in several[layout]:
        assert (rank["broken"]["updates"], rank["broken"]["updates_skipped"]) == (0, 1)
        assert rank["stayed"]


@pytest.mark.case(30)
@EVERY
def test_every_row_reaches_its_own_router_when_laid_out(several, layout):
    _, recompute = (LAYOUTS | QUADS)[layout]
    passes = 2 if recompute == "none" else 3  # old log-probs, forward, again in the backward pass
    right = sum((rank["r3"]["deliveries"][0] for rank in several[layout]), Counter())
    assert right == expected_deliveries(batches()[0], MOE_LAYERS, passes)
    assert not any(rank["r3"]["deliveries"][1] for rank in several[layout])
    # Control: rows of the neighbouring token, or of the first layers in every stage, are seen to be wrong.
    right = sum((rank["r3"]["control"][0] for rank in several[layout]), Counter())
    assert len(right) < 0.6 * len(expected_deliveries(batches()[0], MOE_LAYERS, 1))
    assert any(rank["r3"]["control"][1] for rank in several[layout])


@of_layouts(RECORDED)
def test_recorded_routing_gives_the_native_step_and_is_replayed_when_the_routers_changed(
    one, several, layout
):
    _, recompute = (LAYOUTS | QUADS)[layout]
    passes = 1 if recompute == "none" else 2
    assert one["native"]["grad_norm"] != pytest.approx(one["metrics"][0]["grad_norm"], rel=1e-2)
    for rank in several[layout]:
        seen = rank["r2"]
        close(seen["metrics"], one["native"])
        assert seen["recorded"]
        assert seen["replayed"] == Counter({call: passes * n for call, n in seen["recorded"].items()})
        assert seen["changed"] != seen["recorded"]


@of_layouts(RESUMED)
def test_weights_come_back_and_are_published_once_when_two_ranks_resume(one, several, layout, tmp_path):
    """Each rank writes its part. Rank 0 alone publishes the copy, although the weights have changed since."""
    assert all((rank["again"]["step"], rank["again"]["same"]) == (2, True) for rank in several[layout])
    assert [rank["again"]["pickles"] for rank in several[layout]] == [0, 0]
    sizes = sorted(path.stat().st_size for path in (one["out"] / f"hf {layout}").glob("*.safetensors"))
    assert len(sizes) == 2
    assert sizes[1] < (2 if "pipeline" in layout else 1.3) * sizes[0]
    published, copied = (stored_weights(one["out"] / f"{kind} {layout}") for kind in ("hf", "copy"))
    assert list(copied)
    assert not differing(copied, published)
    first, second = (seen["again"] for seen in several[layout])
    assert first["buckets"] > 10
    assert (first["payloads"], second["payloads"]) == ({2}, {0})
    for found in (published, first["shared"]):
        assert not differing(found, several[layout][0]["r3"]["weights"])
    folder = WeightFolder(tmp_path / "host")
    folder.copy_version(str(one["out"] / f"hf {layout}"), 2)
    changed = stored_weights(Path(folder.apply_delta(str(one["out"] / f"delta {layout}"))))
    assert not differing(changed, {name: -tensor for name, tensor in published.items()})


@of_layouts(RESUMED)
def test_both_ranks_send_what_they_own_when_both_are_senders(several, layout):
    sent = several[layout][0]["sent"]
    assert sent["received"] == sent["digest"]
    assert max(sent["bytes"]) < (2 if "pipeline" in layout else 1.1) * min(sent["bytes"])


@pytest.mark.case(36)
@of_layouts(["data"])
def test_both_ranks_refuse_when_one_finds_a_wrong_row(several, layout):
    assert all("another model" in rank["again"]["refusal"] for rank in several[layout])


def fail_on_one_rank(rank: int, store: Path) -> list[str]:
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(store), 2))
    with raise_on_all_ranks():
        told = ["fine"]
    for error in (AlignmentError("rows do not fit"), OSError("the disk is full")):
        try:
            with raise_on_all_ranks(doing="writing"):
                if rank == 1:
                    raise error
        except AsyncRLError as raised:
            told.append(f"{type(raised).__name__} {raised}")
    dist.destroy_process_group()
    return told


def test_an_error_of_one_rank_is_raised_on_all_when_they_decide_together(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on_one_rank, tmp_path / "store")
    failures = "AlignmentError rank 1: rows do not fit", "TrainerError rank 1: writing: the disk is full"
    assert first == ["fine", *failures]
    assert second == ["fine", "AlignmentError rows do not fit", "TrainerError writing: the disk is full"]
