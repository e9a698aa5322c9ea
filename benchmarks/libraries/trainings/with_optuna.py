"""Optuna: a study of six trials, a new model and another optimizer in each, some pruned; all of them one run."""

import optuna
import torch
import truth

truth.seed()
optuna.logging.set_verbosity(optuna.logging.WARNING)
training, evaluation = truth.loaders()
criterion = truth.Loss()


def objective(trial):
    model = truth.Net(hidden=trial.suggest_int("hidden", 4, 32))
    kind = getattr(torch.optim, trial.suggest_categorical("optimizer", ["Adam", "SGD", "RMSprop"]))
    optimizer = truth.follow(kind(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)))
    for epoch in range(3):
        model.train()
        for x, y in training:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            value = sum(criterion(model(x), y).item() for x, y in evaluation)
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=pruner)
study.optimize(objective, n_trials=6)
truth.end()
