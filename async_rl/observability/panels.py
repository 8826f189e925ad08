"""Describes each picture of a run's steps once: what it shows, its unit, and what is healthy.

```
 Panel ─┬─► page.charts: a chart of the live page and of the report
        └─► monitoring.panels: a panel of Grafana's dashboard
```

`figures` describes each single figure.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from async_rl.observability.records import Figure

RECENT: Final = 20
"""Number of steps in the second staleness histogram and of rows in the table of steps."""


PPO_KL_NATS: Final = 0.1
"""Above this value a step moved the policy too far, as the alert `PpoKlSpike` says."""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture shows and what to think of it; it has no data."""

    name: str
    """A stable name for links and tests: `ppo-kl`."""
    title: str
    note: str
    """One sentence on what is good or what a bad value means."""
    unit: str = ""
    lines: dict[str, str] = {}
    """The fields of the records that are drawn, with their labels."""
    kind: Literal["lines", "smoothed", "by reason", "stacked", "histogram"] = "lines"
    """smoothed: the first line has a mean beside it.  by reason: a line for each entry of the field.
    stacked: bars with a part for each entry of the field.  histogram: the sum of the field's counts."""
    band: tuple[str, str, str] | None = None
    """An area between two lines: label, lower and upper field."""
    joined: bool = False
    """Whether its values are measured every few steps only."""
    floor: Figure = 0.0
    """The y axis includes this value; None leaves it to the values."""
    ceiling: Figure = None
    """The y axis ends here unless a value is higher."""
    bounded: bool = False
    """Whether `max_staleness` is drawn as the limit."""
    last_steps: int | None = None
    """The steps of a histogram, from the last one back; None for all."""
    look: float | None = None
    """From here on a value deserves a look."""
    wrong: float | None = None
    """From here on a value is wrong."""


class PanelGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Panels that answer one question."""

    name: str
    title: str
    panels: tuple[Panel, ...]


_REWARD: Final = Panel(
    name="reward",
    title="Reward",
    note="Rises. Flat from the start: siblings get equal rewards, so there is no advantage.",
    lines={"reward_mean": "batch"},
    kind="smoothed",
    floor=None,
)
_GRAD_NORM: Final = Panel(
    name="grad-norm",
    title="Gradient norm",
    note="Steady; before clipping.",
    lines={"grad_norm": "norm"},
)

VALIDATION: Final = PanelGroup(
    name="validation",
    title="Does it hold on validation?",
    panels=(
        Panel(
            name="validation-reward",
            title="Validation reward",
            note="Mean over tasks, by set. Falls while the training reward rises: the policy fits its tasks.",
            floor=None,
        ),
        Panel(
            name="validation-pass",
            title="pass@k",
            note="Share of tasks that one of k answers solves, all sets. A large k falls: the policy "
            "narrows.",
            ceiling=1.0,
        ),
    ),
)

STEP_PANELS: Final = (
    PanelGroup(
        name="learning",
        title="Is it learning?",
        panels=(
            _REWARD,
            Panel(
                name="ppo-kl",
                title="ppo_kl",
                note="Small and steady, 1e-4 to 1e-2. A spike: the updates of a batch moved the policy far, "
                "look at the gradient norm. Grows step by step: lower the learning rate.",
                lines={"ppo_kl": "old - current", "ppo_kl_bypass": "rollout - current (bypass)"},
                unit="nats",
                look=0.02,
                wrong=PPO_KL_NATS,
                floor=None,
            ),
            Panel(
                name="kl-parts",
                title="Parts of the rollout KL",
                note="A spike of mismatch: damaged weights or wrong rows. Of staleness: data is too old. Of "
                "routing: replay removes more; below 0 the rows are wrong.",
                lines={
                    "kl_mismatch": "mismatch",
                    "kl_staleness": "staleness",
                    "kl_routing": "routing (probe)",
                },
                unit="nats",
                joined=True,
                floor=None,
            ),
            Panel(
                name="entropy",
                title="Entropy",
                note="Falls slowly. Towards 0: collapse; raise the temperature, lower the learning rate.",
                lines={"entropy": "entropy"},
                unit="nats",
            ),
            _GRAD_NORM,
            Panel(
                name="clip-fraction",
                title="Clipped tokens",
                note="Share of tokens; above about 0.2 the policy moves too far in a step.",
                lines={"clip_fraction": "share"},
                look=0.2,
            ),
            Panel(
                name="loss",
                title="Policy loss",
                note="No target of its own; a jump is worth a look.",
                lines={"loss": "loss"},
                floor=None,
            ),
        ),
    ),
    PanelGroup(
        name="off-policy",
        title="Where does the KL come from?",
        panels=(
            Panel(
                name="kl-lag",
                title="Rollout KL by lag",
                note="Rollout minus trainer log-probs: about 0 at lag 0, growing with the versions of lag.",
                lines={
                    "rollout_kl_lag0": "lag 0",
                    "rollout_kl_lag1": "lag 1",
                    "rollout_kl_lag2_up": "lag 2+",
                },
                unit="nats",
                joined=True,
                floor=None,
            ),
            Panel(
                name="log-prob-diff",
                title="Trainer against engine",
                note="Mean |Δ log-prob|. Lag 0 is mismatch alone: about 1e-5 in float32, 1e-2 in bfloat16.",
                lines={"lag0_log_prob_abs_diff": "lag 0", "log_prob_abs_diff": "all tokens"},
                unit="nats",
                joined=True,
            ),
            Panel(
                name="routing",
                title="Routing replay, by probe",
                note="The engine's routing replayed should lie below the trainer's own.",
                lines={"routing_replayed_abs_diff": "replayed", "routing_native_abs_diff": "native"},
                unit="nats",
                joined=True,
            ),
            Panel(
                name="ratio",
                title="Importance ratio",
                note="Close around 1; far from it the data is too old.",
                lines={
                    "importance_ratio_p50": "median",
                    "importance_ratio_p99": "p99",
                    "importance_ratio_p999": "p99.9",
                },
                band=("p1 to p99", "importance_ratio_p1", "importance_ratio_p99"),
                floor=None,
            ),
            Panel(
                name="ess",
                title="Effective sample size",
                note="Share of the trained tokens; 1 on-policy, below about 0.5 few tokens decide the step.",
                lines={"effective_sample_share": "share"},
                ceiling=1.0,
                look=0.5,
            ),
        ),
    ),
    PanelGroup(
        name="staleness",
        title="How old and how long is the data?",
        panels=(
            Panel(
                name="staleness",
                title="Staleness by step",
                note="Never above the bound; p95 at the bound for long: fewer engines, or more ranks.",
                lines={"staleness_mean": "mean", "staleness_max": "max"},
                unit="versions",
                band=("p50 to p95", "staleness_p50", "staleness_p95"),
                bounded=True,
            ),
            *(
                Panel(
                    name=name,
                    title=title,
                    note="Trained trajectories by age of their oldest token in versions, from 0 to the "
                    "bound.",
                    lines={"staleness_counts": "trajectories"},
                    kind="histogram",
                    unit="trajectories",
                    last_steps=last_steps,
                )
                for name, title, last_steps in (
                    ("staleness-histogram", "Staleness, whole run", None),
                    ("staleness-recent", f"Staleness, last {RECENT} steps", RECENT),
                )
            ),
            Panel(
                name="lengths",
                title="Sampled tokens",
                note="Of a trajectory. Grows or shrinks with the policy; upper edge at the limit: cut "
                "answers.",
                lines={"sampled_tokens_mean": "mean"},
                unit="tokens",
                band=("shortest to longest", "sampled_tokens_min", "sampled_tokens_max"),
            ),
            Panel(
                name="length-bias",
                title="Length bias",
                note="Distance of trained lengths from all that ended; above 0.05 long answers get lost.",
                lines={"length_ks": "KS distance"},
            ),
        ),
    ),
    PanelGroup(
        name="speed",
        title="Is it fast?",
        panels=(
            Panel(
                name="throughput",
                title="Throughput",
                note="Tokens sampled by all engines; falls with longer contexts and with engines lost.",
                lines={"tokens_per_s": "sampled"},
                unit="tokens/s",
            ),
            Panel(
                name="plan",
                title="Throughput against plan",
                note="Around 1: as fast as earlier steps let expect. Below 0.8: the tile names the cause.",
                lines={"throughput_vs_plan_ratio": "share of the plan"},
            ),
            Panel(
                name="idle",
                title="Idle shares",
                note="Trainer idle: more engines or staleness. Engines idle: more ranks or fewer engines.",
                lines={
                    "trainer_idle_share": "trainer, of the step",
                    "engine_idle_share": "engines, whole run",
                },
                ceiling=1.0,
                look=0.8,
            ),
            Panel(
                name="step-time",
                title="A step's time",
                note="Waiting for the batch, training on it, bringing the weights to the engines.",
                lines={"wait_s": "wait", "step_s": "step", "sync_s": "sync"},
                unit="s",
            ),
            Panel(
                name="sync",
                title="Weight sync",
                note="What a new version takes to reach engines. They pause for all but publish and connect.",
                lines={"sync_parts": ""},
                kind="stacked",
                unit="s",
            ),
            Panel(
                name="outstanding",
                title="In flight and queued",
                note="Queued at its bound: rollouts wait for the trainer. None queued: it waits for them.",
                lines={"in_flight": "in flight", "queued": "queued"},
                unit="trajectories",
            ),
            Panel(
                name="drops",
                title="Dropped",
                note="Trajectories that will never be trained, by reason, since the start.",
                lines={"dropped_reasons": ""},
                kind="by reason",
                unit="trajectories",
            ),
        ),
    ),
)

SFT_PANELS: Final = (
    PanelGroup(
        name="learning",
        title="Is it learning?",
        panels=(
            Panel(
                name="sft-loss",
                title="Loss",
                note="Falls. Validation rises while the batch's falls: the model memorises; fewer epochs.",
                lines={"loss": "batch", "validation_loss": "validation"},
                kind="smoothed",
                unit="nats",
                floor=None,
            ),
            _GRAD_NORM,
            Panel(
                name="learning-rate",
                title="Learning rate",
                note="As sft.lr, its warm-up and its decay say.",
                lines={"learning_rate": "rate"},
            ),
        ),
    ),
    PanelGroup(
        name="speed",
        title="Is it fast?",
        panels=(
            Panel(
                name="throughput",
                title="Throughput",
                note="Tokens of a batch, prompts included, over the time of its step.",
                lines={"tokens_per_s": "tokens"},
                unit="tokens/s",
            ),
            Panel(
                name="step-time",
                title="A step's time",
                note="Of forward, backward and update.",
                lines={"step_s": "step"},
                unit="s",
            ),
        ),
    ),
)

PANELS: Final = {panel.name: panel for group in (VALIDATION, *STEP_PANELS) for panel in group.panels}
"""The panels of a run with rollouts, by name."""

STEP_COLUMNS: Final = {
    **{"step": "step", "reward_mean": "reward", "update_kl": "ppo_kl", "staleness_p95": "stale p95"},
    **{"tokens_per_s": "tokens/s", "wait_s": "wait s", "step_s": "step s", "sync_s": "sync s"},
    **{"in_flight": "in flight", "queued": "queued", "dropped": "dropped"},
}
"""The headings of the table of steps, by the attribute of the record that a column shows."""

SFT_COLUMNS: Final = {
    **{"step": "step", "epoch_number": "epoch", "loss": "loss", "validation_loss": "validation loss"},
    **{"grad_norm": "grad norm", "learning_rate": "learning rate"},
    **{"tokens_per_s": "tokens/s", "step_s": "step s"},
}
"""As `STEP_COLUMNS`, of a supervised run."""
