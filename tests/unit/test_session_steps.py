"""Steps: what a program may send and when, and how often the target is told of a tensor."""

from __future__ import annotations

import pytest

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram
from nemo_rl_reshard.runtime.steps import NOTHING, Steps
from nemo_rl_reshard.topology import Link

TOP, BOTTOM, WHOLE = Region((0,), (2,)), Region((2,), (2,)), Region((0,), (4,))


def message(order: int, src: int, dst: int, *parts: tuple[str, Region]) -> Message:
    made = tuple(Part(tensor, region, "float32", region.numel * 4) for tensor, region in parts)
    return Message(order, order, src, dst, Link.LOCAL if src == dst else Link.FAST, made)


def steps(*messages: Message, held: dict[str, list[Region]] | None = None) -> Steps:
    """Of rank 1."""
    return Steps.of(RankProgram(1, "digest", messages, (), 1024), held or {})


def test_a_forward_waits_for_the_last_of_its_receives() -> None:
    found = steps(message(1, 0, 1, ("w", TOP)), message(3, 0, 1, ("w", BOTTOM)), message(5, 1, 2, ("w", WHOLE)))
    (forward,) = found.outgoing
    assert (forward.forwards, forward.after, forward.forwarded) == ((True,), 3, forward.message.parts)
    assert found.uses == {"w": 3}


def test_a_forward_before_all_of_it_arrived_is_refused() -> None:
    with pytest.raises(PlanError, match=r"w: rank 1 is to send region \(0,\)\+\(4,\) to rank 2 in message 3"):
        steps(message(1, 0, 1, ("w", TOP)), message(3, 1, 2, ("w", WHOLE)), message(5, 0, 1, ("w", BOTTOM)))


def test_messages_out_of_order_are_refused() -> None:
    with pytest.raises(PlanError, match="not in ascending order"):
        steps(message(2, 0, 1, ("w", TOP)), message(2, 0, 1, ("w", BOTTOM)))


def test_parts_of_one_message_are_read_where_each_is() -> None:
    """A colocated rank: `own` from its source at once, `w` from its target once it has arrived."""
    both = (("own", TOP), ("w", TOP))
    found = steps(message(1, 0, 1, ("w", TOP)), message(2, 1, 2, *both), held={"own": [WHOLE]})
    (step,) = found.outgoing
    assert (step.forwards, step.after) == ((False, True), 1)
    assert [part.tensor for part in step.forwarded] == ["w"]
    assert found.uses == {"w": 2}


def test_equal_parts_from_one_place_are_one_content() -> None:
    sends = (message(1, 1, 2, ("own", TOP)), message(2, 1, 3, ("own", TOP)), message(3, 1, 3, ("own", BOTTOM)))
    local = message(4, 1, 1, ("own", WHOLE))
    found = steps(*sends, local, held={"own": [WHOLE]})
    assert [step.content for step in found.outgoing] == [0, 0, 1, 2]
    assert all(step.after == NOTHING for step in found.outgoing)
    assert found.uses == {"own": 1}
