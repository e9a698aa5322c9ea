"""GPyTorch: the marginal likelihood of an exact Gaussian process, by Adam.

Its modules call no hooks of torch's: predictions are not told as evaluations, and left out.
"""

import gpytorch
import torch
import truth


class Process(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


truth.seed()
x = torch.linspace(0, 1, 50)
y = torch.sin(6 * x) + 0.1 * torch.randn(50)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(x, y, likelihood)
likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = truth.follow(torch.optim.Adam(model.parameters(), lr=0.1))
for _ in range(2):
    model.train()
    for _ in range(10):
        optimizer.zero_grad()
        truth.loss(-likelihood_of(model(x), y)).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        likelihood(model(torch.linspace(0, 1, 30)))
truth.end(model)
