"""Every error a user can meet, and the exit code it ends the program with.

```
AsyncRLError            exit 1   a service failed; the message names it
├── ConfigError         exit 2   the config, the dataset or the model cannot work (also a ValueError)
├── EnvironmentNotReady exit 3   Ray, a GPU, an engine or a trainer did not come up
├── EngineError         an engine failed a request; the session moves on with the tokens it has
│   ├── EngineTimeout   no answer for `engine.request_timeout_s`
│   ├── CallLost        one call came to nothing; its engine may be well
│   ├── WeightSyncError an engine could not be brought to the published weights
│   └── VersionMismatch an engine answered under weights nobody published to it
├── WorkerLost          a rollout worker ended or fell silent; its attempts go on in another
├── RolloutError        one trajectory failed; recorded in its outcome, never ends the run
│   ├── PromptTooLong   the prompt leaves no room to generate
│   ├── OutOfTurns      `rollout.max_turns` are done
│   ├── RequestRefused  an engine refuses this very request; another engine would too
│   ├── AgentLoopError  the agent loop raised or ran past its time
│   ├── ToolError       a tool raised or ran past its time (the model sees it as text)
│   └── RewardError     the reward raised, ran past its time or returned no finite number
├── DataError           data of ours is not what it claims to be
│   ├── AlignmentError  routing rows do not fit the tokens they belong to
│   ├── CorruptFrame    a frame is cut short or fails its checksum
│   └── SpoolFull       no room for another frame, by `queue.max_bytes` or on the disk
├── StallError          exit 4   nothing moves any more; the message is the chain of waits and its cause
├── InvariantError      a rule that always holds was about to be broken: staleness, conservation, settled once
└── TrainerError        the trainer failed
    ├── NonFiniteLoss   the loss or the gradient norm is not a finite number
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
    "wrong_versions",
    "out_of_range",
    "duplicate",
]
"""Why routing is refused; the label of `replay_rejected_total`.

payload: it cannot be read, or is not of the size that the tokens ask for.
wrong_shape: not `[T-1, L_moe, K]`, or not of the type that the number of experts asks for.
too_many_rows: more than T-1, as full sequences have that were laid end to end.
wrong_layers: of other layers, or of another model.
wrong_prefix: of another text: the history was edited since.
wrong_versions: the spans of weight versions are no partition of the rows.
out_of_range: an expert that does not exist.
duplicate: an expert twice in a row, as in a layer that an engine left at zeros.
"""


class AsyncRLError(Exception):
    """Root of the tree."""

    exit_code = 1


class ConfigError(AsyncRLError, ValueError):
    """The config, the dataset or the model cannot work together."""

    exit_code = 2


class EnvironmentNotReady(AsyncRLError):
    """Something the run needs did not come up: Ray, a GPU, an engine, a trainer rank."""

    exit_code = 3


class ServiceExited(AsyncRLError):
    """A service that must run as long as the run returned early."""


class EngineError(AsyncRLError):
    """An engine failed a request."""


class CallLost(EngineError):
    """One call came to nothing: a connection lost, a stream that went silent, an engine given up.

    The session goes on elsewhere. An engine that loses several is taken out of service.
    """


class EngineTimeout(EngineError):
    """An engine stayed silent for longer than its limit."""


class WeightSyncError(EngineError):
    """An engine could not be brought to the published weights."""


class VersionMismatch(EngineError):
    """An engine serves weights that were not published to it."""


class WorkerLost(AsyncRLError):
    """A rollout worker ended or fell silent; what it played is played on elsewhere."""


class RolloutError(AsyncRLError):
    """One trajectory failed; its outcome records the error."""


class PromptTooLong(RolloutError):
    """The prompt leaves no room to generate."""


class OutOfTurns(RolloutError):
    """The trajectory has all the turns that it may have."""


class RequestRefused(RolloutError):
    """An engine refuses a request for what it asks, not for how the engine is."""


class AgentLoopError(RolloutError):
    """An agent loop raised or ran past its time."""


class ToolError(RolloutError):
    """A tool raised or ran past its time."""


class RewardError(RolloutError):
    """A reward raised, ran past its time or returned something that is not a finite number."""


class DataError(AsyncRLError):
    """Data of ours is not what it claims to be."""


class AlignmentError(DataError):
    """Routing rows do not fit the tokens they belong to."""

    def __init__(self, message: str, reason: Misalignment = "payload") -> None:
        super().__init__(message)
        self.reason = reason


class CorruptFrame(DataError):
    """A frame is cut short or fails its checksum."""


class SpoolFull(DataError):
    """There is no room for another frame: `queue.max_bytes` is reached or the disk is full."""


class StallError(AsyncRLError):
    """Nothing moves any more, and nothing that could be done about it helped."""

    exit_code = 4

    def __init__(self, message: str, on: str = "") -> None:
        super().__init__(message)
        self.on = on
        """What everything waits for; see `async_rl.runtime.waits.WAIT_KINDS`."""


class InvariantError(AsyncRLError):
    """A rule that always holds was about to be broken; a fault of this program, never of its input."""


class TrainerError(AsyncRLError):
    """The trainer failed."""

    restartable = True
    """Whether the trainer may do better when it is started again from its newest checkpoint."""


class NonFiniteLoss(TrainerError):
    """The loss or the gradient norm is not a finite number."""

    restartable = False


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read."""

    restartable = False
