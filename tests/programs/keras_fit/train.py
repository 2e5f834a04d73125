"""Prints as model.fit() does: `Epoch 1/8`, a bar that is written again and again, four metrics at its end."""

import argparse
import sys
import time

import numpy as np


class Model:
    def __init__(self, units, learning_rate):
        rng = np.random.default_rng(0)
        self.hidden, self.w, self.lr = rng.normal(size=(10, units)), np.zeros(units), learning_rate

    def scores(self, x, y):
        z = np.tanh(x @ self.hidden) @ self.w
        return np.log1p(np.exp(-(2 * y - 1) * z)).mean(), ((z > 0) == y).mean()

    def fit(self, data, validation_data, epochs, batch_size, checkpoint):
        (x, y), best = data, np.inf
        steps = len(x) // batch_size
        for epoch in range(epochs):
            print(f"Epoch {epoch + 1}/{epochs}")
            for step in range(steps):
                rows = slice(step * batch_size, (step + 1) * batch_size)
                h = np.tanh(x[rows] @ self.hidden)
                self.w -= self.lr * h.T @ (1 / (1 + np.exp(-h @ self.w)) - y[rows]) / batch_size
                loss, accuracy = self.scores(x, y)
                bar = "=" * (step * 20 // steps)
                sys.stdout.write(
                    f"\r{step + 1}/{steps} [{bar:.<20}] - ETA: 0s - loss: {loss:.4f} - accuracy: {accuracy:.4f}"
                )
                sys.stdout.flush()
                time.sleep(0.01)
            val_loss, val_accuracy = self.scores(*validation_data)
            sys.stdout.write(
                f"\r{steps}/{steps} [{'=' * 20}] - 0s 10ms/step - loss: {loss:.4f} - accuracy: {accuracy:.4f} - "
                f"val_loss: {val_loss:.4f} - val_accuracy: {val_accuracy:.4f}\n"
            )
            sys.stdout.flush()
            if val_loss < best:
                best = val_loss
                np.save(checkpoint, self.w)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--checkpoint_path", type=str, default="best_weights.npy")
    args = parser.parse_args()
    rng = np.random.default_rng(5)
    x = rng.normal(size=(640, 10))
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(float)
    model = Model(args.units, args.learning_rate)
    model.fit((x[:512], y[:512]), (x[512:], y[512:]), args.epochs, args.batch_size, args.checkpoint_path)
