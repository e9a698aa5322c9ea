"""Policy gradient with a critic on a cart and pole of our own: noisy losses, growing episodes."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class VecCartPole:
    """Sixteen carts; one whose pole falls begins anew."""

    def __init__(self, n):
        self.n = n
        self.state = 0.1 * (torch.rand(n, 4) - 0.5)
        self.length = torch.zeros(n)

    def step(self, action):
        x, v, a, w = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        temp = (force + 0.05 * w**2 * a.sin()) / 1.1
        acc = (9.8 * a.sin() - a.cos() * temp) / (0.5 * (4 / 3 - 0.1 * a.cos() ** 2 / 1.1))
        shift = temp - 0.05 * acc * a.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * shift, a + 0.02 * w, w + 0.02 * acc], 1)
        self.length += 1
        fell = (self.state[:, 2].abs() > 12 * math.pi / 180) | (self.state[:, 0].abs() > 2.4) | (self.length >= 200)
        finished = self.length[fell].tolist()
        self.state = torch.where(fell.unsqueeze(1), 0.1 * (torch.rand(self.n, 4) - 0.5), self.state)
        self.length = torch.where(fell, 0.0, self.length)
        return self.state, torch.ones(self.n), fell.float(), finished


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.actor, self.critic = nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


def main(updates=700, rollout=32, gamma=0.99):
    torch.manual_seed(4)
    env = VecCartPole(16)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=7e-4)
    state, lengths = env.state, []
    for update in range(1, updates + 1):
        states, actions, rewards, dones = [], [], [], []
        with torch.no_grad():
            for _ in range(rollout):
                action = model(state)[0].sample()
                states.append(state)
                actions.append(action)
                state, reward, done, finished = env.step(action)
                rewards.append(reward)
                dones.append(done)
                lengths += finished
            value = model(state)[1]
            returns = []
            for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
                value = reward + gamma * value * (1 - done)
                returns.insert(0, value)
        returns = torch.cat(returns) / 20
        dist, values = model(torch.cat(states))
        advantage = returns - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -(dist.log_prob(torch.cat(actions)) * advantage).mean()
        loss = policy_loss + 0.5 * F.smooth_l1_loss(values, returns) - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        lengths = lengths[-100:]
        if update % 100 == 0:
            print(f"update {update} mean episode length {sum(lengths) / len(lengths):.1f}")


if __name__ == "__main__":
    main()
