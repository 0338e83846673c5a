"""Site profiles: recognition, precedence, validation, and each site's plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.errors import ConfigError
from lockstep.launch.node.hardware import listed_cpus
from lockstep.launch.plan.batch_script import BatchJob, render
from lockstep.launch.plan.job_plan import JobPlan, describe_plan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.site_profiles import find_site, read_site, sites

HERE = frozenset({"localhost"})
LUMI_MASKS = (
    "0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000,"
    "0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000"
)
FRONTIER_CORES = (48, 56, 16, 24, 0, 8, 32, 40)  # the first of the eight beside each GPU, which the center reserves
AURORA_LIST = "list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"


def _plan(name: str, hosts: str = "n1:1,n2:1", environment: dict[str, str] | None = None, **options: str) -> JobPlan:
    where = LaunchOptions(hosts=hosts, launcher="ssh", site=name, **options)  # type: ignore[arg-type]
    environment = {"USER": "ada", **(environment or {})}
    return plan_from(where, None, ["python", "train.py"], environment, 64, lambda: 0, HERE)


@pytest.mark.parametrize("name", sites({}))
def test_plan_has_the_variables_of_the_profile(name: str) -> None:
    plan, plain, site = _plan(name), _plan("none"), sites({})[name]
    added = {key: value for key, value in plan.environment.items() if key not in plain.environment}
    assert added == {key: value.replace("$USER", "ada") for key, value in (site.variables | site.network).items()}
    assert plan.interfaces == site.interfaces
    assert plan.nodes == plain.nodes
    assert any(note.startswith(f"site {name}: ") for note in plan.notes) == bool(plan.site_notes)


def test_bindings_equal_the_documented_lists_and_masks() -> None:
    assert _plan("aurora").bind == AURORA_LIST
    frontier, bind = _plan("frontier").bind, _plan("lumi").bind
    for local_rank, reserved in enumerate(FRONTIER_CORES):
        assert listed_cpus(frontier, local_rank) == {*range(reserved + 1, reserved + 8)}
    for local_rank, mask in enumerate(LUMI_MASKS.split(",")):
        assert listed_cpus(bind, local_rank) == {cpu for cpu in range(64) if int(mask, 16) >> cpu & 1}
    assert listed_cpus(bind, 8) == set()
    assert listed_cpus("list:0-1,64:7", 0) == {0, 1, 64}


@pytest.mark.parametrize(
    ("name", "host", "variables"),
    [
        ("polaris", "x3005c0s7b0n0", {}),
        ("aurora", "x4117c3s3b0n0.hsn.cm.aurora.alcf.anl.gov", {}),
        ("frontier", "frontier05084", {}),
        ("roihu", "roihu-gpu-login1.csc.fi", {}),
        ("lumi", "nid001", {"SLURM_CLUSTER_NAME": "lumi"}),
        ("derecho", "deg0001", {"NCAR_HOST": "derecho"}),
        ("vista", "login2.vista.tacc.utexas.edu", {}),
        ("perlmutter", "nid001001", {"NERSC_HOST": "perlmutter"}),
        ("juwels", "jwb0001", {"SYSTEMNAME": "juwelsbooster"}),
        ("tuolumne", "tuolumne1001", {}),
        (None, "frontier", {"SLURM_CLUSTER_NAME": "lumi2", "NCAR_HOST": ""}),
    ],
)
def test_site_is_recognized(name: str | None, host: str, variables: dict[str, str]) -> None:
    found = find_site(None, variables, frozenset({host}))
    assert (found.name if found else None) == name
    assert find_site("none", variables, frozenset({host})) is None
    assert find_site(None, {**variables, "LOCKSTEP_SITE": "none"}, frozenset({host})) is None


def test_users_variables_and_flags_take_precedence() -> None:
    plan = _plan("frontier", environment={"NCCL_CROSS_NIC": "0"}, interface="eth0")
    assert "NCCL_CROSS_NIC" not in plan.environment
    assert plan.interfaces == ("eth0",)
    text = describe_plan(plan)
    assert "# NCCL_CROSS_NIC: from the environment, instead of site frontier" in text
    assert "# interfaces: from --interface" in text
    assert "# FI_CXI_RDZV_PROTO: site frontier (olcf/olcf-user-docs" in text
    own = _plan("frontier", environment={"NCCL_SOCKET_IFNAME": "hsn0"})
    assert own.interfaces == ()
    assert "interfaces: from NCCL_SOCKET_IFNAME in the environment" in own.site_notes
    assert _plan("lumi", bind="none").bind == "none"


def test_binding_is_left_out_for_more_workers_than_documented() -> None:
    plan = _plan("lumi", hosts="n1:9,n2:9")
    assert plan.bind == "none"
    assert "binding: none, because site lumi lists CPUs of 8 workers per node" in plan.site_notes


def test_job_on_one_node_keeps_its_own_network() -> None:
    plan = _plan("polaris", hosts="localhost:4")
    assert "NCCL_NET" not in plan.environment
    assert plan.interfaces == ()


def test_users_folder_replaces_a_profile(tmp_path: Path) -> None:
    folder = tmp_path / "lockstep" / "sites"
    folder.mkdir(parents=True)
    (folder / "lumi.yaml").write_text("source: mine\ndate: today\nwhen: {HOME_SITE: 'yes'}\n")
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "HOME_SITE": "yes"}
    found = find_site(None, environment, HERE)
    assert found
    assert (found.name, found.source) == ("lumi", "mine")


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "PATH", "BASH_ENV", "NCCL_NET_PLUGIN"])
def test_only_a_named_file_determines_which_code_is_loaded(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "lockstep" / "sites"
    folder.mkdir(parents=True)
    path = folder / "mine.yaml"
    path.write_text(f"source: a\ndate: b\nwhen: {{HOME_SITE: 'yes'}}\nvariables: {{{name}: x}}\n")
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "HOME_SITE": "yes"}
    for choice, variables in ((None, {}), ("mine", {}), (None, {"LOCKSTEP_SITE": "mine"})):
        with pytest.raises(ConfigError, match=f"site mine sets {name}, with which it can run code: name its file"):
            find_site(choice, {**environment, **variables}, HERE)
    for choice, variables in ((str(path), {}), (None, {"LOCKSTEP_SITE": str(path)})):
        found = find_site(choice, {**environment, **variables}, HERE)
        assert found
        assert found.loading == [name]


def test_several_matching_sites_are_refused() -> None:
    with pytest.raises(ConfigError, match="matches the sites derecho, lumi; choose one with --site"):
        find_site(None, {"NCAR_HOST": "derecho", "SLURM_CLUSTER_NAME": "lumi"}, HERE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sorce: a\ndate: b", "unknown field sorce; did you mean source"),
        ("date: b", "source"),
        ("source: a\ndate: b\nworkers: four", "workers is 'four', but must be"),
        ("source: a\ndate: b\nhost: '('", "not a regular expression"),
        ("source: a\ndate: b\nworkers: 1\nbinding: [one]", "list of CPUs"),
        ("source: a\ndate: b\nworkers: 2\nbinding: [0-7]", "binding has 1 entries, but workers is 2"),
        ("source: a\ndate: b\nnetwork: {A-B: x}", "a name of letters"),
        ('source: "a\\nrm -r x"\ndate: b', "source 'a\\nrm -r x': must be one line"),
        ('source: a\ndate: b\nallocation: ["--x\\nrm -r x"]', "allocation '--x\\nrm -r x': must be one line"),
        ('source: a\ndate: b\nvariables: {A: "1\\nB"}', "one line without control characters"),
        ('source: a\ndate: b\nallocation: ["--x=$(rm -r x)"]', "options without ` and $("),
        ('source: a\ndate: b\nmodules: ["module load a; rm -r x"]', "one command, without ;"),
        ("source: a\ndate: b\nnetwork: {A: 1}", "network is {'A': 1}"),
        ("- a", "must be a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_invalid_profile_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml") as error:
        read_site(path)
    assert message in str(error.value)


def test_unknown_site_is_refused() -> None:
    with pytest.raises(ConfigError, match="--site frontire: unknown site; did you mean frontier"):
        find_site("frontire", {}, HERE)
    with pytest.raises(ConfigError, match=r"x\.yaml: cannot be read"):
        find_site(None, {"LOCKSTEP_SITE": "x.yaml"}, HERE)


def test_script_has_the_sites_modules_and_allocation_options() -> None:
    frontier, roihu = sites({})["frontier"], sites({})["roihu"]
    lines = render("slurm", BatchJob(nodes=2), ["python", "train.py"], frontier).splitlines()
    assert {"#SBATCH --network=disable_rdzv_get", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=8"} <= {
        *lines
    }
    assert "export LOCKSTEP_SITE=frontier" in lines
    assert {*frontier.modules} <= {*lines}
    typed = render("slurm", BatchJob(nodes=2), ["python", "train.py"], roihu)
    assert "#SBATCH --gres=gpu:gh200:4\n" in typed
    assert "--gpus-per-node" not in typed
    assert "#SBATCH --ntasks-per-node=4\n" in typed
    fewer = render("slurm", BatchJob(gpus_per_node=2), ["python", "train.py"], roihu)
    assert "--gres" not in fewer
    assert "--gpus-per-node=2" in fewer


def test_script_asks_for_the_cores_that_the_site_lists() -> None:
    listed = sites({})
    command = ["python", "train.py"]
    assert "#SBATCH --cpus-per-task=7\n" in render("slurm", BatchJob(), command, listed["lumi"])
    assert ":ncpus=96:" in render("pbs", BatchJob(), command, listed["aurora"])
    assert "#SBATCH --cpus-per-task=2\n" in render("slurm", BatchJob(cpus_per_worker=2), command, listed["lumi"])
    assert "#SBATCH --cpus-per-task=4\n" in render("slurm", BatchJob(workers=9), command, listed["lumi"])
    assert "#SBATCH --cpus-per-task=4\n" in render("slurm", BatchJob(), command, listed["roihu"])
    assert "affinity" not in render("lsf", BatchJob(), command, listed["lumi"])
    assert render("flux", BatchJob(), command, listed["lumi"])


def test_script_of_aurora_forgets_the_launcher_of_its_module() -> None:
    lines = render("pbs", BatchJob(), ["python", "train.py"], sites({})["aurora"]).splitlines()
    module = lines.index("module load frameworks")
    assert lines[module + 1] == "unset CCL_PROCESS_LAUNCHER CCL_ATL_TRANSPORT"


def test_sites_are_listed_and_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NCAR_HOST", "derecho")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["sites"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in listed if line.startswith("*")] == ["derecho"]
    assert main(["sites", "frontier"]) == 0
    assert "network     FI_CXI_RDZV_PROTO=alt_read" in capsys.readouterr().out
    assert main(["sites", "frontire"]) == 2
    assert "error: frontire: unknown site; did you mean frontier?" in capsys.readouterr().err
