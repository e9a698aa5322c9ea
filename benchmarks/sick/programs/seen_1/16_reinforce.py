"""REINFORCE with a linear baseline on a small balancing task, one update per episode batch."""

import math

import torch
from torch import nn
from torch.distributions import Categorical

torch.set_num_threads(1)


class Balance:
    """Many carts with a pole at once; an episode ends where the pole falls or after 60 steps."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.state = 0.05 * torch.randn(self.n, 4)
        self.alive = torch.ones(self.n, dtype=torch.bool)
        return self.state

    def step(self, action):
        x, v, a, w = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        acc = (9.8 * a.sin() - a.cos() * (force / 1.1 + 0.045 * w**2 * a.sin())) / (0.5 * (1.333 - a.cos() ** 2 / 11))
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * force / 1.1, a + 0.02 * w, w + 0.02 * acc], 1)
        self.alive = self.alive & (self.state[:, 2].abs() < 12 / 180 * math.pi) & (self.state[:, 0].abs() < 2.4)
        return self.state, self.alive.float()


class Agent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.seen_states, self.seen_returns = [], []

    def baseline(self, states):
        if not self.seen_states:
            return torch.zeros(len(states))
        inputs = torch.tensor([[1.0, *s, *(c * c for c in s)] for s in self.seen_states])
        targets = torch.tensor(self.seen_returns)
        w = torch.linalg.lstsq(inputs, targets.unsqueeze(1)).solution.squeeze(1)
        return torch.cat([torch.ones(len(states), 1), states, states**2], 1) @ w

    def update(self, states, actions, returns):
        advantage = returns - self.baseline(states)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        dist = Categorical(logits=self.policy(states))
        loss = -(dist.log_prob(actions) * advantage).mean() - 0.01 * dist.entropy().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for s, r in zip(states.tolist(), returns.tolist(), strict=True):
            self.seen_states.append(s)
            self.seen_returns.append(r)
        return loss.item()


def play(env, policy, gamma=0.97):
    states, actions, rewards = [], [], []
    state = env.reset()
    alive = env.alive.float()
    masks = []
    for _ in range(60):
        with torch.no_grad():
            action = Categorical(logits=policy(state)).sample()
        states.append(state)
        actions.append(action)
        masks.append(alive)
        state, alive = env.step(action)
        rewards.append(alive)
    returns, g = [], torch.zeros(env.n)
    for r in reversed(rewards):
        g = r + gamma * g
        returns.insert(0, g)
    keep = torch.stack(masks).bool()
    return torch.stack(states)[keep], torch.stack(actions)[keep], torch.stack(returns)[keep], sum(rewards).mean().item()


if __name__ == "__main__":
    torch.manual_seed(1)
    env, agent = Balance(6), Agent()
    for episode in range(1, 161):
        *batch, length = play(env, agent.policy)
        loss = agent.update(*batch)
        if episode % 20 == 0:
            print(f"update {episode} mean length {length:.1f} loss {loss:.3f} remembered {len(agent.seen_states)}")
