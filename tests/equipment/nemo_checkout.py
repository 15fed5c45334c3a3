"""A checkout of NeMo RL in miniature: the functions that our launcher calls, which write down how they were called."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

_FILES = {
    "examples/prompts/cot.txt": "{}",
    "examples/configs/grpo_math_1B.yaml": """
        policy:
          model_name: Qwen/Qwen2.5-1.5B
          tokenizer: {name: "${policy.model_name}"}
          train_micro_batch_size: 4
          logprob_batch_size: "${policy.train_micro_batch_size}"
          max_total_sequence_length: 512
          dtensor_cfg:
            {_v2: true, enabled: true, tensor_parallel_size: 1, activation_checkpointing: false, automodel_kwargs: {}}
          megatron_cfg: {enabled: false, mtp_num_layers: 0}
          draft: {enabled: false}
          dynamic_batching: {enabled: false}
          sequence_packing: {enabled: true}
          generation:
            backend: vllm
            refit_transport: null
            vllm_cfg:
              {async_engine: false, precision: bfloat16, kv_cache_dtype: auto, tensor_parallel_size: 1,
               pipeline_parallel_size: 1, expert_parallel_size: 1, gpu_memory_utilization: 0.6}
            vllm_kwargs: {}
            colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
        grpo:
          num_prompts_per_step: 32
          num_generations_per_prompt: 16
          max_num_steps: 1000000
          use_dynamic_sampling: false
          reward_scaling: {enabled: false}
          reward_shaping: {enabled: false}
          async_grpo: {enabled: false, max_trajectory_age_steps: 1, in_flight_weight_updates: false}
        data: {use_multiple_dataloader: false, default: {prompt_file: examples/prompts/cot.txt}}
        env: {math: {num_workers: 8}}
        loss_fn: {use_importance_sampling_correction: false}
        checkpointing: {enabled: true, checkpoint_dir: results/grpo}
        logger: {log_dir: logs, tensorboard_enabled: false}
        cluster: {gpus_per_node: 1, num_nodes: 1}
        data_plane: {enabled: false}
        """,
    "nemo_rl/__init__.py": "calls = []",
    "nemo_rl/utils/__init__.py": "",
    "nemo_rl/utils/config.py": """
        from pathlib import Path
        from omegaconf import OmegaConf

        class OverridesError(Exception): ...

        def register_omegaconf_resolvers(): ...

        def load_config(path):
            config = OmegaConf.load(path)
            name = config.pop("defaults", None)
            return config if name is None else OmegaConf.merge(load_config(Path(path).parent / name), config)

        def parse_hydra_overrides(config, overrides):
            for override in overrides:
                key = override.partition("=")[0]
                if not override.startswith("++") and OmegaConf.select(config, key) is None:
                    raise OverridesError(f"Key '{key}' is not in struct")
            return OmegaConf.merge(config, OmegaConf.from_dotlist([each.removeprefix("++") for each in overrides]))
        """,
    "nemo_rl/utils/logger.py": """
        from pathlib import Path

        def get_next_experiment_dir(base):
            folder = Path(base) / "exp_001"
            folder.mkdir(parents=True)
            return str(folder)
        """,
    "nemo_rl/distributed/__init__.py": "",
    "nemo_rl/distributed/virtual_cluster.py": """
        import os
        import nemo_rl

        def init_ray():
            nemo_rl.calls.append(("init_ray", os.environ["PYTHONPATH"]))
        """,
    "nemo_rl/weight_sync/interfaces.py": "",
    "nemo_rl/data/__init__.py": "",
    "nemo_rl/data/utils.py": """
        def setup_response_data(tokenizer, data, env):
            return "dataset", "validation dataset", {"math": "grader"}, {"math": "validation grader"}
        """,
    "nemo_rl/models/__init__.py": "",
    "nemo_rl/models/generation/__init__.py": """
        def configure_generation_config(config, tokenizer, has_refit_draft_weights=True, trains_mtp=False):
            assert (has_refit_draft_weights, trains_mtp) == (False, False)
            return {**config, "_pad_token_id": 0}
        """,
    "nemo_rl/algorithms/__init__.py": "",
    "nemo_rl/algorithms/utils.py": """
        def get_tokenizer(config):
            return f"tokenizer of {config['name']}"
        """,
    "nemo_rl/algorithms/grpo.py": """
        import nemo_rl
        from contextlib import contextmanager
        from types import SimpleNamespace
        from typing import Any
        from pydantic import BaseModel

        class AsyncGRPO(BaseModel, extra="allow"):
            enabled: bool = False
            max_trajectory_age_steps: int = 1

        class GRPO(BaseModel, extra="allow"):
            max_num_steps: int
            async_grpo: AsyncGRPO | None = None

        class MasterConfig(BaseModel, extra="allow"):
            policy: dict[str, Any]
            grpo: GRPO
            data: dict[str, Any]
            env: dict[str, Any]
            logger: dict[str, Any]
            cluster: dict[str, Any]

        class Logger:
            def log_metrics(self, metrics, step, prefix=""):
                nemo_rl.calls.append(("log_metrics", sorted(metrics), step, prefix))

        class Generation(SimpleNamespace):
            def shutdown(self):
                nemo_rl.calls.append(("shutdown", "generation"))

        @contextmanager
        def checkpointer():
            yield
            nemo_rl.calls.append(("flushed",))

        def setup(config, tokenizer, dataset, val_dataset):
            assert config.policy["generation"]["_pad_token_id"] == 0
            nemo_rl.calls.append(("setup", tokenizer, dataset, val_dataset))
            return ("policy", Generation(), None, ("training", "inference"), "loader", "validation loader", "loss",
                    Logger(), checkpointer(), "state", config, {}, {})

        def grpo_train(policy, policy_generation, wrapped_dataloader, val_dataloader, tokenizer, loss_fn, task_to_env,
                       val_task_to_env, logger, checkpointer, grpo_save_state, master_config, processor=None):
            nemo_rl.calls.append(("grpo_train", policy, wrapped_dataloader, task_to_env["math"]))

        def async_grpo_train(policy, policy_generation, dataloader, val_dataloader, tokenizer, loss_fn, task_to_env,
                             val_task_to_env, logger, checkpointer, grpo_save_state, master_config,
                             max_trajectory_age_steps=1, teacher_worker_groups=None, alias_to_group_alias=None,
                             processor=None):
            nemo_rl.calls.append(("async_grpo_train", policy, dataloader, max_trajectory_age_steps))

        def shutdown_environments(task_to_env, val_task_to_env):
            nemo_rl.calls.append(("shutdown", task_to_env["math"], val_task_to_env["math"]))
        """,
}


def write_checkout(root: Path) -> Path:
    """Write the files under `root`; `nemo_rl.calls` there is the list of what was called."""
    for name, text in _FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root
