"""Checkpoints as the original writes them, for the tests that read them."""

import dataclasses
from pathlib import Path

import numpy as np

from electra_jax.interop import sources


def write_tf1(prefix: Path, tensors: dict) -> None:
  import tensorflow as tf

  names = list(tensors)
  tf.raw_ops.SaveV2(
    prefix=str(prefix), tensor_names=names, shape_and_slices=[""] * len(names),
    tensors=[tf.constant(tensors[n]) for n in names],
  )  # fmt: skip


def tf1_tensors(cfg, weights, encoder: str, predictions: str) -> dict:
  """The original's variables, laid out here independently of the table: [in, out] kernels."""
  e, layers = weights["embeddings"], weights["encoder"]["layers"]
  D = cfg.hidden_size
  t = {
    "electra/embeddings/word_embeddings": e["word"],
    "electra/embeddings/position_embeddings": e["position"],
    "electra/embeddings/token_type_embeddings": e["token_type"],
    "electra/embeddings/LayerNorm/gamma": e["layer_norm"]["scale"],
    "electra/embeddings/LayerNorm/beta": e["layer_norm"]["bias"],
  }
  if "project" in weights["encoder"]:
    t[f"{encoder}/embeddings_project/kernel"] = weights["encoder"]["project"]["kernel"]
    t[f"{encoder}/embeddings_project/bias"] = weights["encoder"]["project"]["bias"]
  for i in range(cfg.num_layers):
    at = f"{encoder}/encoder/layer_{i}"
    for j, name in enumerate(("query", "key", "value")):
      t[f"{at}/attention/self/{name}/kernel"] = layers["qkv"]["kernel"][i, :, j].reshape(D, D)
      t[f"{at}/attention/self/{name}/bias"] = layers["qkv"]["bias"][i, j].reshape(D)
    t[f"{at}/attention/output/dense/kernel"] = layers["attention_output"]["kernel"][i].reshape(D, D)
    t[f"{at}/attention/output/dense/bias"] = layers["attention_output"]["bias"][i]
    for ours, theirs in (("ffn_in", "intermediate"), ("ffn_output", "output")):
      t[f"{at}/{theirs}/dense/kernel"] = layers[ours]["kernel"][i]
      t[f"{at}/{theirs}/dense/bias"] = layers[ours]["bias"][i]
    for ours, theirs in (("attention_norm", "attention/output"), ("ffn_norm", "output")):
      t[f"{at}/{theirs}/LayerNorm/gamma"] = layers[ours]["scale"][i]
      t[f"{at}/{theirs}/LayerNorm/beta"] = layers[ours]["bias"][i]
  if "rtd_head" in weights:
    for ours, theirs in (("dense", "dense"), ("logit", "dense_1")):
      for part in ("kernel", "bias"):
        t[f"{predictions}/{theirs}/{part}"] = weights["rtd_head"][ours][part]
  else:
    for part in ("kernel", "bias"):
      t[f"{predictions}/dense/{part}"] = weights["mlm_head"]["dense"][part]
    t[f"{predictions}/LayerNorm/gamma"] = weights["mlm_head"]["layer_norm"]["scale"]
    t[f"{predictions}/LayerNorm/beta"] = weights["mlm_head"]["layer_norm"]["bias"]
    t[f"{predictions}/output_bias"] = weights["mlm_head"]["bias"]
  return t


def save_tf1(prefix: Path, source: sources.Source, tied: bool = False) -> Path:
  """Writes a checkpoint of the original; its encoder has another scope where it is not `tied`."""
  prefix.parent.mkdir(parents=True, exist_ok=True)
  tensors = {"global_step": np.int64(7)}
  for role, network in source.networks.items():
    scope = "electra" if tied or role == "discriminator" else "generator"
    tensors |= tf1_tensors(network.cfg, network.weights, scope, f"{role}_predictions")
  write_tf1(prefix, tensors)
  if source.tokenizer:
    source.tokenizer.save(prefix.parent)
  return prefix


def same_embeddings(source: sources.Source, encoder: bool = False) -> sources.Source:
  """Gives the generator the discriminator's tables, and encoder, as the original ties them."""
  main, generator = source.networks.values()
  shared = {k: main.weights[k] for k in ("embeddings", *(["encoder"] if encoder else []))}
  generator = dataclasses.replace(generator, weights={**generator.weights, **shared})
  return dataclasses.replace(source, networks={"discriminator": main, "generator": generator})
