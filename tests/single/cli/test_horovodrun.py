"""horovodrun's command line and configuration file."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from commands import HOROVODRUN, run

from lockstep.cli.horovodrun import main, parse_flags
from lockstep.errors import ConfigError
from lockstep.launch.plan.horovodrun_plan import plan_horovod
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import JobPlan


def test_quoted_values_may_begin_with_a_dash() -> None:
    flags = parse_flags(["-np", "2", "--binding-args", "--bind-to=core --map-by=socket", "python", "train.py"])
    assert flags.binding_args == "--bind-to=core --map-by=socket"
    with pytest.raises(ConfigError, match="--mpi-args needs a value"):
        parse_flags(["--mpi-args", "--output-filename=a b", "python", "train.py"])


def test_short_flags_may_be_abbreviated_and_lists_be_empty() -> None:
    flags = parse_flags(["-n", "4", "--network-interfaces=", "python", "train.py"])
    assert (flags.num_proc, flags.network_interfaces) == (4, ("",))


def test_the_command_begins_at_the_first_word_that_is_not_a_flag() -> None:
    flags = parse_flags(["-np", "4", "-H", "a:2,b:2", "python", "train.py", "-np", "7", "--verbose"])
    assert (flags.num_proc, flags.hosts, flags.verbose) == (4, "a:2,b:2", None)
    assert flags.command == ["python", "train.py", "-np", "7", "--verbose"]


def test_two_dashes_end_the_flags() -> None:
    assert parse_flags(["-np", "1", "--", "train", "--", "-x"]).command == ["train", "--", "-x"]


def test_single_dash_words_are_flags() -> None:
    flags = parse_flags(["-prefix-timestamp", "-hostfile", "f", "-p", "22", "-i", "key", "-np", "1", "x"])
    assert (flags.prefix_timestamp, flags.hostfile, flags.ssh_port, flags.ssh_identity_file) == (True, "f", 22, "key")


def test_a_flag_may_be_shortened_while_it_is_clear() -> None:
    assert parse_flags(["--num-p", "2", "x"]).num_proc == 2
    with pytest.raises(ConfigError, match="ambiguous option: --num could match"):
        parse_flags(["--num", "2", "x"])


# The flags of Horovod 0.28.1's parser, hidden and deprecated ones included, with a value where they take one.
HOROVODS = """
-v --version -np=2 --num-proc=2 -cb --check-build --disable-cache --start-timeout=9 --network-interfaces=lo
--network-interface=lo --output-filename=folder --verbose --config-file=file -p=22 --ssh-port=22 -i=key
--ssh-identity-file=key --fusion-threshold-mb=8 --cycle-time-ms=2.5 --cache-capacity=9 --hierarchical-allreduce
--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce
--autotune --no-autotune --autotune-log-file=log --autotune-warmup-samples=3 --autotune-steps-per-sample=9
--autotune-bayes-opt-max-samples=9 --autotune-gaussian-process-noise=0.5 --min-np=1 --min-num-proc=1 --max-np=4
--max-num-proc=4 --slots-per-host=2 --elastic-timeout=9 --reset-limit=3 --blacklist-cooldown-range=1,9
--timeline-filename=file --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check
--stall-check-warning-time-seconds=9 --stall-check-shutdown-time-seconds=9 --mpi-threads-disable
--no-mpi-threads-disable --mpi-args=words --tcp --binding-args=words --num-nccl-streams=2 --thread-affinity=1
--gloo-timeout-seconds=9 --log-level=DEBUG --log-with-timestamp --log-without-timestamp -prefix-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H=localhost:2 --hosts=localhost:2
-hostfile=file --hostfile=file --host-discovery-script=file --gloo --mpi --jsrun
"""
WITH_ADVICE = {"--mpi": "Remove --mpi, or start the workers with `mpirun", "--jsrun": "Remove --jsrun"}


@pytest.mark.parametrize("given", HOROVODS.split())
def test_every_flag_of_horovod_is_accepted_or_explained(given: str, tmp_path: Path) -> None:
    name, _, value = given.partition("=")
    file = tmp_path / "file"
    file.write_text("localhost slots=2\n" if "host" in name else "{}")
    words = [name, *(str(file) if each == "file" else each for each in value.split(",") if each)]
    flags = parse_flags([*words, *([] if name in ("-np", "--num-proc") else ["-np", "2"]), "python"])
    assert flags.command == ["python"]
    planned = partial(plan_horovod, vars(flags), flags.command, 2, {}, {"localhost"}, [Host("localhost", 2)])
    if name in WITH_ADVICE:
        with pytest.raises(ConfigError, match=WITH_ADVICE[name]):
            planned()
    else:
        assert all("has no effect in Lockstep: " in warning for warning in planned().warnings)


def test_interfaces_may_be_repeated_and_tcp_disables_infiniband() -> None:
    words = ["--network-interface", "eth0", "--network-interfaces", "eth1,eth2", "--tcp", "-H", "a:1,b:1", "-np", "2"]
    flags = parse_flags([*words, "python"])
    plan = plan_horovod(vars(flags), flags.command, 2, {}, {"here"})
    assert isinstance(plan.job, JobPlan)
    assert plan.job.interfaces == ("eth0", "eth1", "eth2")
    assert plan.job.environment["NCCL_IB_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("controller: gloo", "controller", "gloo"),
        ("controller: mpi", "controller", "mpi"),
        ("stall_check: {enabled: true}", "no_stall_check", False),
        ("stall-check: true", "no_stall_check", False),
        ("no_stall_check: true", "no_stall_check", True),
        ("logging: {with_timestamp: true}", "log_without_timestamp", False),
        ("logging: {with_timestamp: false}", "log_without_timestamp", True),
        ("verbose: false", "verbose", None),
        ("params: {torus_allreduce: true}", "torus_allreduce", True),
        ("network_interfaces: [eth0, eth1]", "network_interfaces", ("eth0", "eth1")),
    ],
)
def test_switches_in_a_configuration_file(text: str, name: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert getattr(parse_flags(["--config-file", str(file), "x"]), name) == value


def test_the_command_line_wins_over_the_files_controller(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("controller: mpi")
    assert parse_flags(["--config-file", str(file), "--gloo", "x"]).controller == "gloo"


CONFIG = """
num-proc: 3
params: {fusion_threshold_mb: 32, cycle_time_ms: 2.5, hierarchical_allreduce: false}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 9}
autotune: {enabled: true, log_file: a.csv}
logging: {level: info, hide_timestamp: true}
elastic: {min_np: 1, max-np: 4, timeout: 7, blacklist_cooldown_range: [1, 2]}
library_options: {num_nccl_streams: 2}
"""


def test_a_configuration_file_holds_flags_in_sections(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    flags = vars(parse_flags(["--config-file", str(file), "--fusion-threshold-mb", "8", "python"]))
    expected = {
        "num_proc": 3,
        "fusion_threshold_mb": 8,  # the command line's
        "cycle_time_ms": 2.5,
        "hierarchical_allreduce": False,
        "timeline_filename": "t.json",
        "timeline_mark_cycles": True,
        "no_stall_check": True,
        "stall_check_warning_time_seconds": 9,
        "autotune": True,
        "autotune_log_file": "a.csv",
        "log_level": "INFO",
        "log_without_timestamp": True,
        "min_np": 1,
        "max_np": 4,
        "elastic_timeout": 7,
        "blacklist_cooldown_range": (1.0, 2.0),
        "num_nccl_streams": 2,
        "command": ["python"],
    }
    assert {name: flags[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {fusion: 1}", "unknown flag params.fusion;"),
        ("colour: red", "unknown flag colour;"),
        ("controller: smoke", "controller is gloo or mpi or jsrun, not smoke"),
        ("[1, 2]", "expected sections"),
        ("a: [", "config.yaml"),
    ],
)
def test_a_wrong_configuration_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_flags(["--config-file", str(file), "x"])


def test_the_build_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check-build"]) == 0
    shown = capsys.readouterr().out
    assert "[X] PyTorch" in shown
    assert "[ ] TensorFlow" in shown
    assert shown.count("[X] Gloo") == 2


def test_a_job_over_hosts_waits_until_the_script_names_enough(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text(f"echo there:1; [ -e {tmp_path}/asked ] && echo elsewhere:2; touch {tmp_path}/asked")
    flags = ["--host-discovery-script", f"sh {script}", "--reset-limit", "-1", "--min-np", "3", sys.executable]
    done = run([*HOROVODRUN, *flags], tmp_path)
    assert done.returncode == 2  # not before the hosts are there is the wrong limit found
    assert "1 slots are available, and the job needs 3; waiting for hosts" in done.stderr
    assert "--reset-limit -1: must be at least 0" in done.stderr
