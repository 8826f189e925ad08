"""All errors that users can meet, with their exit codes.

```
AsyncRLError            exit 1   a service failed; the message names it
├── ConfigError         exit 2   the config, the dataset or the model cannot work (also a ValueError)
├── EnvironmentNotReady exit 3   Ray, a GPU, an engine or a trainer did not come up
├── EngineError         an engine failed a request; the session moves on with the tokens it has
│   ├── EngineTimeout   no answer for `engine.request_timeout_s`
│   ├── CallLost        one call failed; its engine may be healthy
│   ├── EngineBusy      an engine takes no more calls for now
│   ├── LocalShortage   this process has no descriptor, port or memory left to reach an engine
│   ├── WeightSyncError an engine could not be brought to the published weights
│   │   └── WeightsNotReceived  a broadcast to it failed; another engine may be to blame
│   └── VersionMismatch an engine answered under weights that were not published to it
├── NodeUnreachable     a node with finished trajectories does not answer; they are waited for, then lost
├── WorkerLost          a rollout worker ended or stopped responding; its attempts continue in another
├── RolloutError        one trajectory failed; recorded in its outcome, never ends the run
│   ├── PromptTooLong   the prompt leaves no tokens to generate
│   ├── OutOfTurns      `rollout.max_turns` are used
│   ├── RequestRefused  an engine refuses this request; any other engine would too
│   ├── AgentLoopError  the agent loop raised
│   │   └── TimeOver    the attempt ran past its time
│   ├── ToolError       a tool raised or ran past its time (the model sees it as text)
│   │   └── ToolBroken  the tool itself does not work, however it is called (the attempt fails)
│   │       └── SandboxLost  a sandbox did not start, or is gone
│   └── RewardError     the reward raised or returned no finite number
│       └── RewardUnavailable  its infrastructure failed: server, process, sandbox, time limit
├── DataError           data written by this program is invalid
│   ├── AlignmentError  routing rows do not fit the tokens they belong to
│   ├── CorruptFrame    a frame is cut short or fails its checksum
│   └── SpoolFull       no space for another frame, by `queue.max_bytes` or on the disk
├── StoppedAtStart      130, 143 a signal came before there was work to save
├── StallError          exit 4   the run makes no progress; the message is the chain of waits and its cause
├── InvariantError      a rule that always holds would be violated: staleness, conservation, settled once
└── TrainerError        the trainer failed
    ├── NonFiniteLoss   the loss or the gradient norm is not a finite number
    ├── EngineMismatch  engines and trainer compute different log-probs with the same weights
    └── CheckpointError a checkpoint cannot be written or read
```

A message says what is wrong, the actual value, what was expected, and the remedy. All errors survive
pickling, because Ray carries them between processes.
"""

from typing import Literal

Misalignment = Literal[
    "payload",
    "wrong_shape",
    "too_many_rows",
    "wrong_layers",
    "wrong_prefix",
    "out_of_range",
    "duplicate",
]
"""Why routing is refused; the label of `replay_rejected_total`.

payload: it cannot be read, or its size does not match the tokens.
wrong_shape: not `[T-1, L_moe, K]`, or not of the type that the number of experts requires.
too_many_rows: more than T-1, as in concatenated full sequences.
wrong_layers: of other layers, or of another model.
wrong_prefix: of another text: the history was edited since.
out_of_range: an expert that does not exist.
duplicate: an expert twice in a row, as in a layer that an engine left at zeros.
"""


FailureKind = Literal["agent_wrong", "tool_broken", "sandbox_lost", "time_over", "context_full", "other"]
"""Why an attempt did not succeed.

agent_wrong: its answer was scored and does not pass, or the agent's own program failed.
tool_broken: a tool raised, or an MCP server died; not: the policy called it wrongly.
sandbox_lost: a sandbox did not start, or is gone.
time_over: a time limit ended it.
context_full: it used up its context or its turns.
other: an engine, the reward or a rollout worker failed.
"""

ABORTED = "aborted: "
"""What an engine's message contains when its broadcast was aborted by the sender."""


class AsyncRLError(Exception):
    """Root of the tree."""

    exit_code = 1
    failure_kind: FailureKind = "other"
    """What an attempt that it ends counts as; an instance may differ from its class."""


class ConfigError(AsyncRLError, ValueError):
    """The config, the dataset or the model do not work together."""

    exit_code = 2


class EnvironmentNotReady(AsyncRLError):
    """Something the run needs did not come up: Ray, a GPU, an engine, a trainer rank."""

    exit_code = 3


class ServiceExited(AsyncRLError):
    """A service that must run as long as the run returned early."""


class StoppedAtStart(AsyncRLError):
    """A signal asked the run to stop before it had started, so that there is nothing to save."""


class EngineError(AsyncRLError):
    """An engine failed a request."""


class EngineUnreachable(EngineError):
    """No connection to an engine could be made."""


class CallLost(EngineError):
    """One call failed: the connection broke, the stream went silent, or the engine was abandoned.

    The session continues on another engine. An engine that fails several calls is taken out of service.
    """


class ConnectionLost(CallLost):
    """The connection of one call broke, or none was made in time: the caller's network may be to blame."""


class EngineBusy(EngineError):
    """An engine takes no more calls for now. It is called less, and blamed only if it completes none."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s
        """How long the engine asked not to be called; None if it did not say."""

    def __str__(self) -> str:
        return str(self.args[0])


class LocalShortage(EngineError):
    """This process has no file descriptor, port or memory left to reach an engine, which is not to blame."""


class EngineTimeout(EngineError):
    """An engine stayed silent for longer than its limit."""


class WeightSyncError(EngineError):
    """An engine could not be brought to the published weights."""


class WeightsNotReceived(WeightSyncError):
    """Weights sent to an engine did not arrive: the sender or another receiver may be to blame."""

    @property
    def is_aborted(self) -> bool:
        """Whether the sender aborted the broadcast, so that another one is."""
        return ABORTED in str(self)


class VersionMismatch(EngineError):
    """An engine serves weights that were not published to it."""


class NodeUnreachable(AsyncRLError):
    """A node with frames of finished trajectories does not answer."""

    node = ""
    """Its address, where the caller shall wait for it."""
    reader_has_ended = False
    """Whether what read the frames there has ended, so that another one must be started."""


class WorkerLost(AsyncRLError):
    """A rollout worker ended or stopped responding; its attempts continue in another one."""

    is_excused = False
    """Whether the attempt's own code was not what ended the worker: it was waiting for an engine, say."""


class RolloutError(AsyncRLError):
    """One trajectory failed; its outcome records the error."""


class PromptTooLong(RolloutError):
    """The prompt leaves no tokens to generate."""

    failure_kind: FailureKind = "context_full"


class OutOfTurns(RolloutError):
    """The trajectory has used all of its turns."""

    failure_kind: FailureKind = "context_full"


class RequestRefused(RolloutError):
    """An engine refuses a request because of its content, not because of the engine's state."""


class AgentLoopError(RolloutError):
    """An agent loop raised."""

    failure_kind: FailureKind = "agent_wrong"


class NotScored(AgentLoopError):
    """What scores an attempt inside its agent loop did not work, whatever the agent did."""

    failure_kind: FailureKind = "other"


class TimeOver(AgentLoopError):
    """An attempt ran past its time."""

    failure_kind: FailureKind = "time_over"


class ToolError(RolloutError):
    """A tool refused a call, raised or ran past its time; the policy reads why."""

    failure_kind: FailureKind = "agent_wrong"


class ToolBroken(ToolError):
    """A tool does not work, however it is called: its attempt fails without a score and is made again."""

    failure_kind: FailureKind = "tool_broken"


class SandboxLost(ToolBroken):
    """A sandbox did not start, is gone, or does not answer: no fault of the trajectory, and no score of 0."""

    failure_kind: FailureKind = "sandbox_lost"


class RewardError(RolloutError):
    """A reward raised or returned something that is not a finite number."""


class RewardUnavailable(RewardError):
    """What a reward needs is gone, busy or too slow: no fault of the trajectory, and no score of 0."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s
        """The delay that a server asks for before the next request."""


class DataError(AsyncRLError):
    """Data written by this program is invalid."""


class AlignmentError(DataError):
    """Routing rows or sampling masks do not fit the tokens they belong to."""

    def __init__(self, message: str, reason: Misalignment = "payload") -> None:
        super().__init__(message)
        self.reason = reason


class CorruptFrame(DataError):
    """A frame is cut short or fails its checksum."""


class SpoolFull(DataError):
    """There is no space for another frame: `queue.max_bytes` is reached or the disk is full."""


class StallError(AsyncRLError):
    """The run makes no progress, and the available remedies did not help."""

    exit_code = 4

    def __init__(self, message: str, on: str = "") -> None:
        super().__init__(message)
        self.on = on
        """The kind of wait that everything depends on; see `async_rl.runtime.waits`."""


class InvariantError(AsyncRLError):
    """A rule that always holds would have been violated: a bug of this program, not an error of its input."""


class TrainerError(AsyncRLError):
    """The trainer failed."""

    restartable = True
    """Whether a restart of the trainer from its newest checkpoint may help."""


class NonFiniteLoss(TrainerError):
    """The loss or the gradient norm is not a finite number."""

    restartable = False


class EngineMismatch(TrainerError):
    """Engines and trainer compute different log-probs with the same weights."""

    restartable = False


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read."""

    restartable = False
