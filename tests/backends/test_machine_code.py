"""The check of machine code for Hopper: which descriptors of tiles it calls wrong."""

import pytest

from tests.backends.machine_code import wrong_descriptors

AFTER = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", "EXIT"]


def code(*instructions):
    """Returns instructions as cuobjdump prints them."""
    lines = [f"        /*{16 * i:04x}*/                   {x} ;    /* 0x0 */" for i, x in enumerate(instructions)]
    return "\n".join(lines).replace("                   @", "              @")


@pytest.mark.parametrize(
    ("upper_halves", "is_right"),
    [
        (["UMOV UR9, 0x40000040", "UMOV UR11, 0x40000040"], True),
        (["UMOV UR9, UR5", "UMOV UR11, 0x40000040"], False),  # not known
        (["UMOV UR9, URZ", "UMOV UR11, 0x40000040"], False),
        (["UIADD3.X UR9, URZ, 0x40000040, URZ, UP0, !UPT", "UMOV UR11, UR9"], True),
        (["UIADD3.X UR9, UR8, 0x40000040, URZ, UP0, !UPT", "UMOV UR11, UR9"], False),  # the zero has been left out
        (["UMOV UR7, 0x40000040", "UIADD3.64 UR8, UR6, 0x80, URZ", "UMOV UR11, UR9"], True),
        (["MOV R9, 0x40000040", "STL [R1+0x8], R9", "LDL R8, [R1+0x8]", "R2UR UR9, R8", "R2UR UR11, R8"], True),
    ],
)
def test_upper_halves(upper_halves, is_right):
    assert wrong_descriptors(code("R2UR UR8, R4", *upper_halves, *AFTER)) == (
        [] if is_right else [16 * (1 + len(upper_halves))]
    )


@pytest.mark.parametrize("other", ["UMOV UR9, 0x40000040", "UMOV UR10, UR8"])
def test_both_branches(other):
    """A value has to be there whichever branch was taken."""
    branches = ["@!P0 BRA 0x0040", "UMOV UR9, 0x40000040", "BRA 0x0050", other]
    expected = [] if other.startswith("UMOV UR9") else [0x50]
    assert wrong_descriptors(code("UMOV UR11, 0x40000040", *branches, *AFTER)) == expected


def test_a_swap_by_exclusive_ors():
    swap = ["ULOP3.LUT UR9, UR9, UR8, URZ, 0x3c, !UPT", "ULOP3.LUT UR8, UR8, UR9, URZ, 0x3c, !UPT"]
    before = ["R2UR UR9, R4", "UMOV UR8, 0x40000040", "UMOV UR11, 0x40000040"]
    assert wrong_descriptors(code(*before, *swap, swap[0], *AFTER)) == []
    assert wrong_descriptors(code(*before, *swap, *AFTER)) == [0x50]
