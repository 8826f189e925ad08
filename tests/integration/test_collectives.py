"""An error of one trainer rank, on both: two processes that have nothing but a Gloo group."""

import subprocess
import sys
from pathlib import Path

RANK = """
import sys
import torch.distributed as dist
from async_rl.errors import AlignmentError, AsyncRLError
from trainer.collectives import raise_on_all_ranks
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
with raise_on_all_ranks():
    pass
print("fine")
for error in (AlignmentError("rows do not fit"), OSError("the disk is full")):
    try:
        with raise_on_all_ranks(doing="writing"):
            if rank == 1:
                raise error
    except AsyncRLError as raised:
        print(type(raised).__name__, raised)
dist.destroy_process_group()
"""


def test_an_error_of_one_rank_is_raised_on_all_when_they_decide_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=280)[0].splitlines() for process in ranks]
    assert told[0] == [
        "fine",
        "AlignmentError rank 1: rows do not fit",
        "TrainerError rank 1: writing: the disk is full",
    ]
    assert told[1] == ["fine", "AlignmentError rows do not fit", "TrainerError writing: the disk is full"]
