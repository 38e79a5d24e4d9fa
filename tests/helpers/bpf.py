"""Filters of system calls, run without the kernel."""

import struct
from typing import Any


def judge(program: bytes, number: int, architecture: int, arguments: tuple[int, ...]) -> int:
    """Return what the kernel would do, in slow motion."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *padded)
    steps: list[tuple[int, int, int, int]] = list(struct.iter_unpack("=HBBI", program))
    accumulator: Any = 0
    place = 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                place += if_true if accumulator == operand else if_false
            case 0x35:
                place += if_true if accumulator >= operand else if_false
            case _:
                return operand
