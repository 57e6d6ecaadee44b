"""The kernels of a program that XLA compiled for a GPU, and the bytes that each reads and writes.

On a GPU every fusion, copy, product or library call in the optimized program is a kernel, which
reads its operands from device memory and writes its results there. Caches may save traffic, and
without a GPU nothing is autotuned, so these counts are not bounds of time.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_OPERAND = re.compile(r"%([\w.-]+)")
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # f32[2,3]; pred is one byte
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
# On an H200 copies reach 3.2 of the data sheet's 4.8 TB/s (benchmarks/results/gpu.json), and
# ELECTRA-Base's products 700 of 989 TFLOP/s (gpu_unroll.json). LAUNCH_SECS is per kernel.
MEMORY_SHARE, PRODUCT_SHARE, LAUNCH_SECS = 2 / 3, 0.7, 1.3e-6
# Instructions that move no data: they name buffers or parts of them.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id"
  " add-dependency".split()
)
_CALLS = frozenset(("while", "call", "async-start", "conditional"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand with the new values


class Kernel(NamedTuple):
  """A kernel of a step."""

  name: str
  times: int  # launches per step
  moved: float  # bytes read and written per launch
  flops: int  # of matrix products, per launch


class _Instruction(NamedTuple):
  name: str
  result: str  # its type
  opcode: str
  inside: str  # the text in its parentheses
  attributes: str
  is_root: bool

  @property
  def operands(self) -> list[str]:
    return _OPERAND.findall(self.inside)


_Computation = dict[str, _Instruction]


def arrays_of(text: str) -> list[tuple[tuple[int, ...], int]]:
  """Returns the shape and the bytes of every array in a type.

  >>> arrays_of("(f32[2,3]{1,0}, bf16[4]{0}, pred[])")
  [((2, 3), 24), ((4,), 8), ((), 1)]
  """
  found = []
  for bits, axes in _SHAPE.findall(text):
    shape = tuple(int(n) for n in axes.split(",") if n)
    found.append((shape, int(bits or 8) * math.prod(shape) // 8))
  return found


def kernels(text: str) -> list[Kernel]:
  """Returns the kernels of a GPU program, from its optimized HLO text.

  Kernels in a loop are multiplied by its trip count, 1 if unknown. A fusion reads only the part of
  an operand selected by `dynamic-slice`, `slice` or `gather`. An in-place update
  (`dynamic-update-slice`, `scatter`) writes only the new values.
  """
  computations, entry = _parse(text)
  return list(_walk(computations, entry, 1))


def moved_bytes(found: Iterable[Kernel]) -> float:
  """Returns the bytes that kernels read and write in a step."""
  return sum(k.times * k.moved for k in found)


def launches(found: Iterable[Kernel]) -> int:
  """Returns the number of kernels that a step launches."""
  return sum(k.times for k in found)


def estimate_secs(found: Iterable[Kernel], memory_rate: float, peak: float) -> float:
  """Estimates the seconds of a step, kernel after kernel, from a data sheet's rates.

  Fitted to ELECTRA-Small and Base on an H200 only (docs/preflight.md).
  """
  memory, products = MEMORY_SHARE * memory_rate, PRODUCT_SHARE * peak
  return sum(k.times * (max(k.moved / memory, k.flops / products) + LAUNCH_SECS) for k in found)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
  """Returns a program's computations by name, and the name of its entry."""
  computations, entry, current = {}, "", {}
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = computations[header[2]] = {}
      entry = header[2] if header[1] else entry
    elif line.startswith(" ") and " = " in line:
      found = _instruction(line.strip())
      current[found.name] = found
  return computations, entry


def _instruction(line: str) -> _Instruction:
  name, _, rest = line.removeprefix("ROOT ").partition(" = ")
  end = _closing(rest) if rest.startswith("(") else rest.index(" ")
  result, rest = rest[:end], rest[end:].strip()
  opcode, end = rest[: rest.index("(")], _closing(rest)
  inside = rest[len(opcode) + 1 : end - 1]
  return _Instruction(name[1:], result, opcode, inside, rest[end:], line.startswith("ROOT "))


def _closing(text: str) -> int:
  """Returns the index after the parenthesis that closes the first."""
  depth = 0
  for place, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if letter == ")" and not depth:
      return place + 1
  raise ValueError(f"unclosed parenthesis in HLO: {text[:80]}")


def _walk(computations: dict[str, _Computation], name: str, times: int) -> Iterator[Kernel]:
  """Yields the kernels of a computation that runs `times` times."""
  within = computations[name]
  for found in within.values():
    called = [name for name in _OPERAND.findall(found.attributes) if name in computations]
    if found.opcode in _CALLS:
      trips = _TRIPS.search(found.attributes)
      for inner in called:
        yield from _walk(computations, inner, times * int(trips[1] if trips else 1))
    elif found.opcode not in _FREE and not found.opcode.endswith("-done"):
      body = computations[called[0]] if found.opcode == "fusion" else _alone(found, within)
      flops = sum(_product_flops(i, body) for i in body.values())
      yield Kernel(found.name, times, _moved(found, within, body), flops)


def _alone(found: _Instruction, within: _Computation) -> _Computation:
  """Returns the body of a fusion of a single instruction."""
  parameters = {
    name: within[name]._replace(opcode="parameter", inside=f"{place}", is_root=False)
    for place, name in enumerate(found.operands)
  }
  return parameters | {found.name: found._replace(is_root=True)}


def _moved(found: _Instruction, within: _Computation, body: _Computation) -> float:
  """Returns the bytes that a kernel with the computation `body` reads and writes."""
  operands = [arrays_of(within[name].result) for name in found.operands]
  outputs = arrays_of(found.result)
  if found.opcode == "custom-call":  # the results include a library's scratch memory, in bytes
    outputs = outputs[:1] + [o for o in outputs[1:] if f"s8[{o[1]}]" not in found.result]
  if found.opcode.endswith("-start"):  # its type has more than the results, which are as large
    outputs = [array for operand in operands for array in operand]
  read = _read_shares(body)
  written = [_written_share(body, name) for name in _roots(body)]
  shares = written if len(written) == len(outputs) else [1.0] * len(outputs)
  moved = [read.get(place, 0) * size for place, op in enumerate(operands) for _, size in op]
  return sum(moved + [share * size for (_, size), share in zip(outputs, shares, strict=True)])


def _roots(body: _Computation) -> list[str]:
  """Returns the names of a fusion's results, looking through bitcasts."""
  root = next(i for i in body.values() if i.is_root)
  names = root.operands if root.opcode == "tuple" else [root.name]
  return [_behind_bitcasts(body, name) for name in names]


def _behind_bitcasts(body: _Computation, name: str) -> str:
  while body[name].opcode == "bitcast":
    (name,) = body[name].operands
  return name


def _elements(found: _Instruction) -> int:
  return sum(math.prod(shape) for shape, _ in arrays_of(found.result))


def _in_place(body: _Computation, name: str, roots: list[str]) -> bool:
  """Returns whether an instruction updates an operand of a fusion in place."""
  found = body[name]
  if found.opcode not in _UPDATES or name not in roots:
    return False
  return body[_behind_bitcasts(body, found.operands[0])].opcode == "parameter"


def _written_share(body: _Computation, name: str) -> float:
  """Returns the written share of a result."""
  found = body[name]
  if not _in_place(body, name, _roots(body)):
    return 1.0
  return _elements(body[found.operands[_UPDATES[found.opcode]]]) / _elements(found)


def _read_shares(body: _Computation) -> dict[int, float]:
  """Returns the share of each operand that a fusion reads."""
  roots, shares = _roots(body), dict.fromkeys(body, 0.0)
  for found in reversed(body.values()):  # each after its operands
    used = 1.0 if found.is_root else min(1.0, shares[found.name])
    for place, name in enumerate(found.operands):
      part = used
      if place == 0 and found.opcode in _SLICES:
        part *= _elements(found) / _elements(body[name])
      elif place == 0 and _in_place(body, found.name, roots):
        # Scatter adds to the old values, so it reads them.
        part = _written_share(body, found.name) if found.opcode == "scatter" else 0.0
      if name in shares:
        shares[name] += part
  parameters = (i for i in body.values() if i.opcode == "parameter")
  return {int(i.inside): min(1.0, shares[i.name]) for i in parameters}


def _product_flops(found: _Instruction, body: _Computation) -> int:
  """Returns the FLOPs of a matrix product, 0 for other instructions."""
  contracted = _CONTRACTED.search(found.attributes)
  if not contracted or not found.operands:
    return 0
  shape, output = (arrays_of(i.result)[0][0] for i in (body[found.operands[0]], found))
  axes = re.findall(r"\d+", contracted[1])
  return 2 * math.prod(output) * math.prod(shape[int(axis)] for axis in axes)
