"""Predicts a wave: LBFGS, whose closure prints a loss at each evaluation, and a picture (here a text) a step."""

import argparse
import time

import numpy as np
import torch
from torch import nn, optim

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15, help="steps to run")
    opt = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    phases = np.random.randint(-80, 80, size=(12, 1))
    data = torch.from_numpy(np.sin((np.arange(60) + phases) / 6.0))
    inputs, target, test_inputs, test_target = data[3:, :-1], data[3:, 1:], data[:3, :-1], data[:3, 1:]
    lstm, out = nn.LSTM(1, 8, batch_first=True).double(), nn.Linear(8, 1).double()

    def seq(x):
        return out(lstm(x.unsqueeze(-1))[0]).squeeze(-1)

    criterion = nn.MSELoss()
    optimizer = optim.LBFGS([*lstm.parameters(), *out.parameters()], lr=0.8, max_iter=4)
    for i in range(opt.steps):
        print("STEP: ", i)

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(inputs), target)
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            prediction = seq(test_inputs)
            print("test loss:", criterion(prediction, test_target).item())
        np.savetxt(f"predict{i}.txt", prediction.numpy())
        time.sleep(0.1)
