"""Assemble a catalog from a rule that lays out one tensor, asked once for all tensors that are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from nemo_rl_reshard.layout import TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.roles import Placed, Role

Seat = Callable[[Place, Role], Hashable]
LayOut = Callable[[TensorSpec, Place, Role], TensorLayout]


def assemble(
    side: Side,
    model: ModelShape,
    placed: Placed,
    ranks: Sequence[int],
    seat: Seat,
    lay_out: LayOut,
    *,
    dtypes: Mapping[str, str] | None = None,
    indirect: Mapping[str, str] | None = None,
) -> Catalog:
    """The catalog of one side. Tensors of one part, shape and `seat` (which ranks may hold it) are laid out alike.

    `dtypes` gives the dtype that parts are kept in where it is not the model's; `indirect` the parts that are not
    copied region by region, with the reason: nobody needs regions of those.
    """
    dtypes, indirect = dtypes or {}, indirect or {}
    alike: dict[tuple[str, tuple[int, ...], Hashable], TensorLayout] = {}
    specs: dict[str, TensorSpec] = {}
    layouts: dict[str, TensorLayout] = {}
    reasons: dict[str, str] = {}
    for spec, (place, role) in zip(model.specs, placed, strict=True):
        key = (place.part, spec.shape, seat(place, role))
        layout = alike.get(key)
        if layout is None:
            layout = TensorLayout(spec.shape, ()) if place.part in indirect else lay_out(spec, place, role)
            alike[key] = layout
        dtype = dtypes.get(place.part, spec.dtype)
        specs[spec.name] = spec if dtype == spec.dtype else TensorSpec(spec.name, spec.shape, dtype)
        layouts[spec.name] = layout
        if place.part in indirect:
            reasons[spec.name] = indirect[place.part]
    return Catalog(side, specs, layouts, reasons, tuple(ranks))
