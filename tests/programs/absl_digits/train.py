"""absl: flags at the top, app.run, two lines an epoch of its logger on stderr."""

import time

import numpy as np
from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_float("learning_rate", default=0.1, help="The learning rate for the momentum optimizer.")
flags.DEFINE_float("momentum", default=0.9, help="The decay rate used for the momentum optimizer.")
flags.DEFINE_integer("batch_size", default=64, help="Batch size for training.")
flags.DEFINE_integer("num_epochs", default=10, help="Number of training epochs.")


def scores(x, y, w):
    logits = x @ w
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(y))
    return -np.log(p[rows, y] + 1e-9).mean(), (p.argmax(1) == y).mean(), p


def main(_):
    rng = np.random.RandomState(0)
    x = rng.randn(800, 12)
    y = x[:, :4].argmax(1)
    w, v = np.zeros((12, 4)), np.zeros((12, 4))
    for epoch in range(1, FLAGS.num_epochs + 1):
        perms = rng.permutation(640)
        metrics = []
        for rows in perms[: 640 // FLAGS.batch_size * FLAGS.batch_size].reshape(-1, FLAGS.batch_size):
            loss, accuracy, p = scores(x[rows], y[rows], w)
            p[np.arange(len(rows)), y[rows]] -= 1
            v = FLAGS.momentum * v - FLAGS.learning_rate * x[rows].T @ p / len(rows)
            w = w + v
            metrics.append((loss, accuracy))
        loss, accuracy = np.mean(metrics, axis=0)
        logging.info("train epoch: %d, loss: %.4f, accuracy: %.2f", epoch, loss, accuracy * 100)
        time.sleep(0.15)
        loss, accuracy, _ = scores(x[640:], y[640:], w)
        logging.info("eval epoch: %d, loss: %.4f, accuracy: %.2f", epoch, loss, accuracy * 100)


if __name__ == "__main__":
    app.run(main)
