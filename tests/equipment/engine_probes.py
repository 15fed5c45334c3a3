"""A script: questions to single live engines that need no second layout; one JSON line of answers per question."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from equipment.checkpoints import make_checkpoint, read_weights, write_checkpoint
from equipment.engines import engine, greedy, refit_from, specs_of
from nemo_rl_reshard.errors import ReshardError
from nemo_rl_reshard.targets.vllm_front import publish_version, published_version, reset_caches
from nemo_rl_reshard.targets.worker_extension import target_of_worker

LONG_PROMPT = [(7 * position) % 500 for position in range(150)]  # more than one block of the prefix cache


def prefix_cache(folder: Path) -> dict[str, Any]:
    """What the first token after a long, cached prompt is worth, before and after the caches are reset."""
    old, new = (make_checkpoint(folder, "dense", seed) for seed in (0, 1))
    with engine(new, dtype="float32", max_model_len=256) as llm:
        fresh = _first_logprob(llm)
    with engine(old, dtype="float32", max_model_len=256) as llm:
        _first_logprob(llm)
        target = target_of_worker(_worker(llm))
        weights = read_weights(new)
        target.manifest(0, specs_of(weights))
        refit_from(target, weights, 7, ())
        stale = _first_logprob(llm)
        before = published_version(llm)
        reset_caches(llm)
        publish_version(llm, 7)
        return {
            "fresh": fresh,
            "stale": stale,
            "reset": _first_logprob(llm),
            "versions": [before, published_version(llm)],
        }


def wrong_names(folder: Path) -> dict[str, Any]:
    """Names that the engine does not know, drafts, padding and a shape that does not fit: what each is answered."""
    checkpoint = make_checkpoint(folder, "dense", 0)
    weights = read_weights(checkpoint)
    gate = "model.layers.0.mlp.gate_proj.weight"
    cases = {
        "typo": {f"modle.{name.removeprefix('model.')}": tensor for name, tensor in weights.items()},
        "tower": {**weights, "model.visual.blocks.0.mlp.gate_proj.weight": weights[gate]},
        "missing": {name: tensor for name, tensor in weights.items() if name != gate},
        "draft": {**weights, "mtp.layers.0.mlp.down_proj.weight": torch.zeros(64, 96)},
        "padded": {**weights, "lm_head.weight": torch.zeros(504, 64)},
    }
    answers = {}
    with engine(checkpoint, dtype="float32") as llm:
        first = greedy(llm)
        for name, named in cases.items():
            target = target_of_worker(_worker(llm))
            try:
                manifest = target.manifest(0, specs_of(named))
            except ReshardError as error:
                answers[name] = str(error)
            else:
                skipped = target.trace.loader.skipped
                answers[name] = f"took {len(manifest.specs)} of {len(named)}, skipped {sorted(skipped)}"
        llm.reset_prefix_cache()
        answers["still the same"] = greedy(llm) == first
    return answers


def tied_head(folder: Path) -> dict[str, Any]:
    """A tied engine given both tensors: equal ones, then different ones, then equal ones again."""
    old, new = (make_checkpoint(folder, "tied", seed) for seed in (0, 1))
    weights = read_weights(new)
    with engine(new, dtype="float32") as llm:
        fresh = greedy(llm)
    with engine(old, dtype="float32") as llm:
        target = target_of_worker(_worker(llm))
        both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
        manifest = target.manifest(0, specs_of(both))
        refit_from(target, both, 1, ())
        llm.reset_prefix_cache()
        answers: dict[str, Any] = {"indirect": dict(manifest.indirect), "equal": greedy(llm) == fresh}
        try:
            refit_from(target, {**both, "lm_head.weight": both["lm_head.weight"] + 1}, 2, ())
        except ReshardError as error:
            answers["different"] = str(error)
            answers["version"] = target.version
            target.abandon()
        refit_from(target, both, 3, ())
        llm.reset_prefix_cache()
        answers["healed"] = greedy(llm) == fresh
    return answers


def untied_by_checkpoint(folder: Path) -> dict[str, Any]:
    """The configuration says tied, the checkpoint holds another head: the engine's own parameters decide."""
    like = make_checkpoint(folder, "tied", 0)
    checkpoints = []
    for seed in (0, 1):
        weights = read_weights(make_checkpoint(folder, "tied", seed))
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 0.5 + 0.25
        checkpoints.append(write_checkpoint(folder / f"untied_{seed}", like, weights))
    weights = read_weights(checkpoints[1])
    with engine(checkpoints[1], dtype="float32") as llm:
        fresh = greedy(llm)
    with engine(checkpoints[0], dtype="float32") as llm:
        model = _worker(llm).model_runner.get_model()
        target = target_of_worker(_worker(llm))
        target.manifest(0, specs_of(weights))
        refit_from(target, weights, 1, ())
        llm.reset_prefix_cache()
        return {
            "own parameter": model.lm_head.weight is not model.model.embed_tokens.weight,
            "head": torch.equal(model.lm_head.weight[:500], weights["lm_head.weight"]),
            "tokens": greedy(llm) == fresh,
        }


def abandoned(folder: Path) -> dict[str, Any]:
    """A refit that stops half way, then a full one."""
    old, new = (make_checkpoint(folder, "moe", seed) for seed in (0, 1))
    weights = read_weights(new)
    with engine(new, dtype="float32") as llm:
        fresh = greedy(llm)
    with engine(old, dtype="float32") as llm:
        target = target_of_worker(_worker(llm))
        target.manifest(0, specs_of(weights))
        half = dict(list(weights.items())[:31])
        answers: dict[str, Any] = {}
        try:
            refit_from(target, half, 1, ())
        except ReshardError as error:
            answers["half"] = str(error)
        target.abandon()
        refit_from(target, weights, 2, ())
        llm.reset_prefix_cache()
        return {**answers, "healed": greedy(llm) == fresh, "version": target.version}


def too_narrow(folder: Path) -> dict[str, Any]:
    """A hidden size that vLLM's CPU MoE kernel cannot take."""
    try:
        with engine(make_checkpoint(folder, "moe_narrow", 0), dtype="float32"):
            return {"started": True}
    except Exception as error:
        return {"started": False, "why": str(error)}


PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (prefix_cache, wrong_names, tied_head, untied_by_checkpoint, abandoned, too_narrow)
}


def _worker(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def _first_logprob(llm: Any) -> float:
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=1, temperature=0, logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": LONG_PROMPT}], wanted, use_tqdm=False)
    return float(next(iter(answer.outputs[0].logprobs[0].values())).logprob)


def main() -> None:
    """Answer every question named on the command line; a failing one reports its error and the rest go on."""
    folder, *names = sys.argv[1:]
    for name in names:
        try:
            findings = PROBES[name](Path(folder))
        except Exception:
            findings = {"error": traceback.format_exc()}
        sys.stdout.write("\nCASE " + json.dumps({"name": name, **findings}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
