"""Buckets of weights on their way: planned, exported, relayed, sent to the groups of engines."""

import asyncio
import os
import pickle
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions

from async_rl.engine_protocol import GroupInvite, TensorSpec
from async_rl.engines.group_liveness import SilenceMonitor, store_of
from async_rl.engines.sglang.abortable_groups import GroupMember, receive
from async_rl.engines.sglang.server import free_port
from async_rl.errors import ABORTED, WeightSyncError
from async_rl.runtime.supervision import Nursery
from async_rl.weights import broadcast
from async_rl.weights.broadcast import WeightGroup, open_store, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of, plan_buckets, spec_of
from async_rl.weights.relay import BUFFERS, BucketRelay
from async_rl.weights.shared_memory import payload_for, shared_buffer
from trainer.megatron.weight_owners import assign_owners
from trainer.weights import snapshot as snapshot_module
from trainer.weights.snapshot import WeightSnapshot
from trainer.weights.weight_export import WeightExport


def specs(*shapes: tuple[int, ...], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, shape in enumerate(shapes)]


class FakeGroup:
    """Records what is sent, and that no bucket is overwritten while it is."""

    def __init__(self, name: str = "", fails_at: int = 10**9) -> None:
        self.name, self.fails_at, self.sent = name, fails_at, []
        self.sending: torch.Tensor | None = None
        self.has_waited, self.silent = False, list[int]()

    def start_broadcast(self, data: torch.Tensor) -> None:
        assert self.sending is None
        self.sending = data

    def wait(self) -> None:
        if self.sending is None:
            return
        self.sent.append(self.sending.clone())
        self.sending = None
        if len(self.sent) > self.fails_at:
            raise RuntimeError("connection reset by peer")

    def wait_for_receivers(self) -> None:
        assert self.sending is None
        self.has_waited = True


def test_buckets_keep_order_and_size_when_planned():
    plan = plan_buckets(specs((10,), (10,), (5,), (30,), (1,)), 80)
    assert [[s.name for s in bucket] for bucket in plan] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert all(sum(spec.num_bytes for spec in bucket) <= 80 for bucket in plan if len(bucket) > 1)


@pytest.mark.parametrize(
    "order", [("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"), ("kv_a_proj_with_mqa", "q_a_proj")]
)
def test_a_bucket_goes_on_when_the_engine_fuses_what_it_cuts(order):
    fused = (f"model.layers.{i}.self_attn.{name}.weight" for i in (0, 1) for name in order)
    names = ["embed", *fused, "head"]
    named = [TensorSpec(name=name, dtype="float32", shape=(10,)) for name in names]
    plan = [[s.name for s in bucket] for bucket in plan_buckets(named, 40)]
    assert [name for bucket in plan for name in bucket] == names
    assert plan == [["embed"], names[1 : 1 + len(order)], names[1 + len(order) : -1], ["head"]]


def test_a_bucket_ends_when_the_next_tensor_would_be_misaligned():
    mixed = [*specs((3,), dtype="bfloat16"), TensorSpec(name="f", dtype="float32", shape=(2,))]
    assert [[s.name for s in bucket] for bucket in plan_buckets(mixed, 1000)] == [["t0"], ["f"]]


def test_bucket_bytes_are_those_of_the_tensors_when_filled():
    tensors = [("a", torch.randn(2, 3)), ("b", torch.randn(4).bfloat16()), ("c", torch.randn(0, 3))]
    plan = plan_buckets([spec_of(name, t) for name, t in tensors], 1000)
    (data,) = fill_buckets(tensors, plan, [torch.zeros(largest_of(plan), dtype=torch.uint8)])
    assert data[:24].view(torch.float32).view(2, 3).equal(tensors[0][1])
    assert data[24:32].view(torch.bfloat16).equal(tensors[1][1])


@pytest.mark.parametrize(("exported", "found"), [([("other", torch.zeros(3))], "other"), ([], "nothing")])
def test_filling_refuses_when_a_tensor_is_not_the_planned_one(exported, found):
    plan = plan_buckets(specs((2,), (3,)), 1000)
    with pytest.raises(WeightSyncError, match=f"{found}.*t1"):
        list(fill_buckets([("t0", torch.zeros(2)), *exported], plan, [torch.zeros(20, dtype=torch.uint8)]))


def test_other_groups_get_everything_when_one_fails():
    good, bad = FakeGroup("good"), FakeGroup("bad", fails_at=1)
    buffers = torch.zeros(2, 2, dtype=torch.uint8)

    def filled():
        for number in range(5):
            yield buffers[number % 2].fill_(number)

    send_buckets(filled(), [good, bad])
    assert [int(sent[0]) for sent in good.sent] == [0, 1, 2, 3, 4]
    assert (good.has_waited, bad.has_waited) == (True, False)
    assert len(bad.sent) == 2


def test_nothing_more_is_filled_when_no_group_is_left(caplog):
    filled = iter([torch.zeros(1, dtype=torch.uint8)] * 5)
    send_buckets(filled, [FakeGroup("bad", fails_at=0)])
    assert len(list(filled)) == 3  # one is filled while the first is sent
    assert "bad failed: connection reset" in caplog.text


def test_the_store_listens_on_its_host_only_and_waits_for_the_others():
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_store, "127.0.0.1", port, 2, 20.0)
        other = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20))
        store = opening.result()
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert ("127.0.0.1", port) in listening
    assert {ip for ip, at in listening if at == port} == {"127.0.0.1"}
    store.set("said", "hello")
    assert other.get("said") == b"hello"


def test_the_store_gives_up_when_the_others_do_not_come():
    port = free_port("127.0.0.1")
    with pytest.raises(RuntimeError, match="1/2"):
        open_store("127.0.0.1", port, 2, timeout_s=0.2)


# -- groups of trainer rank 0 and one engine ----------------------------------------------------------


VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize("before", [None, "0"])
def test_waits_of_a_group_raise_and_those_of_other_groups_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """A dead engine must not end the rank by torch's watchdog, which training keeps."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    seen: list[str | None] = []

    make = c10d.PrefixStore

    def record(name: str, store: Store) -> Store:
        seen.append(os.environ.get(VARIABLE))  # while the group is created
        return make(name, store)

    monkeypatch.setattr(broadcast, "open_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(c10d, "PrefixStore", record)
    invite = GroupInvite(
        group_name="g", host="127.0.0.1", port=1, world_size=1, rank_offset=1, backend="gloo"
    )
    WeightGroup(invite, timeout_s=5).close()
    assert seen[0] == "1"
    assert os.environ.get(VARIABLE) == before


class Communicators:
    """Stands for NCCL's backend: its communicator is not there before the other members are."""

    def __init__(self) -> None:
        self.begun, self.others_are_there = threading.Event(), threading.Event()
        self.devices: list[torch.device] = []
        self.error: Exception | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.devices.append(device)
        self.begun.set()
        self.others_are_there.wait()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Nothing: torch does not know yet of a communicator that is being created."""


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WeightGroup, Communicators]]:
    """Yield a group that takes itself for one of NCCL, with what creates its communicator."""
    communicators = Communicators()
    monkeypatch.setattr(broadcast, "open_store", lambda *_: dist.HashStore())
    invite = GroupInvite(
        group_name="n", host="127.0.0.1", port=1, world_size=1, rank_offset=1, backend="gloo"
    )
    group = WeightGroup(invite, timeout_s=60)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group: "nccl")
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: communicators)
        yield group, communicators
        communicators.others_are_there.set()
        for thread in [each for each in threading.enumerate() if each.name == "weight group connection"]:
            thread.join()
    group.close()
    assert group._group not in c10d._world.pg_map


def test_a_communicator_is_created_before_the_first_broadcast(nccl) -> None:
    group, communicators = nccl
    communicators.others_are_there.set()
    for number in range(2):
        group.start_broadcast(torch.zeros(4, dtype=torch.uint8))
        group.wait()
        assert communicators.devices == [torch.device("cpu")], number
    group.wait_for_receivers()


def test_what_a_communicator_fails_with_is_raised(nccl) -> None:
    group, communicators = nccl
    communicators.error = RuntimeError("unhandled system error")
    communicators.others_are_there.set()
    with pytest.raises(RuntimeError, match="unhandled system error"):
        group.start_broadcast(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("found", ["by the driver", "in the store"])
def test_the_first_broadcast_ends_when_a_member_died_after_it_had_joined(
    nccl, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, communicators = nccl
    monkeypatch.setattr(broadcast, "CHECK_S", 0.001)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(group.start_broadcast, torch.zeros(4, dtype=torch.uint8))
        assert communicators.begun.wait(timeout=30)
        if found == "by the driver":
            group.abort("engine-3 has died")
        else:
            store_of(group._group).add("alive/1", 1)
            group._monitor = SilenceMonitor(group._group, world_size=2)
        with pytest.raises(WeightSyncError, match=r"aborted the update|no sign of life from ranks \[1\]"):
            sending.result(timeout=30)
    assert group.silent == ([] if found == "by the driver" else [1])
    group.close()
    assert group._group in c10d._world.pg_map  # to destroy it would wait for the member


def test_an_engine_leaves_its_first_broadcast_when_the_sender_gives_it_up(nccl) -> None:
    group, communicators = nccl
    member = GroupMember(group._group, rank=1)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive, [member], [torch.zeros(4, dtype=torch.uint8)], in_parts=False)
        assert communicators.begun.wait(timeout=30)
        group.abort("engine-3 has died")
        with pytest.raises(WeightSyncError, match=f"{ABORTED}engine-3 has died"):
            receiving.result(timeout=30)


# -- relays between readers of shared memory ---------------------------------------------------------


class Memory:
    """The trainer's buffers: what a reader holds must still be there when it lets go."""

    def __init__(self) -> None:
        self.slots: list[int | None] = [None] * BUFFERS
        self.fetched: list[int] = []

    async def fill(self, number: int) -> int:
        self.fetched.append(number)
        self.slots[number % BUFFERS] = None
        await asyncio.sleep(0)
        self.slots[number % BUFFERS] = number
        return number


async def read(
    relay: BucketRelay[int], memory: Memory, reader: str, waits: int, upto: int = 10**6
) -> list[int]:
    taken = []
    try:
        async for bucket in relay.buckets(reader):
            for _ in range(waits):
                await asyncio.sleep(0)
            assert memory.slots[bucket % BUFFERS] == bucket
            taken.append(bucket)
            if len(taken) == upto:
                break
    finally:
        relay.remove_reader(reader)
    return taken


async def none_dead(readers: Sequence[str]) -> Sequence[str]:
    return ()


async def test_no_bucket_is_overwritten_while_somebody_reads_it_when_one_is_slower():
    memory = Memory()
    relay = BucketRelay(["quick", "slow"], 7, memory.fill, none_dead)
    async with Nursery() as nursery:
        quick = nursery.start_task("quick", read(relay, memory, "quick", 0))
        slow = nursery.start_task("slow", read(relay, memory, "slow", 9))
        nursery.start_task("send", relay.fetch_buckets())
    assert quick.result() == slow.result() == memory.fetched == list(range(7))


async def test_the_next_bucket_is_filled_while_one_is_read():
    memory = Memory()
    relay = BucketRelay(["reader"], 3, memory.fill, none_dead)
    async with Nursery() as nursery:
        nursery.start_task("send", relay.fetch_buckets())
        buckets = relay.buckets("reader")
        assert await anext(buckets) == 0
        for _ in range(10):
            await asyncio.sleep(0)
        assert memory.fetched == [0, 1]
        assert [bucket async for bucket in buckets] == [1, 2]


async def test_the_others_get_everything_when_a_reader_leaves_in_the_middle():
    memory = Memory()
    relay = BucketRelay(["fails", "reads"], 6, memory.fill, none_dead)
    async with Nursery() as nursery:
        nursery.start_task("fails", read(relay, memory, "fails", 3, upto=2))
        reads = nursery.start_task("reads", read(relay, memory, "reads", 0))
        nursery.start_task("send", relay.fetch_buckets())
    assert reads.result() == list(range(6))


async def test_nothing_more_is_filled_when_all_readers_have_left():
    memory = Memory()
    relay = BucketRelay(["reader", "never began"], 6, memory.fill, none_dead)
    relay.remove_reader("never began")
    async with Nursery() as nursery:
        nursery.start_task("reader", read(relay, memory, "reader", 0, upto=2))
        nursery.start_task("send", relay.fetch_buckets())
    assert memory.fetched[-1] < 5


async def test_a_reader_is_given_up_when_all_wait_for_it_and_it_does_not_answer():
    memory, asked = Memory(), []

    async def find_dead(readers: Sequence[str]) -> Sequence[str]:
        asked.append(list(readers))
        return [reader for reader in readers if reader == "stopped"]

    relay = BucketRelay(["reads", "slow", "stopped"], 6, memory.fill, find_dead)

    async def read_slowly() -> list[int]:
        taken = []
        async for bucket in relay.buckets("slow"):
            await asyncio.sleep(9.0)
            taken.append(bucket)
        relay.remove_reader("slow")
        return taken

    async with Nursery() as nursery:
        stopped = relay.buckets("stopped")
        reads = nursery.start_task("reads", read(relay, memory, "reads", 0))
        slow = nursery.start_task("slow", read_slowly())
        nursery.start_task("send", relay.fetch_buckets())
        assert await anext(stopped) == 0
    assert reads.result() == slow.result() == list(range(6))
    assert (relay.dead, asked[0]) == (["stopped"], ["slow", "stopped"])
    assert len(asked) > 1  # the slow one was asked again, and lives
    with pytest.raises(WeightSyncError, match="stopped was given up after 1 of 6 buckets"):
        await anext(stopped)


# -- snapshots ----------------------------------------------------------------------------------------


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((2, 3), value).bfloat16()), ("b", torch.full((4, 2), value).T)]


def test_the_copy_stays_what_it_was_when_the_weights_change():
    snapshot, live = WeightSnapshot(keeps=True, where="host"), weights(1.0)
    snapshot.copy_tensors(live)
    for _, tensor in live:
        tensor.zero_()
    assert [(name, tensor.unique().tolist()) for name, tensor in snapshot.tensors()] == [
        ("a", [1.0]),
        ("b", [1.0]),
    ]
    assert [tensor.dtype for _, tensor in snapshot.tensors()] == [torch.bfloat16, torch.float32]
    assert dict(snapshot.tensors())["b"].shape == (2, 4)


def test_no_memory_is_allocated_when_a_copy_is_made_again():
    snapshot = WeightSnapshot(keeps=True, where="host")
    snapshot.copy_tensors(weights(1.0))
    before = [tensor.data_ptr() for _, tensor in snapshot.tensors()]
    snapshot.copy_tensors(weights(2.0))
    assert [tensor.data_ptr() for _, tensor in snapshot.tensors()] == before
    assert all((tensor == 2).all() for _, tensor in snapshot.tensors())


def test_a_copy_takes_its_own_size_where_torch_rounds_pinned_memory_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch does below 1 GiB, the limit that ranks are given: weights would take a third more memory."""
    unit, taken, allocate = 1 << 20, [], torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        tensor = allocate(*size, **options)
        taken.append(1 << (tensor.nbytes - 1).bit_length() if 0 < tensor.nbytes <= unit else tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    monkeypatch.setattr(snapshot_module, "_SLAB_BYTES", unit)
    live = [(f"expert {number}", torch.full((37, 350), number).bfloat16()) for number in range(200)]
    live.insert(90, ("embedding", torch.ones(3 << 18)))
    snapshot = WeightSnapshot(keeps=True, where="host")
    snapshot.copy_tensors(live)
    assert sum(taken) < 1.05 * sum(tensor.nbytes for _, tensor in live) + unit  # and a last piece
    assert all(
        torch.equal(copy, tensor) for (_, copy), (_, tensor) in zip(snapshot.tensors(), live, strict=True)
    )


def test_a_rank_keeps_nothing_but_gathers_all_when_another_one_sends():
    gathered = []
    snapshot = WeightSnapshot(keeps=False, where="host")
    snapshot.copy_tensors(gathered.append(name) or (name, tensor) for name, tensor in weights(1.0))
    assert gathered == ["a", "b"]
    assert list(snapshot.tensors()) == []


# -- exports ------------------------------------------------------------------------------------------


TENSORS = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2)), ("c", torch.zeros(3))]


def export(tensors=TENSORS, rank=0, owners=None, shares_device=False) -> WeightExport:
    exports = [lambda: iter(tensors)] * 3
    owners = owners or (lambda: assign_owners([(0, [spec_of(*each) for each in tensors])], (0,)))
    return WeightExport(
        *exports,
        rank,
        torch.device("cpu"),
        owners=owners,
        group_timeout_s=1.0,
        shares_device=shares_device,
    )


def refuse():
    raise WeightSyncError("x is unknown")


@pytest.mark.parametrize("use", ["plan", "share", "send"])
def test_nothing_is_sent_when_the_tensors_are_refused(use):
    tampered = export([("x", torch.ones(2))], owners=refuse)
    calls = {
        "plan": lambda: tampered.plan_buckets(100),
        "share": lambda: tampered.share_bucket(0, 100, [0]),
        "send": lambda: tampered.send_weights([], 100),
    }
    for _ in range(2):  # not the second time either
        with pytest.raises(WeightSyncError, match="x is unknown"):
            calls[use]()
    assert tampered.shared_buffers == []


def test_other_ranks_leave_the_payloads_to_the_first():
    second = export(rank=1)
    numbers = range(len(second.plan_buckets(24)))
    assert [second.share_bucket(number, 24, [0] * 3) for number in numbers] == [[]] * 3
    assert second.shared_buffers == []


def test_each_rank_fills_buckets_for_its_own_readers_when_they_share_its_device(monkeypatch):
    """Of three buckets none is overwritten before an engine has answered to the next one."""
    collected = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(True))
    second = export(rank=1, shares_device=True)
    counts = [len(second.share_bucket(number, 24, [0, 1, 2, 1])) for number in range(3)]
    assert counts == [2, 2, 2]
    filled = [bytes(buffer.numpy()) for buffer in second.shared_buffers]
    assert filled[0] == TENSORS[0][1].numpy().tobytes()
    assert [buffer.device.type for buffer in second.shared_buffers] == ["cpu"] * 3
    second.release_device()
    assert (second.shared_buffers, collected) == ([], [True])
    assert len(second.share_bucket(0, 24, [1])) == 1  # the next update allocates them again
    second.close()


def test_a_bucket_on_a_gpu_is_a_handle_that_names_it_by_its_uuid(monkeypatch):
    """The GPU has another number in the engine's process."""
    spec = spec_of("a", torch.arange(6.0))
    rebuilt = []
    arguments = (torch.Tensor, torch.Size([24]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3, b"h")
    monkeypatch.setattr(
        reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, arguments)
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}")
    )
    payload = payload_for(cast(torch.Tensor, SimpleNamespace(is_cuda=True)), [spec])
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *given: rebuilt.append(given) or "data")
    found = pickle.loads(payload)
    assert rebuilt == [(*arguments[:6], "gpu-3", b"h")]
    assert found["flattened_tensor"] == "data"
    assert [(each.name, each.end_idx) for each in found["metadata"]] == [("a", 24)]


def test_a_pass_ends_with_the_tensors_of_its_bucket_when_one_is_not_the_planned_one():
    """Gathering is collective: this rank goes through what the others go through."""
    passed = []

    def tensors():
        for name, tensor in [("a", torch.ones(6)), ("b", torch.ones(2, 2)), ("c", torch.zeros(3))]:
            passed.append(name)
            yield name, tensor

    planned = [spec_of(*each) for each in (TENSORS[0], TENSORS[2], TENSORS[1])]
    changing = WeightExport(
        *[tensors] * 3,
        0,
        torch.device("cpu"),
        owners=lambda: assign_owners([(0, planned)], (0,)),
        group_timeout_s=1.0,
    )
    with pytest.raises(WeightSyncError, match="the engines expect"):
        changing.share_bucket(0, 1000, [0])
    assert passed == ["a", "b", "c"]
    changing.close()


def test_there_is_one_clear_error_when_shared_memory_is_too_small(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64, 60, 4))
    with pytest.raises(WeightSyncError, match=r"needs 24 bytes more of shared memory .* has 4: lower"):
        export().allocate_buffers([each.tensors for each in export().plan_buckets(24)])
    with pytest.raises(WeightSyncError):
        shared_buffer(5)
