"""Translate the flags of older training scripts into Lockstep's, before they are parsed.

Flags with exactly one equivalent are translated; flags with none or several are rejected, and the error suggests a
replacement. docs/howto/old-scripts.md has the tables. The flags are those of PyTorch's ImageNet and MNIST examples,
Apex's main_amp.py, pytorch-cifar and Horovod's examples. The translation is idempotent, so workers may be started with
the original or the translated flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from lockstep.config.flags import flags_of
from lockstep.errors import ConfigError

RENAMED = {
    "--b": "-b",
    "--backend": "--dist-backend",
    "--batches-per-allreduce": "--accumulate",
    "--log-interval": "--log-every",
    "--num-proc": "-np",
    "--static-loss-scale": "--loss-scale",
}
FIXED = {
    "--dynamic-loss-scale": ("--loss-scale", "dynamic"),
    "--fp16-allreduce": ("--compress", "fp16"),
    "--no-accel": ("--device", "cpu"),
    "--no-cuda": ("--device", "cpu"),
    "--use-mixed-precision": ("--precision", "O1"),
}
# Values for flags that are given without one, and a note if the flag meant something else in the older scripts.
BARE = {
    "--resume": ("auto", "--resume without a value resumes the newest run; specify an older script's file"),
    "--pretrained": ("default", ""),
}
# imagenet_ddp.py and similar scripts take --dist-url, start one process per GPU and divide these by the node's GPUs.
PER_NODE = frozenset({"--batch-size", "--workers"})
PER_NODE_NOTE = "-b and -j are per worker; if the older script divided them by the node's GPUs, divide them here, too"
_HOW_MANY = "use -np N (auto: one per GPU) for the number of workers, and -H HOST:SLOTS,... for the hosts"
_RUN_DIR = "use --run-dir DIR, the folder of all files of a run"
_FOLDERS = "pass the folder that contains train/ and val/: lockstep train FOLDER"
_EVALUATION = "remove it: evaluation uses the batch size of training, which does not change its results"
REFUSED = {
    "--base-lr": "use --lr LR --lr-base-batch B, where B is the batch size per worker (32 in Horovod's example)",
    "--checkpoint-format": f"{_RUN_DIR}; --resume FILE reads an older script's checkpoint",
    "--communication": "remove it, or choose the backend with --dist-backend gloo|nccl",
    "--deterministic": "remove it: --seed determines the order, the augmentation and the initial weights of every run",
    "--dummy": "use the data set synthetic",
    "--fp16": "use --precision O2 (fp16 with fp32 master weights, as in those scripts), O1 (autocast) or O3 (fp16)",
    "--gamma": "use --schedule step --lr-gamma G, and --lr-milestones for the epochs at which the rate is lowered",
    "--gpu": "remove it, or choose GPUs with CUDA_VISIBLE_DEVICES",
    "--gpus": _HOW_MANY,
    "-g": _HOW_MANY,
    "--gradient-predivide-factor": "remove it: gradients are averaged, and the factor cancels out",
    "--local-rank": "remove it: the launcher sets each worker's rank",
    "--log-dir": _RUN_DIR,
    "--multiprocessing-distributed": (
        "use -np auto (one worker per GPU) on one node; on several, --dist-url, --world-size and --rank are enough. "
        "-b and -j were per node, and are per worker here: divide them by the node's GPUs, or use --global-batch-size "
        "for the whole batch"
    ),
    "-n": "use --nodes N, with --node-rank K and --master-addr HOST, on each node; or -H HOST:SLOTS,... on one",
    "-nr": "write --node-rank K, with --nodes N and --master-addr HOST; or -H HOST:SLOTS,... on one node",
    "--nr": "write --node-rank K, with --nodes N and --master-addr HOST; or -H HOST:SLOTS,... on one node",
    "--prof": "remove it; --max-steps N ends a run early",
    "--save-model": "remove it: each run saves its best weights in its folder, as model.safetensors",
    "--test-batch-size": _EVALUATION,
    "--train-dir": _FOLDERS,
    "--use-adasum": "use Horovod's API, which has Adasum (docs/reference/horovod.md)",
    "--val-batch-size": _EVALUATION,
    "--val-dir": _FOLDERS,
}
TRUE, FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True)
class Translation:
    """The translated arguments, and a note for each flag whose meaning may have changed."""

    arguments: list[str]
    notes: list[str]


def translate(arguments: Sequence[str], command: type) -> Translation:
    """Translate an older script's arguments; Lockstep's own arguments are not changed.

    Args:
        command: The command's dataclass; its types determine which flags are switches.

    Raises:
        ConfigError: A flag has no equivalent, or a switch has an invalid value; the message names the replacement.
    """
    own = {name: flag for flag in flags_of(command) for name in flag.names}
    rest = list(arguments)
    done: list[str] = []
    notes: list[str] = []
    seen: set[str] = set()
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            done += [argument, *rest]
            break
        flag, equals, value = argument.partition("=")
        flag = _canonical(flag)
        known = own.get(RENAMED.get(flag, flag))
        full = known.names[0] if known else flag
        seen.add(full)
        if flag in REFUSED:
            raise ConfigError(f"{flag} is an older script's flag: {REFUSED[flag]}")
        if flag in FIXED:
            if equals:
                raise ConfigError(f"{flag} takes no value; it stands for {' '.join(FIXED[flag])}")
            done += FIXED[flag]
        elif flag in RENAMED:
            done += [RENAMED[flag], value] if equals else [RENAMED[flag]]
        elif known and bool in known.kinds:
            given = value if equals else _take(rest)
            done.append(_yes_or_no(full, given, NoneType in known.kinds))
        elif full in BARE and not equals and _is_missing(full, rest):
            default, note = BARE[full]
            done += [argument, default]
            notes += [note] if note else []
        else:
            done.append(argument)
    if "--dist-url" in seen and seen & PER_NODE:
        notes.append(PER_NODE_NOTE)
    return Translation(done, notes)


def _canonical(flag: str) -> str:
    return "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag


def _take(rest: list[str]) -> str | None:
    """Remove and return the value after a switch; None if the next argument is not a value for a switch."""
    return rest.pop(0) if rest and rest[0].lower() in TRUE | FALSE | {"none"} else None


def _yes_or_no(flag: str, value: str | None, optional: bool) -> str:
    """Return the argument for a switch; `optional` switches may also be None."""
    text = "true" if value is None else value.lower()
    if optional:
        if text in TRUE | FALSE | {"none"}:
            return f"{flag}={'None' if text == 'none' else text in TRUE}"
        raise ConfigError(f"{flag} {value}: must be True, False or None")
    if text not in TRUE | FALSE:
        raise ConfigError(f"{flag} {value}: must be yes or no; or use {flag} or --no-{flag[2:]}")
    return flag if text in TRUE else f"--no-{flag[2:]}"


def _is_missing(flag: str, rest: list[str]) -> bool:
    """Return whether the value of a flag is missing."""
    if not rest or rest[0].startswith("-"):
        return True
    # In the ImageNet examples, --pretrained took no value and was often followed by the data folder.
    return flag == "--pretrained" and Path(rest[0], "train").is_dir()
