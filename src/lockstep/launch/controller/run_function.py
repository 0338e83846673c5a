"""`horovod.run` and `lockstep.launch.run`: a Python function on several workers, for notebooks and other programs.

The function, pickled by value, and the results are exchanged through a private temporary folder. A separate process
of `horovodrun` or `lockstep run` starts the workers, so that the caller keeps its signal handlers and environment.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TextIO

import cloudpickle

from lockstep.errors import ConfigError, WorkerFailedError
from lockstep.launch.node import function_worker, parent_death
from lockstep.launch.plan.hosts import are_here, names_of_this_machine, parse_hosts, read_hostfile
from lockstep.launch.plan.timings import Timings

# Horovod's sentence, by which callers recognize the error.
PROCESS_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated."
)
WORKER_FAILED = 1  # horovodrun's exit code


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `num_proc` workers. The other arguments are `horovodrun`'s flags.

    Args:
        executable: The workers' Python interpreter; this one by default.

    Returns:
        The results, by rank.

    Raises:
        ValueError: Arguments are mutually exclusive, or an elastic job has hosts other than this machine.
        RuntimeError: A worker failed, or the job could not be started. If a worker failed, the message starts with
            Horovod's sentence and contains the rank and the traceback of the worker that failed first.
    """
    for old, value, new in (
        ("np", np, "num_proc"),
        ("min_np", min_np, "min_num_proc"),
        ("max_np", max_np, "max_num_proc"),
        ("network_interface", network_interface, "network_interfaces"),
    ):
        if value is not None:
            warnings.warn(f"horovod.run: {old} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile both name the hosts; remove one of them")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are mutually exclusive; remove use_mpi")
    elastic = any(each is not None for each in (min_np, min_num_proc, max_np, max_num_proc))
    if elastic and _names_others(hosts, hostfile):
        raise ValueError(
            "an elastic function runs only on this machine; on other hosts, run a script with `horovodrun --min-np`"
        )
    flags = {
        "--num-proc": num_proc if np is None else np,
        "--min-np": min_num_proc if min_np is None else min_np,
        "--max-np": max_num_proc if max_np is None else max_np,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--blacklist-cooldown-range": cooldown_range,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--disable-cache": disable_cache,
        "--output-filename": output_filename,
        "--verbose": bool(verbose),
        "--gloo": use_gloo,
        "--mpi": use_mpi,
        "--mpi-args": mpi_args,
        "--network-interfaces": _joined(network_interface if network_interfaces is None else network_interfaces),
    }
    launcher = ["lockstep.cli.horovodrun", *_arguments(flags)]
    elastic = elastic or host_discovery_script is not None
    return _call_in_workers(pack_call(func, args, kwargs), launcher, executable, elastic)


def run_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], np: int | str
) -> list[Any]:
    """Implement `lockstep.launch.run`, which checks the arguments."""
    try:
        call = pack_call(function, args, kwargs)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"{function!r:.80} cannot be pickled for the workers: {error}; create such objects inside the function"
        ) from error
    try:
        return _call_in_workers(call, ["lockstep", "run", f"-np={np}"])
    except RuntimeError as error:
        raise WorkerFailedError(str(error).removeprefix(f"{PROCESS_FAILED} ")) from None


def _call_in_workers(
    call: bytes, launcher: Sequence[str], executable: str | None = None, elastic: bool = False
) -> list[Any]:
    """Run a launcher, a module with its arguments, whose workers make a call; return the results by rank."""
    with TemporaryDirectory(prefix="lockstep-run-") as name:
        folder = Path(name)
        (folder / function_worker.CALL).write_bytes(call)
        worker = [executable or sys.executable, function_worker.__file__, name]
        return results(folder, *_launch([sys.executable, "-m", *launcher, "--", *worker]), elastic)


def pack_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Return the bytes that function_worker.py reads: `sys.path` and the pickled call."""
    return pickle.dumps((sys.path, cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))))


def _joined(names: str | Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)


def _names_others(hosts: str | None, hostfile: str | None) -> bool:
    """Whether the hosts include another machine; if they cannot be parsed, the launcher reports that."""
    try:
        named = read_hostfile(Path(hostfile)) if hostfile is not None else parse_hosts(hosts) if hosts else ()
    except ConfigError:
        return False
    return not are_here(named, names_of_this_machine())


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    arguments = []
    for flag, value in flags.items():
        if isinstance(value, (tuple, list)):
            arguments += [flag, *map(str, value)]
        elif value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments.append(f"{flag}={value}")
    return arguments


def _launch(command: Sequence[str]) -> tuple[int, str]:
    """Run the launcher; return its exit code and its error messages.

    Its output is written to `sys.stdout` and `sys.stderr`, which a notebook shows below the cell.
    """
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(
        parent_death.command(command), stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    )
    assert launcher.stdout
    assert launcher.stderr
    complaint: list[str] = []
    threads = [
        threading.Thread(target=_show, args=(launcher.stdout, sys.stdout, []), daemon=True),
        threading.Thread(target=_show, args=(launcher.stderr, sys.stderr, complaint), daemon=True),
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return launcher.wait(), "".join(complaint)
    except BaseException:  # mostly KeyboardInterrupt: the workers end with the call
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(Timings().caller_end)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
        raise
    finally:
        for thread in threads:
            thread.join(1)
        launcher.stdout.close()
        launcher.stderr.close()


def _show(lines: IO[str], stream: TextIO, complaint: list[str]) -> None:
    for line in lines:
        if line.startswith(("horovodrun: error:", "lockstep run: error:", "lockstep:")):
            complaint.append(line)
        stream.write(line)
        stream.flush()


def results(folder: Path, code: int, complaint: str, elastic: bool = False) -> list[Any]:
    """Return the workers' results from a folder, by rank.

    Args:
        complaint: The launcher's error messages.
        elastic: Whether the job survives failures of workers; if so, the last failure, if any, ended it.

    Raises:
        RuntimeError: `code` is not 0, or a result is missing.
    """
    errors: list[tuple[int, int, str]]  # each failure's time in nanoseconds, rank and traceback
    errors = sorted(pickle.loads(file.read_bytes()) for file in folder.glob(f"{function_worker.ERROR}*"))
    if code and errors and elastic:
        _, rank, text = errors[-1]
        raise RuntimeError(f"{PROCESS_FAILED} {complaint.strip()}\nThe last error of a worker, {rank}:\n{text}")
    if code and errors:
        _, rank, text = errors[0]
        raise RuntimeError(f"{PROCESS_FAILED} worker {rank} failed:\n{text}")
    if code:
        begin = f"{PROCESS_FAILED} " if code == WORKER_FAILED else ""
        raise RuntimeError(begin + (complaint.strip() or f"the launcher exited with code {code}"))
    files = {_rank_and_size(file): file for file in folder.glob(f"{function_worker.RESULT}*")}
    size = max((size for _, size in files), default=0)
    if not files or set(files) != {(rank, size) for rank in range(size)}:
        ranks = sorted(rank for rank, _ in files)
        raise RuntimeError(
            f"only the workers {ranks} of {size or 'all'} returned a result; the others called sys.exit(0) "
            "or, in an elastic job, never joined"
        )
    return [pickle.loads(files[rank, size].read_bytes()) for rank in range(size)]


def _rank_and_size(file: Path) -> tuple[int, int]:
    """Return the rank and the number of workers from the name of a result's file."""
    rank, size = file.name.removeprefix(function_worker.RESULT).split(".")
    return int(rank), int(size)
