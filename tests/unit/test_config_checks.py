"""Settings that do not fit together are refused with a message that names them and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config import parse_config
from async_rl.config.loader import apply_override
from async_rl.config.root import CHECKS
from async_rl.errors import ConfigError
from trainer.losses.trial import try_loss

REFUSED: dict[str, list[tuple[str, str]]] = {
    "check_data": [
        ("data.datasets=[{path: a.jsonl}]", "are both set: set only one of them"),
        (
            "data={datasets: [{path: a.jsonl, weight: 1}, {path: b.jsonl}]}",
            "the weights are [1.0, None]; set all of them, or none",
        ),
    ],
    "check_groups": [
        ("trainer={updates_per_batch: 3, groups_per_batch: 2}", "only 2, and groups are not split"),
        ("rollout={group_size: 1, dynamic_filtering: true}", "would drop all: raise rollout.group_size"),
        ("rollout.group_size=1", "advantages are all zero: use at least 2, or set trainer.loss.advantages"),
        (
            "{models: {a: {path: m}}, trainer: {loss: {teacher: {model: a, only: true}}}, "
            "rollout: {dynamic_filtering: true}}",
            "would drop groups that the teacher trains: set rollout.dynamic_filtering=false",
        ),
    ],
    "check_engines": [
        ("engine={urls: ['http://a:1'], urls_file: b}", "are both set: write the URLs into the file"),
        (
            "engine={kind: sglang, extra_args: [--preferred-sampling-params, '{\"min_p\": 0.1}']}",
            "log-probs: remove it, and set what rollout has (temperature, top_p, top_k, min_p)",
        ),
        (
            "{models: {a: {path: m, extra_args: ['--preferred-sampling-params={}']}}}",
            "models.a.extra_args has --preferred-sampling-params",
        ),
        *(
            (f"engine.urls=['{url}']", f"'{url}', which is not the URL of a server such as")
            for url in (
                "http://a:99999",
                "http://a:b",
                "http://",
                "http://a:1?x=1",
                "http://a:0",
                "http://[a",
            )
        ),
        (
            "engine.urls=['http://a:1', 'http://a:1']",
            "engine.urls has http://a:1 twice: name each server once",
        ),
        *(
            (f"engine={{kind: sglang, extra_args: [{given}]}}", f"has {given[:6]}")
            for given in ("--model-path, /x", "--dtype=float16", "--tp-size=2", "--port=80", "--host=a")
        ),
        ("engine.urls=[localhost:30500]", "'localhost:30500', which is no URL: write http://localhost:30500"),
    ],
    "check_models": [
        ("models={engine: {path: m}}", "models has the name 'engine'"),
        ("models={a/b: {path: m}}", "models has the name 'a/b'"),
        ("models={a: {path: m, urls: [a:1]}}", "which is no URL"),
        (
            "models={a: {path: m, urls: ['http://a:99999']}}",
            "models.a.urls has 'http://a:99999', which is not",
        ),
        ("trainer.loss.teacher.model=a", "which models does not have (there: none)"),
        ("trainer.loss.teacher.only=true", "names no teacher"),
        (
            "rollout.rewards={r: {kind: judge, judge: b, template: t}}",
            "judge is 'b', which models does not have",
        ),
        (
            "{models: {a: {path: m}}, "
            "rollout: {rewards: {r: {kind: judge, judge: a, template: t, score: '('}}}}",
            "no regular expression",
        ),
        (
            "{models: {a: {path: m}}, trainer: {loss: {teacher: {model: a}}}, rollout: {top_k: 20}}",
            "rollout truncates its sampling",
        ),
        (
            "{models: {a: {path: m}}, trainer: {loss: {teacher: {model: a}}}, "
            "rollout: {top_p: 0.9, replay_sampling: false}}",
            "rollout truncates its sampling",
        ),
    ],
    "check_layout": [
        ("trainer={num_ranks: 3, layout: {tp: 2}}", "num_ranks is 3, but trainer.layout needs a multiple of"),
        ("trainer={num_ranks: 2, layout: {ep: 4}}", "the experts need a multiple of ep*etp*pp = 4"),
        ("trainer.layout={vpp: 2}", "only a pipeline can be interleaved; set vpp=1 or raise pp"),
        ("trainer.layout={last_stage_layers: 1}", "pp is 1: only stages of a pipeline can differ"),
    ],
    "check_sampling": [
        ("rollout={max_new_tokens: 64, max_context_tokens: 64}", "leaves no tokens for a prompt"),
        ("rollout.top_k=0", "no token could be sampled: use -1 for no limit"),
        ("rollout.top_p=0.9", "engines return at most 4096 kept tokens per position"),
        ("engine.context_length=100", "engine.context_length is 100, below rollout.max_context_tokens"),
        ("engine.max_total_tokens=100", "engine.max_total_tokens is 100, below rollout.max_context_tokens"),
    ],
    "check_loss": [
        ("trainer.loss.reject={geometric_low: 2.0, geometric_high: 1.0}", "every answer would be rejected"),
        ("trainer.loss={objective: gspo, dual_clip: 3.0}", "only objective=ppo supports it"),
        ("trainer.loss.importance={low: 3, high: 2}", "above its high = 2.0: no ratio is between them"),
        ("trainer.loss.overlong_buffer_tokens=999999", "every answer would be penalised"),
        ("trainer.loss.kl={coefficient: 0.1, where: loss, estimator: k1}", "use k2 or k3, or where=reward"),
        (
            "trainer.loss.kl={coefficient: 0.1, where: reward}",
            "or advantages=dr_grpo or rloo",
        ),
        (
            "{models: {a: {path: m}}, trainer: {loss: {teacher: {model: a, only: true}, "
            "kl: {coefficient: 0.1, where: reward}}}}",
            "rewards have no effect: set trainer.loss.kl.where=loss",
        ),
    ],
    "check_critic": [
        ("trainer.critic.lr=1e-4", "advantages is grpo, which uses no critic: set it to gae"),
        (
            "trainer.loss={advantages: gae, turn_discount: 0.9}",
            "set turn_discount=null and use trainer.critic.gamma",
        ),
    ],
    "check_lora": [
        ("trainer.lora.targets=[mlp, mlp]", "name each target once"),
        (
            "{trainer: {lora: {rank: 8}, loss: {advantages: gae}}}",
            "gae, whose critic trains all weights of a second model",
        ),
    ],
    "check_corrections": [
        ("trainer.loss.importance.level=off", "nothing corrects for data of older weights"),
    ],
    "check_updates": [
        ("{rollout: {max_staleness: 1}, weights: {every: 3}}", "set weights.every=2 or less"),
    ],
    "check_routing": [
        ("{routing: {replay: r2}, trainer: {loss: {old_log_probs: rollout}}}", "is rollout: set it to"),
        (
            "{routing: {replay: r3, merge: replace}, weights: {interrupt: in_place}}",
            "so the engine itself splices routing: set routing.merge=splice",
        ),
    ],
    "check_evaluation": [
        ("evaluation.every=5", "data.validation names no dataset"),
    ],
    "check_adapters": [
        ("{trainer: {lora: {}}, weights: {transport: tensor}}", "set weights.transport=disk, or set trainer"),
        (
            "{trainer: {lora: {}}, weights: {interrupt: retract}}",
            "with the adapter with which it was begun, so calls must end before an update",
        ),
        (
            "{trainer: {lora: {}}, weights: {verify: checksum}}",
            "weights, which do not change, and not the adapter; set weights.verify=version",
        ),
    ],
    "check_sharing": [
        ("{placement: {shared: true}, weights: {interrupt: retract}}", "set weights.interrupt=abort"),
        ("{placement: {shared: true}, weights: {every: 2}}", "set weights.every=1"),
        (
            "{placement: {shared: true}, weights: {transport: distributed}}",
            "set weights.transport=tensor, or disk",
        ),
        (
            "{placement: {shared: true}, weights: {interrupt: abort, transport: disk}, "
            "engine: {kind: sglang, device: cpu, extra_args: [--tokenizer-worker-num, '2']}, "
            "trainer: {device: cpu}}",
            "engine.extra_args has --tokenizer-worker-num",
        ),
        (
            "{placement: {shared: true}, data: {path: x.jsonl, validation: [{path: y.jsonl}]}, "
            "engine: {num_engines: 2}, evaluation: {at_start: true, engines: 1}}",
            "evaluation.engines is 1, but engines reserved for evaluation would hold their devices",
        ),
    ],
}
"""What each check refuses: an override, or several as a tree, and a part of the message."""


def tree_with(override: str) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "x.jsonl"}}
    if not override.startswith("{"):
        apply_override(tree, override)
        return tree
    holder: dict[str, Any] = {}
    apply_override(holder, f"whole={override}")
    return tree | holder["whole"]


@pytest.mark.parametrize(("override", "said"), [case for cases in REFUSED.values() for case in cases])
def test_a_config_is_refused_with_the_remedy_when_its_settings_do_not_go_together(
    override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree_with(override))
    assert said in str(caught.value)


def test_a_critic_needs_no_siblings() -> None:
    config = parse_config(tree_with("{rollout: {group_size: 1}, trainer: {loss: {advantages: gae}}}"))
    assert config.trainer.critic.gae_lambda == 1.0


@pytest.mark.parametrize("advantages", ["grpo", "tests.unit.test_custom_losses:centred"])
def test_a_teacher_alone_needs_no_siblings(advantages: str) -> None:
    config = parse_config(
        tree_with(
            "{models: {a: {path: m}}, rollout: {group_size: 1}, "
            f"trainer: {{loss: {{advantages: '{advantages}', teacher: {{model: a, only: true}}}}}}}}"
        )
    )
    try_loss(config)


def test_each_check_is_made() -> None:
    assert [check.__name__ for check in CHECKS] == list(REFUSED)


def test_the_home_folder_is_meant_by_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = parse_config({"model": {"path": "~/m"}, "data": {"path": "x~"}, "run": {"dir": "~/runs"}})
    assert (config.model.path, config.data.path, config.run.dir) == ("/home/me/m", "x~", "/home/me/runs")
