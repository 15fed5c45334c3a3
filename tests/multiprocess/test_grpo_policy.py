"""The example's trainers, four real processes (dp 2 x tp 2): they train as one process would, and can start again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.batch import Batch, Sample
from grpo.loss import clipped_loss, token_logprobs
from grpo.model import load_checkpoint, write_checkpoint
from grpo.policy import PolicyTrainer
from grpo.tokenizer import BEGIN

from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

MODEL = {
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_length": 32,
}
SECTION: dict[str, Any] = {
    "dp": 2,
    "tp": 2,
    "timeout_s": 60,
    "compute_dtype": "float32",
    "learning_rate": 1e-3,
    "minibatches": 2,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "max_importance_weight": 2.0,
    "max_gradient_norm": 1.0,
}
STEPS = 2
TOKEN = b"t" * 32


def samples() -> list[Sample]:
    """Prompts of unequal length, so that padding occurs; answers and advantages fixed by a seed."""
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(
            prompt=[BEGIN, *range(1, 3 + index % 3)],
            answer=torch.randint(0, 256, (2 + index % 2 * 3,), generator=generator).tolist(),
            sampled_logprobs=[-5.5] * (2 + index % 2 * 3),
            advantage=float((-1) ** (index // 2)) * (1 + index / 10),
        )
        for index in range(8)
    ]


def train_rank(rank: int, address: tuple[str, int], checkpoint: Path, out: Path) -> None:
    """One trainer process: two steps, back to the start, the same two steps again."""
    trainer = PolicyTrainer(rank, RendezvousStore(address, TOKEN, 60.0), checkpoint, SECTION)
    plain = [sample.to_plain() for sample in samples()]
    runs = []
    for _ in range(2):
        metrics = [trainer.train_step(plain, seed) for seed in range(STEPS)]
        whole = {name: parameter.full_tensor().detach().clone() for name, parameter in trainer.model.named_parameters()}
        locals_ = {
            name: parameter.to_local().detach().clone()
            for name, parameter in trainer.model.named_parameters()
            if isinstance(parameter, DTensor)
        }
        runs.append({"metrics": metrics, "whole": whole, "locals": locals_})
        trainer.restart()
    torch.save(runs, out / f"rank{rank}.pt")
    trainer.close()


def train_alone(checkpoint: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What four ranks must come to, in one process: the same two steps over the same mini batches."""
    model = load_checkpoint(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    shares = [Batch.of(samples()[rank::2]) for rank in range(2)]
    norms = []
    for seed in range(STEPS):
        with torch.no_grad():
            olds = [token_logprobs(model(batch.tokens, use_cache=False).logits, batch.tokens) for batch in shares]
        for rows in torch.randperm(4, generator=torch.Generator().manual_seed(seed)).chunk(2):
            optimizer.zero_grad()
            tokens = sum(batch.rows(rows).num_tokens for batch in shares)
            for whole, old in zip(shares, olds, strict=True):
                batch = whole.rows(rows)
                current = token_logprobs(model(batch.tokens, use_cache=False).logits, batch.tokens)
                terms = clipped_loss(current, old[rows], batch.sampled, batch.advantages, batch.mask, 0.2, 0.28, 2.0)
                (terms.loss_sum / tokens).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """The checkpoint, and per rank what its two runs left."""
    folder = tmp_path_factory.mktemp("policy")
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, MODEL, seed=0)
    with RendezvousServer("127.0.0.1", TOKEN) as rendezvous:
        mp.spawn(train_rank, (rendezvous.address, checkpoint, folder), nprocs=4)
    return checkpoint, [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does(trained: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    checkpoint, ranks = trained
    expected, norms = train_alone(checkpoint)
    found = ranks[0][0]
    untrained = dict(load_checkpoint(checkpoint).named_parameters())
    moved = max(float((expected[name] - untrained[name]).detach().abs().max()) for name in expected)
    for name, whole in found["whole"].items():
        assert torch.allclose(whole, expected[name], rtol=0, atol=moved / 50), name
    reported = [step["train/gradient_norm"] for step in found["metrics"]]
    assert reported == pytest.approx([sum(norms[:2]) / 2, sum(norms[2:]) / 2], rel=1e-4)


@pytest.mark.slow
def test_replicas_stay_equal_bit_for_bit(trained: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Norms lie on the dp axis alone, or are replicated over tp: both tp ranks must hold the same elements."""
    _, ranks = trained
    for first, second in ((0, 1), (2, 3)):
        for name, local in ranks[first][0]["locals"].items():
            if "norm" in name:
                assert torch.equal(local, ranks[second][0]["locals"][name]), name


@pytest.mark.slow
def test_starting_again_repeats_the_run(trained: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    _, ranks = trained
    for once, again in ranks:
        for name, local in once["locals"].items():
            assert torch.equal(local, again["locals"][name]), name
        assert [step["loss"] for step in once["metrics"]] == [step["loss"] for step in again["metrics"]]


@pytest.mark.slow
def test_all_ranks_report_the_same_global_figures(trained: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    _, ranks = trained
    keys = ("loss", "logprob_gap/mean_abs", "logprob_gap/max_abs", "train/clipped_share", "train/gradient_norm")
    for step in range(STEPS):
        figures = {tuple(rank[0]["metrics"][step][key] for key in keys) for rank in ranks}
        assert len(figures) == 1
