"""A project of hydra: groups of settings, instantiated classes, lines of a logger; it returns the metric it tunes."""

import logging
import time

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf

log = logging.getLogger(__name__)


def instantiate_optimizer(cfg, size):
    velocity = np.zeros(size)

    def step(weights, gradient):
        nonlocal velocity
        velocity = cfg.get("momentum", 0.0) * velocity + gradient
        return weights - cfg.lr * (velocity + cfg.weight_decay * weights)

    return step


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> float:
    log.info("Config:\n%s", OmegaConf.to_yaml(cfg))
    rng = np.random.default_rng(cfg.seed)
    x = np.random.default_rng(0).normal(size=(400, 8))
    y = np.sin(x[:, 0]) + x[:, 1]
    features = rng.normal(size=(8, cfg.model.hidden_size)) * cfg.model.scale
    hidden = np.tanh(x @ features)
    weights, step = np.zeros(cfg.model.hidden_size), instantiate_optimizer(cfg.optimizer, cfg.model.hidden_size)
    if cfg.get("train"):
        log.info("Starting training!")
        for epoch in range(cfg.trainer.max_epochs):
            order = rng.permutation(320)
            for rows in np.array_split(order, 320 // cfg.data.batch_size):
                weights = step(weights, hidden[rows].T @ (hidden[rows] @ weights - y[rows]) / len(rows))
            val_loss = float(np.mean((hidden[320:] @ weights - y[320:]) ** 2))
            time.sleep(0.15)
            log.info("Epoch %d - val/loss: %.5f", epoch, val_loss)
    np.save(f"{hydra.core.hydra_config.HydraConfig.get().runtime.output_dir}/weights.npy", weights)
    return val_loss


if __name__ == "__main__":
    main()
