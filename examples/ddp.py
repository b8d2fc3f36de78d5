"""Plain DDP, without the engine: it needs nothing of this project. `launch --num-gpus 2 examples/ddp.py`."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")  # by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 1, device=device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    inputs = torch.randn(32, 8, device=device)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, loss {loss.item():.6f}")
dist.destroy_process_group()
