"""MLflow; requires the extra `lockstep-torch[mlflow]`."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.trackers.base import Record, Tracker, scalars


class MlflowTracker(Tracker):
    """Logs the configuration and scalars to the server or folder set by MLflow's environment variables."""

    def __init__(self, config: TrainConfig, folder: Path):
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError:
            raise ConfigError("--track mlflow: install it with pip install 'lockstep-torch[mlflow]'") from None
        self._metric = Metric
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name("lockstep")
        number = experiment.experiment_id if experiment else self._client.create_experiment("lockstep")
        self._run = self._client.create_run(number, run_name=folder.name).info.run_id
        groups = to_mapping(config)
        params = [
            Param(f"{group}.{key}", str(value))
            for group, values in groups.items()
            for key, value in (values.items() if isinstance(values, dict) else [("value", values)])
        ]
        self._client.log_batch(self._run, params=params)

    def record(self, record: Record) -> None:
        metrics = [
            self._metric(tag, float(value), int(record["unix_time"] * 1000), record["step"])
            for tag, value in scalars(record).items()
        ]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
