"""Executes the PTX of a kernel on a CPU, thread after thread, and watches every byte that it reads or writes.

It knows integers, branches, parameters and global memory, because page_copy needs no more. Anything else is
an error when the text is read: threads that wait for each other would need another machine than this.
"""

import bisect
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

MAX_STEPS = 1 << 20
"""A thread that takes more is in an endless loop."""


class PtxError(Exception):
    """An instruction that is not known, or one that a GPU would refuse."""


class Range:
    """Bytes at an address. `writes` has how often each was written; None means that none may be."""

    def __init__(self, start: int, content: bytes, *, writable: bool = False) -> None:
        self.start = start
        self.content = bytearray(content)
        self.writes = [0] * len(content) if writable else None


class Memory:
    """All that the kernel may touch; its ranges do not overlap. What can be written cannot be read."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = sorted(ranges, key=lambda each: each.start)
        self._starts = [each.start for each in self._ranges]

    def _find(self, address: int, num_bytes: int, *, write: bool) -> tuple[Range, int]:
        what = f"{num_bytes} bytes {'written' if write else 'read'} at {address:#x}"
        if address % num_bytes:
            raise PtxError(f"misaligned: {what}")
        found = self._ranges[max(0, bisect.bisect_right(self._starts, address) - 1)]
        first = address - found.start
        if not 0 <= first <= len(found.content) - num_bytes or (found.writes is not None) != write:
            raise PtxError(f"outside: {what}")
        return found, first

    def read(self, address: int, num_bytes: int) -> bytes:
        found, first = self._find(address, num_bytes, write=False)
        return bytes(found.content[first : first + num_bytes])

    def write(self, address: int, data: bytes) -> None:
        found, first = self._find(address, len(data), write=True)
        assert found.writes is not None
        found.content[first : first + len(data)] = data
        for index in range(first, first + len(data)):
            found.writes[index] += 1


Registers = dict[str, int]
"""Unsigned values. A literal is a register of its own name, and so is a parameter."""
Action = Callable[[Registers, Memory], None]


class Instruction(NamedTuple):
    """It is left out unless the register `guard` is `wanted`. `target` is the label of a branch."""

    guard: str
    wanted: int
    action: Action | None
    target: str


RETURN = "ret"
BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.floordiv,
    "rem": operator.mod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "shl": operator.lshift, "shr": operator.rshift, "min": min, "max": max,
}  # fmt: skip
COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*);")
PLACE = re.compile(r"\[(%?\w+)(?:\+(-?\d+))?\]")


def _bits(kind: str) -> int:
    if kind not in ("u8", "b8", *(sign + size for sign in "usb" for size in ("16", "32", "64"))):
        raise PtxError(f"unknown type: {kind}")
    return int(kind[1:])


def _as(kind: str) -> Callable[[int], int]:
    """What an unsigned value means as one of that type."""
    bits = _bits(kind)
    mask, sign = (1 << bits) - 1, 1 << (bits - 1)
    if kind[0] != "s":
        return lambda value: value & mask
    return lambda value: ((value & mask) ^ sign) - sign


def _arithmetic(parts: list[str], operands: list[str]) -> Action:
    """add, mul.lo, mad.lo, setp.ge, cvt, …: a value from values."""
    name, *how, kind = parts
    to, *sources = operands
    first, convert, function = sources[0], _as(kind), None
    keep = (1 << _bits(kind)) - 1
    if len(sources) == 2 and name in BINARY and how == (["lo"] if name == "mul" else []):
        function = None if kind[0] == "s" and name in ("div", "rem") else BINARY[name]
    elif len(sources) == 2 and parts[:-1] == ["mul", "wide"]:
        function, keep = operator.mul, (1 << 2 * _bits(kind)) - 1
    elif len(sources) == 2 and name == "setp" and len(how) == 1:
        function = COMPARED.get(how[0])
    elif len(sources) == 3 and parts[:-1] == ["mad", "lo"]:
        return lambda r, _: r.update({to: (r[first] * r[sources[1]] + r[sources[2]]) & keep})
    elif len(sources) == 3 and parts[:-1] == ["selp"]:
        return lambda r, _: r.update({to: r[first if r[sources[2]] else sources[1]] & keep})
    elif len(sources) == 1 and parts[:-1] == ["neg"]:
        return lambda r, _: r.update({to: -r[first] & keep})
    elif len(sources) == 1 and parts[:-1] in (["mov"], ["cvta", "to", "global"]):
        return lambda r, _: r.update({to: r[first] & keep})
    elif len(sources) == 1 and name == "cvt" and len(how) == 1:
        keep = (1 << _bits(how[0])) - 1
        return lambda r, _: r.update({to: convert(r[first]) & keep})
    if function is None:
        raise PtxError(f"unknown: {'.'.join(parts)} {', '.join(operands)}")
    return lambda r, _: r.update({to: int(function(convert(r[first]), convert(r[sources[1]]))) & keep})


def _memory(parts: list[str], operands: list[str]) -> Action:
    """ld and st: of a parameter, or of one or four words of global memory."""
    name, space, *how, kind = parts
    value, place = operands if name == "ld" else reversed(operands)
    found = PLACE.fullmatch(place)
    if found is None or space not in ("param", "global") or not {*how} <= {"cs", "v4"}:
        raise PtxError(f"unknown: {'.'.join(parts)} {place}")
    base, offset, size = found[1], int(found[2] or 0), _bits(kind) // 8
    registers = re.findall(r"%\w+", value)
    if len(registers) != (4 if "v4" in how else 1):
        raise PtxError(f"unknown: {'.'.join(parts)} {value}")
    if space == "param":
        return lambda r, _: r.update({registers[0]: r[base]})

    def load(r: Registers, memory: Memory) -> None:
        data = memory.read(r[base] + offset, size * len(registers))
        for index, register in enumerate(registers):
            r[register] = int.from_bytes(data[index * size : (index + 1) * size], "little")

    def store(r: Registers, memory: Memory) -> None:
        words = ((r[register] & ((1 << 8 * size) - 1)).to_bytes(size, "little") for register in registers)
        memory.write(r[base] + offset, b"".join(words))

    return load if name == "ld" else store


class Kernel:
    """A kernel of a PTX text."""

    def __init__(self, text: str, name: str) -> None:
        head, _, rest = text.partition(f".entry {name}(")[2].partition("{")
        self._parameters = re.findall(r"\.param \.\w+ (\w+)", head)
        self._code: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._literals: set[str] = set()
        for line in rest[: rest.rindex("}")].splitlines():
            self._read(line.partition("//")[0].strip())

    def _read(self, line: str) -> None:
        if not line or line.startswith((".reg ", ".pragma ")):
            return
        if line.endswith(":"):
            self._labels[line[:-1]] = len(self._code)
            return
        found = LINE.fullmatch(line)
        if found is None:
            raise PtxError(f"unknown: {line}")
        parts = found[3].split(".")
        operands = [each.strip() for each in re.split(r",(?![^{]*})", found[4]) if each]
        self._literals.update(each for each in operands if re.fullmatch(r"-?\d+", each))
        action, target = None, ""
        if parts[0] == "bra":
            (target,) = operands
        elif parts == ["ret"]:
            target = RETURN
        elif parts[0] in ("ld", "st"):
            action = _memory(parts, operands)
        else:
            action = _arithmetic(parts, operands)
        self._code.append(Instruction(found[2] or "", 0 if found[1] else 1, action, target))

    def run(
        self, grid: int, threads: int, arguments: Sequence[int], memory: Memory, only: Iterable[int] = ()
    ) -> int:
        """All threads of all blocks, or of the blocks `only`; returns how many instructions they took."""
        given = {name: int(name) for name in self._literals}
        given |= dict(zip(self._parameters, arguments, strict=True))
        given |= {"%nctaid.x": grid, "%ntid.x": threads}
        return sum(
            self._thread({**given, "%ctaid.x": block, "%tid.x": thread}, memory)
            for block in only or range(grid)
            for thread in range(threads)
        )

    def _thread(self, registers: Registers, memory: Memory) -> int:
        at, code = 0, self._code
        for step in range(MAX_STEPS):
            guard, wanted, action, target = code[at]
            at += 1
            if guard and registers[guard] != wanted:
                continue
            if action is not None:
                action(registers, memory)
            elif target == RETURN:
                return step + 1
            else:
                at = self._labels[target]
        raise PtxError("a thread that does not end")
