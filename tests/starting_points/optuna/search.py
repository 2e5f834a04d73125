"""The study as a search: python search.py."""

import optuna
from study import EPOCHS, objective

import rubberband


def train(config):
    return objective(optuna.trial.FixedTrial(config))


if __name__ == "__main__":
    result = rubberband.tune(
        train,
        name="optuna",
        search={
            "space": {
                "n_layers": rubberband.randint(1, 3),
                "n_units_l0": rubberband.randint(16, 65),
                "dropout_l0": rubberband.uniform(0.1, 0.4),
                "n_units_l1": rubberband.randint(16, 65),
                "dropout_l1": rubberband.uniform(0.1, 0.4),
                "optimizer": rubberband.choice(["Adam", "RMSprop", "SGD"]),
                "lr": rubberband.loguniform(1e-4, 1e-1),
            },
            "scheduler": {"type": "sha", "num_samples": 4, "max_t": EPOCHS, "reduction_factor": 2},
            "metric": "loss",
            "mode": "min",
        },
        constraints={"deadline": "10m"},
        resources={"provider": "local", "gpus_per_instance": 2, "price_per_hour": 6.12, "max_instances": 1},
    )
    print("best loss:", result.best.metrics["loss"])
    print("best config:", result.best_config)
