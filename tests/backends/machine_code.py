"""Reads machine code of Hopper, to check descriptors of tiles, which some assemblers get wrong.

A product of warpgroups (HGMMA) reads tiles in shared memory by descriptors of 64 bits in uniform registers. The upper
32 bits hold the swizzle of a tile and its stride, which are constants. So they are known wherever a product reads them,
if the assembler has put the right values there. That of Triton 3.6 and 3.7 (CUDA 12.8) has left out descriptors on one
of two branches, and zeros to which upper halves are added. Such products read other memory, or none.
"""

import functools
import itertools
import re
from typing import NamedTuple

PREDICATE = re.compile(r"!?U?P[T\d]")
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*(.*?) ;")
LOWER_HALF = 0xFFFF
"""The lower half of a descriptor is less: the upper half borrows if more is subtracted."""
REGISTER = re.compile(r"U?R\d+")


class Instruction(NamedTuple):
    address: int
    guarded: bool
    name: str
    operands: list[str]


class Masked(NamedTuple):
    """The exclusive or of a constant and numbers that are not known."""

    bits: int
    numbers: frozenset[str]


def _masked(x):
    return x if isinstance(x, Masked) else Masked(x, frozenset())


def wrong_descriptors(code):
    """Returns the addresses of products that may read a descriptor whose upper half is not a constant.

    Constants are followed through copies and additions, and over branches. Carries of lower halves count as 0.

    Args:
        code: what `cuobjdump -sass` says of a kernel.
    """
    instructions = [
        Instruction(int(address, 16), bool(guard), name, re.split(r",\s*", operands.replace(".reuse", "")))
        for address, guard, name, operands in LINE.findall(code)
    ]
    blocks = _blocks(instructions)
    known = dict.fromkeys(blocks)  # the constants in registers where a block begins; None where nothing leads to it yet
    for start in blocks:  # the first one, and those that only a branch by a table leads to
        if known[start] is None:
            known[start] = {}
            _follow(start, blocks, known)
    wrong = []
    for start, (body, _) in blocks.items():
        constants = dict(known[start])
        for each in body:
            wrong += [each.address] if each.name.startswith("HGMMA") and not _are_constants(each, constants) else []
            _execute(each, constants)
    return wrong


def _follow(start, blocks, known):
    """Updates the constants of all blocks that a block leads to."""
    waiting = [start]
    while waiting:
        start = waiting.pop()
        body, after = blocks[start]
        constants = dict(known[start])
        for each in body:
            _execute(each, constants)
        for place in after:
            before = known[place]
            merged = constants if before is None else dict(before.items() & constants.items())
            if merged != before:
                known[place] = merged
                waiting.append(place)


def _blocks(instructions):
    """Returns the instructions of each block without branches, and where the blocks after it begin, by its address."""
    targets = {int(x.operands[-1], 16) for x in instructions if x.name == "BRA"}
    starts = {instructions[0].address} | targets
    starts |= {b.address for a, b in itertools.pairwise(instructions) if a.name in ("BRA", "BRX", "EXIT")}
    blocks, body = {}, []
    for each, following in zip(instructions, [*instructions[1:], None], strict=True):
        body.append(each)
        if following is None or following.address in starts:
            after = [int(each.operands[-1], 16)] if each.name == "BRA" else []
            if following is not None and (each.guarded or each.name not in ("BRA", "BRX", "EXIT")):
                after.append(following.address)
            blocks[body[0].address] = body, after
            body = []
    return blocks


def _are_constants(product, constants):
    """Returns whether the upper halves of the descriptors that a product reads are constants, and not 0."""
    first = int(re.search(r"gdesc\[UR(\d+)\]", " ".join(product.operands))[1])
    operands = [3] if re.fullmatch(r"R\d+", product.operands[1]) else [1, 3]
    upper = [constants.get(f"UR{first + i}") for i in operands]
    return all(isinstance(x, int) and x > 0 for x in upper)


def _execute(instruction, constants):
    """Updates the constants that registers and words of the stack hold."""
    name, operands = instruction.name, [x for x in instruction.operands if not PREDICATE.fullmatch(x)]
    target = operands[0] if operands else ""
    if name.startswith("STL"):
        for i in range(_words(name)):
            _set(constants, _word(target, i), _value(_after(operands[1], i), constants), instruction.guarded)
    if not REGISTER.fullmatch(target):
        return
    if name.startswith("LDL"):
        values = [constants.get(_word(operands[1], i)) for i in range(_words(name))]
    elif name == "CS2R" and operands[1] == "SRZ":
        values = [0, 0]
    else:
        _name_unknown(instruction, operands, constants)
        values = [_result(name, operands, constants)]
        if any(part in name for part in (".64", "WIDE")):
            values.append(_upper_half_of_sum(operands, constants) if name == "UIADD3.64" else None)
    for i, value in enumerate(values):
        _set(constants, _after(target, i), value, instruction.guarded)


def _name_unknown(instruction, operands, constants):
    """Gives names to unknown operands of an exclusive or: three of them swap a constant with another number."""
    if _is_exclusive_or(instruction.name, operands):
        for x in operands[1:3]:
            if _value(x, constants) is None:
                constants[x] = Masked(0, frozenset([f"{x} at {instruction.address}"]))


def _is_exclusive_or(name, operands):
    return name in ("ULOP3.LUT", "LOP3.LUT") and operands[4] == "0x3c"


def _result(name, operands, constants):
    """Returns what an instruction computes; None if it is not known."""
    if _is_exclusive_or(name, operands):
        x, y = (_masked(_value(each, constants)) for each in operands[1:3])
        bits, numbers = x.bits ^ y.bits, x.numbers ^ y.numbers
        return Masked(bits, numbers) if numbers else bits
    if name in ("UMOV", "MOV", "R2UR"):
        return _value(operands[1], constants)
    if name in ("IMAD.MOV.U32", "IMAD.U32", "IMAD.X") and operands[1:3] == ["RZ", "RZ"]:
        return _value(operands[3], constants)
    terms = [_value(x, constants) for x in operands[1:4]]
    if len(terms) < 3 or not all(isinstance(x, int) for x in terms):
        return None
    if name in ("UIADD3", "UIADD3.X", "IADD3", "IADD3.X"):
        return sum(terms) & 0xFFFFFFFF
    if name in ("ULOP3.LUT", "LOP3.LUT"):
        table, (x, y, z) = int(operands[4], 16), terms
        rows = [(x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z) for i in range(8) if table >> i & 1]
        return functools.reduce(int.__or__, rows, 0) & 0xFFFFFFFF
    return None


def _words(name):
    """Returns the number of words of 32 bits that an instruction moves."""
    return 4 if ".128" in name else 2 if ".64" in name else 1


def _word(address, i):
    """Returns the name of word i after an address of the stack, such as [R1+0x10]."""
    offset = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", address)
    return f"stack {int(offset[1] or '0', 16) + 4 * i}" if offset else "elsewhere"


def _after(register, i):
    """Returns the i-th register after one."""
    letters, number = re.fullmatch(r"(U?R)(\d+|Z)", register).groups()
    return register if number == "Z" else f"{letters}{int(number) + i}"


def _upper_half_of_sum(operands, constants):
    """Returns the upper half of a sum of 64 bits; numbers have no upper half. A lower half that is added is small."""
    x, y = operands[1:3]
    is_subtracted = y.startswith("-UR")
    y = y.removeprefix("-")
    upper, lower, other = (_value(z, constants) for z in (_after(x, 1), y, _after(y, 1) if "UR" in y else "URZ"))
    if is_subtracted:
        if not isinstance(lower, int) or not isinstance(other, int):
            return None
        other = -other - (lower > LOWER_HALF)
    return (upper + other) & 0xFFFFFFFF if isinstance(upper, int) and isinstance(other, int) else None


def _set(constants, register, value, guarded):
    if value is None or register == "elsewhere" or (guarded and constants.get(register) != value):
        constants.pop(register, None)
    else:
        constants[register] = value


def _value(operand, constants):
    """Returns the constant that an operand is; None if it is not known."""
    if operand in ("RZ", "URZ"):
        return 0
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        return int(operand, 16) & 0xFFFFFFFF
    return constants.get(operand)
