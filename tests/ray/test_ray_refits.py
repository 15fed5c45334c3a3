"""Refits of light actors under Ray: planned once, both backends, published last, one report."""

import json

import pytest
import ray
import torch
from equipment.ray_faults import Planned
from equipment.ray_light import DOWN, GATE, LAST, NORM, SPECS, LightWorld

from nemo_rl_reshard.config import Backend
from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.runtime.order import VerifyMode

pytestmark = pytest.mark.ray


@pytest.fixture
def controller(light: LightWorld):
    made = light.controller()
    yield made
    made.close()


def test_two_refits_are_bit_equal_and_the_second_plans_nothing(light, controller):
    for version in (1, 2):
        light.fill(version)
        report = controller.refit(version, verify=VerifyMode.FULL)
        light.assert_serves(version)
        assert light.versions() == [version, version]
        assert (report.version, report.direct_share, len(report.ranks)) == (version, 1.0, 5)
        assert (controller.num_plans, controller.generation) == (1, 1)
    received = {report.rank: sum(report.bytes_received.values()) for report in report.ranks}
    needed = [sum(spec.nbytes for spec in SPECS), 4 * (8 * 4 + 2 * 6 + 7 + 5 * 3)]
    assert [received[3], received[4]] == needed


def test_the_plan_goes_into_the_object_store_once_whatever_the_number_of_ranks(light, controller, monkeypatch):
    put, real = [], ray.put

    def counting(value):
        put.append(value)
        return real(value)

    monkeypatch.setattr("nemo_rl_reshard.orchestration.shared.ray.put", counting)
    for version in (5, 6):
        light.fill(version)
        controller.refit(version)
        light.assert_serves(version)
    assert [value["digest"] for value in put if "plan" in value] == [controller.plan().plan.digest]


def test_the_report_has_every_key_of_a_training_steps_metrics(light, controller):
    light.fill(3)
    metrics = controller.refit(3).metrics()
    phases = ("declare", "pack", "network", "exchange", "leftover", "install", "verify")
    expected = {"backend", "version", "seconds", "bytes_received_max", "bytes_received_sum", "direct_share"}
    expected |= {"fraction_of_floor", "peak_extra_bytes", *(f"seconds_{phase}" for phase in phases)}
    assert {f"refit/{key}" for key in expected} <= set(metrics)
    assert metrics["refit/seconds"] > 0
    json.dumps(metrics)


def test_backends_change_between_refits_of_the_same_actors(light, controller):
    version = 10
    for backend in (Backend.RESHARD, Backend.GATHER_BROADCAST, Backend.RESHARD, Backend.GATHER_BROADCAST):
        version += 1
        light.fill(version)
        report = controller.refit(version, backend=backend, verify=VerifyMode.FULL)
        light.assert_serves(version)
        assert report.backend == backend
        assert report.direct_share == (1.0 if backend is Backend.RESHARD else 0.0)
    assert (controller.num_plans, controller.generation) == (2, 1), "one plan per backend, one world for both"


def test_the_ffn_route_leaves_the_rest_to_the_loader(light):
    controller = light.controller(route="ffn")
    light.fill(20)
    report = controller.refit(20)
    controller.close()
    light.assert_serves(20)
    assert 0.0 < report.direct_share < 1.0
    assert {leftover.tensor for leftover in controller.plan().plan.leftovers} == {NORM, LAST}
    controller.close()


def test_b60_slow_receivers_do_not_time_out_the_trainers_gather(light):
    """Every leftover is loaded slowly, in a batch of its own, while trainers may already gather the next."""
    light.fill(30)
    for spec in (GATE, NORM):
        light.arm(light.engines[1], Planned("stall", spec, seconds=1.0))
        controller = light.controller(backend="gather_broadcast", bucket_bytes=64, message_bytes=64)
        controller.refit(30)
        controller.close()
        light.assert_serves(30)


def test_b65_an_engine_that_still_works_is_not_refitted_and_says_so(light, controller):
    light.fill(40)
    controller.refit(40)
    ray.get(light.engines[1].handle.have_requests.remote(2, 0))
    with pytest.raises(RefitError, match="2 unfinished requests") as failed:
        controller.refit(41)
    assert list(failed.value.causes) == ["rank 4 (engine 1)"]
    controller.refit(42)
    light.assert_serves(40)


def test_b65_an_engine_is_asked_again_whether_it_is_idle_inside_the_refit(light, controller):
    ray.get(light.engines[0].handle.have_requests.remote(0, 1, 0))
    with pytest.raises(RefitError, match="1 unfinished requests"):
        controller.refit(45)
    assert light.versions() == [None, None], "nothing is published when one engine mixed two versions"
    controller.refit(46)
    assert light.versions() == [46, 46]


def test_a_new_engine_serves_nothing_until_a_full_refit(light):
    light.replace_engine(0)
    with pytest.raises(ray.exceptions.RayTaskError, match="no refit has succeeded since it started"):
        ray.get(light.engines[0].handle.generate.remote())
    light.fill(50)
    controller = light.controller()
    controller.refit(50)
    controller.close()
    light.assert_serves(50)


def test_a_trainer_that_holds_nothing_of_a_tensor_sends_none_of_it(light, controller):
    """The third trainer holds nothing of one tensor and still takes part."""
    plan = controller.plan().plan
    senders = {transfer.src for transfer in plan.transfers() if transfer.tensor == DOWN}
    assert senders == {0, 1}
    assert torch.equal(torch.tensor(plan.targets), torch.tensor([3, 4]))
