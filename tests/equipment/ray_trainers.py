"""Real trainers as Ray actors: each a gloo process of an FSDP2 x TP world of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from equipment.ray_faults import Planned, with_fault
from equipment.trainers import shard_columns_and_rows, shard_fully
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.trainer_actor import ReshardTrainer
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.endpoint import Source
from nemo_rl_reshard.sources.dtensor import DTensorSource

DP, TP = 2, 2


class TinyTrainer(ReshardTrainer):
    """One of DP x TP ranks that train the model of a checkpoint folder."""

    def __init__(self, rank: int, store: str, checkpoint: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        size = DP * TP
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        shard_columns_and_rows(self._model, mesh["tp"])
        shard_fully(self._model, mesh["dp"])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.05)

        self._fault: Planned | None = None
        self._operation = ""

    def arm(self, fault: Planned | None) -> None:
        """Strike `fault` in the next world."""
        self._fault = fault

    def reshard_source(self, rank: int) -> Source:
        fault, self._fault = self._fault, None
        return with_fault(DTensorSource.from_model(self._model, rank), fault, lambda: self._operation == "refit")

    def reshard(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        self._operation = operation
        return super().reshard(operation, arguments, shared)

    def train(self, step: int) -> float:
        """One step on tokens that depend on `step` alone; the loss before it."""
        vocabulary = self._model.config.vocab_size
        tokens = (torch.arange(24).view(2, 12) * (7 + step)) % vocabulary
        self._optimizer.zero_grad()
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def save(self, folder: str) -> None:
        """Gather every tensor whole, and have rank 0 write a checkpoint that transformers and vLLM can load."""
        from safetensors.torch import save_file

        gathered = {name: tensor.full_tensor().contiguous() for name, tensor in self._model.state_dict().items()}
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True)
            save_file(gathered, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self._model.config.save_pretrained(folder)
        dist.barrier()


class TrainerGroup:
    """The actors of one trainer world, started together from a checkpoint."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder = folder
        self._num_starts = 0
        self.actors: list[Any] = []
        self.restart(checkpoint)

    @property
    def members(self) -> list[Member]:
        return [Member(f"trainer {rank}", Side.TRAINER, 1, handle) for rank, handle in enumerate(self.actors)]

    def restart(self, checkpoint: Path) -> None:
        """Stop whoever still runs, and start all ranks from `checkpoint`."""
        self.stop()
        self._num_starts += 1
        store = str(self._folder / f"store {self._num_starts}")
        actor = ray.remote(num_cpus=0)(TinyTrainer)
        self.actors = [actor.remote(rank, store, str(checkpoint)) for rank in range(DP * TP)]

    def train(self, step: int) -> list[float]:
        return ray.get([actor.train.remote(step) for actor in self.actors], timeout=60)

    def save(self, folder: Path) -> Path:
        ray.get([actor.save.remote(str(folder)) for actor in self.actors], timeout=60)
        return folder

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
