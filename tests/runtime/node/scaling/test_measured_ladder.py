"""The measured rungs of one function, and the ladder that follows at the owner's prices."""

import pytest
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.scaling.measured_ladder import LadderSpec, MeasuredLadder
from pilotflame.runtime.node.scaling.rung_figures import HoldingPrices, RungFigures

PRICES = HoldingPrices(memory_byte_s=1e-9, device_s=2.0, waiting_s=0.5)
SPEC = LadderSpec((RungName.READY, RungName.LOCAL), PRICES)


def adopted(spec: LadderSpec = SPEC) -> MeasuredLadder:
    measured = MeasuredLadder()
    measured.adopt(spec, RungFigures(), (0, 0))
    return measured


def test_a_wake_is_measured_from_the_rung_on_which_it_began() -> None:
    measured = adopted()
    assert not measured.end_wake(10.0, usual=True, devices=0.0)
    measured.begin_wake(RungName.LOCAL, 10.0)
    assert measured.end_wake(14.0, usual=True, devices=0.5)
    assert measured.figures.wakes_s == {RungName.LOCAL: (4.0,)}
    assert measured.ladder.rungs[1].wake_s == 4.0
    assert measured.ladder.rungs[0].hold_per_s >= 0.5 * PRICES.device_s


def test_an_unusual_start_and_the_start_of_another_revision_are_no_wakes() -> None:
    measured = adopted()
    measured.begin_wake(RungName.LOCAL, 10.0)
    assert not measured.end_wake(14.0, usual=False, devices=0.0)
    measured.begin_wake(RungName.LOCAL, 20.0)
    measured.adopt(SPEC, measured.figures, (0, 0))
    assert not measured.end_wake(24.0, usual=True, devices=0.0)
    assert measured.figures.wakes_s == {}


def test_the_price_of_waiting_follows_from_the_slow_requests_only_with_a_target() -> None:
    untargeted, targeted = adopted(), adopted(SPEC._replace(slow_share=0.01))
    for measured in (untargeted, targeted):
        measured.count_slow((2, 2))
    assert untargeted.prices == PRICES
    price = targeted.prices.waiting_s
    assert price > PRICES.waiting_s
    assert targeted.ladder.wait_per_s == price
    # Requests that were counted once do not count again.
    targeted.count_slow((2, 2))
    assert targeted.prices.waiting_s == price
    targeted.count_slow((2, 102))
    assert targeted.prices.waiting_s < price


@pytest.mark.parametrize("rung", [RungName.ZYGOTE, RungName.RESIDENT, RungName.LOCAL])
def test_below_a_rung_that_the_owner_excludes_is_the_lowest(rung: RungName) -> None:
    assert SPEC.number(rung) == 1
    assert SPEC.below(RungName.READY) == (RungName.LOCAL,)
    assert SPEC.below(rung) == (() if rung is RungName.LOCAL else (RungName.LOCAL,))
