"""Whether things can be paired with what is expected, in any order."""

from collections.abc import Sequence


def is_assignable(fits: Sequence[Sequence[bool]], num_expected: int) -> bool:
    """
    Whether every thing can be given a place of its own, and no place stays empty.

    Args:
        fits (`Sequence[Sequence[bool]]`):
            For each thing, whether it fits each of the expected ones.
        num_expected (`int`):
            How many are expected.

    Returns:
        `bool`: Whether they can.
    """
    owners: dict[int, int] = {}

    def place(thing: int, tried: set[int]) -> bool:
        for expected, is_fit in enumerate(fits[thing]):
            if is_fit and expected not in tried:
                tried.add(expected)
                if expected not in owners or place(owners[expected], tried):
                    owners[expected] = thing
                    return True
        return False

    return len(fits) == num_expected and all(place(thing, set()) for thing in range(len(fits)))
