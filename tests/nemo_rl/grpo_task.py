"""What is learned: answer with different characters of the kind that the prompt names; with a model and its tokenizer.

The task is that of examples/grpo, brought to NeMo RL the way NeMo RL wants it: prompts in a file, a data processor
and an environment actor registered by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
import torch
from equipment.tiny_qwen import tiny
from nemo_rl.data.processors import register_processor
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import ENV_REGISTRY, register_env
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

NAME = "kinds"
LENGTH = 8
"""Tokens of an answer, one byte each."""
KINDS = {
    "lower": frozenset("abcdefghijklmnopqrstuvwxyz"),
    "upper": frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "digit": frozenset("0123456789"),
}
PAD, BEGIN, END = 256, 257, 258
NO_BYTES = ("<pad>", "<begin>", "<end>", "<unused>")
VOCABULARY = 256 + len(NO_BYTES)
"""No multiple of 64, so engines pad it; a multiple of 2, since NeMo RL's vocabulary-parallel log-probabilities take the
shards of all tensor-parallel ranks to be equal."""


def write_model(folder: Path, family: str, seed: int) -> Path:
    """A checkpoint folder of `model` with random weights and its byte tokenizer."""
    torch.manual_seed(seed)
    model(family).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def model(family: str) -> PreTrainedModel:
    """A small one of `family`, "qwen2" or "qwen3"."""
    fields = tiny(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        max_position_embeddings=64,
        initializer_range=0.02,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, its id the byte's value, and three tokens that are no byte."""
    alphabet = bytes_as_characters()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(NO_BYTES))
    pad, begin, end, unused = NO_BYTES
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end, extra_special_tokens=[unused]
    )


def bytes_as_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {byte: chr(byte) for byte in seen}
    hidden = (byte for byte in range(256) if byte not in characters)
    characters |= {byte: chr(256 + position) for position, byte in enumerate(hidden)}
    return [characters[byte] for byte in range(256)]


def write_prompts(path: Path, count: int) -> Path:
    """A file of `count` prompts, kinds in turn, as NeMo RL's ResponseDataset reads it."""
    kinds = [list(KINDS)[index % len(KINDS)] for index in range(count)]
    path.write_text("".join(json.dumps({"input": f"{kind}:", "output": kind}) + "\n" for kind in kinds))
    return path


def process(datum: dict[str, Any], _spec: Any, tokenizer: Any, _max_length: int | None, index: int) -> dict[str, Any]:
    """NeMo RL's DatumSpec of one prompt: its tokens, and the kind that the environment wants to see."""
    question, answer = (message["content"] for message in datum["messages"])
    tokens = torch.tensor([BEGIN, *tokenizer(question, add_special_tokens=False)["input_ids"]])
    return {
        "message_log": [{"role": "user", "content": question, "token_ids": tokens}],
        "length": len(tokens),
        "extra_env_info": {"kind": answer},
        "loss_multiplier": 1.0,
        "idx": index,
        "task_name": datum["task_name"],
    }


def reward(kind: str, answer: str) -> float:
    """Different characters of the right kind, as a share of the answer's full length: 0 to 1."""
    return len(KINDS[kind] & set(answer)) / LENGTH


@ray.remote
class KindsEnvironment(EnvironmentInterface[dict[str, str]]):
    """One turn: the answer is judged and the episode ends."""

    def __init__(self, _config: dict[str, Any]) -> None:
        pass

    def step(self, message_log_batch: list[Any], metadata: list[dict[str, str]]) -> EnvironmentReturn[dict[str, str]]:
        answers = [log[-1]["content"] for log in message_log_batch]
        rewards = [reward(each["kind"], answer) for each, answer in zip(metadata, answers, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in answers],
            metadata=metadata,
            next_stop_strings=[None] * len(answers),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(answers), dtype=torch.bool),
            answers=list(answers),
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}

    def shutdown(self) -> None:
        """Nothing is held."""


def register() -> None:
    """Make task, processor and actor known to NeMo RL in this process, once."""
    if NAME not in ENV_REGISTRY:
        actor = f"{__name__}.KindsEnvironment"
        register_env(NAME, actor)
        register_processor(f"{NAME}_processor", process)
        ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
