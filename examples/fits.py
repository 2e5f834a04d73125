"""50 fits of boosted trees on scikit-learn's digits: each configuration trains once and reports once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

import rubberband


def train(config: Mapping[str, Any]) -> None:
    """Fit one configuration, and report its loss and accuracy on held-out digits."""
    images, labels = load_digits(return_X_y=True)
    known, held_out, known_labels, held_out_labels = train_test_split(images, labels, test_size=0.3, random_state=0)
    model = HistGradientBoostingClassifier(**config, early_stopping=False, random_state=0)
    model.fit(known, known_labels)
    loss = float(log_loss(held_out_labels, model.predict_proba(held_out)))
    rubberband.report({"loss": loss, "accuracy": float(model.score(held_out, held_out_labels))}, checkpoint=model)
