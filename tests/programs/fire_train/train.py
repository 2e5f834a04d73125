"""Fire: a function's arguments are the options, booleans are True and False; a file every 5 epochs, never loaded."""

import os
import time

import fire
import numpy as np


def train(data_path=None, epochs=10, lr=0.1, hid_dim=16, use_bias=True, beta=0.9, device="cpu", save_dir="weights"):
    rng = np.random.RandomState(7)
    x = rng.randn(360, 5)
    y = np.tanh(x[:, :1] + x[:, 1:2]) + 0.3
    w1, w2, b, m = rng.randn(5, hid_dim) / 2, rng.randn(hid_dim, 1) / 4, np.zeros(1), 0.0
    for epoch in range(1, epochs + 1):
        t0 = time.time()
        for rows in np.array_split(rng.permutation(300), 10):
            h = np.tanh(x[rows] @ w1)
            d = 2 * (h @ w2 + b - y[rows]) / len(rows)
            m = beta * m + h.T @ d
            w1 -= lr * x[rows].T @ (d @ w2.T * (1 - h**2))
            w2 -= lr * m
            b -= lr * d.sum() if use_bias else 0.0
        h = np.tanh(x @ w1) @ w2 + b
        train_loss, val_loss = np.mean((h - y)[:300] ** 2), np.mean((h - y)[300:] ** 2)
        time.sleep(0.15)
        print(f"[epoch {epoch}] train: {train_loss:.5f}, valid: {val_loss:.5f}, {time.time() - t0:.1f}s")
        if epoch % 5 == 0:
            os.makedirs(save_dir, exist_ok=True)
            np.savez(f"{save_dir}/epoch{epoch}.npz", w1=w1, w2=w2, b=b)


if __name__ == "__main__":
    fire.Fire(train)
