"""The `refit:` section at the top level of a NeMo RL configuration, read together with the keys it depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum

from pydantic import Field, field_validator

from nemo_rl_reshard.config import Backend, RefitConfig
from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.integrations.nemo_rl.compatibility import violations
from nemo_rl_reshard.integrations.nemo_rl.settings import Settings

SECTION = "refit"


class NemoRlBackend(StrEnum):
    """Who brings the engines up to date: this package, either way it can, or NeMo RL itself."""

    RESHARD = "reshard"
    GATHER_BROADCAST = "gather_broadcast"
    NEMO_RL = "nemo_rl"


class OnFailure(StrEnum):
    """What follows a refit that failed before anything was written: the error, or NeMo RL's own refit."""

    RAISE = "raise"
    FALL_BACK = "fall_back"


class NemoRlSection(RefitConfig):
    """One `refit:` section. `host` is the driver's address; None means the address of its node."""

    # Both are wider than below: `refit_config` hands down only what a refit can use.
    backend: NemoRlBackend = NemoRlBackend.RESHARD  # type: ignore[assignment]
    host: str | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    on_failure: OnFailure = OnFailure.RAISE

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_no_switch(cls, value: object) -> object:
        """YAML 1.1 reads a bare `off` as false."""
        return "off" if value is False else value

    def refit_config(self, host: str) -> RefitConfig:
        """What the refits themselves need; `host` is used where the section names none.

        Raises ConfigError for backend nemo_rl, which sets up nothing of this package, and for a host that listens
        everywhere.
        """
        if self.backend is NemoRlBackend.NEMO_RL:
            raise ConfigError("refit.backend: nemo_rl leaves refits to NeMo RL; there is nothing to configure here")
        fields = {name: getattr(self, name) for name in RefitConfig.model_fields}
        return RefitConfig.read({**fields, "backend": Backend(self.backend), "host": self.host or host})


def read_section(config: object) -> NemoRlSection:
    """Read and check the `refit:` section of `config`, a NeMo RL MasterConfig, an OmegaConf container or a mapping.

    Every entry point comes through here. A configuration without the section means its defaults.

    Raises ConfigError listing every violation: of the section itself, and unless refits are left to NeMo RL, every
    NeMo RL key that contradicts it or asks for something not supported (see `compatibility.RULES`).
    """
    section, violated = examine_section(config)
    faults = FaultList("refit configuration", ConfigError)
    faults.extend(violated)
    faults.raise_if_any()
    return section


def examine_section(config: object) -> tuple[NemoRlSection, tuple[str, ...]]:
    """The section as far as it is sound, and a sentence for each violation that `read_section` would raise.

    Raises ConfigError if `config` is no configuration at all.
    """
    settings = Settings(config)
    if not settings.keys():
        raise ConfigError(f"a configuration of NeMo RL is needed to read its {SECTION} section, not {config!r:.80}")
    section, violated = _section(settings)
    if section.backend is NemoRlBackend.NEMO_RL:
        return section, violated
    return section, (*violated, *violations(Settings(config, {SECTION: section})))


def _section(settings: Settings) -> tuple[NemoRlSection, tuple[str, ...]]:
    found = settings.at(SECTION)
    if found is None:
        return NemoRlSection(), tuple(_misplaced(settings))
    if not isinstance(found, Mapping):
        example = f"{SECTION}: {{backend: reshard}}"
        return NemoRlSection(), (f"{SECTION}: must be a section of keys, such as {example}, got {found!r}",)
    section, faults = NemoRlSection.examine(found)
    return section, tuple(f"{SECTION}.{fault}" for fault in faults)


def _misplaced(settings: Settings) -> Iterator[str]:
    """NeMo RL ignores top-level keys that it does not know, so a slip of the pen would pass unnoticed."""
    keys = settings.keys()
    for key in get_close_matches(SECTION, keys, cutoff=0.8):
        if key != SECTION:
            yield f"{key}: unknown key; did you mean {SECTION!r}?"
    if "policy" not in keys and not NemoRlSection.model_fields.keys().isdisjoint(keys):
        yield f"this is the {SECTION} section alone; give the whole configuration, since other keys may contradict it"
