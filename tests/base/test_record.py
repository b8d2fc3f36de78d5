"""Records behave as frozen dataclasses do."""

from __future__ import annotations

import pickle

import pytest

from launcher.base.record import Record


class Point(Record):
    """A place."""

    x: int
    y: int = 2


class Size(Record):
    """Of the same shape as a Point."""

    x: int
    y: int = 2


def test_fields_come_by_position_by_name_and_by_default() -> None:
    assert Point(1) == Point(1, 2) == Point(y=2, x=1)
    assert Point(1).as_dict() == {"x": 1, "y": 2}
    assert repr(Point(1)) == "Point(x=1, y=2)"


def test_equal_means_one_kind_and_the_same_values() -> None:
    assert Point(1) != Point(1, 3)
    assert Point(1) != Size(1)
    assert {Point(1), Point(1, 2), Size(1)} == {Point(1), Size(1)}


@pytest.mark.parametrize(("values", "named"), [((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})])
def test_what_fits_no_field_is_an_error(values: tuple[int, ...], named: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="Point has the fields"):
        Point(*values, **named)


def test_records_do_not_change_and_can_be_copied() -> None:
    point = Point(1)
    with pytest.raises(AttributeError, match="Point is immutable"):
        point.x = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(point)) == point
