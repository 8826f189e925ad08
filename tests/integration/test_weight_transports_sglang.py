"""Our end of a distributed weight update against SGLang's own code for the other end, in another process."""

import json
import os
import subprocess
import sys

import pytest
import torch

from async_rl.engine_protocol import GroupInvite
from async_rl.engines.sglang.server import free_port
from async_rl.errors import WeightSyncError
from async_rl.weights.broadcast import WeightGroup, send_buckets
from async_rl.weights.buckets import fill_buckets, largest_of, plan_buckets, spec_of

RECEIVER = """
import sys, json
import torch
import async_rl.engines.sglang.cpu_launcher  # lets SGLang be imported here
from sglang.srt.utils.common import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

address, name, buckets, out = json.loads(sys.argv[1])
group = init_custom_process_group(
    backend="gloo", init_method=f"tcp://{address}", world_size=2, rank=1, group_name=name
)
received = {}
for bucket in buckets:
    names, dtypes, shapes = zip(*bucket)
    flat = FlattenedTensorBucket.empty(names, dtypes, shapes, "cpu")
    torch.distributed.broadcast(flat.get_flattened_tensor(), src=0, group=group)
    received |= {name: tensor.clone() for name, tensor in flat.reconstruct_tensors()}
torch.save(received, out)
torch.distributed.destroy_process_group(group)
"""


def invite(name: str) -> GroupInvite:
    host = "127.0.0.1"
    where = {"host": host, "port": free_port(host), "world_size": 2, "rank_offset": 1}
    return GroupInvite(group_name=name, backend="gloo", **where)


@pytest.mark.timeout(400)
@pytest.mark.long  # tests/contract/test_real_parts.py sends whole models to a server
def test_tensors_arrive_bitwise_when_sglang_receives(tmp_path):
    torch.manual_seed(0)
    tensors = [
        ("model.embed", torch.randn(40, 8)),
        ("layer.gate", torch.randn(3, 5).bfloat16()),
        ("layer.norm", torch.randn(8)),
        ("head", torch.randn(8, 40)),
    ]
    buckets = plan_buckets([spec_of(name, t) for name, t in tensors], 1500)
    assert len(buckets) == 2
    where = invite("weights-engine-0-1")
    plan = [[(s.name, s.dtype, s.shape) for s in bucket] for bucket in buckets]
    argument = json.dumps([f"127.0.0.1:{where.port}", where.group_name, plan, str(tmp_path / "got")])
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", RECEIVER, argument], env=environment) as receiver:
        try:
            group = WeightGroup(where, timeout_s=240)  # the receiver imports SGLang meanwhile
            buffer = torch.empty(largest_of(buckets), dtype=torch.uint8)
            send_buckets(fill_buckets(tensors, buckets, [buffer]), {where.group_name: group})
            assert receiver.wait(240) == 0
            group.close()
        finally:
            receiver.kill()
    got = torch.load(tmp_path / "got")
    assert list(got) == [name for name, _ in tensors]
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors)


@pytest.mark.real
def test_opening_fails_when_no_engine_joins():
    with pytest.raises(WeightSyncError, match="did not join the weight-update group alone"):
        WeightGroup(invite("alone"), timeout_s=1)
