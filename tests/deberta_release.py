"""A folder with the files of a release of DeBERTaV3, of random weights; needs PyTorch.

  python tests/deberta_release.py FOLDER

Layout: microsoft/deberta-v3-xsmall. The classes of transformers name and shape the tensors; the
detection head and the position table, which transformers lacks, follow Microsoft's modules.
"""

import io
import json
import pydoc_data.topics
import sys
from pathlib import Path

PIECES = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
CONFIG = {
  "model_type": "deberta-v2",
  "attention_probs_dropout_prob": 0.1,
  "hidden_act": "gelu",
  "hidden_dropout_prob": 0.1,
  "hidden_size": 128,
  "initializer_range": 0.02,
  "intermediate_size": 512,
  "max_position_embeddings": 64,
  "relative_attention": True,
  "position_buckets": 16,
  "norm_rel_ebd": "layer_norm",
  "share_att_key": True,
  "pos_att_type": "p2c|c2p",
  "layer_norm_eps": 1e-7,
  "max_relative_positions": -1,
  "position_biased_input": False,
  "num_attention_heads": 2,
  "num_hidden_layers": 4,
  "type_vocab_size": 0,
  "pooler_dropout": 0,
  "pooler_hidden_act": "gelu",
  "pooler_hidden_size": 128,
  "pad_token_id": 0,
}
SPARE = 7  # rows of the word table after [MASK]; the release has 99


def write_spm(path: Path, text: list[str], size: int = 300) -> int:
  """Trains a model like spm.model, with byte fallback and without [MASK]; returns its size."""
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text),
    model_writer=model,
    vocab_size=size,
    hard_vocab_limit=False,
    byte_fallback=True,
    normalization_rule_name="nmt_nfkc",
    minloglevel=2,
    **{f"{role}_id": i for i, role in enumerate(PIECES)},
    **{f"{role}_piece": piece for role, piece in PIECES.items()},
  )
  path.write_bytes(model.getvalue())
  return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


def masked_lm(config: dict, seed: int):
  """Returns transformers' masked LM with the release's head, of random weights."""
  import torch
  from transformers import DebertaV2Config, DebertaV2ForMaskedLM

  torch.manual_seed(seed)
  network = DebertaV2ForMaskedLM(DebertaV2Config(**config, legacy=False)).eval()
  with torch.no_grad():
    for weight in network.parameters():  # norms and biases, too
      weight.add_(torch.randn_like(weight) * 0.05)
  return network


def extra(config: dict, seed: int) -> dict:
  """Returns the tensors of the detection head and of the absolute positions."""
  import torch

  g, width = torch.Generator().manual_seed(seed), config["hidden_size"]
  shapes = {
    "deberta.embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
    "mask_predictions.LayerNorm.weight": (width,),
    "mask_predictions.LayerNorm.bias": (width,),
    "mask_predictions.dense.weight": (width, width),
    "mask_predictions.dense.bias": (width,),
    "mask_predictions.classifier.weight": (1, width),
    "mask_predictions.classifier.bias": (1,),
  }
  tensors = {name: torch.randn(shape, generator=g) * 0.05 for name, shape in shapes.items()}
  tensors["mask_predictions.LayerNorm.weight"] += 1
  return tensors


def write(folder: Path, text: list[str], size: int = 300, **changes) -> Path:
  """Writes the files; `changes` are fields of config.json, `size` that of the vocabulary."""
  import torch

  folder.mkdir(parents=True)
  pieces = write_spm(folder / "spm.model", text, size)
  content = {**CONFIG, "vocab_size": pieces + 1 + SPARE, **changes}
  (folder / "config.json").write_text(json.dumps(content))
  (folder / "tokenizer_config.json").write_text('{"do_lower_case": false, "vocab_type": "spm"}')
  tensors = masked_lm(content, 0).state_dict() | extra(content, 1)
  words = "deberta.embeddings.word_embeddings"
  layers = {**content, "num_hidden_layers": content["num_hidden_layers"] // 2}
  (folder / "generator_config.json").write_text(json.dumps(layers))
  of_generator = masked_lm(layers, 2).state_dict()
  of_generator |= {k: x for k, x in extra(layers, 3).items() if k.startswith("deberta.")}
  tensors[f"{words}._weight"] = tensors[f"{words}.weight"] - of_generator[f"{words}.weight"]
  halves = {name: x.half() for name, x in of_generator.items()}
  torch.save(halves, folder / "pytorch_model.generator.bin")
  torch.save({name: x.half() for name, x in tensors.items()}, folder / "pytorch_model.bin")
  return folder


if __name__ == "__main__":
  topics = "\n".join(pydoc_data.topics.topics.values()).split("\n")
  write(Path(sys.argv[1]), [line for line in topics if line.strip()], size=4000)
