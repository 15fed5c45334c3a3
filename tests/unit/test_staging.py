"""Staging: what is packed, what may travel as it is, and that the slots stay bounded."""

import pytest
import torch

from nemo_rl_reshard.errors import TransportError
from nemo_rl_reshard.params.dtype import ITEM_SIZE
from nemo_rl_reshard.runtime.verify import digest
from nemo_rl_reshard.sources.replicas import replica_digest
from nemo_rl_reshard.transport.staging import StagingSlots, is_plain, pack, unpack, wire_bytes


def through_the_wire(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pack, copy the bytes as a transport would, unpack into a fresh tensor."""
    buffer = torch.full((view.numel() * dtype.itemsize,), 255, dtype=torch.uint8)
    pack(view, buffer, dtype)
    arrived = torch.zeros(view.shape, dtype=dtype)
    unpack(buffer.clone(), arrived, dtype)
    return arrived


def test_b40_a_transposed_source_travels_in_row_major_order():
    source = torch.arange(6.0).view(2, 3).t()
    assert not is_plain(source, torch.float32)
    buffer = torch.zeros(24, dtype=torch.uint8)
    pack(source, buffer, torch.float32)
    assert torch.equal(buffer, wire_bytes(source.contiguous()))
    with pytest.raises(TransportError, match=r"shape \(3, 2\) and strides \(1, 3\) must be packed"):
        wire_bytes(source)


def test_b41_receiving_into_some_columns_leaves_the_others_alone():
    storage = torch.full((3, 4), -1.0)
    buffer = torch.zeros(24, dtype=torch.uint8)
    pack(torch.arange(6.0).view(3, 2), buffer, torch.float32)
    unpack(buffer, storage[:, 0:2], torch.float32)
    expected = torch.tensor([[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]], dtype=torch.float32)
    assert torch.equal(storage, expected)


def test_b41_halves_of_stacked_experts_are_strided_and_land_exactly():
    experts = torch.full((2, 4, 3), -1.0)  # gate rows above up rows, expert by expert
    up = torch.arange(12.0).view(2, 2, 3)
    buffer = torch.zeros(48, dtype=torch.uint8)
    pack(up, buffer, torch.float32)
    assert not is_plain(experts[:, 2:], torch.float32)
    unpack(buffer, experts[:, 2:], torch.float32)
    assert torch.equal(experts[:, 2:], up)
    assert torch.equal(experts[:, :2], torch.full((2, 2, 3), -1.0))


def test_b42_a_contiguous_view_starts_at_its_own_first_element_and_ends_with_it():
    storage = torch.arange(8.0)
    view = storage[1:6]
    assert is_plain(view, torch.float32)
    travels = wire_bytes(view)
    assert travels.numel() == 20
    assert torch.equal(travels.view(torch.float32), torch.tensor([1.0, 2, 3, 4, 5]))
    travels.view(torch.float32).mul_(2)  # the same memory, not a copy
    assert torch.equal(storage, torch.tensor([0.0, 2, 4, 6, 8, 10, 6, 7]))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_element_of_strided_storage_is_plain_and_travels(shape):
    """It is contiguous, with a stride of 3 that torch would not read bytes through."""
    view = torch.arange(6.0)[1::3][:1].as_strided(shape, (3,) * len(shape), 1)
    assert is_plain(view, torch.float32)
    assert wire_bytes(view).tolist() == [0, 0, 128, 63]
    buffer = torch.zeros(5, dtype=torch.uint8)
    pack(view, buffer[1:], torch.float32)  # not aligned
    assert buffer.tolist() == [0, 0, 0, 128, 63]
    assert digest(view) == digest(torch.ones(shape))
    assert replica_digest(view) == replica_digest(torch.ones(shape))


@pytest.mark.parametrize("scalar", [torch.tensor(3.0), torch.tensor(7), torch.tensor(True)])
def test_b43_scalars_keep_value_and_shape(scalar):
    assert is_plain(scalar, scalar.dtype)
    assert wire_bytes(scalar).shape == (scalar.dtype.itemsize,)
    arrived = through_the_wire(scalar, scalar.dtype)
    assert arrived.shape == ()
    assert torch.equal(arrived, scalar)


def test_b44_a_slot_is_not_handed_out_again_before_it_is_given_back():
    slots = StagingSlots(num_slots=2, slot_bytes=4)
    held = []
    for value in (1, 2):
        slot, buffer = slots.take(4)
        buffer.fill_(value)
        held.append((slot, buffer))
    assert not slots.has_free
    with pytest.raises(TransportError, match="all 2 staging slots are taken"):
        slots.take(4)
    assert [buffer.tolist() for _, buffer in held] == [[1] * 4, [2] * 4]
    slots.give_back(held[0][0])
    slot, buffer = slots.take(3)
    buffer.fill_(3)
    assert slot == held[0][0]
    assert held[1][1].tolist() == [2] * 4
    slots.give_back(slot)
    with pytest.raises(TransportError, match="is not taken"):
        slots.give_back(slot)
    with pytest.raises(TransportError, match="is not taken"):
        slots.give_back(2)


def test_b36_the_cast_rounds_to_nearest_even_once_at_the_sender():
    master = torch.tensor([1.00390625, 1.01171875, -1.00390625])
    assert not is_plain(master, torch.bfloat16)
    arrived = through_the_wire(master, torch.bfloat16)
    assert torch.equal(arrived, torch.tensor([1.0, 1.015625, -1.0], dtype=torch.bfloat16))


def test_b37_a_tensor_whose_receiver_is_wider_keeps_every_bit():
    bias = torch.tensor([0.1, 0.2])
    assert torch.equal(through_the_wire(bias, torch.float32), bias)


@pytest.mark.parametrize("name", sorted(ITEM_SIZE))
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 3)])
def test_every_wire_dtype_travels_from_any_byte_of_a_message(name, shape):
    dtype = getattr(torch, name)
    assert dtype.itemsize == ITEM_SIZE[name]
    numel = torch.Size(shape).numel()
    source = (torch.arange(numel) % 2 if name == "bool" else torch.arange(numel)).to(dtype).view(shape)
    nbytes = numel * dtype.itemsize
    message = torch.zeros(nbytes + 16, dtype=torch.uint8)
    for start in range(9):  # behind an odd number of narrower elements torch cannot view the bytes as wider ones
        arrived = torch.ones(shape, dtype=dtype)
        message.fill_(255)
        pack(source, message[start : start + nbytes], dtype)
        unpack(message[start : start + nbytes], arrived, dtype)
        assert torch.equal(arrived, source)
        outside = torch.cat([message[:start], message[start + nbytes :]])
        assert torch.equal(outside, torch.full_like(outside, 255))


def test_parameters_are_read_and_written_outside_autograd():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    buffer = torch.zeros(12, dtype=torch.uint8)
    pack(torch.ones(3), buffer, torch.float32)
    unpack(buffer, parameter[1], torch.float32)
    assert parameter.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert not wire_bytes(parameter).requires_grad
    assert not parameter.grad_fn


def test_a_buffer_of_another_length_is_refused():
    for buffer in (torch.zeros(11, dtype=torch.uint8), torch.zeros(13, dtype=torch.uint8)):
        with pytest.raises(TransportError, match="takes 12 bytes, the buffer has"):
            pack(torch.ones(3), buffer, torch.float32)
        with pytest.raises(TransportError, match="takes 12 bytes, the buffer has"):
            unpack(buffer, torch.ones(3), torch.float32)


def test_slots_are_one_bounded_allocation_and_do_not_overlap():
    slots = StagingSlots(num_slots=3, slot_bytes=100)
    assert slots.nbytes == 3 * 128
    taken = [slots.take(100)[1] for _ in range(3)]
    for value, buffer in enumerate(taken):
        buffer.fill_(value + 1)
        assert buffer.data_ptr() % 64 == 0
    assert [buffer.unique().tolist() for buffer in taken] == [[1], [2], [3]]
    assert len({buffer.untyped_storage().data_ptr() for buffer in taken}) == 1


def test_b39_a_message_longer_than_a_slot_is_refused_and_takes_none():
    slots = StagingSlots(num_slots=1, slot_bytes=64)
    with pytest.raises(TransportError, match="100 bytes does not fit a staging slot of 64"):
        slots.take(100)
    assert slots.has_free
    assert slots.take(64)[1].numel() == 64


def test_staging_of_nothing_is_allowed_and_no_slots_is_not():
    assert StagingSlots(num_slots=1, slot_bytes=0).nbytes == 0
    for num_slots, slot_bytes in ((0, 4), (1, -1)):
        with pytest.raises(ValueError, match="at least one slot"):
            StagingSlots(num_slots, slot_bytes)
