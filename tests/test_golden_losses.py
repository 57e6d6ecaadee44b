"""Every configuration trains as it did when `tests/golden/losses.json` was written."""

import json
from pathlib import Path

import pytest
from golden import losses

EXPECTED = json.loads((Path(losses.__file__).parent / "losses.json").read_text())
QUICK = ("small",)


@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in losses.CASES]
)
def test_the_first_five_losses_are_those_on_record(case):
  # Bit for bit on the processor that wrote them; others, and other levels of the compiler's
  # optimization, add up in another order: an ulp of float32 is 6e-8, and Adam's first steps of
  # nearly the sign of a gradient enlarge it.
  assert losses.difference(losses.run(case), EXPECTED[case]) < 1e-5
