"""Tune a small network on handwritten digits with Optuna: python study.py."""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rubberband

EPOCHS = 7


def define_model(trial):
    n_layers = trial.suggest_int("n_layers", 1, 2)
    layers, in_features = [], 64
    for i in range(n_layers):
        out_features = trial.suggest_int(f"n_units_l{i}", 16, 64)
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
        layers.append(nn.Dropout(trial.suggest_float(f"dropout_l{i}", 0.1, 0.4)))
        in_features = out_features
    return nn.Sequential(*layers, nn.Linear(in_features, 10))


def get_digits():
    digits = load_digits()
    data, target = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(data[:1437], target[:1437]), batch_size=64, shuffle=True)
    return train_loader, data[1437:], target[1437:]


def objective(trial):
    torch.manual_seed(0)
    model = define_model(trial)
    optimizer_name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=lr)
    train_loader, valid_data, valid_target = get_digits()

    start, model, optimizer, random = rubberband.get_checkpoint() or (0, model, optimizer, torch.get_rng_state())
    torch.set_rng_state(random)
    for epoch in range(start, EPOCHS):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(valid_data), valid_target).item()

        rubberband.report({"loss": loss}, checkpoint=(epoch + 1, model, optimizer, torch.get_rng_state()))
        if trial.should_prune():
            raise optuna.TrialPruned()

    return loss


if __name__ == "__main__":
    study = optuna.create_study(direction="minimize", pruner=optuna.pruners.SuccessiveHalvingPruner())
    study.optimize(objective, n_trials=4)
    print("best value:", study.best_value)
    print("best params:", study.best_params)
