"""The errors that Lockstep raises on purpose.

Each carries one message for the person who reads it: what happened, where, and what to do. The command line prints
that message alone, without a traceback, and exits with the class's `exit_code`.
"""

INTERRUPTED = 130  # the exit code of what Ctrl-C has ended, as shells report it


class LockstepError(Exception):
    """Base of all errors whose message is meant for the user. Exit code 1."""

    exit_code = 1
    retryable = False
    """Whether the job may do better when its workers are started anew."""


MOST_CHARACTERS = 300  # of a library's error in a message; a file's own text may be in it


def first_line(error: BaseException) -> str:
    """The first line of an error's text, up to 300 characters, or its type where it has none."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


# What Gloo and NCCL say when a peer is gone.
LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("remote process exited", "remote process exiting", "was aborted"),
)


def tells_of_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective only follows from another worker's end."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_PEER)
    return said or isinstance(error, LostPeerError)


class ConfigError(LockstepError, ValueError):
    """A flag, recipe field or argument is wrong or contradicts another. Exit code 2, as for any usage error."""

    exit_code = 2


def require(holds: bool, flag: str, value: object, wanted: str) -> None:
    """Refuse the value of a flag unless a condition holds.

    Raises:
        ConfigError: "FLAG VALUE: must be WANTED".
    """
    if not holds:
        raise ConfigError(f"{flag} {f'{value:g}' if isinstance(value, float) else value}: must be {wanted}")


class WorldError(LockstepError):
    """The worker's place in the job is unknown or contradictory, or the job cannot be connected. Exit code 3."""

    exit_code = 3
    retryable = True


class LostPeerError(LockstepError):
    """Another worker has ended, or its host cannot be reached, while an accelerator waited for it. Exit code 1."""

    retryable = True


class DataError(LockstepError):
    """A data set is missing, malformed or empty. Exit code 4."""

    exit_code = 4


class CorruptImageError(DataError):
    """One image file cannot be decoded; the message names it. Exit code 4."""


class LoaderError(DataError):
    """A loader process has ended, such as when memory ran out. Exit code 4."""

    retryable = True


class CheckpointError(LockstepError):
    """A checkpoint cannot be written, read, or does not fit this run. Exit code 5."""

    exit_code = 5


class NonFiniteLossError(LockstepError):
    """The loss, a gradient or a weight became NaN or infinite. Exit code 6."""

    exit_code = 6


class ReplicasDifferError(LockstepError):
    """The workers' weights are not equal any more, so that they no longer train one model. Exit code 7."""

    exit_code = 7
    retryable = True  # all snapshots and checkpoints are of equal replicas


class WorkerFailedError(LockstepError):
    """A function called by `lockstep.launch.run` failed on a worker; the message has its traceback. Exit code 1."""


class StoppedError(LockstepError):
    """Training was stopped by a signal or its time limit, after a checkpoint; `--resume auto` goes on. Exit code 75.

    EX_TEMPFAIL of sysexits.h: the same command may succeed later.
    """

    exit_code = 75
