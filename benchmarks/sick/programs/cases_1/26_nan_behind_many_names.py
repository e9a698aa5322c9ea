# 5,000 names of the user, and a loss that is NaN from step 51 on: the run must keep its own series, and the NaN must be told.
import time, torch, torch.nn as nn, perfagent, os
N = int(os.environ.get("N", "5000"))
torch.manual_seed(0); net = nn.Linear(32, 1); opt = torch.optim.SGD(net.parameters(), 0.01)
run = perfagent.attach(net, opt, project="cases", name="26_nan_behind_many_names")
spent = 0.0
for step in range(1, 101):
    x = torch.randn(64, 32); loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean(); opt.zero_grad(); loss.backward(); opt.step()
    if step == 50: net.weight.data.fill_(float("nan"))
    t = time.perf_counter(); run.log({f"task/{k}/corr": step * 0.01 + k for k in range(N)}); spent += time.perf_counter() - t
    time.sleep(0.05)
print(f"log of {N} names: {10 * spent:.2f} ms a step; {run.url}")
