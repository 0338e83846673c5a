"""MLflow; requires the extra `lockstep-torch[mlflow]`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, first_line
from lockstep.train.trackers.base import Record, Tracker, scalars

INSTALL = "pip install 'lockstep-torch[mlflow]'"


class MlflowTracker(Tracker):
    """Logs the configuration and scalars to the server or database set by MLflow's environment variables.

    The default is MLflow's, mlflow.db in the current folder.
    """

    def __init__(self, config: TrainConfig, folder: Path):
        """Start a run.

        Raises:
            ConfigError: MLflow or what its store needs is not installed, or the store's address is invalid.
        """
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise ConfigError(f"--track mlflow: install it with {INSTALL}") from None
        self._metric = Metric
        groups = to_mapping(config)
        params = [
            Param(f"{group}.{key}", str(value))
            for group, values in groups.items()
            for key, value in (values.items() if isinstance(values, dict) else [("value", values)])
        ]
        try:
            self._client = MlflowClient()
            experiment = self._client.get_experiment_by_name("lockstep")
            number = experiment.experiment_id if experiment else self._client.create_experiment("lockstep")
            self._run = self._client.create_run(number, run_name=folder.name).info.run_id
            self._client.log_batch(self._run, params=params)
        except ImportError as error:
            raise ConfigError(f"--track mlflow: {first_line(error)}; {INSTALL}") from None
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":  # such as an unreachable server: a restart may succeed
                raise
            fix = "set MLFLOW_TRACKING_URI to a server or a database"
            if find_spec("sqlalchemy") is None:
                fix = f"for a database, {INSTALL}; for a server, set MLFLOW_TRACKING_URI"
            raise ConfigError(f"--track mlflow: {first_line(error).strip()}; {fix}") from None

    def record(self, record: Record) -> None:
        metrics = [
            self._metric(tag, float(value), int(record["unix_time"] * 1000), record["step"])
            for tag, value in scalars(record).items()
        ]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
