"""A loop with constants at the top: no options at all."""

import time

import numpy as np

LEARNING_RATE = 0.1
EPOCHS = 10
HIDDEN = 12

np.random.seed(0)
x = np.random.randn(300, 4)
y = (x[:, 0] > x[:, 1]).astype(float)
w1, w2 = np.random.randn(4, HIDDEN) * 0.5, np.random.randn(HIDDEN) * 0.5

for epoch in range(EPOCHS):
    h = np.maximum(x @ w1, 0)
    p = 1 / (1 + np.exp(-h @ w2))
    d = (p - y) / len(x)
    w1 -= LEARNING_RATE * x.T @ (np.outer(d, w2) * (h > 0))
    w2 -= LEARNING_RATE * h.T @ d
    loss = -np.mean(np.log(np.where(y > 0, p, 1 - p)))
    time.sleep(0.15)
    print("Epoch", epoch, "Loss", round(loss, 6))
