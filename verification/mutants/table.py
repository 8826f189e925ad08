"""The mutants, by the promise that they break.

Each function below stands in for the one that its decorator names. It gets the original function and the
arguments of the call. The decorator also names the promise, by the test file of its row in CONTRIBUTING.md,
and the test files of which one must fail (default: that of the promise), as `folder/name` of
`tests/folder/test_name.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np

from agent_loops.sandboxes.protocol import ExecResult
from async_rl.errors import SandboxLost
from verification.mutants.patching import Mutant

MUTANTS: Final[dict[str, Mutant]] = {}

WITHOUT: Final = {
    "tests/integration/test_trainer_ranks.py": "ranks are processes of their own",
    "tests/unit/test_killed_sandbox_owners.py": "the owner is a process of its own",
    "tests/integration/test_verifiers.py": "the environment is a process of its own",
    "tests/settings/test_settings.py": "it tries each setting itself",
    "tests/integration/test_chaos.py": "Ray's processes are not those of the test",
    "tests/unit/test_monitoring.py": "rules are data, no functions",
    "tests/unit/test_cluster_files.py": "the files are data, no functions",
    "tests/unit/test_docs.py": "its promises are about pages",
    "tests/unit/test_architecture.py": "its promise is about the source",
    "tests/unit/test_requirements.py": "its promise is about files and pip",
    "tests/verification/test_mutants.py": "it tries the mutants",
}
"""Promises without a mutant, by their tests, with the reason."""


def breaks(target: str, promise: str, *tests: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the decorated function to the mutants."""

    def add(replacement: Callable[..., Any]) -> Callable[..., Any]:
        name = replacement.__name__.replace("_", "-")
        assert name not in MUTANTS, f"{name} is there twice"
        files = [_file(test) for test in tests or (promise,)]
        MUTANTS[name] = Mutant(
            name, replacement.__doc__ or "", target, replacement, _file(promise), tuple(files)
        )
        return replacement

    return add


def _file(test: str) -> str:
    folder, _, name = test.partition("/")
    return f"tests/{folder}/test_{name}.py"


# -- conservation, staleness ------------------------------------------------------------------------


@breaks("async_rl.store.ledger:Ledger._drop", "simulation/seeds", "unit/ledger")
def drops_are_not_recorded(original, *args, **named):
    """A dropped trajectory stays counted where it was."""


@breaks("async_rl.store.ledger:Ledger.rollback", "simulation/seeds", "unit/ledger")
def rollback_undoes_a_step_too_many(original, ledger, step):
    """A restart at the checkpoint of step N undoes N, too."""
    return original(ledger, max(step - 1, 0))


@breaks(
    "async_rl.store.outstanding:OutstandingGroups.take_groups", "simulation/seeds", "unit/trajectory_queue"
)
def groups_are_handed_out_twice(original, *args, **named):
    """The groups of a batch stay ready."""


@breaks("async_rl.data.feeder:Feeder.next_task", "simulation/seeds", "simulation/small_runs")
def tasks_are_skipped(original, feeder):
    """Some tasks are never given out."""
    return (original(feeder), original(feeder))[1]


@breaks("async_rl.cli.what_if:changed_config", "simulation/what_if")
def settings_are_not_changed(original, folder, past, overrides):
    """What would be is what was."""
    return original(folder, past, [])


@breaks("async_rl.run.plan_watch:PlanWatch.observe_step", "simulation/plan_watch")
def slow_runs_pass_for_planned(original, *args, **named):
    """A run that is slower than its plan is compared with nothing."""
    return original(*args, **named)[0], ()


@breaks("async_rl.store.ledger:Ledger.record_result", "simulation/curriculum", "unit/curriculum")
def results_count_as_soon_as_they_come(original, ledger, group_id, scored, passed, lag):
    """Draws depend on when groups end."""
    return original(ledger, group_id, scored, passed, 0)


@breaks("async_rl.store.ledger_tables:LedgerTables.add_attempt", "simulation/failure_kinds", "unit/failures")
def attempts_are_not_recorded(original, *args, **named):
    """The table of failures begins anew with each process."""


@breaks("async_rl.staleness:may_admit", "property/staleness_properties", "unit/staleness")
def a_batch_too_many_is_admitted(original, outstanding, groups_per_batch, *rest, **named):
    """One batch more is outstanding than versions can consume in time."""
    return original(outstanding - groups_per_batch, groups_per_batch, *rest, **named)


@breaks("async_rl.staleness:Backlog.overdue", "property/staleness_properties", "unit/staleness")
def overdue_groups_stay(original, *args, **named):
    """Groups whose deadline has passed are not dropped."""
    return ()


@breaks("async_rl.staleness:batch_is_safe", "simulation/long_answers", "unit/staleness")
def every_batch_is_safe(original, *args, **named):
    """A batch is given away though groups that are due do not fit into the next ones."""
    return True


@breaks("async_rl.rollout.groups:can_drop_stragglers", "simulation/long_answers", "unit/groups")
def stragglers_are_given_up(original, *args, **named):
    """A group goes without its slow answers although nothing allows it."""
    return True


# -- sessions ---------------------------------------------------------------------------------------


@breaks("async_rl.rollout.session.transcript:Transcript._append_call", "property/session_properties")
def interrupted_calls_lose_their_tokens(original, transcript, running, *rest, **named):
    """What a call has sampled is thrown away when it ends."""
    if len(running.token_ids) > 1:
        running.clear()
    return original(transcript, running, *rest, **named)


@breaks(
    "async_rl.rollout.session.stop_strings:StopStringAtSeam.find_end",
    "property/session_properties",
    "unit/stop_strings",
)
def stop_strings_at_seams_are_missed(original, *args, **named):
    """A stop string that an interruption has split is not seen."""


@breaks(
    "async_rl.rollout.session.transcript:_RunningCall.cut_non_finite",
    "property/session_properties",
    "unit/session",
    "simulation/small_runs",
)
def log_probs_that_are_no_numbers_are_kept(original, *args, **named):
    """Tokens with log-probs that are not finite are kept."""


@breaks("async_rl.data.chat_format:ChatFormat.append_ids", "property/chat_properties", "unit/chat")
def turns_end_twice(original, chat, messages, **_):
    """The end-of-turn token that the policy wrote is added once more."""
    return original(chat, messages, after_length=True)


@breaks("async_rl.data.control_tokens:ControlTokens.mark", "property/chat_properties", "unit/chat")
def text_becomes_control_tokens(original, tokens, value, keeping):
    """The text of messages is tokenised as control tokens."""
    return value


@breaks("async_rl.types:TokenSpan.is_sampled", "simulation/branching", "unit/batching")
def branches_train_what_they_inherit(original, span):
    """Tokens that a branch shares with its parent are trained by both."""
    return span.weight_version >= 0


@breaks("async_rl.rollout.session.restore:RestoredTurns.next_turn", "simulation/recovery", "unit/replay")
def restored_turns_are_sampled_again(original, restored, *args):
    """A restart samples turns again that the journal has."""
    restored._discard_rest()
    return [], None


@breaks("async_rl.store.ledger_tables:LedgerTables.flush", "simulation/recovery", "simulation/small_runs")
def settled_steps_are_lost_with_the_power(original, tables, **_):
    """A checkpoint may be complete before the ledger is on disk."""
    return original(tables)


@breaks(
    "async_rl.store.outstanding:OutstandingGroups.flush_ledger",
    "simulation/recovery",
    "simulation/checkpoints",
)
def the_older_of_two_drivers_writes_its_checkpoint(original, groups, *, durable=False):
    """A driver does not look whether another one has replaced it before it writes a checkpoint."""
    original(groups)


@breaks(
    "async_rl.rollout.workers.worker_handle:WorkerHandle.is_answer",
    "simulation/rollout_workers",
    "unit/rollout_workers",
)
def workers_answer_what_they_were_not_asked(original, *args):
    """An answer counts whatever trajectory, file or request it is of."""
    return True


@breaks(
    "async_rl.rollout.workers.failing_workers:FailingWorkers.record_failure", "simulation/rollout_workers"
)
def one_bad_worker_fails_most_attempts(original, *args, **named):
    """A worker in which all loops raise at once keeps its attempts, and gets more."""


@breaks("async_rl.store.outstanding:ChangeSignal.notify_all", "simulation/sweep", "unit/trajectory_queue")
def what_waits_is_not_woken(original, *args, **named):
    """What waits for a change of the queue waits forever."""


@breaks("async_rl.store.ledger:Ledger.rollback", "simulation/trainer_restart", "unit/ledger")
def checkpoints_keep_the_steps_after_them(original, *args, **named):
    """A trainer that restarts from its checkpoint does not undo later steps."""


# -- engines ----------------------------------------------------------------------------------------


@breaks("async_rl.engines.health:find_stall", "simulation/engines_under_fire", "unit/health")
def silent_engines_are_kept(original, *args, **named):
    """An engine whose calls are silent is never quarantined."""


@breaks("async_rl.engines.pool:EnginePool.record_strike", "simulation/engines_under_fire", "unit/lease")
def strikes_do_not_count(original, *args, **named):
    """An engine that fails calls stays in service."""


@breaks("async_rl.engines.lease:Lease.drop", "contract/real_parts", "unit/session", "unit/lease")
def calls_that_fail_fail_their_attempts(original, *args, **named):
    """A call that its engine loses is not made again elsewhere."""


@breaks(
    "async_rl.engines.simulated:SimulatedEngine._abort_calls",
    "contract/engine_contract",
    "unit/simulated_engine",
    "unit/weight_sync",
)
async def interrupts_end_nothing(original, *args, **named):
    """Calls of a simulated engine run on when it is interrupted."""


@breaks("async_rl.engines.lease_dispatcher:Balancer._has_capacity", "property/balancing_properties")
def engines_have_no_capacity(original, *args, **named):
    """An engine is given calls beyond the bound of its load."""
    return True


@breaks(
    "async_rl.runtime.serving_clock:ServingClock.set_paused",
    "simulation/engines_under_fire",
    "unit/waits",
)
def held_time_counts(original, *args, **named):
    """The time in which no engine serves counts against agent loops."""


# -- routing ----------------------------------------------------------------------------------------


@breaks("async_rl.routing:_check_text", "unit/acceptance", "unit/routing")
def rows_of_another_text_fit(original, *args, **named):
    """Rows are taken for those of any text."""


@breaks("async_rl.routing:find_repeated", "unit/acceptance", "unit/routing")
def repeated_experts_pass(original, *args, **named):
    """A row that names an expert twice is accepted."""


@breaks(
    "async_rl.rollout.session.routing_rows:RoutingRows._mixture", "unit/acceptance", "unit/session_routing"
)
def mixed_versions_go_unnoticed(original, *args, **named):
    """Rows of two weight versions in one answer raise no alarm."""


@breaks(
    "async_rl.rollout.session.routing_rows:RoutingRows.num_held", "unit/acceptance", "unit/session_routing"
)
def held_rows_are_forgotten(original, *args, **named):
    """Rows that were delivered are fetched again."""
    return 0


@breaks(
    "trainer.megatron.replay:MaskedRouterReplay.set_target_indices",
    "integration/replay_numbers",
    "unit/router_replay",
)
def routers_choose_for_themselves(original, *args, **named):
    """Routers ignore the rows that they are to replay."""


@breaks("trainer.megatron.replay:local_rows", "integration/replay_numbers", "unit/router_replay")
def rows_stand_one_too_late(original, rows, *rest, **named):
    """Each token replays the row of the token before it."""
    return original(np.roll(rows, 1, axis=0), *rest, **named)


# -- the trainer ------------------------------------------------------------------------------------


@breaks("trainer.megatron.lora:Adapter.add_to", "integration/trainer_lora")
def adapters_add_nothing(original, adapter, output, *rest):
    """The output of an adapter is not added."""
    return output


@breaks("trainer.megatron.sliced_adam:_step", "unit/sliced_adam")
def the_optimizer_copies_all_moments(original, optimizer, step_at_once, most):
    """All parameters are one slice."""
    return original(optimizer, step_at_once, 1 << 40)


@breaks("trainer.losses.log_probs:_row_sums", "integration/trainer_models", "unit/log_probs")
def temperatures_are_ignored(original, logits, temperature):
    """Log-probs are those of temperature 1."""
    return original(logits, 1.0)


@breaks("trainer.losses.objectives:ppo", "property/loss_properties", "unit/objectives")
def ppo_takes_the_inverse_ratio(original, tokens, loss):
    """PPO takes the ratio of the proximal over the current policy."""
    return original(tokens._replace(log_probs=tokens.old_log_probs, old_log_probs=tokens.log_probs), loss)


@breaks("trainer.losses.sequences:Sequences.means", "property/loss_properties", "unit/objectives")
def gspo_multiplies_ratios(original, sequences, values):
    """The ratio of GSPO is the product over an answer, not its geometric mean."""
    return sequences.sums(values)


@breaks("trainer.losses.objectives:token_weights", "property/loss_properties", "unit/objectives")
def long_answers_count_more(original, aggregate, *rest):
    """Every way of averaging counts all tokens alike."""
    return original("token_mean", *rest)


@breaks("trainer.losses.corrections:importance_correction", "property/loss_properties", "unit/objectives")
def importance_weights_are_inverted(original, importance, old, rollout, *rest):
    """Importance weights are of the behaviour over the proximal policy."""
    return original(importance, rollout, old, *rest)


@breaks("trainer.losses.kl:kl_estimate", "property/loss_properties", "unit/objectives")
def kl_is_the_other_way_round(original, kind, log_probs, reference):
    """KL estimates take the inverse ratio."""
    return original(kind, reference, log_probs)


@breaks("trainer.losses.advantages:ComparedRewards.group_mean", "property/loss_properties")
def advantages_have_no_baseline(original, *args, **named):
    """Advantages are rewards."""
    mean = original(*args, **named)
    return mean * 0


@breaks("trainer.losses.gae:gae", "property/loss_properties", "unit/advantages")
def gae_forgets_lambda(original, rewards, values, trajectory, gamma, gae_lambda):
    """Later differences count as if lambda were 1."""
    return original(rewards, values, trajectory, gamma, 1.0)


@breaks("trainer.losses.turns:turn_returns", "property/loss_properties", "unit/advantages")
def turn_rewards_are_not_discounted(original, turns, rewards, positions, values, discount):
    """Later turns count in full."""
    return original(turns, rewards, positions, values, 1.0)


@breaks("trainer.megatron.packing:shift_left", "property/packing_properties")
def trajectories_predict_the_next(original, values, ends):
    """The last token of a trajectory is trained to predict the first of the next."""
    return np.roll(values, -1, axis=0)


@breaks("trainer.megatron.packing:_first_fit", "property/packing_properties")
def micro_batches_exceed_their_budget(original, share, padded, budget):
    """Micro-batches are planned for four times their tokens."""
    return original(share, padded, 4 * budget)


@breaks("async_rl.store.kept_batches:keep_frames", "integration/step_replay", "unit/captures")
def frames_of_a_capture_are_not_kept(original, *args, **named):
    """A capture lacks the frames of its batch."""


@breaks("trainer.worker:TrainerWorker._token_weights", "integration/trainer_lags")
def every_lag_has_the_gradient_of_all(original, worker, trajectories, goal):
    """The loss of a lag counts tokens of other lags."""
    return original(worker, trajectories, replace(goal, only=None))


@breaks("trainer.worker:TrainerWorker._exact_correction", "integration/trainer_lags")
def no_correction_is_biased(original, worker):
    """Gradients are compared with those of the run's own correction."""
    return nullcontext()


@breaks("trainer.checkpoints.manifest:find_flaw", "integration/checkpoints")
def damaged_checkpoints_are_complete(original, *args, **named):
    """No flaw of a checkpoint is found."""


@breaks("trainer.checkpoints.folder:set_aside_newer", "integration/checkpoints", "unit/checkpoint_folder")
def skipped_checkpoints_come_back(original, *args, **named):
    """A checkpoint that was skipped is loaded by a later start."""


@breaks("trainer.megatron.names:portable_names", "integration/checkpoint_specs")
def names_are_those_of_the_layer_spec(original, names):
    """What one layer spec wrote cannot be read by the other."""
    return {name: name for name in names}


# -- weights ----------------------------------------------------------------------------------------


@breaks("async_rl.weights.checksums:VersionVerifier.verify_version", "unit/weight_sync")
async def unverified_versions_are_served(original, *args, **named):
    """An engine serves after an update although its version was not read back."""


@breaks(
    "async_rl.weights.publisher:WeightPublisher.remove_old_files", "contract/real_parts", "unit/weight_sync"
)
async def old_weights_are_kept(original, *args, **named):
    """Weights of old versions are never removed."""


@breaks("async_rl.weights.buckets:inseparable", "contract/real_parts", "unit/weight_transports")
def buckets_separate_fused_weights(original, specs):
    """Parts of a fused weight are sent in two buckets."""
    return [[spec] for spec in specs]


@breaks(
    "async_rl.engines.lease:Lease.weight_version", "contract/adapters_sglang", "unit/adapters", "unit/lease"
)
def calls_have_another_version(original, *args, **named):
    """A call says that it needs another version's adapter."""
    return 0


@breaks("async_rl.weights.delta:decode", "property/delta_properties")
def deltas_change_nothing(original, *args, **named):
    """A delta leaves the weights as they are."""


@breaks("async_rl.staleness:Backlog.may_admit", "simulation/overlap", "unit/trajectory_queue")
def admission_ignores_the_lag(original, backlog):
    """Groups are admitted as if engines served what the trainer holds."""
    served, backlog.served_version = backlog.served_version, backlog.next_version
    try:
        return original(backlog)
    finally:
        backlog.served_version = served


@breaks("async_rl.run.device_sharing:SharedDevices._clear_engine", "simulation/shared_devices")
async def engines_keep_their_memory(original, *args, **named):
    """An engine keeps its memory when the trainer gets the devices."""


@breaks("async_rl.run.device_sharing:SharedDevices._offload", "simulation/shared_devices")
async def the_trainer_keeps_its_memory(original, self, trainer, *, keep_weights=False):
    """The trainer keeps its weights when engines have them and take the rest of their memory."""
    if keep_weights:
        await original(self, trainer, keep_weights=True)


@breaks("async_rl.run.device_sharing:SharedDevices.are_starved", "simulation/shared_devices")
def starved_engines_are_not_fed(original, *args, **named):
    """Engines that wait for weights wait for a batch too, which none of them makes."""
    return False


# -- workers, evaluation, sft, stalls ---------------------------------------------------------------


@breaks(
    "async_rl.rollout.workers.worker_backend:WorkerBackend._watch_silence",
    "simulation/rollout_workers",
    "unit/rollout_workers",
)
async def workers_that_are_silent_are_kept(original, *args, **named):
    """A rollout worker that sends nothing is never replaced."""


@breaks("async_rl.store.journal:Journal.write_entries", "simulation/rollout_workers", "unit/journal")
def journals_are_not_written(original, *args, **named):
    """What trajectories in flight have sampled is not journalled."""


@breaks("async_rl.evaluation.estimates:pass_at_k", "simulation/evaluation", "unit/evaluation")
def pass_at_k_is_pass_at_1(original, answers, passed, k):
    """pass@k is the share of answers that pass."""
    return original(answers, passed, 1)


@breaks("async_rl.sft.examples:_trained_messages", "integration/trainer_sft", "unit/sft")
def every_message_is_trained(original, *args, **named):
    """Supervised training trains all messages of the assistant."""


@breaks("async_rl.sft.schedule:learning_rate", "integration/trainer_sft", "unit/sft")
def rates_do_not_decay(original, step, total, *, peak, **_):
    """The learning rate of supervised training is constant."""
    return peak


@breaks("async_rl.observability.diagnosis:_Walk._full_engines", "simulation/stalls", "unit/diagnosis")
def full_engines_are_to_blame(original, *args, **named):
    """What waits for engines that are full is named as the cause of a stall."""


# -- data, agents, tools, rewards -------------------------------------------------------------------


@breaks("async_rl.data.schemas:_without", "unit/data_pages", "unit/dataset")
def agents_are_told_the_answer(original, value, path):
    """The metadata that agents see has the answer of the task."""
    return value


@breaks("async_rl.rollout.session.rollout_session:RolloutSession.add_tool_result", "unit/agent_loop_docs")
def tool_results_are_not_added(original, *args, **named):
    """The policy never reads what a tool returned."""


@breaks("agent_loops.tools:_describe", "unit/tools_doc", "unit/tools", "unit/tool_loop")
def errors_of_tools_have_no_text(original, *args, **named):
    """The policy reads an error without its text."""
    return ""


@breaks("async_rl.openai_api.history:find_continued", "unit/openai_agent", "unit/openai_api")
def conversations_are_never_continued(original, *args, **named):
    """Each request over OpenAI's API begins a conversation."""


@breaks(
    "async_rl.openai_api.request_handler:RequestHandler.with_history",
    "integration/frameworks",
    "unit/dialects",
)
def ids_of_answers_are_ignored(original, handler, request):
    """A request that names an earlier answer begins another conversation."""
    return msgspec.structs.replace(request, previous=None, has_references=False)


@breaks("async_rl.openai_api.reading:with_instructions", "unit/dialects")
def instructions_are_left_out(original, instructions, messages):
    """The policy never reads what a request asks of it."""
    return list(messages)


@breaks("async_rl.openai_api.constraints:_either", "unit/constraints")
def nothing_precedes_what_is_forced(original, elements):
    """A grammar forbids thoughts, and a call in place of text."""
    return elements[0]


@breaks("agent_loops.claims:ClaimBoard.renew", "unit/claims")
def lost_claims_are_renewed(original, board, claim_id):
    """Two agents work on one task, and each believes that it is its own."""
    original(board, claim_id)
    return True


@breaks("agent_loops.harness.place:_num_bytes", "unit/harness")
def workspaces_are_never_full(original, folder):
    """A program may fill the disk."""
    return 0


@breaks("async_rl.openai_api.history:find_repeated", "unit/harness_conversations")
def requests_are_never_repeated(original, *args, **named):
    """A retry is sampled again."""
    return None


@breaks("agent_loops.harness.scoring:Scorer.parts", "contract/harness_programs", "unit/harness")
async def everything_scores(original, *args, **named):
    """What a program left is not looked at."""
    return {"reward": 1.0}


@breaks("agent_loops.sandbox:_refuse_home", "unit/sandbox")
def programs_see_home_folders(original, *args, **named):
    """A folder with a home folder in it is shown to programs."""


@breaks("agent_loops.sandboxes.protocol:ran_too_long", "contract/sandbox_contract")
def no_command_runs_too_long(original, *args):
    """A command that its time limit has ended is not told from one that was killed."""
    return False


@breaks("agent_loops.sandboxes.opener:_Lease.end", "unit/sandboxes")
def leases_do_not_end(original, self):
    """A sandbox runs on after its block."""


@breaks("agent_loops.sandboxes.protocol:ShellSandbox.exec", "simulation/lost_sandboxes")
async def lost_sandboxes_fail_commands(original, *args, **named):
    """A lost sandbox is a result of the command."""
    try:
        return await original(*args, **named)
    except SandboxLost:
        return ExecResult(exit_code=1, stdout="", stderr="")


@breaks("agent_loops.rewards_code:is_same_output", "unit/examples", "unit/rewards_code")
def output_is_not_compared(original, *args, **named):
    """A program passes whatever it prints."""
    return True


@breaks("agent_loops.rewards:last_number", "unit/readme", "unit/rewards")
def right_answers_score_nothing(original, task, completion):
    """The reward of the examples is inverted."""
    return 1.0 - original(task, completion)


@breaks("async_rl.openai_api.reading:_limited", "unit/defences", "unit/openai_api", "unit/listeners")
def bodies_of_any_size_are_decoded(original, body):
    """A request may have any number of objects and lists."""
    return body


# -- processes, pages and commands, by tests in the test's own process


@breaks("trainer.megatron.shards:boxes", "integration/checkpoint_layouts", "property/box_properties")
def the_last_box_is_left_out(original, *args):
    """A part of a flattened tensor is stored without its last box."""
    return list(original(*args))[:-1]


@breaks(
    "async_rl.store.outstanding:OutstandingGroups.follow_nodes", "integration/ray_cluster", "unit/frame_nodes"
)
def lost_frames_stay_lost(original, *args):
    """A ready group stays ready although a node was lost with frames of it."""


@breaks("async_rl.run.train_loop:TrainLoop._update_engines", "integration/real_loop", "simulation/small_runs")
async def engines_are_never_updated(original, *args):
    """Engines keep their first weights for the whole run."""


@breaks("async_rl.engines.model_facts:facts_of", "contract/sglang_models", "unit/engine_facts")
def the_last_layer_has_no_experts(original, *args, **named):
    """The rows of engines are read without the last MoE layer."""
    facts = original(*args, **named)
    return msgspec.structs.replace(facts, moe_layers=facts.moe_layers[:-1])


@breaks("async_rl.observability.metrics:Metrics.observe_step", "integration/prometheus", "unit/metrics")
def steps_reach_no_instrument(original, *args):
    """The figures of a step reach no metric, so that dashboard and alerts see nothing."""


@breaks("async_rl.cli.new_loop:new_loop", "unit/new_loop")
def written_files_do_not_fit(original, name, parent):
    """The written loop and its test name different classes."""
    folder = original(name, parent)
    for file in folder.glob("*.py"):
        file.write_text(file.read_text().replace("Loop", "Lop", 1))
    return folder


@breaks("async_rl.cli.metrics_reference:_sections", "unit/metrics")
def a_metric_is_not_documented(original):
    """The page of metrics lacks the last metric."""
    return list(original())[:-1]


@breaks("async_rl.config.reference:describe_fields", "unit/cli")
def a_setting_is_not_documented(original):
    """The page of settings lacks the last setting."""
    return list(original())[:-1]


@breaks("async_rl.observability.page.view:slowest", "integration/page_browser", "unit/page")
def slow_trajectories_are_not_shown(original, *args):
    """The live page names no slow trajectory."""
    return []
