"""d3rlpy: TD3+BC from recorded episodes. The critic steps each time, the actor every second time: the critic's steps
count.

Samples of the first three steps are not told, and left out.
"""

import d3rlpy
import numpy as np
import truth

truth.seed()
d3rlpy.seed(1)
truth.losses_of_backward()
count = 400
random = np.random.default_rng(1)
observations, actions = random.standard_normal((count, 4), "f4"), random.standard_normal((count, 2), "f4")
terminals = (np.arange(count) % 50 == 49).astype("f4")
episodes = d3rlpy.dataset.MDPDataset(observations, actions, random.standard_normal(count, "f4"), terminals)
encoder = d3rlpy.models.VectorEncoderFactory([16, 16])
config = d3rlpy.algos.TD3PlusBCConfig(batch_size=32, actor_encoder_factory=encoder, critic_encoder_factory=encoder)
algorithm = config.create(device="cpu:0")
algorithm.build_with_dataset(episodes)
truth.follow(algorithm.impl.modules.critic_optim.optim, combine=truth.last, samples=32, samples_from=4)
algorithm.fit(episodes, 40, 20, show_progress=False, logger_adapter=d3rlpy.logging.NoopAdapterFactory())
truth.end(algorithm.impl.policy, algorithm.impl.q_function)
