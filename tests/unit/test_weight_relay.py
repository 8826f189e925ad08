import asyncio

from async_rl.runtime.supervision import Nursery
from async_rl.weights.relay import BUFFERS, BucketRelay


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


async def test_no_bucket_is_overwritten_while_somebody_reads_it_when_one_is_slower():
    memory = Memory()
    relay = BucketRelay(["quick", "slow"], 7, memory.fill)
    async with Nursery() as nursery:
        quick = nursery.start_task("quick", read(relay, memory, "quick", 0))
        slow = nursery.start_task("slow", read(relay, memory, "slow", 9))
        nursery.start_task("send", relay.fetch_buckets())
    assert quick.result() == slow.result() == memory.fetched == list(range(7))


async def test_the_next_bucket_is_filled_while_one_is_read():
    memory = Memory()
    relay = BucketRelay(["reader"], 3, memory.fill)
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
    relay = BucketRelay(["fails", "reads"], 6, memory.fill)
    async with Nursery() as nursery:
        nursery.start_task("fails", read(relay, memory, "fails", 3, upto=2))
        reads = nursery.start_task("reads", read(relay, memory, "reads", 0))
        nursery.start_task("send", relay.fetch_buckets())
    assert reads.result() == list(range(6))


async def test_nothing_more_is_filled_when_all_readers_have_left():
    memory = Memory()
    relay = BucketRelay(["reader", "never began"], 6, memory.fill)
    relay.remove_reader("never began")
    async with Nursery() as nursery:
        nursery.start_task("reader", read(relay, memory, "reader", 0, upto=2))
        nursery.start_task("send", relay.fetch_buckets())
    assert memory.fetched[-1] < 5
