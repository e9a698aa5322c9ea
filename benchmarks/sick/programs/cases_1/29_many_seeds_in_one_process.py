import os, torch, torch.nn as nn, torch.nn.functional as F, perfagent
mode = os.environ.get("MODE", "same")
centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(3))
for seed in range(4):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)); opt = torch.optim.AdamW(net.parameters(), 1e-3)
    if mode == "names": run = perfagent.attach(net, opt, project="cases", name=f"29-seed-{seed}", config={"seed": seed})
    elif mode == "same": run = perfagent.attach(net, opt, project="cases", name="29_many_seeds_in_one_process")
    else: run = perfagent.init(project="cases", name=f"29-finish-{seed}", config={"seed": seed})
    for step in range(1, 401):
        y = torch.randint(0, 10, (64,)); x = centers[y] + 1.2 * torch.randn(64, 32)
        loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
    run.log({"final/acc": seed / 10})
    if mode == "finish": run.finish()
print("END", perfagent.run)
