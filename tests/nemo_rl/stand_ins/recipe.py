"""A recipe that inherits NeMo RL's own example configuration, as small as the machine that runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf


@dataclass(frozen=True)
class Recipe:
    """Trainers and engines that are not colocated. Each trainer and each engine worker takes one pretended GPU."""

    model: Path
    num_trainers: int = 2
    trainer_tp: int = 1
    num_engines: int = 1
    engine_tp: int = 1
    is_async: bool = False
    precision: str = "float32"
    refit: dict[str, Any] = field(default_factory=lambda: {"backend": "reshard"})
    others: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value, over everything else."""

    def master_config(self, checkout: Path) -> MasterConfig:
        """What NeMo RL's launcher makes of a YAML file that inherits `grpo_math_1B.yaml`."""
        register_omegaconf_resolvers()
        config = load_config(checkout / "examples" / "configs" / "grpo_math_1B.yaml")
        for key, value in {**self._overrides(), **self.others}.items():
            OmegaConf.update(config, key, value, force_add=True)
        plain = OmegaConf.to_container(config, resolve=True)
        assert isinstance(plain, dict)
        return MasterConfig(**{str(key): value for key, value in plain.items()})

    def _overrides(self) -> dict[str, Any]:
        generation = "policy.generation"
        num_workers = self.num_engines * self.engine_tp
        return {
            "refit": self.refit,
            "cluster": {"gpus_per_node": self.num_trainers + num_workers, "num_nodes": 1},
            "policy.model_name": str(self.model),
            "policy.tokenizer.name": str(self.model),
            "policy.precision": self.precision,
            "policy.max_total_sequence_length": 64,
            # Version 2 needs Automodel on the import path of its processes alone.
            "policy.dtensor_cfg._v2": False,
            "policy.dtensor_cfg.tensor_parallel_size": self.trainer_tp,
            # Flash attention.
            "policy.sequence_packing.enabled": False,
            f"{generation}.model_name": str(self.model),
            f"{generation}.max_new_tokens": 8,
            f"{generation}._pad_token_id": 0,
            f"{generation}.stop_token_ids": [],
            f"{generation}.colocated.enabled": False,
            f"{generation}.colocated.resources": {"gpus_per_node": num_workers, "num_nodes": None},
            f"{generation}.vllm_cfg.async_engine": self.is_async,
            f"{generation}.vllm_cfg.precision": self.precision,
            f"{generation}.vllm_cfg.tensor_parallel_size": self.engine_tp,
            f"{generation}.vllm_cfg.max_model_len": 64,
            f"{generation}.vllm_cfg.load_format": "dummy",
            f"{generation}.vllm_cfg.skip_tokenizer_init": True,
            f"{generation}.vllm_cfg.enforce_eager": True,
            # Left out, NeMo RL asks the GPU for its compute capability.
            f"{generation}.vllm_cfg.enable_prefix_caching": True,
        }
