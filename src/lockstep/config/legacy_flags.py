"""Words of older training scripts in Lockstep's: a pure step before the flags are read.

What meant one thing is translated, what meant nothing or several things is refused with what to write instead;
docs/howto/old-scripts.md has the tables. The flags are those of the scripts themselves: PyTorch's ImageNet and MNIST
examples, Apex's main_amp.py, pytorch-cifar and Horovod's examples. Translating twice changes nothing, so that workers
may be started with either words.
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
# What a flag without a value means, and what to tell the user where the older scripts meant something else.
BARE = {
    "--resume": ("auto", "--resume without a value resumes the newest run; specify an older script's file"),
    "--pretrained": ("default", ""),
}
# imagenet_ddp.py and its like take --dist-url, start a process a GPU and divide these by the node's GPUs.
PER_NODE = frozenset({"--batch-size", "--workers"})
PER_NODE_NOTE = (
    "-b and -j are each worker's; a script that divided them by the node's GPUs was given that many times more"
)
_PLACE = "the launcher sets each worker's rank"
_HOW_MANY = "use -np N (auto: one per GPU) for the number of workers, and -H HOST:SLOTS,... for the hosts"
_RUN_DIR = "a run writes everything to one folder: --run-dir DIR"
_FOLDERS = "name the folder that holds both as train/ and val/: lockstep train FOLDER"
_EVALUATION = "leave it out: an evaluation takes batches as large as training's, which does not change its figures"
REFUSED = {
    "--base-lr": "write --lr LR --lr-base-batch B, where B is the batch of one worker (32 in Horovod's example)",
    "--checkpoint-format": f"{_RUN_DIR}; --resume FILE reads an older script's checkpoint",
    "--communication": "leave it out, or name what carries the gradients with --dist-backend gloo|nccl",
    "--deterministic": "leave it out: --seed decides the order, the augmentation and the first weights of every run",
    "--dummy": "write synthetic as the data set",
    "--fp16": "write --precision O2 (fp16 with fp32 master weights, as those scripts had), O1 (autocast) or O3 (fp16)",
    "--gamma": "write --schedule step --lr-gamma G, with --lr-milestones for the epochs at which the rate falls",
    "--gpu": "leave it out, or choose GPUs with CUDA_VISIBLE_DEVICES",
    "--gpus": _HOW_MANY,
    "-g": _HOW_MANY,
    "--gradient-predivide-factor": "leave it out: gradients are averaged, and a factor that cancels changes nothing",
    "--local-rank": f"leave it out: {_PLACE}",
    "--log-dir": _RUN_DIR,
    "--multiprocessing-distributed": (
        "write -np auto (one worker a GPU) on one node; --dist-url, --world-size and --rank alone do it for several. "
        "-b and -j were then a node's, and are each worker's here: divide them by the node's GPUs, or write "
        "--global-batch-size for the whole batch"
    ),
    "-n": "write --nodes N, with --node-rank K and --master-addr HOST, on each node; or -H HOST:SLOTS,... on one",
    "-nr": "write --node-rank K, with --nodes N and --master-addr HOST; or -H HOST:SLOTS,... on one node",
    "--nr": "write --node-rank K, with --nodes N and --master-addr HOST; or -H HOST:SLOTS,... on one node",
    "--prof": "leave it out; --max-steps N ends a run early",
    "--save-model": "leave it out: a run leaves its best weights in its folder as model.safetensors",
    "--test-batch-size": _EVALUATION,
    "--train-dir": _FOLDERS,
    "--use-adasum": "Adasum is there for scripts of Horovod's API (docs/reference/horovod.md), not for lockstep train",
    "--val-batch-size": _EVALUATION,
    "--val-dir": _FOLDERS,
}
TRUE, FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True)
class Translation:
    """Lockstep's words, and a line on each that may mean something else than it did."""

    arguments: list[str]
    notes: list[str]


def translate(arguments: Sequence[str], command: type) -> Translation:
    """An older script's words in Lockstep's; words that are Lockstep's already stay as they are.

    Args:
        command: The dataclass that the words will be read into; its types say which flags are yes or no.

    Raises:
        ConfigError: A flag has no equal, or a yes-or-no flag another value; the message says what to write.
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
                raise ConfigError(f"{flag} takes no value; it means {' '.join(FIXED[flag])}")
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
    """The value that follows a yes-or-no flag, if one does; any other word is not the flag's."""
    return rest.pop(0) if rest and rest[0].lower() in TRUE | FALSE | {"none"} else None


def _yes_or_no(flag: str, value: str | None, optional: bool) -> str:
    """The one word for a flag that is yes or no, or may be neither."""
    text = "true" if value is None else value.lower()
    if optional:
        if text in TRUE | FALSE | {"none"}:
            return f"{flag}={'None' if text == 'none' else text in TRUE}"
        raise ConfigError(f"{flag} is True, False or None; got {value!r}")
    if text not in TRUE | FALSE:
        raise ConfigError(f"{flag} is yes or no: write {flag} or --no-{flag[2:]}; got {value!r}")
    return flag if text in TRUE else f"--no-{flag[2:]}"


def _is_missing(flag: str, rest: list[str]) -> bool:
    """Whether a flag that takes a value has been given none."""
    if not rest or rest[0].startswith("-"):
        return True
    # In the ImageNet examples --pretrained took no value, and the data's folder often came next.
    return flag == "--pretrained" and Path(rest[0], "train").is_dir()
