"""A script of SageMaker: hyperparameters are options, places are SM_ variables, one model at the end."""

import argparse
import json
import logging
import os
import sys
import time

import numpy as np

logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)
logger.addHandler(logging.StreamHandler(sys.stdout))


def train(args):
    logger.info("Get train data from %s", args.data_dir)
    table = np.loadtxt(os.path.join(args.data_dir, "points.csv"), delimiter=",")
    rng = np.random.default_rng(args.seed)
    x, y = table[:, :-1], table[:, -1]
    w, velocity = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for epoch in range(1, args.epochs + 1):
        for step, rows in enumerate(np.array_split(rng.permutation(160), max(1, 160 // args.batch_size))):
            p = 1 / (1 + np.exp(-x[rows] @ w))
            velocity = args.momentum * velocity - args.lr * x[rows].T @ (p - y[rows]) / len(rows)
            w = w + velocity
            if step % args.log_interval == 0:
                loss = -np.mean(np.log(np.where(y[rows] > 0, p, 1 - p) + 1e-9))
                done = step * args.batch_size
                logger.info("Train Epoch: %d [%d/160 (%.0f%%)] Loss: %.6f", epoch, done, done / 1.6, loss)
        p = 1 / (1 + np.exp(-x[160:] @ w))
        test_loss, correct = -np.mean(np.log(np.where(y[160:] > 0, p, 1 - p) + 1e-9)), int(((p > 0.5) == y[160:]).sum())
        time.sleep(0.15)
        logger.info(
            "Test set: Average loss: %.4f, Accuracy: %d/%d (%.0f%%)\n",
            test_loss,
            correct,
            len(p),
            100 * correct / len(p),
        )
    logger.info("Saving the model.")
    np.save(os.path.join(args.model_dir, "model.npy"), w)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="input batch size (default: 64)")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="number of epochs (default: 10)")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate (default: 0.01)")
    parser.add_argument("--momentum", type=float, default=0.5, metavar="M", help="SGD momentum (default: 0.5)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    parser.add_argument("--log-interval", type=int, default=100, metavar="N", help="batches between two lines")
    parser.add_argument("--backend", type=str, default=None, help="backend for distributed training")
    parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
    parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--data-dir", type=str, default=os.environ["SM_CHANNEL_TRAINING"])
    parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
    train(parser.parse_args())
