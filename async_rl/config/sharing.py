"""What cannot be where engines and trainer take turns on the same devices (`placement.shared`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.config.engines import SGLangEngines

if TYPE_CHECKING:
    from async_rl.config.root import Config


def check_sharing(config: Config) -> None:
    """Refuse a config that has one side work in the other's turn.

    Raises:
        ValueError: With the remedy.
    """
    if not config.placement.shared:
        return
    engine, weights, trainer = config.engine, config.weights, config.trainer
    urls = engine.urls if isinstance(engine, SGLangEngines) else ()
    if urls or engine.urls_file is not None:
        raise ValueError(
            "placement.shared: engine.urls and engine.urls_file name servers that somebody else started, on "
            "devices that are not ours to share: leave them out"
        )
    if isinstance(engine, SGLangEngines) and engine.device != trainer.device:
        raise ValueError(
            f"placement.shared: engine.device is {engine.device} and trainer.device is {trainer.device}: set "
            "both to the same"
        )
    if weights.interrupt != "abort":
        raise ValueError(
            f"placement.shared: weights.interrupt is {weights.interrupt}, which leaves calls on engines that "
            "are to be empty: set weights.interrupt=abort"
        )
    if weights.transport != "disk":
        raise ValueError(
            f"placement.shared: weights.transport is {weights.transport}, for which the trainer must hold "
            "its weights while engines load them: set weights.transport=disk"
        )
    for field in ("overlap", "rolling"):
        if getattr(weights, field):
            raise ValueError(
                f"placement.shared: weights.{field} has engines and trainer at work at the same time: set "
                f"weights.{field}=false"
            )
    if config.evaluation.enabled and config.evaluation.engines != "shared":
        raise ValueError(
            f"placement.shared: evaluation.engines is {config.evaluation.engines}, but engines that are kept "
            "for evaluation would hold their devices in the trainer's turn: set evaluation.engines=shared"
        )
