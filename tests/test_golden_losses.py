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
  # An ulp of float32 is 1.2e-7. Another processor, or another level of the compiler's optimization
  # as in conftest.py, adds up in another order: 3.3e-7 in the worst case measured.
  assert losses.difference(losses.run(case), EXPECTED[case]) < 1e-6
