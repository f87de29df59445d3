"""Where workers are, as lists and configurations say it, and what that lets one expect."""

from __future__ import annotations

import re

import pytest

from cluster.config.ray import PlacementConfig
from cluster.placement.place import Endpoint, Place


@pytest.mark.parametrize(
    ("line", "endpoint"),
    [
        ("a:1", Endpoint("a:1")),
        ("a:1 zone=b host=h2", Endpoint("a:1", Place(host="h2", zone="b"))),
        ("[::1]:70  region=r", Endpoint("[::1]:70", Place(region="r"))),
    ],
)
def test_a_line_says_who_and_where(line: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(line) == endpoint
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a", "'a' is not host:port"),
        ("zone=b a:1", "is not host:port"),
        ("a:1 rack=4", "'rack=4' is not one of host=..., region=..., zone=..."),
        ("a:1 zone", "'zone' is not one of"),
        ("a:1 zone=", "'zone=' is not one of"),
        ("a:1 zone=b zone=c", "zone is given twice"),
    ],
)
def test_a_line_that_is_wrong_says_why(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Endpoint.parse(line)


def test_nearer_by_labels_is_nearer() -> None:
    own = Place("h1", "a", "r")
    others = [Place("h1", "a", "r"), Place("h2", "a", "r"), Place("h3", "b", "r"), Place("h4", "c", "s")]
    expected = [own.round_trip_to(other) for other in others]
    assert None not in expected
    assert expected == sorted(set(expected))


@pytest.mark.parametrize(
    ("own", "other"), [(Place(), Place("h", "a", "r")), (Place(zone="a"), Place(host="h")), (Place(), Place())]
)
def test_labels_that_say_nothing_lead_to_no_expectation(own: Place, other: Place) -> None:
    assert own.round_trip_to(other) is None


def test_a_program_knows_its_own_by_configuration_and_by_environment_where_that_is_silent() -> None:
    environment = {"OUTRIDER_ZONE": "b", "OUTRIDER_HOST": "h2"}
    assert Place.own(PlacementConfig(zone="a"), environment) == Place(host="h2", zone="a")
    assert Place.own(PlacementConfig(), {}) == Place()
