"""What is recognised by name is there under that name in the versions that are installed."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from agent.hooks.loops import nap, sgd, step
from torch.utils.data import DataLoader

from perfagent.integrations.functions import FUNCTIONS
from perfagent.integrations.loggers.libraries import LOGGERS

NAMES = [
    (module, name) for _, functions in (*FUNCTIONS, *LOGGERS) for module, names in functions.items() for name in names
]
X = torch.ones(2, 4)


@pytest.mark.real  # DeepSpeed binds a socket
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_functions_that_are_recognised_exist(module, name):
    owner = importlib.import_module(module) if module.split(".")[0] == "torch" else pytest.importorskip(module)
    *classes, attribute = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    assert hasattr(owner, attribute)


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(module, class): a library that has this class in this module, whether or not there is such a package."""

    def make(name, owner):
        module = types.ModuleType(name)
        setattr(module, owner.__name__, owner)
        monkeypatch.setitem(sys.modules, name, module)

    return make


def test_losses_that_a_library_divides_are_divided(every_step, stand_in):
    class Model:
        def _adjust_step_size(self, examples):
            model.weight.grad.div_(examples)

    stand_in("poutyne.framework.model", Model)
    model, losses = torch.nn.Linear(4, 1, bias=False), []
    recorded, optimizer = every_step(model), sgd(model)
    for number in range(1, 5):
        loss = model(X).square().sum()
        loss.backward()
        if number % 2:
            Model()._adjust_step_size(2)
        losses.append(loss.item() / (2 if number % 2 else 1))
        optimizer.step()
        optimizer.zero_grad()
    assert recorded.series("loss") == pytest.approx(dict(enumerate(losses, 1)))


class OrderEnforcing:
    """An environment of gym's."""

    def step(self, action):
        return action.cos().expand(1, 4)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_acts_in_an_environment_is_not_evaluated(record, stand_in, training):
    """Proximal policy optimization in one file, and as Stable-Baselines3 has it: its policy acts in evaluation mode."""
    stand_in("gym.wrappers.order_enforcing", OrderEnforcing)
    policy, environment = torch.nn.Linear(4, 1), OrderEnforcing()
    recorded, optimizer = record(policy), sgd(policy)
    for number in range(1, 13):
        if number % 4 == 0:
            policy.train(training)
            seen = torch.ones(1, 4)
            with torch.no_grad():
                for _ in range(20):
                    seen = environment.step(policy(seen))
                policy(seen)
            policy.train()
        if number == 6:
            policy.eval()
            with torch.no_grad():
                [policy(batch) for batch in DataLoader(torch.ones(8, 4), batch_size=2)]
            policy.train()
        step(optimizer, policy(X).square())
    assert recorded.numbers("phase/rollout_s") == [4, 8, 12]
    assert recorded.numbers("phase/eval_s") == [6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
def test_what_a_model_in_training_writes_is_a_rollout(clock, record, training):
    """Rollouts, of which each feeds some steps: GRPO."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    model.register_forward_pre_hook(lambda *_: nap(0.01))
    recorded, optimizer = record(model), sgd(model)
    for number in range(1, 11):
        if number % 4 == 1:
            model.train(training)
            prompt = torch.ones(2, 4, dtype=torch.long)
            tokens = model.generate(prompt, min_new_tokens=12, max_new_tokens=12, pad_token_id=0)
            model.train()
            with torch.no_grad():
                model(tokens)  # how probable it was, as the policy stands
        step(optimizer, model(input_ids=tokens, labels=tokens).loss)
    evaluations, rollouts = recorded.series("phase/eval_s"), recorded.series("phase/rollout_s")
    if not training:
        assert [*evaluations][-2:] == [5, 9]
        return
    assert [*evaluations] == [], "how probable a rollout was is asked with it"
    assert [*rollouts] == [1, 5, 9]
    assert all(0.12 <= seconds < 0.135 for seconds in rollouts.values()), "twelve calls, and perhaps the last one"
