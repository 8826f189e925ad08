import torch

from trainer.weights.snapshot import WeightSnapshot


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


def test_a_rank_keeps_nothing_but_gathers_all_when_another_one_sends():
    gathered = []
    snapshot = WeightSnapshot(keeps=False, where="host")
    snapshot.copy_tensors(gathered.append(name) or (name, tensor) for name, tensor in weights(1.0))
    assert gathered == ["a", "b"]
    assert list(snapshot.tensors()) == []
