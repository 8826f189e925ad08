"""Whether an SGLang server runs, and was started as a run needs it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.config import Config, LoraConfig
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.sglang.adapter_flags import target_modules
from async_rl.engines.sglang.generate_call import SENT_SETTINGS
from async_rl.errors import ConfigError
from async_rl.runtime.untrusted_json import UNREADABLE


class ServerState(msgspec.Struct, frozen=True):
    """The state of the processes of a server."""

    exit_reason: str | None = None
    """Why it has ended; None while it runs."""
    compilers: frozenset[int] = frozenset()
    """Its processes that compile kernels."""


class ServerNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs of its servers beyond plain calls."""

    routing: bool = False
    """Whether calls ask for routed experts."""
    mask_top_k: int | None = None
    """The `top_k` of calls that ask for sampling masks; None if none does."""
    adapters: LoraConfig | None = None
    """The adapters that servers load on top of the weights they were started with; None for whole weights."""

    @classmethod
    def of(cls, config: Config) -> ServerNeeds:
        """Return the needs of a run."""
        return cls(
            routing=config.routing.from_engine,
            mask_top_k=config.rollout.top_k if config.rollout.needs_masks else None,
            adapters=config.adapters,
        )


class ServerInfo(msgspec.Struct):
    """The options that a server was started with, as it reports them."""

    version: str = ""
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    dp_size: int = 1
    enable_return_routed_experts: bool = False
    incremental_streaming_output: bool = False
    enable_hierarchical_cache: bool = False
    pp_size: int = 1
    speculative_algorithm: str | None = None
    speculative_eagle_topk: int | None = None
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    moe_runner_backend: str | None = None
    disaggregation_mode: str = "null"
    sampling_mask_max_tokens: int | None = None
    sampling_backend: str | None = None
    enable_lora: bool | None = False
    max_lora_rank: int | None = None
    lora_target_modules: list[str] | None = None


def check_server(server: str, info: ServerInfo, needs: ServerNeeds, facts: EngineFacts) -> None:
    """Refuse a server that was started without what a run needs, or with what would falsify its data.

    Args:
        server: Its name and URL, for messages.
        info: How it was started.
        needs: What the run needs.
        facts: The model's dimensions.

    Raises:
        ConfigError: With the options to start it with.
    """
    if not info.incremental_streaming_output:
        raise ConfigError(
            f"{server} repeats all sampled tokens with every token: start it with "
            f"--incremental-streaming-output"
        )
    thresholds = {
        "single": info.speculative_accept_threshold_single,
        "acc": info.speculative_accept_threshold_acc,
    }
    for name, threshold in thresholds.items():
        if info.speculative_algorithm is not None and threshold != 1:
            raise ConfigError(
                f"{server} runs with --speculative-accept-threshold-{name} {threshold:g}, expected 1: it "
                f"accepts drafts more often than their probability, so that tokens come from another "
                f"distribution than their log-probs; start it without"
            )
    if needs.routing:
        if not info.enable_return_routed_experts:
            raise ConfigError(
                f"{server} would silently leave out the routing: start it with "
                f"--enable-return-routed-experts, or set routing.replay=off"
            )
        incompatible = {
            "--enable-hierarchical-cache (rows of loaded-back prefixes are stale)": (
                info.enable_hierarchical_cache
            ),
            f"--pp-size {info.pp_size} (rows of the stages are not gathered)": info.pp_size > 1,
            "tree speculation (the cache moves, the rows do not)": (
                info.speculative_algorithm is not None and (info.speculative_eagle_topk or 1) > 1
            ),
            f"--moe-runner-backend {info.moe_runner_backend} (it bypasses the recorded top-k)": any(
                name in (info.moe_runner_backend or "") for name in ("trtllm", "mxfp4")
            ),
            f"--disaggregation-mode {info.disaggregation_mode} (the decoding server was never fed the "
            f"prompt, so it has no rows for it)": info.disaggregation_mode != "null",
        }
        for option, found in incompatible.items():
            if found:
                raise ConfigError(
                    f"{server} runs with {option}, which gives wrong routing: start it without, or set "
                    f"routing.replay=off"
                )
    if needs.mask_top_k is not None:
        _check_masks(server, info, needs.mask_top_k)
    if needs.adapters is not None:
        _check_adapters(server, info, needs.adapters, facts)


def check_preferred_sampling(server: str, preferred: dict[str, Any] | str | None) -> None:
    """Refuse a server with sampling settings of its own that a call does not override.

    Source: `sglang/srt/managers/tokenizer_manager.py`, which merges them under those of the call.
    """
    settings = preferred or {}
    if isinstance(settings, str):
        try:
            settings = msgspec.json.decode(settings, type=dict[str, Any])
        except (*UNREADABLE, msgspec.ValidationError):
            settings = {str(preferred): "unreadable"}
    others = [f"{name} = {value}" for name, value in settings.items() if name not in SENT_SETTINGS]
    if others:
        raise ConfigError(
            f"{server} runs with --preferred-sampling-params "
            f"{', '.join(others)}: it would sample from another distribution than the trainer computes: "
            "start it without"
        )


def _check_masks(server: str, info: ServerInfo, top_k: int) -> None:
    """Refuse a server that cannot return the sampling masks that a run needs.

    Source: `sglang/srt/managers/scheduler.py`, where requests with `return_sampling_mask` are checked.
    """
    remedy = "or disable top_k, top_p and min_p (or set rollout.replay_sampling=false: biased gradients)"
    if info.sampling_mask_max_tokens is None:
        raise ConfigError(f"{server} returns no sampling masks: use SGLang 0.5.23, {remedy}")
    if top_k > info.sampling_mask_max_tokens:
        raise ConfigError(
            f"{server} returns at most {info.sampling_mask_max_tokens} kept tokens per position, below "
            f"rollout.top_k = {top_k}: start it with --sampling-mask-max-tokens {top_k}, {remedy}"
        )
    if info.speculative_algorithm is not None:
        raise ConfigError(
            f"{server} runs with --speculative-algorithm, whose drafts have no sampling masks: start it "
            f"without, {remedy}"
        )
    if info.sampling_backend == "ascend":
        raise ConfigError(f"{server} runs with --sampling-backend ascend, which has no masks: {remedy}")


def _check_adapters(server: str, info: ServerInfo, adapters: LoraConfig, facts: EngineFacts) -> None:
    """Refuse a server that cannot load the adapters of a run."""
    modules, served = target_modules(adapters, facts), set(info.lora_target_modules or ())
    missing = [] if "all" in served else [name for name in modules if name not in served]
    if info.enable_lora and (info.max_lora_rank or 0) >= adapters.rank and not missing:
        return
    found = (
        f"--max-lora-rank {info.max_lora_rank} --lora-target-modules {' '.join(sorted(served))}"
        if info.enable_lora
        else "no --enable-lora"
    )
    raise ConfigError(
        f"{server} runs with {found}, so it cannot load the adapters of trainer.lora: start it with "
        f"--enable-lora --max-lora-rank {adapters.rank} --lora-target-modules {' '.join(modules)}, or "
        "set trainer.lora.sync=merged"
    )
