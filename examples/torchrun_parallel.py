"""Train a small net on several ranks; kill any of them, and torchrun brings the training back.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
    examples/torchrun_parallel.py ddp runs/ddp 2000

Instead of ddp: fsdp2, zero, or tensor_parallel.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everstep

spread, path, steps = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
if spread == "fsdp2":
    model = fully_shard(model)
elif spread == "tensor_parallel":
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
else:
    model = nn.parallel.DistributedDataParallel(model)
if spread == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if spread != "tensor_parallel":  # its ranks share each batch
    torch.manual_seed(rank)

state = {"model": model, "optimizer": optimizer}
ckpt = everstep.Checkpointer(path, state, method="logged", on_failure="warn")
found = ckpt.resume()
print(f"rank {rank}, pid {os.getpid()}: begins at step {found.step} ({found.source})", flush=True)
for _ in ckpt.steps(int(steps)):
    x = torch.randn(32, 64, device=device)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
digest = hashlib.sha256(b"".join(weight.cpu().numpy().tobytes() for weight in weights.values()))
print(f"rank {rank}: weights {digest.hexdigest()[:16]}", flush=True)
dist.destroy_process_group()
