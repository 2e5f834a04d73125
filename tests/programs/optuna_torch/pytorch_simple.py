"""A whole study: constants at the top, layers that depend on a suggestion, reports each epoch, pruning."""

import time

import optuna
import torch
from optuna.trial import TrialState
from torch import nn, optim

DEVICE = torch.device("cpu")
BATCHSIZE = 64
EPOCHS = 8


def define_model(trial):
    n_layers = trial.suggest_int("n_layers", 1, 3)
    layers, in_features = [], 10
    for i in range(n_layers):
        out_features = trial.suggest_int(f"n_units_l{i}", 4, 32)
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
        layers.append(nn.Dropout(trial.suggest_float(f"dropout_l{i}", 0.0, 0.3)))
        in_features = out_features
    return nn.Sequential(*layers, nn.Linear(in_features, 3), nn.LogSoftmax(dim=1))


def get_points():
    x = torch.randn(896, 10, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return (x[:640], y[:640]), (x[640:], y[640:])


def objective(trial):
    torch.manual_seed(0)
    model = define_model(trial).to(DEVICE)
    optimizer_name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = getattr(optim, optimizer_name)(model.parameters(), lr=lr)
    (train_x, train_y), (valid_x, valid_y) = get_points()
    for epoch in range(EPOCHS):
        model.train()
        for data, target in zip(train_x.split(BATCHSIZE), train_y.split(BATCHSIZE), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(valid_x).argmax(1) == valid_y).float().mean().item()
        time.sleep(0.1)
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned()
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=20, timeout=600)
    pruned_trials = study.get_trials(deepcopy=False, states=[TrialState.PRUNED])
    print("Study statistics: ")
    print("  Number of finished trials: ", len(study.trials))
    print("  Number of pruned trials: ", len(pruned_trials))
    print("Best trial:")
    print("  Value: ", study.best_trial.value)
    for key, value in study.best_trial.params.items():
        print(f"    {key}: {value}")
