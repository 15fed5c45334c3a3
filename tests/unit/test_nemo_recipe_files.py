"""The recipes for NeMo RL as files: whole, portable, and twins that differ in one key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from equipment.nemo_checkout import write_checkout
from omegaconf import OmegaConf

from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlBackend, NemoRlSection, read_section

FOLDER = Path(__file__).parents[2] / "configs" / "nemo_rl"
TWIN = "-gather_broadcast"
RECIPES = sorted(path for path in FOLDER.glob("grpo-*.yaml") if not path.stem.endswith(TWIN))


def resolved(path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The recipe over a checkout in miniature, whose base file has the keys that recipes change."""
    monkeypatch.setenv("NEMO_RL", str(write_checkout(checkout)))

    def chain(file: Path) -> Any:
        config = OmegaConf.load(file)
        name = config.pop("defaults", None)
        return config if name is None else OmegaConf.merge(chain(file.parent / name), config)

    plain = OmegaConf.to_container(chain(path), resolve=True)
    assert isinstance(plain, dict)
    return plain


def leaves(plain: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(plain, dict) and plain:
        return {name: value for key, part in plain.items() for name, value in leaves(part, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): plain}


def test_three_recipes_each_with_its_twin() -> None:
    assert len(RECIPES) == 3
    for recipe in RECIPES:
        twin = yaml.safe_load((FOLDER / f"{recipe.stem}{TWIN}.yaml").read_text())
        assert twin == {"defaults": recipe.name, "refit": {"backend": "gather_broadcast"}}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_twin_differs_in_the_backend_and_in_where_it_writes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common folder would have one run resume from the other's checkpoints."""
    ours = leaves(resolved(recipe, tmp_path, monkeypatch))
    twins = leaves(resolved(FOLDER / f"{recipe.stem}{TWIN}.yaml", tmp_path, monkeypatch))
    assert ours.keys() == twins.keys()
    different = {key for key in ours if ours[key] != twins[key]}
    assert different == {"refit.backend", "logger.log_dir", "checkpointing.checkpoint_dir"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("grpo-*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_passes_our_rules(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = read_section(resolved(path, tmp_path, monkeypatch))
    assert section.backend is (NemoRlBackend.GATHER_BROADCAST if path.stem.endswith(TWIN) else NemoRlBackend.RESHARD)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_gpus_and_parallel_sizes_fit(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(recipe, tmp_path, monkeypatch)
    cluster, resources = config["cluster"], config["policy"]["generation"]["colocated"]["resources"]
    inference = resources["gpus_per_node"] * (resources["num_nodes"] or 1)
    training = cluster["gpus_per_node"] * cluster["num_nodes"] - inference
    trainer, engine = config["policy"]["dtensor_cfg"], config["policy"]["generation"]["vllm_cfg"]
    assert training > 0
    assert training % (trainer["tensor_parallel_size"] * trainer.get("expert_parallel_size", 1)) == 0
    assert inference % engine["tensor_parallel_size"] == 0
    # On several nodes NeMo RL hands out whole ones.
    assert cluster["num_nodes"] == 1 or resources["gpus_per_node"] == cluster["gpus_per_node"]
    assert config["data"]["default"]["prompt_file"] == str(tmp_path / "examples" / "prompts" / "cot.txt")


def test_no_path_of_one_machine_is_in_a_recipe() -> None:
    for path in FOLDER.glob("*.yaml"):
        values = leaves(yaml.safe_load(path.read_text())).values()
        assert not [value for value in values if str(value).startswith(("/", "~"))], path.name


def test_the_base_file_shows_keys_that_the_section_has() -> None:
    shown = yaml.safe_load((FOLDER / "base.yaml").read_text())["refit"]
    assert shown.keys() <= NemoRlSection.model_fields.keys()
    assert NemoRlSection.read(shown).route == "all"
