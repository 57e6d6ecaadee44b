"""Writes exports of networks, and compares them with transformers and onnxruntime."""

import dataclasses
import functools
import importlib.util
import math
import pydoc_data.topics
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from electra_jax.core import networks as nets
from electra_jax.core import params
from electra_jax.core.batch import Batch, from_rows
from electra_jax.core.heads import HEADS
from electra_jax.core.task_network import EXPORT_FORMS
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.export.card import model_card
from electra_jax.finetune.prepare import TASK_KINDS
from electra_jax.finetune.task_data import TaskInfo
from electra_jax.interop import hub, huggingface, onnx, sources
from electra_jax.interop.huggingface import FLOAT32, Storage
from electra_jax.interop.sources import ExchangeError, Network, Source
from electra_jax.interop.weights import label_fields
from electra_jax.monitor.display import doing
from electra_jax.pretrain import start
from electra_jax.runtime import bucket, parallel
from electra_jax.runtime.checkpoint import FOLDER, steps_on_disk
from electra_jax.runtime.workdir import new_folder

# Allowed difference of float32 logits, as libraries sum in different orders: a share of their
# standard deviation (measured: up to 7e-6; 8e-4 with the wrong GELU, by tanh) or, if all logits are
# nearly equal, a share of the largest. Weights of a large scale amplify rounding: their logits may
# differ by LAST_BITS times what the last bit of every weight changes (measured: up to 18).
TOLERANCE, ROUNDING, LAST_BITS = 5e-5, 1e-5, 40


def logits(network: Network, batch: Batch) -> np.ndarray:
  """Returns the float32 logits of a network's head: [B, L], [B, L, V or C], or [B, C] for texts.

  Without a head, returns the states [B, L, D].
  """
  cfg, weights, name = network.cfg, network.weights, network.head
  states = nets.encode(cfg, weights, batch.ids, batch, None)
  if name is None:
    return np.asarray(states)
  if form := EXPORT_FORMS.get(name):
    return np.asarray(form.logits(cfg, weights[name], states, batch.padding_mask))
  if HEADS[name].predicts_words:
    return np.asarray(nets.vocabulary_logits(cfg, weights, states))
  return np.asarray(nets.token_logits(cfg, weights, name, states))


def with_task_head(source: Source) -> tuple[Network, tuple[str, ...], tuple[float, float] | None]:
  """Returns a fine-tuned network with its task's head in the form of Hugging Face's class.

  Returns:
    The network, without the head if Hugging Face has no equivalent; the class names or (); the
    scale and the offset from the logit to the label, None unless the label is a number.
  """
  network, finetuned = source.networks["discriminator"], source.finetuned
  info = TaskInfo.from_json(finetuned.info)
  head = info.head.make().export
  if head is None or head not in huggingface.family_of(network.cfg).classes:
    return network, (), None
  weights, kind = {**network.weights, head: finetuned.head}, TASK_KINDS[info.kind]
  network = dataclasses.replace(network, weights=weights, head=head)
  return network, kind.class_names(info), kind.unit(info)


def trained_pooling(source: Source) -> str | None:
  """Returns the pooling of a network fine-tuned to embed texts, else None."""
  if not source.finetuned:
    return None
  info = TaskInfo.from_json(source.finetuned.info)
  return TASK_KINDS[info.kind].pooling(info)


def in_unit(network: Network, unit: tuple[float, float]) -> Network:
  """Returns the network with the last layer of its task head in the unit (scale, offset)."""
  head, last = network.weights[network.head], EXPORT_FORMS[network.head].layers.last
  scaled = jax.tree.map(lambda x: np.asarray(x) * np.float32(unit[0]), head[last])
  scaled["bias"] += np.float32(unit[1])
  weights = {**network.weights, network.head: {**head, last: scaled}}
  return dataclasses.replace(network, weights=weights)


def rounded(network: Network, dtype: str) -> Network:
  """Returns the network with weights rounded to a dtype, in float32."""
  weights = jax.tree.map(
    lambda x: np.asarray(x, jnp.dtype(dtype)).astype(np.float32), network.weights
  )
  return dataclasses.replace(network, weights=weights)


def lengths(cfg: TransformerConfig) -> list[int]:
  """Returns the text lengths at which a network is compared with transformers.

  128 and 600 tokens, and two windows if longer; at most 1,024 and the number of positions.

  >>> lengths(TransformerConfig(9, 8, 8, 1, 1, 8, 8192, window=400))
  [128, 600, 800]
  """
  wanted = (128, 600, max(600, 2 * cfg.window))
  return sorted({min(length, 1024, cfg.max_positions) for length in wanted})


def real_text(tokens: Tokenizer, length: int) -> Batch:
  """Returns two to eight rows of Python's documentation, of at most `length` tokens."""
  vocab, count = tokens.vocab, min(8, max(2, 1024 // length))
  topics = sorted(pydoc_data.topics.topics.values(), key=len)[-count:]
  encoded = tokens.encode_batch([topic[: 16 * length] for topic in topics])
  rows = [
    [vocab.cls, *ids[: length - 2 - i * length // (2 * count)], vocab.sep]
    for i, ids in enumerate(encoded)  # different lengths, to test padding
  ]
  return from_rows(rows, (count, length), vocab.pad)


def without_padding(logits: np.ndarray, head: str | None, batch: Batch) -> np.ndarray:
  """Drops padding from a head's logits or their differences, unless they are pooled."""
  form = EXPORT_FORMS.get(head)
  return logits if form is not None and form.is_pooled else logits[batch.padding_mask]


def largest(logits: np.ndarray, head: str | None, batch: Batch) -> float:
  """Returns the largest absolute value of a head's logits or differences, without padding."""
  return float(np.abs(without_padding(logits, head, batch)).max())


def last_bit(network: Network, batch: Batch) -> float:
  """Returns the largest change of a network's logits if the last bit of every weight changes."""
  draw = np.random.default_rng(0)
  weights = jax.tree.map(
    lambda x: np.nextafter(x, draw.choice(np.float32([-np.inf, np.inf]), np.shape(x))),
    network.weights,
  )
  changed = logits(dataclasses.replace(network, weights=weights), batch)
  return largest(changed - logits(network, batch), network.head, batch)


def check_parity(
  folder: Path,
  head: str | None,
  batch: Batch,
  ours: np.ndarray,
  library: str = "transformers",
  network: Network | None = None,
) -> float:
  """Returns the largest difference between our logits and a library's, padding excluded.

  Args:
    library: transformers or onnxruntime.
    network: the written one, for LAST_BITS.

  Raises:
    ExchangeError: it exceeds TOLERANCE x their standard deviation, ROUNDING x the largest and
      LAST_BITS x `last_bit`.
  """
  compute = onnx.outputs if library == "onnxruntime" else huggingface.torch_outputs
  difference = largest(ours - compute(folder, head, batch), head, batch)
  spread = float(without_padding(ours, head, batch).std())
  tolerance = max(TOLERANCE * spread, ROUNDING * largest(ours, head, batch))
  if network and not difference <= tolerance:
    tolerance = max(tolerance, LAST_BITS * last_bit(network, batch))
  if not difference <= tolerance:
    raise ExchangeError(
      f"nothing exported: logits of {folder.name} differ from {library} by {difference:.2g} on"
      f" {batch.ids.shape[1]} tokens, above the tolerance {tolerance:.2g} (their standard deviation"
      f" is {spread:.2g})"
    )
  return difference


def export_hf(source: Source, out: Path, console: Console, storage: Storage = FLOAT32) -> None:
  """Writes a folder for each network, checks its logits and prints a summary."""
  networks, reason, left_out = dict(source.networks), None, list(source.left_out)
  if trained := trained_pooling(source):
    if storage.pooling not in (None, trained):
      raise ExchangeError(f"pooling={storage.pooling} differs from training: leave it out")
    storage = storage._replace(pooling=trained)
  folders: dict[str, Network] = {}
  if {"discriminator", "generator"} <= networks.keys():
    try:
      generator = networks["generator"]
      huggingface.check_form(generator.cfg, generator.head, generator.decodes)
    except ExchangeError as error:
      reason = error
      del networks["generator"]
  for role, network in networks.items():
    family, head = huggingface.family_of(network.cfg), network.head
    if source.finetuned or (head in family.classes and not family.is_shared(head)):
      folders[role] = network
      continue
    # A head whose class is also for fine-tuning would be loaded as the new task's head.
    folders[role] = network.without_head()
    if head in family.classes:
      folders[sources.DETECTOR] = network
    else:
      left_out.append(f"the {role}'s {head}")
  needed = _bytes(folders.values(), storage.dtype) * (1 + storage.onnx)
  with new_folder(out, needed) as folder:
    for name, network in folders.items():
      _write_hf(folder / name, network, source, console, storage)
  if reason:
    console.print(f"not exported: the generator: {reason}")
  for what in left_out:
    console.print(f"not exported: {what} (not read, or without a class in Hugging Face)")


def _write_hf(
  folder: Path, network: Network, source: Source, console: Console, storage: Storage
) -> None:
  """Writes a network to a new folder named after its role, checks it and prints the result."""
  role, tokens, family = folder.name, source.tokenizer, huggingface.family_of(network.cfg)
  others, labels, unit = {}, (), None
  if source.finetuned:
    network, labels, unit = with_task_head(source)
  written = network if unit is None else in_unit(network, unit)
  others |= label_fields(labels)
  # A generator alone is a masked language model.
  if role != "generator" and (trained := source.training) is not None:
    others[huggingface.TRAINING] = trained
  if tokens:
    others |= {field: getattr(tokens.vocab, x) for field, x in family.token_ids.items()}
  if unit is not None:  # so that pipelines of transformers return the logit
    others["problem_type"] = "regression"
  folder.mkdir()
  pad = tokens.vocab.pad if tokens else 0
  with doing(f"writing the {role}"):
    huggingface.save(folder, written.cfg, written.weights, written.head, pad, others, storage)
    has_tokenizer = tokens is not None and huggingface.save_tokenizer(
      folder, tokens, network.cfg.max_positions, family.token_types
    )
  embeds = trained_pooling(source) is not None
  if storage.pooling and role == source.main:
    if not has_tokenizer:
      raise ExchangeError("leave out pooling: AutoTokenizer does not support the tokenizer")
    width = network.cfg.hidden_size
    huggingface.save_sentence_transformer(folder, width, storage.pooling, normalize=embeds)
  if tokens and not has_tokenizer:
    tokens.save(folder)
    kind, file = tokens.vocab.kind, tokens.vocab.file
    console.print(f"{role}: AutoTokenizer does not support this {kind}; exported {file}")
  card = functools.partial(model_card, role, network, source, has_tokenizer, storage)
  (folder / "README.md").write_text(card(), "utf-8")
  if storage.repo and role == source.main:
    (folder.parent / "README.md").write_text(card(repo=storage.repo), "utf-8")
  pair = network, written
  if network.head and not family.computes(network.head):
    pair = network.without_head(), written.without_head()
  found = _compare(folder, *pair, source, unit, storage.dtype)
  if storage.onnx:
    found += _write_onnx(folder, pair[1], source)
  count = f"{params.count(network.weights) / 1e6:,.2f} M"
  console.print(f"{role}: {family.classes[network.head]}, {count}, {found}")
  gaps = [f"its {network.head}, which is in the file"] if pair[0] is not network else []
  gaps += ["its mask decoder: other words for [MASK]"] if network.decodes else []
  for gap in gaps:
    console.print(f"{role}: transformers does not compute {gap}")
  if source.finetuned and network.head is None and not embeds:
    task = source.finetuned.info
    console.print(
      f"{role}: exported only the encoder: Hugging Face has no head for {task['kind']} with"
      f" {task['head']['arguments']}"
    )


def _compare(
  folder: Path,
  network: Network,
  written: Network,
  source: Source,
  unit: tuple[float, float] | None,
  dtype: str,
) -> str:
  """Checks the logits of a written network and describes the differences."""
  lacking = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
  is_there = not lacking
  is_rounded, role, head = dtype != "float32", folder.name, network.head
  needed = ["a tokenizer"] if source.tokenizer is None else lacking
  line = f"not compared with transformers (needs {' and '.join(needed)})"
  if source.tokenizer is None or not (is_there or is_rounded):
    return line
  with doing(f"comparing the {role} with {'transformers' if is_there else 'its float32 weights'}"):
    there = rounded(written, dtype) if is_rounded else written
    differences, changes, sizes = [], [], []
    scale, offset = unit or (1.0, 0.0)
    for length in lengths(network.cfg):
      batch = real_text(source.tokenizer, length)
      exact = logits(network, batch) * scale + offset
      ours = logits(there, batch) if is_rounded else exact
      differences += [check_parity(folder, head, batch, ours, network=there)] if is_there else []
      changes.append(largest(ours - exact, head, batch))
      sizes.append(largest(exact, head, batch))
  if is_there:
    compared = " and ".join(map(str, lengths(network.cfg)))
    line = f"logits within {max(differences):.1e} of transformers on real text"
    line += f" of {compared} tokens{'' if unit is None else ', in the unit of the labels'}"
  if is_rounded:
    line += f"; rounding to {dtype} changed logits by up to {max(changes):.1e}"
    line += f" (largest logit {max(sizes):.2g})"
  return line


def _write_onnx(folder: Path, network: Network, source: Source) -> str:
  """Writes a network's model.onnx, checks it and describes the difference.

  Checks two batches of different sizes, one longer than the window of local attention.
  """
  head, longest = network.head, max(128, 2 * network.cfg.window)
  batch = real_text(source.tokenizer, min(longest, network.cfg.max_positions))
  second = np.arange(batch.ids.shape[1]) >= batch.ids.shape[1] // 2
  batch = batch._replace(token_type_ids=(second & batch.padding_mask).astype(np.int32))
  fewer = jax.tree.map(lambda x: x[:3], real_text(source.tokenizer, batch.ids.shape[1] // 3))
  with doing(f"writing the {folder.name}'s {onnx.FILE}"):
    names = onnx.save(folder, head, batch)
    difference = max(
      check_parity(folder, head, some, logits(network, some), "onnxruntime", network)
      for some in (batch, fewer)
    )
  with (folder / "README.md").open("a", encoding="utf-8") as card:
    card.write(
      f"\n`{onnx.FILE}` is the same network for onnxruntime: {names}, any batch size and length\n"
    )
  return f", within {difference:.1e} of onnxruntime"


def _bytes(networks: Iterable[Network], dtype: str = "float32") -> int:
  return jnp.dtype(dtype).itemsize * sum(params.count(network.weights) for network in networks)


def run(
  path: str,
  out: str | Path,
  form: str,
  console: Console,
  *,
  heads: tuple[int, ...] = (),
  weights_license: str | None = None,
  step: int | None = None,
  all_checkpoints: bool = False,
  push: str | None = None,
  overwrite: bool = False,
  **storage,
) -> None:
  """Exports the networks of a source to a new folder, as `write`.

  Args:
    out: the folder, or a URL of gs:// or s3:// to which the complete folder is uploaded.
    path, heads: as in `sources.open_source`.
    weights_license: for the model card.
    step: of a run, 0 for its start; None: the newest.
    all_checkpoints: export step 0 and every checkpoint of a run to folders in `out`, such as
      step-00000650.
    push: ORG/NAME of a repository on the Hub, to which `out` is pushed in one commit.
    overwrite: whether a push replaces the repository's files.
  """

  def export(step: int | None, to: Path) -> None:
    of_run = start.read_initial if step == 0 else functools.partial(sources.read_run, step=step)
    with doing("reading"):
      source = sources.open_source(path, heads, None if step is None else of_run)
    if hub.is_name(name):
      source.card["origin"] = name
    if all_checkpoints:
      console.print(f"step {step:,}:")
    if weights_license:
      source.card["license"] = weights_license
    write(source, to, form, console, repo=push, **storage)

  with bucket.uploaded(out) as place:
    if place.exists():
      raise ExchangeError(f"{out} exists: choose another name")
    if push:
      hub.claim(push, overwrite)
    name = hub.pinned(path)
    path = bucket.local(name, step, all_checkpoints)
    if all_checkpoints:
      with new_folder(place) as folder:
        for step in (0, *steps_on_disk(path / FOLDER)):
          try:
            export(step, folder / f"step-{step:08d}")
          except ValueError as error:
            if step or not sources.is_run(path):
              raise
            console.print(f"not exported: step 0: {error}")  # its initial weights may be gone
    else:
      export(step, place)
    if push:
      with doing("pushing"):
        pushed = hub.push(place, push)
  console.print(f"exported to {out}")
  if push:
    console.print(f"pushed to {pushed} (private, unless made public)")


def write(
  source: Source,
  out: Path,
  form: str,
  console: Console,
  *,
  dtype: str = "float32",
  max_shard_mb: float = math.inf,
  pooling: str | None = None,
  repo: str | None = None,
) -> None:
  """Exports the networks of an opened source.

  Args:
    out: a new folder.
    form: hf, onnx (hf with model.onnx) or orbax.
    dtype, max_shard_mb: for hf, the dtype of the weights, and the size of a file in 10^6 bytes.
    pooling: for hf, a key of `huggingface.POOLINGS` to write the main network for
      sentence-transformers, or None.
    repo: for hf, ORG/NAME on the Hub, to write its model card.

  Raises:
    ExchangeError, ValueError: `out` exists, the format does not support the networks, or a package
      for onnx is missing.
  """
  if form == "onnx":
    onnx.check_packages()
    if source.tokenizer is None:
      raise ExchangeError("an ONNX export needs a tokenizer: add it to the folder of the weights")
  with parallel.full_precision():
    if form == "orbax":
      export_orbax(source, out, console)
    else:
      storage = Storage(dtype, max_shard_mb * 10**6, pooling, form == "onnx", repo)
      export_hf(source, out, console, storage)


def export_orbax(source: Source, out: Path, console: Console) -> None:
  """Writes the discriminator for fine-tuning and prints what is left out."""
  if "discriminator" not in source.networks:
    raise ExchangeError("an orbax export needs a discriminator, which the source does not have")
  needed = _bytes([source.networks["discriminator"]])
  with new_folder(out, needed) as folder, doing("writing"):
    sources.save_orbax(folder, source)
  written = ("discriminator", sources.MASKED_LM)
  others = (f"the {role}" for role in source.networks if role not in written)
  for what in (*source.left_out, *others):
    console.print(f"not exported: {what}")
