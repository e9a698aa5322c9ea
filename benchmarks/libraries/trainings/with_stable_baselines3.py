"""Stable-Baselines3: PPO, with evaluations by EvalCallback.

Samples of the first three steps are not told, and left out.
"""

import gymnasium
import truth
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor


class Evaluation(EvalCallback):
    def _on_step(self):
        if self.n_calls % self.eval_freq == 0:
            truth.evaluated()
        return super()._on_step()


truth.seed()
truth.losses_of_backward()
agent = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, n_epochs=3, seed=1, device="cpu", verbose=0)
truth.follow(agent.policy.optimizer, samples=16, samples_from=4)
environment = Monitor(gymnasium.make("CartPole-v1"))
environment.reset(seed=2)
agent.learn(256, callback=Evaluation(environment, n_eval_episodes=2, eval_freq=100, verbose=0))
truth.end(agent.policy)
