"""What the report's sections say of what was read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from report_material import (
    ENVIRONMENT,
    batch_record,
    epoch_record,
    io_record,
    loading_record,
    make_run,
    phase_spread,
    run_records,
    scaling_record,
    start_record,
    step_record,
    straggler_record,
    write_lines,
)

from lockstep.report.document import Bars, Chart, Document, Line, Table
from lockstep.report.sections import build
from lockstep.report.sections.scaling import Costs
from lockstep.report.sources import gather

HUGE = 10**400  # no float


def _document(*paths: Path) -> Document:
    return build(gather(paths), "Results")


def _of_records(tmp_path: Path, *records: dict[str, Any]) -> Document:
    return _document(write_lines(tmp_path / "study.jsonl", records))


def _parts(document: Document) -> dict[str, Chart | Bars | Table]:
    parts = [part for section in document.sections for part in section.parts]
    assert len({part.key for part in parts}) == len(parts)
    return {part.key: part for part in parts}


def _chart(document: Document, key: str) -> Chart:
    chart = _parts(document)[key]
    for line in chart.lines:
        assert len(line.x) == len(line.y) > 0
        assert all(band is None or len(band) == len(line.x) for band in (line.low, line.high))
    return chart


def _rows(document: Document, key: str) -> list[dict[str, Any]]:
    table = _parts(document)[key]
    assert len(table.columns) == len(table.formats)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def _line(chart: Chart, name: str) -> Line:
    (line,) = [line for line in chart.lines if line.name == name]
    return line


def test_a_run_has_its_curves_in_percent_against_epochs_and_time(tmp_path: Path) -> None:
    document = _document(make_run(tmp_path / "run"))
    validation = _line(_chart(document, "top1-epochs"), "run, validation")
    assert (validation.x, validation.y, validation.look) == ([1, 2, 3], [70, 80, 90], "dotted")
    assert _line(_chart(document, "top1-time"), "run, training").x == [5, 10, 15]
    assert _chart(document, "loss-time").x_label == "training time (s)"
    for key in ("top5-epochs", "loss-epochs", "learning-rate", "throughput", "data-wait"):
        assert _chart(document, key).lines
    assert _line(_chart(document, "data-wait"), "run").y == [2.0] * 6


def test_a_run_keeps_its_color_in_every_chart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [start_record(workers=1), epoch_record(1, "val")])
    make_run(tmp_path / "b")
    document = _document(tmp_path)
    lines = [line for key in ("top1-epochs", "throughput") for line in _chart(document, key).lines]
    assert {line.name.split(",")[0]: line.color for line in lines} == {"1 worker": 0, "2 workers": 1}


def test_the_table_of_results_has_best_and_last(tmp_path: Path) -> None:
    worse = epoch_record(3, "val", top1=0.5)
    (row,) = _rows(_document(make_run(tmp_path / "run", [*run_records(2), worse])), "results")
    assert (row["best top-1 (%)"], row["best at epoch"], row["last top-1 (%)"]) == (pytest.approx(80), 2, 50)
    assert (row["samples/s"], row["training time (s)"], row["epochs"]) == (1001.5, 15, "3")


def test_results_come_first_without_common_columns(tmp_path: Path) -> None:
    for workers in (1, 2):
        make_run(tmp_path / str(workers), run_records(workers=workers))
    table = _parts(_document(tmp_path))["results"]
    assert list(table.columns[:4]) == ["run", "best top-1 (%)", "samples/s", "training time (s)"]
    assert [row[0] for row in table.rows] == ["1 worker", "2 workers"]
    assert table.note.startswith("All runs: cifar10, resnet18, batch 64, fp32.")
    assert not {"data", "network", "workers", "global batch", "precision"} & set(table.columns)


def test_a_setting_that_some_runs_lack_is_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "a", run_records(workers=1))
    make_run(tmp_path / "b", [epoch_record(1, "val")], config="{}")
    table = _parts(_document(tmp_path))["results"]
    assert table.note.startswith("All runs, as far as recorded: cifar10, resnet18, 1 worker, batch 64, fp32.")


def test_what_no_run_has_gets_no_column(tmp_path: Path) -> None:
    run = write_lines(tmp_path / "run" / "metrics.jsonl", [start_record(workers=4), step_record(5)])
    assert _rows(_document(run.parent), "results") == [{"run": "run", "samples/s": 1000, "training time (s)": 2.5}]


def test_runs_of_different_data_sets_have_separate_sections(tmp_path: Path) -> None:
    for data, top1 in (("digits", 0.9), ("mnist", 0.5)):
        for workers in (1, 2):
            records = [start_record(data=data, workers=workers), epoch_record(1, "val", top1=top1)]
            make_run(tmp_path / f"{data}-{workers}", records)
    document = _document(tmp_path)
    titles = [section.title for section in document.sections]
    assert titles[:2] == ["Results: digits", "Results: mnist"]
    assert titles[3:5] == ["Learning curves: digits", "Learning curves: mnist"]
    for key, title, top1 in (("", "digits", 90), ("-2", "mnist", 50)):
        chart = _chart(document, f"top1-epochs{key}")
        assert chart.title == f"Top-1 accuracy against epochs: {title}"
        assert [(line.name, line.y) for line in chart.lines] == [
            ("1 worker, validation", [top1]),
            ("2 workers, validation", [top1]),
        ]
        assert [row["run"] for row in _rows(document, f"results{key}")] == ["1 worker", "2 workers"]
    environment = {row["fact"]: row["value"] for row in _rows(document, "environment")}
    assert (environment["Python"], environment["GPUs"]) == ("3.11.7", "2 x A100")


def test_runs_without_a_data_set_join_the_only_one(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", [epoch_record(1, "val")], config="{}")
    assert len(_rows(_document(tmp_path), "results")) == 2
    make_run(tmp_path / "c", run_records(data="mnist"))
    titles = [section.title for section in _document(tmp_path).sections]
    assert {"Results: cifar10", "Results: mnist", "Results: data set not recorded"} <= set(titles)


def test_training_losses_with_changed_labels_are_named(tmp_path: Path) -> None:
    configs = {"plain": "{}", "smooth": "optim: {label_smoothing: 0.1}", "mixed": "augment: {mixup: 0.2, cutmix: 1.0}"}
    for name, config in configs.items():
        make_run(tmp_path / name, config=config)
    document = _document(tmp_path)
    loss = _chart(document, "loss-epochs")
    assert [line.name for line in loss.lines if "training" in line.name] == [
        "mixed, training (mixup 0.2 and cutmix 1)",
        "plain, training",
        "smooth, training (label smoothing 0.1)",
    ]
    assert "not comparable" in loss.note
    assert [line.name for line in _chart(document, "top1-epochs").lines][:2] == ["mixed, training", "mixed, validation"]


@pytest.mark.parametrize(("rate", "scale"), [(9_000, "linear"), (12_000, "log10")])
def test_rates_that_differ_by_ten_times_have_a_logarithmic_axis(rate: float, scale: str, tmp_path: Path) -> None:
    slow = [step_record(step, images_per_second=1000.0, lr=0.01) for step in (5, 10)]
    fast = [step_record(step, images_per_second=rate, lr=rate / 1e5) for step in (5, 10)]
    make_run(tmp_path / "slow", [start_record(), *slow])
    make_run(tmp_path / "fast", [start_record(workers=4), *fast])
    document = _document(tmp_path)
    for key in ("throughput", "learning-rate"):
        chart = _chart(document, key)
        assert chart.y_scale == scale
        assert ("logarithmic" in chart.note) == (scale == "log10")


def test_a_schedules_end_does_not_stretch_a_logarithmic_axis(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [start_record(), *(step_record(step, lr=10.0**-step) for step in (1, 2, 3, 6, 7))])
    make_run(tmp_path / "b", [start_record(workers=4), *(step_record(step, lr=9.0) for step in (1, 2, 3, 6, 7))])
    assert _chart(_document(tmp_path), "learning-rate").lines[0].y == [0.1, 0.01, 0.001, None, None]


def test_runs_that_differ_by_seed_alone_have_mean_and_spread(tmp_path: Path) -> None:
    for seed, top1 in enumerate((0.8, 0.9, 0.85)):
        records = [*run_records(2), epoch_record(3, "val", top1=top1)]
        make_run(tmp_path / f"seed-{seed}", records, config=f"seed: {seed}\nrun:\n  run_dir: seed-{seed}\n")
    make_run(tmp_path / "other", config="seed: 9\noptim:\n  lr: 3\n")
    (row,) = _rows(_document(tmp_path), "seeds")
    assert (row["count"], row["best top-1, mean (%)"]) == (3, pytest.approx(85))
    assert row["standard deviation (%)"] == pytest.approx(5)
    assert (row["minimum (%)"], row["maximum (%)"]) == (pytest.approx(80), pytest.approx(90))


def test_runs_on_other_machines_do_not_differ_by_seed_alone(tmp_path: Path) -> None:
    for seed, gpu in enumerate(("A100", "V100")):
        run = make_run(tmp_path / gpu, config=f"seed: {seed}\n")
        (run / "environment.json").write_text(json.dumps({"gpus": [gpu]}))
    assert "seeds" not in _parts(_document(tmp_path))


def test_a_scaling_study_has_points_model_and_ideal_line(tmp_path: Path) -> None:
    counts = (1, 2, 4, 8)
    records = [scaling_record(workers, repeat, split_seconds=None) for workers in counts for repeat in (0, 1, 2)]
    document = _of_records(tmp_path, *records)
    throughput = _chart(document, "scaling-strong-throughput")
    measured, model, ideal = throughput.lines
    assert (ideal.look, ideal.color) == ("dotted", None)
    assert list(measured.x) == [1, 2, 4, 8]
    assert measured.y[0] == pytest.approx(256 / 0.21 + 1)
    assert measured.low[0] == pytest.approx(256 / 0.21 + 0.5)
    assert max(model.x) == 16
    assert list(ideal.y) == pytest.approx([(256 / 0.21 + 1) * count for count in (1, 2, 4, 8, 16)])
    assert _chart(document, "scaling-strong-speedup").lines[0].y[0] == pytest.approx(1)
    efficiency = _chart(document, "scaling-strong-efficiency")
    assert efficiency.lines[0].y[0] == pytest.approx(100)
    for name, height in (("ideal", 100), ("threshold", 75)):
        assert set(_line(efficiency, name).y) == {height}
    rows = _rows(document, "scaling-strong-throughput-points")
    assert (rows[0]["quartiles"], rows[0]["quartiles (ms)"]) == ("1,219.5–1,220.5", "210.00–210.00")
    assert rows[0]["efficiency (%)"] == pytest.approx(100)
    assert rows[3]["speed-up"] == pytest.approx(rows[3]["throughput"] / rows[0]["throughput"])


def test_a_steps_time_is_split_into_its_parts(tmp_path: Path) -> None:
    document = _of_records(tmp_path, *(scaling_record(workers, utilization=0.9) for workers in (1, 2)))
    bars = _parts(document)["scaling-strong-split"]
    assert list(bars.categories) == ["1", "2"]
    stacks = dict(bars.stacks)
    assert stacks["exchange"] == [10, 10]
    assert stacks["forward"] == pytest.approx([60, 30])
    assert "waiting for data" not in stacks  # nothing of it
    assert list(bars.colors) == [1, 2, 3, 4]
    row = _rows(document, "scaling-strong-throughput-points")[1]
    assert row["time per step (ms)"] == pytest.approx(sum(values[1] for values in stacks.values()))  # a bar's end
    assert (row["data (ms)"], row["exchange (ms)"]) == (0, 10)
    assert (row["utilization (%)"], row["peak memory (GB)"]) == (90, 2)


def test_parts_too_small_to_be_seen_are_left_out(tmp_path: Path) -> None:
    split = {"forward": 0.1, "backward": 0.1, "optimizer": 0.0005, "other": 0.002}
    bars = _parts(_of_records(tmp_path, scaling_record(1, split_seconds=split)))["scaling-strong-split"]
    assert [name for name, _ in bars.stacks] == ["forward", "backward", "other"]


@pytest.mark.parametrize(("most", "scales"), [(8, ("linear", "linear")), (16, ("log2", "log10"))])
def test_axes_are_logarithmic_from_16_workers_on(most: int, scales: tuple[str, str], tmp_path: Path) -> None:
    document = _of_records(tmp_path, *(scaling_record(workers) for workers in (1, 4, most)))
    throughput, efficiency = (_chart(document, f"scaling-strong-{key}") for key in ("throughput", "efficiency"))
    assert (throughput.x_scale, throughput.y_scale) == scales
    assert (efficiency.x_scale, efficiency.y_scale) == (scales[0], "linear")
    assert throughput.from_zero
    assert ("logarithmic" in document.sections[0].text) == (most == 16)


@pytest.mark.parametrize(("threshold", "verdict"), [(0.5, "at least 50 % up to 2"), (0.99, "falls below 99 % at 2")])
def test_the_section_says_where_the_efficiency_is_too_low(threshold: float, verdict: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "study.jsonl", [scaling_record(workers) for workers in (1, 2)])
    document = build(gather([path]), threshold=threshold)
    assert f"The efficiency {'is ' if threshold == 0.5 else ''}{verdict} workers." in document.sections[0].text


def test_a_program_that_divides_its_batch_does_not_scale_weakly(tmp_path: Path) -> None:
    records = [scaling_record(workers, modes=["weak"], batch=None, samples_per_step=64) for workers in (1, 2)]
    assert "so this is not weak scaling" in _of_records(tmp_path, *records).sections[0].text


def test_a_report_on_the_scaling_of_one_job_names_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "study.jsonl", [scaling_record(workers) for workers in (1, 2)])
    document = build(gather([path]))
    assert document.title == "Scaling of resnet18 on cifar10, global batch 256"
    table = _parts(document)["scaling-strong-throughput-points"]
    assert table.note.startswith("resnet18 on cifar10, global batch 256. Computed on CPUs only: Model 1. ")
    assert "series" not in _rows(document, "scaling-strong-throughput-points")[0]
    other = write_lines(tmp_path / "other.jsonl", [scaling_record(1, job="76543210", arch="vgg16")])
    assert build(gather([path, other])).title == "Training results"
    assert build(gather([path, make_run(tmp_path / "run")])).title == "Training results"


def test_the_environment_of_a_program_has_its_command(tmp_path: Path) -> None:
    facts = {"measured_steps": 30, "flags": ["python", "a b.py"], "batch_system": "Slurm"}
    requests = ["#SBATCH --nodes=2", "#SBATCH --gpus=8"]
    document = _of_records(tmp_path, scaling_record(2, **facts, batch_requests=requests))
    shown = {row["fact"]: row["value"] for row in _rows(document, "environment")}
    assert (shown["command"], shown["processor"], shown["cores"]) == ("python 'a b.py'", "Model 1", "8")
    assert shown["batch system"] == "Slurm"
    assert shown["batch script requests"] == "#SBATCH --nodes=2; #SBATCH --gpus=8"


@pytest.mark.parametrize(
    ("commit", "shown"),
    [("abc", "abc, clean"), ("abc-dirty", "abc, with uncommitted changes"), ("", "unknown, or not in Git")],
)
def test_the_programs_commit_is_apart_from_locksteps(commit: str, shown: str, tmp_path: Path) -> None:
    facts = {"environment": {**ENVIRONMENT, "project_commit": commit, "commit": "def"}, "flags": ["python", "a/b.py"]}
    document = _of_records(tmp_path, scaling_record(1, **facts))
    table = {row["fact"]: row["value"] for row in _rows(document, "environment")}
    assert (table["program's commit"], table["Lockstep's commit"]) == (shown, "def, clean")


@pytest.mark.parametrize(
    ("command", "title"),
    [("python src/train.py -b 64", "train.py"), ("python -m pkg.train x", "pkg.train"), ("./train -v", "a label")],
)
def test_the_title_is_the_programs_name(command: str, title: str, tmp_path: Path) -> None:
    record = scaling_record(2, label="a label", flags=command.split())
    assert build(gather([write_lines(tmp_path / "study.jsonl", [record])])).title == f"Scaling of {title}"


def test_costs_are_those_of_so_many_samples(tmp_path: Path) -> None:
    """100 samples/s need 1,000 s for 100,000 samples, and 360 W in this time are 0.1 kWh."""
    power = {1: {"cpu": 60.0, "gpu": 300.0}, 2: {"cpu": 120.0, "gpu": 600.0}, 4: {"cpu": 240.0}}
    records = [
        scaling_record(count, images_per_second=100.0 * count, nodes=count, watts=watts, energy_unread=["DRAM: why"])
        for count, watts in power.items()
    ]
    path = write_lines(tmp_path / "study.jsonl", records)
    document = build(gather([path]), costs=Costs(100_000, carbon=250.0))
    first, second, third = _rows(document, "scaling-strong-throughput-costs")
    assert first == pytest.approx(
        {
            "workers": 1,
            "global batch": 256,
            "batch per worker": 256.0,
            "nodes": 1,
            "time (h)": 1000 / 3600,
            "node-hours": 1000 / 3600,
            "power (W)": 360.0,
            "energy (kWh)": 0.1,
            "energy per sample (J)": 3.6,
            "CO2e (g)": 25.0,
        }
    )
    assert (second["time (h)"], second["node-hours"]) == pytest.approx((500 / 3600, 1000 / 3600))
    assert second["energy (kWh)"] == pytest.approx(0.1)
    assert third["energy (kWh)"] is None  # its GPUs were not counted
    batches = [
        (row["global batch"], row["batch per worker"]) for row in _rows(document, "scaling-strong-throughput-costs")
    ]
    assert batches == [(256, 256.0), (256, 128.0), (256, 64.0)]
    assert "\nenergy that is not counted: DRAM: why" in document.sections[0].text
    assert "CO2e (g)" not in _rows(build(gather([path])), "scaling-strong-throughput-costs")[0]


def test_energy_of_a_run_is_in_its_results(tmp_path: Path) -> None:
    energy = {"kind": "energy", "step": 10, "time_seconds": 1.0, "unix_time": 1e9, "unread": ["DRAM: why"]}
    records = [*run_records(), {**energy, "joules": {"cpu": 1.8e6, "gpu": 1.8e6}, "samples": 1000}]
    make_run(tmp_path / "run", [*records, {**energy, "joules": {"cpu": 3.6e6}, "samples": 0}])
    document = build(gather([tmp_path]), costs=Costs(carbon=100.0))
    (row,) = _rows(document, "results")
    assert (row["energy (kWh)"], row["energy per sample (J)"], row["CO2e (g)"]) == pytest.approx((2.0, 3600.0, 200.0))
    table = _parts(document)["results"]
    assert "Energy that is not counted: DRAM: why." in table.note


def test_only_runs_with_accuracies_explain_them(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [start_record(), step_record(5)])
    assert "ccuracies" not in _parts(_document(tmp_path))["results"].note


def test_strong_and_weak_scaling_have_sections_of_their_own(tmp_path: Path) -> None:
    both = scaling_record(1, modes=["strong", "weak"])
    weak = scaling_record(2, modes=["weak"], global_batch=512, batch=256.0)
    document = _of_records(tmp_path, both, scaling_record(2), weak)
    assert [section.title for section in document.sections][:2] == ["Strong scaling", "Weak scaling"]
    assert list(_chart(document, "scaling-weak-throughput").lines[0].x) == [1, 2]


def _at(rates: dict[int, float]) -> list[dict[str, Any]]:
    """Scaling records of throughput alone."""
    return [scaling_record(count, images_per_second=rate, split_seconds=None) for count, rate in rates.items()]


def test_the_models_largest_error_stands_beside_its_name(tmp_path: Path) -> None:
    rates = {1: 100.0, 2: 190.0, 4: 390.0, 8: 700.0}
    document = _of_records(tmp_path, *_at(rates))
    model = _line(_chart(document, "scaling-strong-throughput"), "model")
    drawn = dict(zip(model.x, model.y, strict=True))
    largest = max(abs((drawn[workers] or 0) / rate - 1) for workers, rate in rates.items())
    assert largest > 0.01
    for key in ("throughput", "speedup", "efficiency"):
        (remark,) = [line.remark for line in _chart(document, f"scaling-strong-{key}").lines if line.remark]
        assert remark == f"±{100 * largest:.2g} %"


def test_model_with_large_errors_is_not_drawn(tmp_path: Path) -> None:
    document = _of_records(tmp_path, *_at({1: 100.0, 2: 197.0, 4: 380.0, 8: 720.0, 16: 1340.0, 32: 1500.0}))
    lines = _chart(document, "scaling-strong-throughput").lines
    assert [line.name for line in lines] == ["measured", "ideal"]
    assert re.search(r"^no model is drawn: its largest error is [1-9]\d %$", document.sections[0].text, re.MULTILINE)


def test_a_study_with_one_repeat_says_so_and_has_no_spread(tmp_path: Path) -> None:
    document = _of_records(tmp_path, *map(scaling_record, (1, 2, 4)))
    assert (
        'measured only once with each number of workers, so the spread is unknown; use "--repeats 3" to measure'
        in document.sections[0].text
    )
    for key in ("throughput", "speedup", "efficiency"):
        assert _chart(document, f"scaling-strong-{key}").lines[0].low is None
    assert not re.search("quartile|whisker|band", document.sections[0].text, re.IGNORECASE)
    (row, *_) = _rows(document, "scaling-strong-throughput-points")
    assert "quartiles" not in row
    repeated = [scaling_record(workers, repeat) for workers in (1, 2, 4) for repeat in range(1 if workers == 4 else 3)]
    (tmp_path / "study.jsonl").unlink()
    text = _of_records(tmp_path, *repeated).sections[0].text
    assert "measured only once with 4 workers, so the spread is unknown" in text


def test_whiskers_and_bands_are_explained_where_they_are_drawn(tmp_path: Path) -> None:
    def text(*counts: int) -> str:
        (tmp_path / "study.jsonl").unlink(missing_ok=True)
        rates = {count: 100.0 * (count if count < 5 else 1) for count in counts}  # of which the latter have no model
        records = [
            scaling_record(count, repeat, images_per_second=rate + repeat)
            for count, rate in rates.items()
            for repeat in range(3)
        ]
        return _of_records(tmp_path, *records).sections[0].text

    assert "Whiskers show the quartiles of the repeats." in text(1, 2, 4)
    assert "Bands show the quartiles of the repeats." in text(1, 2, 4, 8, 9)


def test_model_has_an_interval_up_to_twice_the_workers(tmp_path: Path) -> None:
    chart = _chart(_of_records(tmp_path, *map(scaling_record, (1, 2, 4))), "scaling-strong-throughput")
    model = chart.lines[1]
    assert list(model.x) == [1, 2, 3, 4, 6, 8]
    for y, low, high in zip(model.y, model.low or (), model.high or (), strict=True):
        assert low < y < high
    text = _document(tmp_path).sections[0].text
    assert "The model is fitted to the points, with its 80% prediction interval;" in text


def test_model_without_interval_ends_at_last_point(tmp_path: Path) -> None:
    rates = (1.0, 100.0, 100_000.0)
    records = [scaling_record(n, i, images_per_second=n * rate) for n in (1, 2, 4) for i, rate in enumerate(rates)]
    document = _of_records(tmp_path, *records)
    model = _chart(document, "scaling-strong-throughput").lines[1]
    assert (max(model.x), model.low) == (4, [None] * len(model.x))
    assert "The model is fitted to the points; " in document.sections[0].text
    (tmp_path / "study.jsonl").unlink()
    assert "The model" not in _of_records(tmp_path, scaling_record(1)).sections[0].text


def test_ideal_lines_have_the_colors_of_their_series(tmp_path: Path) -> None:
    records = [scaling_record(count, gpu=gpu, device="cuda") for gpu in ("V100", "A100") for count in (1, 2)]
    document = _of_records(tmp_path, *records)
    ideal = [line for line in _chart(document, "scaling-strong-throughput").lines if line.name.startswith("ideal")]
    assert [(line.look, line.color) for line in ideal] == [("dotted", 0), ("dotted", 1)]


def test_a_failed_point_is_left_out_and_named(tmp_path: Path) -> None:
    failed = {"kind": "scaling", "modes": ["strong"], "workers": 4, "repeat": 0, "job": "01234567", "failed": "killed"}
    document = _of_records(tmp_path, scaling_record(1), scaling_record(2), failed)
    assert list(_chart(document, "scaling-strong-throughput").lines[0].x) == [1, 2]
    assert any("killed" in warning for warning in document.warnings)


def test_one_number_of_workers_has_a_point_but_no_model(tmp_path: Path) -> None:
    document = _of_records(tmp_path, scaling_record(2))
    (line,) = _chart(document, "scaling-strong-throughput").lines
    assert list(line.x) == [2]
    assert not {"scaling-strong-speedup", "scaling-strong-efficiency"} & set(_parts(document))  # of 1 and 100 %
    assert "no model: a fit needs at least 3 different numbers of workers" in document.sections[0].text


def test_points_with_other_threads_per_worker_are_named(tmp_path: Path) -> None:
    known = scaling_record(1)["environment"] | {"threads_per_worker": 8}  # by the program itself
    document = _of_records(tmp_path, scaling_record(1, threads=4, environment=known), scaling_record(2, threads=2))
    assert [row["threads per worker"] for row in _rows(document, "scaling-strong-throughput-points")] == [8, 4]
    assert "threads per worker differs (8 with 1 worker and 4 with 2 workers)" in document.sections[0].text
    (tmp_path / "study.jsonl").unlink()
    document = _of_records(tmp_path, *(scaling_record(workers, threads=4) for workers in (1, 2)))
    assert "threads per worker differs" not in document.sections[0].text


def test_throughput_is_drawn_in_the_unit_of_the_records(tmp_path: Path) -> None:
    facts = {"kind": "scaling", "modes": ["weak"], "label": "GPT-2"}
    rates = [{"tokens_per_second": 100.0}, {"tokens_per_second": 190.0, "workers": 2}, {"images_per_second": 0.5}]
    document = _document(write_lines(tmp_path / "mine.jsonl", [{**facts, "workers": 1, **rate} for rate in rates]))
    tokens = _chart(document, "scaling-weak-throughput-tokens")
    assert (tokens.y_label, tokens.lines[0].name) == ("throughput (tokens/s)", "GPT-2, tokens/s")
    assert _chart(document, "scaling-weak-throughput").lines[0].y == [0.5]
    assert "GPT-2, tokens/s: measured only once with each number of workers, so the spread is unknown\n" in (
        document.sections[0].text
    )


def test_the_batch_study_shows_throughput_and_memory(tmp_path: Path) -> None:
    about = {name: batch_record(512)[name] for name in ("kind", "batch", "workers", "job")}
    too_large = {**about, "fits": False, "why": "out of memory"}  # which is all that such a record says
    document = _of_records(tmp_path, batch_record(256), batch_record(64), too_large)
    (line,) = _chart(document, "batch-throughput").lines
    assert (list(line.x), line.y) == ([64, 256], [100, 100])
    memory, limit = _chart(document, "batch-memory").lines
    assert (memory.y, limit.y) == ([0.64, 2.56], [4, 4])
    assert "the largest batch that fits is 256; 512 does not (out of memory)" in document.sections[0].text


def test_studies_of_two_machines_are_apart(tmp_path: Path) -> None:
    machines: list[dict[str, Any]] = [{"device": "cuda", "environment": {"gpus": [gpu]}} for gpu in ("V100", "A100")]
    loaders = [{"device": "cpu", "environment": {"processor": processor}} for processor in ("EPYC", "Xeon")]
    records = [batch_record(batch, **machine) for machine in machines for batch in (64, 128)]
    document = _of_records(tmp_path, *records, *(loading_record(**machine) for machine in loaders))
    batches = _chart(document, "batch-throughput").lines
    assert [line.name for line in batches] == ["resnet18 on cifar10, V100", "resnet18 on cifar10, A100"]
    loading = [line.name for line in _chart(document, "loading-pipeline").lines if not line.name.startswith("demand")]
    assert loading == [f"photos, batch 32, cpu, resnet18, {name}" for name in ("EPYC", "Xeon")]


def test_the_loading_study_shows_rates_and_demand(tmp_path: Path) -> None:
    document = _of_records(tmp_path, loading_record())
    pipeline, demand = _chart(document, "loading-pipeline").lines
    assert (pipeline.x, pipeline.y, demand.y) == ([0, 1, 2], [100] * 3, [50] * 3)
    assert "0 loader processes are enough" in document.sections[0].text


def test_io_is_drawn_over_time_and_what_was_never_counted_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    times = (5.0, 10.0, 40.0)  # nothing ran in between
    for rank in (0, 1):
        write_lines(run / "io" / f"worker-{rank}.jsonl", [io_record(rank, 1000 + time) for time in times], '{"kind"')
    document = _document(run)
    (line,) = _chart(document, "io-read").lines  # nothing came from storage
    assert (line.x, line.y) == ([0, 5, 10, 35], [2, 2, None, 2])
    assert {line.name for line in _chart(document, "io-operations").lines} == {"run, reads", "run, writes"}
    assert "io-network" not in _parts(document)
    assert sum("worker-" in warning and "1 damaged line" in warning for warning in document.warnings) == 2


def test_workers_and_data_sets_have_medians_of_their_runs(tmp_path: Path) -> None:
    for data, workers, seconds in (("cifar10", 2, 4.0), ("cifar10", 2, 6.0), ("cifar10", 1, 8.0), ("mnist", 1, 3.0)):
        records = [start_record(data=data, workers=workers)]
        records += [epoch_record(epoch, "train", epoch_seconds=seconds) for epoch in (1, 2, 3)]
        make_run(tmp_path / f"{data}-{workers}-{seconds}", [*records, epoch_record(3, "val", top1=seconds / 10)])
    document = _document(tmp_path)
    assert [section.title for section in document.sections][:3] == [
        *("Results: cifar10", "Results: mnist", "Workers and data sets")
    ]
    names = ("data set", "workers", "time per epoch (s)", "best top-1 (%)")
    rows = [[row[name] for name in names] for row in _rows(document, "workers")]
    assert rows == [["cifar10", 1, 8.0, 80.0], ["cifar10", 2, 5.0, 50.0], ["mnist", 1, 3.0, 30.0]]
    assert "workers" not in _parts(_document(tmp_path / "cifar10-2-4.0", tmp_path / "cifar10-2-6.0"))


def test_epochs_of_a_loop_are_made_of_its_steps(tmp_path: Path) -> None:
    steps = (1, 4, 10, 15, 20, 25)  # the third epoch is not complete
    times = {1: 1.0, 4: 2.0, 10: 8.0, 15: 9.0, 20: 10.0, 25: 11.0}
    records = [
        step_record(step, loss=float(step), time_seconds=times[step], images_per_second=100.0 * step, top5=None)
        for step in steps
    ]
    run = make_run(tmp_path / "run", [start_record(script="train.py"), *records, epoch_record(2, "val")])
    document = _document(run)
    assert [(line.x, line.y) for line in _chart(document, "epoch-time").lines] == [([1, 2], [8.0, 2.0])]
    training, _ = _chart(document, "loss-epochs").lines
    assert training.y == [(1 * 1 + 3 * 4 + 6 * 10) / 10, (15 + 20) / 2]
    (row,) = _rows(document, "results")
    assert row["samples/s"] == median([(1 * 100 + 1 * 400 + 6 * 1000) / 8, (1500 + 2000) / 2])
    assert "top5-epochs" in _parts(document), "of the evaluation"


def test_bytes_to_storage_are_separate_from_write_calls(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    amounts = {"written_bytes": 50e6, "storage_written_bytes": 10e6}
    write_lines(run / "io" / "worker-0.jsonl", [io_record(0, 1000 + time, **amounts) for time in (5.0, 10.0)])
    chart = _chart(_document(run), "io-written")
    assert [(line.name, line.y) for line in chart.lines] == [
        ("run, to storage", [2, 2]),
        ("run, write calls", [10, 10]),
    ]
    assert "sockets" in chart.note


def test_axes_start_at_zero_except_for_accuracy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "io" / "worker-0.jsonl", [io_record(0, 1000 + time) for time in (5.0, 10.0)])
    write_lines(tmp_path / "study.jsonl", [scaling_record(1), scaling_record(2), batch_record(64), loading_record()])
    document = _document(tmp_path)
    amounts = (
        "scaling-strong-throughput",
        "throughput",
        "batch-throughput",
        "batch-memory",
        "loading-pipeline",
        "io-read",
        "data-wait",
        "epoch-time",
    )
    assert all(_chart(document, key).from_zero for key in amounts)
    assert not _chart(document, "top1-epochs").from_zero


def test_loss_scale_has_the_number_of_skipped_steps(tmp_path: Path) -> None:
    values = {5: (1024.0, 0), 10: (512.0, 1), 15: (512.0, 1), 20: (256.0, 2)}
    steps = [step_record(step, loss_scale=scale, skipped_steps=skips) for step, (scale, skips) in values.items()]
    document = _document(make_run(tmp_path / "run", [start_record(), *steps]))
    (scale,) = _chart(document, "loss-scale").lines
    assert dict(zip(scale.x, scale.y, strict=True)) == {5: 1024, 10: 512, 15: 512, 20: 256}
    (section,) = [section for section in document.sections if section.title == "Loss scale"]
    assert section.text == "run: 2 of 20 steps were skipped."


def test_environments_are_listed_once_without_private_fields(tmp_path: Path) -> None:
    make_run(tmp_path / "a", run_records(workers=1))
    make_run(tmp_path / "b")
    write_lines(tmp_path / "scaling.jsonl", [scaling_record(1), scaling_record(2)])
    document = _document(tmp_path)
    of_runs, of_study = _rows(document, "environment")
    assert (of_runs["measurement"], of_runs["GPUs"], of_runs["PyTorch"]) == (
        "1 worker; 2 workers",
        "2 x A100",
        "2.11.0",
    )
    assert (of_study["measurement"], of_study["processor"], of_study["Lockstep's commit"]) == (
        "study: scaling",
        "Model 1",
        "abc1234, clean",
    )
    assert "secret" in str(ENVIRONMENT)
    assert "secret" not in str(document)


@pytest.mark.parametrize("kind", ["scaling", "batch", "loading"])
@pytest.mark.parametrize("damage", [None, "text", -1, [], {}, [{}], {"low": None}, True, HUGE, 1e300, {"median": HUGE}])
def test_damaged_fields_are_never_fatal(kind: str, damage: object, tmp_path: Path) -> None:
    whole: dict[str, dict[str, Any]] = {
        "scaling": scaling_record(2, utilization=0.9, measured_steps=9, flags=["a"], batch_requests=["b"], threads=2),
        "batch": batch_record(32),
        "loading": loading_record(),
    }
    record = whole[kind]
    broken = [{**record, key: damage} for key in record if key != "kind"]
    document = _of_records(tmp_path, record, *broken)
    assert document.sections
    for part in _parts(document).values():
        if isinstance(part, Chart):
            assert all(len(line.x) == len(line.y) for line in part.lines)


@pytest.mark.parametrize("damage", [None, "text", -1, [], {}, True, HUGE, 1e300])
def test_damaged_fields_of_a_run_are_never_fatal(damage: object, tmp_path: Path) -> None:
    examples = [start_record(), step_record(5, loss_scale=8.0, skipped_steps=0), epoch_record(1, "val")]
    examples += [step_record(6, **phase_spread(0.2, 0.1)), straggler_record(6)]
    examples += [epoch_record(2, "train", phase_seconds={"forward": [1.0, 2.0]})]
    broken = [{**record, key: damage} for record in examples for key in record if key != "kind"]
    run = make_run(tmp_path / "run", [*run_records(), *broken])
    io_records = [{**io_record(0, 9.0), key: damage} for key in io_record(0, 9.0)]
    write_lines(run / "io" / "worker-0.jsonl", [io_record(0, 5.0), *io_records])
    (run / "environment.json").write_text('{"cores": "x", "gpus": 3, "packages": []}')
    assert _rows(_document(run), "results")


@pytest.mark.parametrize(
    "config",
    [
        "optim: {optimizer: [x]}",
        "parallel: {strategy: 3, compress: {a: b}}",
        "1: a\nb: c\nnull: d\n2026-01-01: e",
        "data: &loop [*loop]",
        "[]",
        "seed: [0]\nepochs: x\nnumerics: 3\ndevice: [cuda]",
        f"seed: {HUGE}\nglobal_batch_size: {HUGE}",
    ],
)
def test_damaged_configurations_are_never_fatal(config: str, tmp_path: Path) -> None:
    for index, workers in enumerate((1, 2, 2)):
        make_run(tmp_path / str(index), run_records(workers=workers), config=f"{config}\n")
    make_run(tmp_path / "whole", config="seed: 3\noptim: {optimizer: sgd}\nparallel: {strategy: ddp}\n")
    assert len(_rows(_document(tmp_path), "results")) == 4


def test_a_damaged_environment_is_never_fatal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for text in ("[" * 100_000, '{"gpus": [3], "processor": []}', f'{{"cores": {HUGE}}}', "[]"):
        (run / "environment.json").write_text(text)
        assert _rows(_document(run), "results")
