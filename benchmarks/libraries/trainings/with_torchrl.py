"""TorchRL: PPO's clipped loss over a collector and a replay buffer without replacement."""

import torch
import truth
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

truth.seed()
environment = GymEnv("CartPole-v1")
environment.set_seed(1)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
value = ValueOperator(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])
module = TensorDictModule(policy, ["observation"], ["logits"])
actor = ProbabilisticActor(module, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
objective, advantage = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
optimizer = truth.follow(torch.optim.Adam(objective.parameters(), 3e-4), samples=16)
memory = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16)
for frames in Collector(environment, actor, frames_per_batch=64, total_frames=320):
    for _ in range(2):
        with torch.no_grad():
            advantage(frames)
        memory.extend(frames.reshape(-1))
        for _ in range(4):
            losses = objective(memory.sample())
            loss = truth.loss(losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
            optimizer.step()
truth.end(policy, value)
