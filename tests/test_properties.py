"""Properties of parsers, packing and batching, on inputs that hypothesis generates."""

import io
import itertools
import math
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_jax.core import schedules
from electra_jax.data import examples, plan, pretrain_batches, sources
from electra_jax.data.examples import ExampleSpec
from electra_jax.finetune import batches, tagging

settings.register_profile("quick", derandomize=True, max_examples=60, deadline=None, database=None)
settings.load_profile("quick")
NUMBERS = st.floats(-1e6, 1e6, width=32)
PACKED = ExampleSpec(8, "packed", False, 0.0, 0, 0.0, 0.0, 101, 102, 0)


@given(st.lists(st.tuples(st.integers(0, 10**6), NUMBERS), min_size=1), st.integers(0, 10**6))
def test_a_schedule_that_is_written_is_read_and_stays_between_its_points(points, step):
  points = tuple(sorted((float(x), y) for x, y in points))
  text = ", ".join(f"{x:.0f}={y!r}" for x, y in points)
  assert schedules.parse(text, 10) == points
  # Percent of a million steps are the same positions.
  percent = ",".join(f"{Fraction(int(x), 10**4)}%={y!r}" for x, y in points if x % 10**4 == 0)
  assert schedules.parse(percent, 10**6) == tuple(p for p in points if p[0] % 10**4 == 0)
  value, values = float(schedules.Schedule(0.0, points).at(step)), [y for _, y in points]
  if step >= points[-1][0]:
    assert value == pytest.approx(values[-1], rel=1e-6)
  around = [y for x, y in points if x <= step][-1:] + [y for x, y in points if x > step][:1]
  assert min(around) - 1 <= value <= max(around) + 1  # 1: float32 of a million


@given(st.text("0123456789.%=,-+eE x", max_size=20), st.integers(1, 100))
def test_any_other_text_is_no_schedule_in_one_line(text, steps):
  try:
    points = schedules.parse(text, steps)
  except ValueError as error:
    assert "schedule" in str(error) and "\n" not in str(error)
    return
  assert all(math.isfinite(number) for point in points for number in point)
  assert [x for x, _ in points] == sorted(x for x, _ in points)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.data())
def test_parts_cut_files_of_any_size_into_ranges_that_are_not_empty(sizes, data):
  parts = data.draw(st.integers(1, len(sizes)))
  bounds = plan.cuts(sizes, parts)
  assert len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == len(sizes)
  assert all(a < b for a, b in itertools.pairwise(bounds))


@given(st.text("a é中😀\n", max_size=60), st.integers(8, 20))
def test_lines_of_any_text_are_cut_between_characters_and_lose_nothing(text, limit):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sources, "LINE_BYTES", limit)
    found = list(sources._lines(io.BytesIO(text.encode())))
  assert "".join(line.decode() for line in found) == text
  assert all(0 < len(line) < 2 * limit for line in found)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(5, 20))
def test_parts_of_a_sentence_fit_a_segment_and_lose_nothing(words, length):
  spec = ExampleSpec(length, "segments", True, 0.0, 0, 0.0, 0.0, 101, 102, 0)
  found = list(examples.cut(words, spec))
  assert [word for part in found for word in part] == words
  assert all(0 < len(part) <= (length - 3) // 2 for part in found)


DOCUMENTS = st.lists(st.lists(st.integers(200, 70_000), max_size=40), max_size=12)


@given(DOCUMENTS, st.integers(8, 40), st.data())
def test_packed_records_hold_every_token_in_order_however_it_arrives(documents, length, data):
  spec = ExampleSpec(length, "packed", False, 0.0, 0, 0.0, 0.0, 101, 102, 0)
  dtype = examples.record_dtype(length, 80_000, starts=True)
  cut = data.draw(st.integers(0, len(documents)))
  one, two = (
    examples.stream([[x] for x in part], spec, dtype) for part in (documents[:cut], documents[cut:])
  )
  first, rest = examples.pack(one, spec, dtype)
  second, left = examples.pack(np.concatenate([rest, two]), spec, dtype, last=True)
  records = np.concatenate([first, second])
  assert not len(left)
  whole, _ = examples.pack(np.concatenate([one, two]), spec, dtype, last=True)
  assert records.tobytes() == whole.tobytes()
  numbers, found = examples.document_ids(records), []
  for record, number in zip(records, numbers, strict=True):
    assert number.max() <= max(1, length // 8) and (number > 0).sum() == record["length"] <= length
    for place in range(1, number.max() + 1):
      cls, *tokens, sep = record["ids"][number == place].tolist()
      assert (cls, sep) == (101, 102) and tokens
      found += tokens
  assert found == [token for document in documents for token in document]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20))
def test_tag_windows_of_any_sentence_tag_each_word_once_within_their_room(sizes, room):
  starts = np.concatenate([[0], np.cumsum(np.minimum(sizes, room))])
  bounds = tagging._window_bounds(starts, room)
  tagged = tagging._answered(starts, bounds)
  assert [word for words in tagged for word in words] == list(range(len(sizes)))
  for (begin, end), words in zip(bounds, tagged, strict=True):
    assert 0 < starts[end] - starts[begin] <= room
    assert not words or (begin <= words.start and words.stop <= end)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 9))
def test_buckets_hold_any_lengths_and_an_epoch_has_each_row_once(lengths, most, size):
  lengths = np.array(lengths)
  buckets = batches.bucket_lengths(lengths, most)
  assert len(buckets) <= most and list(buckets) == sorted(set(buckets))
  assert buckets[-1] - batches.ROUND < lengths.max() <= buckets[-1]
  plans = batches.plan_epoch(lengths, buckets, size, seed=1, epoch=2)
  assert sorted(row for p in plans for row in p.rows) == list(range(len(lengths)))
  assert all(lengths[p.rows].max() <= p.length for p in plans)
  assert sum(len(p.rows) < size for p in plans) == bool(len(lengths) % size)
  assert len(plans) == batches.steps_of(len(lengths), size, 1)


PATHS = st.text("ab.é/ @#[]*?,\\:", max_size=12)
ENTRIES = st.builds(
  "{}{}{}".format,
  st.sampled_from(["text:", "jsonl:", "tfds:", "hf:", "python-docs", ""]),
  PATHS,
  st.sampled_from(["", "#text", "@2", "@0.5", "#text@1.5"]),
)


@given(st.lists(ENTRIES, max_size=3).map(",".join))
def test_a_source_that_is_read_is_written_as_it_is_read_again(spec):
  try:
    found = sources.parse(spec)
  except sources.SourceError as error:
    assert "\n" not in str(error)
    return
  for source in found:
    assert (source.target or source.kind == "python-docs") and source.weight > 0
    assert sources.parse(f"{source.text}@{source.weight}") == (source,)


@given(st.text("abcé/._-", min_size=1, max_size=12), st.sampled_from([0.25, 1.0, 2.5]))
def test_a_path_without_special_characters_is_the_target_itself(path, weight):
  first, second = sources.parse(f"text:{path}@{weight}, jsonl:{path}#{path}")
  assert (first.target, first.weight) == (path, weight)
  assert (second.target, second.field, second.weight) == (path, path, 1.0)


@given(
  st.integers(1, 40),
  st.integers(4, 20),
  st.integers(0, 40),
  st.lists(st.integers(0, 40), max_size=5, unique=True),
)
def test_a_run_that_resumes_at_any_step_reads_the_batches_that_it_would_have(
  size, batches_of_epoch, start, skipped
):
  count = size * batches_of_epoch - size // 3

  def rotated(index, seed, last):  # another order in each epoch, without a cipher of 2^16 blocks
    return (index + 7 * seed[0] + 3 * seed[1]) % (last + 1)

  def take(first: int, steps: int, left_out=()) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(pretrain_batches, "index_shuffle", rotated)
      read = pretrain_batches._numpy_indices(count, 5, size, np.arange(size), first, left_out)
      return [index.tolist() for index in itertools.islice(read, steps)]

  assert take(start, 3, skipped) == take(0, start + 3, skipped)[start:]
  kept = [index for number, index in enumerate(take(0, 25)) if number not in skipped]
  assert take(0, 20, skipped) == kept[:20]
  epoch = sum(take(0, -(-count // size)), [])[:count]
  assert sorted(epoch) == list(range(count))


@given(st.text("ab.é @#[]*?,\\:1", min_size=1, max_size=12).filter(lambda x: x not in (".", "..")))
def test_a_path_of_any_name_is_found_by_its_escaped_specification(name):
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, name)
    path.write_text("x\n", encoding="utf-8")
    escaped = sources.escape(str(path))
    first, second = sources.parse(f"text:{escaped}@2.5, text:{escaped}")
    assert (first.weight, second.weight) == (2.5, 1.0)
    assert [file.url for file in sources.files(first)] == [str(path)]
