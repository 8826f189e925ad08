from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from async_rl.engine_protocol import TensorSpec
from async_rl.engines.sglang.server import free_port
from async_rl.errors import WeightSyncError
from async_rl.weights.broadcast import open_store, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of, plan_buckets, size_of, spec_of


def specs(*shapes: tuple[int, ...], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name=f"t{i}", dtype=dtype, shape=shape) for i, shape in enumerate(shapes)]


class FakeWork:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def wait(self) -> None:
        if self.fails:
            raise RuntimeError("connection reset by peer")


class FakeGroup:
    def __init__(self, fails_at: int = 10**9) -> None:
        self.fails_at, self.sent = fails_at, []

    def broadcast(self, data: torch.Tensor) -> FakeWork:
        self.sent.append(data.clone())
        return FakeWork(len(self.sent) > self.fails_at)


def test_buckets_keep_order_and_size_when_planned():
    plan = plan_buckets(specs((10,), (10,), (5,), (30,), (1,)), 80)
    assert [[s.name for s in bucket] for bucket in plan] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert all(sum(map(size_of, bucket)) <= 80 for bucket in plan if len(bucket) > 1)


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
    good, bad = FakeGroup(), FakeGroup(fails_at=1)
    send_buckets([torch.full((2,), i, dtype=torch.uint8) for i in range(4)], {"good": good, "bad": bad})
    assert [int(sent[0]) for sent in good.sent] == [0, 1, 2, 3]
    assert len(bad.sent) == 2


def test_sending_fails_when_no_group_is_left():
    with pytest.raises(WeightSyncError, match="bad"):
        send_buckets([torch.zeros(1, dtype=torch.uint8)] * 3, {"bad": FakeGroup(fails_at=0)})


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
