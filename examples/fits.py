"""50 fits of boosted trees on a table of 569 rows, scikit-learn's breast cancer data, by the mean loss of five folds.

Each configuration trains once and reports once. Run it with `rubberband run examples/fits.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import cross_validate

import rubberband


def train(config: Mapping[str, Any]) -> None:
    """Cross-validate one configuration, report its mean loss and accuracy, and keep the model of all rows."""
    rows, labels = load_breast_cancer(return_X_y=True)
    model = HistGradientBoostingClassifier(**config, early_stopping=False, random_state=0)
    found = cross_validate(model, rows, labels, cv=5, scoring=["neg_log_loss", "accuracy"])
    loss, accuracy = -float(found["test_neg_log_loss"].mean()), float(found["test_accuracy"].mean())
    rubberband.report({"loss": loss, "accuracy": accuracy}, checkpoint=model.fit(rows, labels))
