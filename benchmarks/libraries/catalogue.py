"""The libraries of the suite: what is trained with each, and what must be installed for it. This module is data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIBRARIES", "Library"]


@dataclass(frozen=True, kw_only=True)
class Library:
    """One script, trainings/with_NAME.py.

    requirements: what pip is asked for; the first is the library itself, whose version is told. family: libraries that
    share a virtual environment.
    """

    name: str
    trained: str
    requirements: tuple[str, ...]
    family: str

    @property
    def package(self) -> str:
        return self.requirements[0]


def _library(family: str, name: str, trained: str, *requirements: str) -> Library:
    return Library(name=name, trained=trained, requirements=requirements, family=family)


TRAINERS, VISION, DOMAINS, LANGUAGE = "trainers", "vision", "domains", "language"
# fastai stays apart: it brings torchvision, which others import where they find it, and whose usual build does not load
# beside a torch for the CPU. For that reason timm, and SpeechBrain with torchaudio, are not here. torchtnt needs
# pkg_resources, and d3rlpy the one gymnasium that torchrl refuses.

LIBRARIES = (
    _library(TRAINERS, "ignite", "trainer, evaluator, warm-up, checkpoints", "pytorch-ignite"),
    _library(VISION, "fastai", "one cycle, its own optimizer, SaveModelCallback", "fastai"),
    _library(TRAINERS, "skorch", "fit and partial_fit, schedule, checkpoints", "skorch"),
    _library(TRAINERS, "poutyne", "fit_generator, several batches to a step, fit_dataset", "poutyne"),
    _library(
        "torchtnt", "torchtnt", "AutoUnit, accumulation, evaluation by epoch and by step", "torchtnt", "setuptools<81"
    ),
    _library(TRAINERS, "monai", "SupervisedTrainer, ValidationHandler, batches that are dictionaries", "monai"),
    _library(TRAINERS, "mmengine", "Runner, accumulation, schedule by epoch", "mmengine"),
    _library(TRAINERS, "schedulefree", "AdamW without a schedule, evaluation between", "schedulefree"),
    _library(TRAINERS, "pytorch_optimizer", "Lookahead, SOAP, Lion, one after the other", "pytorch_optimizer"),
    _library(DOMAINS, "stable_baselines3", "PPO, EvalCallback", "stable_baselines3"),
    _library(DOMAINS, "torchrl", "PPO's loss, collector, replay buffer", "torchrl", "gymnasium"),
    _library("d3rlpy", "d3rlpy", "TD3+BC from recorded episodes", "d3rlpy"),
    _library(DOMAINS, "pyro", "variational inference, ClippedAdam", "pyro-ppl"),
    _library(DOMAINS, "gpytorch", "exact Gaussian process", "gpytorch"),
    _library(DOMAINS, "torch_geometric", "graphs in its own loader", "torch_geometric"),
    _library(DOMAINS, "torchdiffeq", "neural differential equation, solver and adjoints", "torchdiffeq"),
    _library(DOMAINS, "pytorch_forecasting", "temporal fusion transformer under Lightning", "pytorch-forecasting"),
    _library(DOMAINS, "optuna", "a study of six trials, some pruned", "optuna"),
    _library(
        LANGUAGE, "sentence_transformers", "pairs of sentences, in-batch negatives", "sentence-transformers", "datasets"
    ),
    _library(LANGUAGE, "trl_sft", "SFTTrainer, packing, accumulation", "trl", "datasets"),
    _library(LANGUAGE, "trl_dpo", "DPOTrainer, a reference model", "trl", "datasets"),
    _library(LANGUAGE, "trl_grpo", "GRPOTrainer, two updates of each generation", "trl", "datasets"),
    _library(LANGUAGE, "peft", "LoRA under the Transformers Trainer", "peft"),
)
