"""A trial of a gang in which one worker is waited for longer than its collectives may take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.utils.data import TensorDataset

from rubberband.executor import gang
from tests.builders.trials.segment_trials import Regression, rank

WAIT_S = 1.4
gang.COLLECTIVE_TIMEOUT = gang.EXCHANGE_TIMEOUT = timedelta(seconds=1)


class Waiting(Regression):
    """Takes its time on the rank `slow`, at the place `at`."""

    num_workers = 0

    def _wait(self, config: Mapping[str, Any], place: str) -> None:
        if (config.get("at"), config.get("slow")) == (place, rank()):
            time.sleep(WAIT_S)  # collectives end by real time

    def train_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        self._wait(config, "data")
        return super().train_dataset(config)

    def eval_dataset(self, config: Mapping[str, Any]) -> TensorDataset:
        return super().train_dataset(config)

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self._wait(self.config, "restore")
