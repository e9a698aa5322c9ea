"""tianshou: DQN from a replay buffer, off-policy trainer with test episodes.

Samples are told of half of the steps, and left out.
"""

import gymnasium
import truth
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from torch.optim.optimizer import register_optimizer_step_post_hook

truth.seed()
truth.losses_of_backward()
register_optimizer_step_post_hook(lambda optimizer, *_: truth.step(optimizer.param_groups[0]["lr"]))
training, testing = (DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2) for _ in range(2))
training.seed(1)
testing.seed(2)
net = Net(state_shape=4, action_shape=2, hidden_sizes=[16, 16])
space = gymnasium.make("CartPole-v1").action_space
policy = DiscreteQLearningPolicy(model=net, action_space=space, eps_training=0.1, eps_inference=0.05)
algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), gamma=0.9, target_update_freq=20)
parameters = OffPolicyTrainerParams(
    training_collector=Collector(algorithm, training, VectorReplayBuffer(500, 2), exploration_noise=True),
    test_collector=Collector(algorithm, testing),
    max_epochs=2,
    epoch_num_steps=60,
    collection_step_num_env_steps=10,
    test_step_num_episodes=2,
    batch_size=32,
    update_step_num_gradient_steps_per_sample=0.2,
    show_progress=False,
    verbose=False,
)
algorithm.run_training(parameters)
truth.end(net)
