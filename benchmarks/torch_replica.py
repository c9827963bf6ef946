"""One rank of PyTorch's DistributedDataParallel over Gloo: steps on the works of torch_steps.py.

    MASTER_ADDR=.. MASTER_PORT=.. RANK=r WORLD_SIZE=n python torch_replica.py WORK STEPS

The first rank prints a line of JSON for every step: the mean of all ranks' losses, and the seconds it took.
"""

import json
import sys
import time

import torch
from sizes import batch_of_replica
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_steps import optimizer_of, step_of, torch_model


def main() -> None:
    """Train, and tell each step."""
    work, steps = sys.argv[1], int(sys.argv[2])
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = torch_model(work)
    step = step_of(DistributedDataParallel(model), optimizer_of(work, model))
    for number in range(steps):
        batch = batch_of_replica(work, number, rank)
        begun_s = time.perf_counter()
        loss = torch.tensor(step(batch))
        took_s = time.perf_counter() - begun_s
        distributed.all_reduce(loss)
        if rank == 0:
            print(json.dumps({"loss": float(loss) / size, "s": took_s}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
