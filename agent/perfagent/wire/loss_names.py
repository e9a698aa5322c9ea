"""Decides by name which series are losses that the optimizer follows: `train/loss`, `loss/total`, `g_loss`, not
`val/loss`.

Scripts name their losses as they like. A NaN in what is trained on damages the weights; a NaN in an evaluation that had
nothing to average, or in a lowest loss that does not exist yet, is no fault. So a name counts only when nothing in it
says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Literal

from perfagent.wire.metrics import CATALOGUE, FAMILIES

__all__ = ["LOGGED", "LOSS", "is_evaluation_loss", "loss_kind", "loss_of"]

LOSS = "loss"
"""The run's own loss: what the agent measured, or the user logged under the catalogue's name."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOGGED = "logged/"
"""Before the name of a series that another logger of the script logs and the agent delivers as well."""


# A name whose other words are all of these is the loss as a whole.
_WHOLE = _words(
    """train training trainer pretrain pretraining finetune finetuning sft total overall all full whole final combined
    joint sum summed mean average averaged avg running smooth smoothed ema raw current global local reduced agg
    aggregated step steps iter iters iteration batch minibatch micro microbatch window epoch interval per rank model lm
    main objective opt optimizer log logs metric metrics scalar scalars stats perf"""
)
# Measured beside the training: NaN where an evaluation had nothing to average, and no weight follows it.
_EVALUATED = _words(
    """val valid validation validate eval evals evaluation evaluate evaluated test tests testing dev devel holdout
    heldout held ood oov probe benchmark bench"""
)
# About a loss, and not a loss: a lowest value that starts at infinity, a spread of one value, a scale.
_ABOUT = _words(
    """best min minimum lowest max maximum highest worst target threshold limit patience plateau spike spikes scale
    scaler scaling scaled weight weights weighting coef coeff coefficient count counts num number std stdev var variance
    sem ratio share fraction frac pct percent delta change diff difference gap improvement slope trend lr grad grads
    norm nonfinite nan inf isnan isfinite finite skipped time seconds ms zscore corr correlation packet"""
)
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+"


@lru_cache(maxsize=16_384)
def loss_kind(name: str) -> Literal["whole", "part", ""]:
    """Class of a series by its name: the whole loss, a part of one (`loss/kl`, `d_loss`), or no training loss ("")."""
    if name == LOSS:
        return "whole"
    if name.startswith(LOGGED):  # it is in the run already, as the agent has it
        return ""
    if "loss" not in name.lower() or name in CATALOGUE or name.partition("/")[0] + "/" in FAMILIES:
        return ""
    words = _words_of(name)
    if not words & {"loss", "losses"} or words & (_EVALUATED | _ABOUT):
        return ""
    return "whole" if words - {"loss", "losses"} <= _WHOLE else "part"


@lru_cache(maxsize=16_384)
def is_evaluation_loss(name: str) -> bool:
    """Whether a series is the loss of an evaluation by its name: `val/loss`, `eval_loss`, `test/epoch_loss`."""
    if "loss" not in name.lower() or name.startswith(LOGGED):
        return False
    words = _words_of(name)
    evaluated = words & _EVALUATED
    return bool(words & {"loss", "losses"} and evaluated) and words - {"loss", "losses"} - evaluated <= _WHOLE


def loss_of(names: Collection[str]) -> str | None:
    """The name of the loss that is trained on, among the names of a run's series."""
    return LOSS if LOSS in names else min((name for name in names if loss_kind(name) == "whole"), default=None)


def _words_of(name: str) -> set[str]:
    return {part for word in re.findall(_WORD, name) for part in _unglued(word.lower())}


def _unglued(word: str) -> tuple[str, ...]:
    """`trainloss` is two words."""
    return (word[:-4], "loss") if word.endswith("loss") and word != "loss" else (word,)
