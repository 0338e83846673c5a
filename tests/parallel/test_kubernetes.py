"""The manifest of examples/kubernetes: its pods' command, with the variables that the training operator gives them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import yaml
from commands import LOCKSTEP, own_environment, started
from ports import free_port

from lockstep.cli.parse import parse_train
from lockstep.files.jsonl import read_records

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "pytorchjob.yaml"


def test_the_pods_of_the_manifest_train_together(tmp_path: Path) -> None:
    roles = yaml.safe_load(MANIFEST.read_text())["spec"]["pytorchReplicaSpecs"]
    containers = [roles[role]["template"]["spec"]["containers"][0] for role in ("Master", "Worker")]
    volumes = {volume["name"] for volume in roles["Worker"]["template"]["spec"]["volumes"]}
    port, starts = free_port(), []
    for rank, container in enumerate(containers):
        program, *words = container["command"]
        assert program == "lockstep"
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert parse_train(words[1:]).job.run.resume == "auto"
        words = [word.replace("/runs", str(tmp_path)) for word in words]
        variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PET_NPROC_PER_NODE": "auto"}
        variables |= {"GLOO_SOCKET_IFNAME": "lo"}  # both pods stand on this machine
        command = [*LOCKSTEP, *words, "--epochs", "1", "--device", "cpu"]
        starts.append(started(command, tmp_path, own_environment(**variables), output=tmp_path / f"pod-{rank}.txt"))
    with ExitStack() as stack:
        pods = [stack.enter_context(start) for start in starts]
        for pod in pods:
            assert pod.wait(120) == 0, pod.text
    assert next(r for r in read_records(tmp_path / "a" / "metrics.jsonl") if r["kind"] == "run")["workers"] == 2
