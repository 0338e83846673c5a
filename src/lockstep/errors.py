"""Exceptions that Lockstep raises.

Each message states what happened, where, and how to fix it. The command line prints only the message, without a
traceback, and exits with the class's `exit_code`.
"""

import errno
import re
import resource

INTERRUPTED = 130  # exit code after Ctrl-C, as in shells: 128 + SIGINT


class LockstepError(Exception):
    """Base class of all errors that users can act on. Exit code 1."""

    exit_code = 1
    retryable = False
    """Whether restarting the workers may help."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote an untrusted file, and a script's traceback shows it


def printable(text: str) -> str:
    """Escape characters that control a terminal, such as escape sequences and changes of writing direction."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )


MAX_CHARACTERS = 300  # of a line of a library's error text, which may quote a file's content
# torch puts NCCL's own reason behind this: in the line after it until 2.14, in the same line since 2.15.
REASON = re.compile(r"Last error:[ \t]*\n?[ \t]*(?!Unknown NCCL)(\S.*)", re.IGNORECASE)
FIXES = {"shared memory segment": "enlarge /dev/shm (docker run --shm-size=2g), or set NCCL_SHM_DISABLE=1"}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type name if it has no text; and NCCL's reason, with its fix.

    Each has at most 300 characters.
    """
    text = str(error)
    line = next(iter(text.splitlines()), type(error).__name__).rstrip()
    reasons = [reason.strip() for reason in REASON.findall(text)]
    fixes = [fix for sign, fix in FIXES.items() if any(sign in reason for reason in reasons)]
    lines = [line, *(reason for reason in reasons if reason not in line)]
    return "; ".join([": ".join(map(_shortened, lines)), *fixes])


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}..."


def plural(number: int | str, noun: str) -> str:
    """Return a number and a noun, which is in the plural unless the number is 1."""
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def bit_rate(bits_per_second: float) -> str:
    """Return the rate of a link with its unit."""
    value, unit = (bits_per_second / 1e9, "G") if bits_per_second >= 999.5e6 else (bits_per_second / 1e6, "M")
    return f"{value:.3g} {unit}bit/s"


def reached_limit(error: BaseException) -> str:
    """Return which limit for open files the system has reported, and how to raise it; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    text, limit = error.strerror, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if error.errno == errno.ENFILE:
        return f"{text} on this host; its administrator can raise fs.file-max"
    return f"{text}: a process may open {limit:,}; raise the limit with `ulimit -n`"


# Error texts of Gloo, NCCL and hvd for a peer that exited.
LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("remote process exited", "remote process exiting", "was aborted"),
    *("or its script ended", "its process exited or its host", "because another worker disconnected"),
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed only because another worker exited."""
    is_matched = isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_PEER)
    return is_matched or isinstance(error, LostPeerError)


class ConfigError(LockstepError, ValueError):
    """Invalid or conflicting flags, recipe fields or arguments. Exit code 2, as for any usage error."""

    exit_code = 2


def require(holds: bool, flag: str, value: object, wanted: str) -> None:
    """Check the value of a flag.

    Raises:
        ConfigError: `holds` is false; the message is "FLAG VALUE: must be WANTED".
    """
    if not holds:
        raise ConfigError(f"{flag} {f'{value:g}' if isinstance(value, float) else value}: must be {wanted}")


class WorldError(LockstepError):
    """The rank info is missing or inconsistent, or the workers cannot connect. Exit code 3."""

    exit_code = 3
    retryable = True


class LostPeerError(LockstepError):
    """Another worker exited, or its host became unreachable, during a collective on an accelerator. Exit code 1."""

    retryable = True


class DataError(LockstepError):
    """A data set is missing, malformed or empty. Exit code 4."""

    exit_code = 4


class CorruptImageError(DataError):
    """One image file cannot be decoded; the message names it. Exit code 4."""


class LoaderError(DataError):
    """A loader process exited, for example because memory ran out. Exit code 4."""

    retryable = True


class CheckpointError(LockstepError):
    """A checkpoint cannot be written or read, or does not match this run. Exit code 5."""

    exit_code = 5


class NonFiniteLossError(LockstepError):
    """The loss, a gradient or a weight became NaN or infinite. Exit code 6."""

    exit_code = 6


class ReplicasDifferError(LockstepError):
    """The workers' weights diverged, so they no longer train one model. Exit code 7."""

    exit_code = 7
    retryable = True  # snapshots and checkpoints are only taken of equal replicas


class HangError(LockstepError):
    """The job made no progress for --hang-timeout seconds, so the launcher stopped it. Exit code 8."""

    exit_code = 8
    retryable = True


class DeviceError(LockstepError):
    """A worker cannot use its accelerator after another one disconnected; both are replaced. Exit code 9."""

    exit_code = 9
    retryable = True


class WorkerFailedError(LockstepError):
    """A function run by `lockstep.launch.run` failed on a worker; the message contains its traceback. Exit code 1."""


class StoppedError(LockstepError, SystemExit):
    """A signal or the time limit stopped training after a checkpoint; `--resume auto` continues. Exit code 75.

    EX_TEMPFAIL of sysexits.h: the same command may succeed later. A script that does not catch it exits with this code
    and without a traceback.
    """

    exit_code = 75

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.code = self.exit_code
