"""horovodrun as users start it: what workers receive, how their output is shown, and how a job ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from commands import HOROVODRUN, own_environment, run, started
from time_limits import wait_for_ends

SHOW = """echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE \\
$HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME $HOROVOD_CONTROLLER \\
$OLDPWD ${HOROVOD_ELASTIC-none} $CUDA_VISIBLE_DEVICES"""


def test_workers_know_their_places_and_both_streams_are_shown(tmp_path: Path) -> None:
    script = f"{SHOW}; printf trouble >&2"
    words = ("-np", "2", "-H", "localhost:4", "--output-filename", str(tmp_path / "out"), "--autotune")
    variables = own_environment(OLDPWD="/", CUDA_VISIBLE_DEVICES="5", HOROVOD_ELASTIC="1")
    done = run([*HOROVODRUN, *words, "sh", "-c", script], tmp_path, variables)
    assert done.returncode == 0
    lines = [f"{rank}/2 {rank}/2 0/1 localhost gloo / none 5" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{line}" for rank, line in enumerate(lines)]
    warning, *errors = done.stderr.splitlines()
    assert warning.startswith("horovodrun: --autotune has no effect in Lockstep: ")
    assert sorted(errors) == ["[0]<stderr>:trouble", "[1]<stderr>:trouble"]
    for rank, line in enumerate(lines):
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == f"{line}\n"


@pytest.mark.cold
def test_workers_have_no_variables_of_torchrun(tmp_path: Path) -> None:
    script = f"{sys.executable} -c 'import horovod.torch as hvd; hvd.init(); print(hvd.rank(), hvd.cross_size())'; env"
    outer = own_environment(ROLE_NAME="outer", TORCHELASTIC_USE_AGENT_STORE="True")
    done = run([*HOROVODRUN, "-np", "2", "sh", "-c", script], tmp_path, outer, cold=True)
    names = {line.partition("=")[0].partition(":")[2] for line in done.stdout.splitlines()}
    assert {"0 1", "1 1", "HOROVOD_LOCAL_RANK"} <= names, done.stderr
    torchruns = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_RUN", "TORCHELASTIC_USE")
    assert not [name for name in names if name.startswith(torchruns)]


def test_workers_inherit_exported_shell_functions(tmp_path: Path) -> None:
    function = own_environment(**{"BASH_FUNC_module%%": '() {  echo "module $*"\n}'})
    done = run([*HOROVODRUN, "-np", "1", "bash", "-c", "module load cuda"], tmp_path, function)
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:module load cuda\n"), done.stderr


def test_a_line_is_shown_when_it_is_printed(tmp_path: Path) -> None:
    script = "import time; print('early'); time.sleep(100)"
    with started([*HOROVODRUN, "-np", "1", sys.executable, "-c", script], tmp_path) as job:
        job.wait_for("[0]<stdout>:early\n")


def test_the_first_failure_ends_the_job_with_code_1(tmp_path: Path) -> None:
    script = 'test "$HOROVOD_RANK" = 0 && sleep 1000; printf "last words"; exit 7'
    done = run([*HOROVODRUN, "-np", "2", "sh", "-c", script], tmp_path)
    assert done.returncode == 1
    assert done.stdout == "[1]<stdout>:last words\n"
    assert done.stderr == "lockstep: worker 1 of 2 failed with exit code 7; the others were stopped\n"


def test_ctrl_c_ends_all_workers_and_their_children(tmp_path: Path) -> None:
    with started([*HOROVODRUN, "-np", "2", "sh", "-c", "echo here; sleep 100; true"], tmp_path) as job:
        job.wait_until(lambda: job.text.count("here") == 2)
        family = job.descendants()
        job.send_signal(signal.SIGINT)
        assert job.wait(20) == 128 + signal.SIGINT
        wait_for_ends(family)
